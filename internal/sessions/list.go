package sessions

import (
	"bytes"
	"context"
	"encoding/json"
	"slices"
	"strconv"
	"time"

	"github.com/mark3labs/mcp-go/mcp"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// lists maps kinds to the method that lists them and the member that holds them.
var lists = map[string]struct{ method, field string }{
	KindTool:             {string(mcp.MethodToolsList), "tools"},
	KindResource:         {string(mcp.MethodResourcesList), "resources"},
	KindResourceTemplate: {string(mcp.MethodResourcesTemplatesList), "resourceTemplates"},
	KindPrompt:           {string(mcp.MethodPromptsList), "prompts"},
	KindDeclaration:      {},
}

// list reads all pages of one kind.
func (c *conn) list(ctx context.Context, t *Target, kind string) (Listing, error) {
	out := Listing{
		Items: []json.RawMessage{}, Scope: "private", ProtocolVersion: c.version, Era: c.era,
		Capabilities: c.caps, ServerInfo: c.info, ListChanged: c.announced[kind],
	}
	if kind == KindDeclaration || member(c.caps, capabilityOf[kind]) == nil {
		return out, nil
	}
	c.afterWatch(ctx)
	what := lists[kind]
	var cursor []byte
	seen := map[string]bool{}
	bytesLeft := c.pool.limits.ListBytes
	for page := 0; ; page++ {
		if page >= c.pool.limits.ListPages {
			return Listing{}, protocolError("LIST_TOO_LONG", "the server's list has too many pages")
		}
		resp, err := c.page(ctx, t, what.method, cursor, bytesLeft)
		if err != nil {
			resp.Release()
			return Listing{}, err
		}
		if e := resp.Error; e != nil {
			resp.Release()
			if e.Code == mcp.METHOD_NOT_FOUND && page == 0 && kind == KindResourceTemplate {
				return out, nil
			}
			return Listing{}, protocolError("LIST_REFUSED", "the server refused to list with code "+strconv.FormatInt(e.Code, 10)).
				With("serverMessage", shorten(e.Message, 200))
		}
		bytesLeft -= int64(len(resp.Result))
		if err := c.addPage(&out, resp.Result, what.field, page); err != nil {
			resp.Release()
			return Listing{}, err
		}
		found, twice := lift(resp.Result, "nextCursor")
		next := bytes.Clone(found["nextCursor"])
		resp.Release()
		if twice == "" && (next == nil || string(next) == "null" || (c.era == EraLegacy && string(next) == `""`)) {
			break
		}
		if twice != "" || next[0] != '"' || len(next) > maxCursor {
			return Listing{}, protocolError("CURSOR_INVALID", "the server's cursor is no string, too long or there twice")
		}
		if seen[string(next)] {
			// What was read is as good as it was; copies of it are no definitions.
			out.Incomplete, out.Items = "pagination loop: the server repeats a cursor", once(out.Items)
			break
		}
		seen[string(next)] = true
		cursor = next
	}
	if kind == KindTool && c.era == EraModern && c.target.Transport == TransportHTTP {
		out.leaveOutInvalid()
	}
	c.enter(StateCatalogued)
	return out, nil
}

func (c *conn) page(ctx context.Context, t *Target, method string, cursor []byte, limit int64) (Response, error) {
	params := json.RawMessage("{}")
	if cursor != nil {
		params = slices.Concat([]byte(`{"cursor":`), cursor, []byte{'}'})
	}
	if limit <= 0 {
		return Response{}, failure(fault.TooLarge, fault.Server, "LIST_TOO_LARGE", "the server's list exceeds the limit in bytes")
	}
	for again := false; ; {
		resp, retry, err := c.do(ctx, t, &Request{Method: method, Params: params, ResultBytes: limit, Timeout: c.pool.limits.Call})
		if err != nil || !retry || again {
			return resp, err
		}
		resp.Release()
		again = true
	}
}

// once leaves out what came before in the same bytes.
func once(items []json.RawMessage) []json.RawMessage {
	seen := make(map[string]bool, len(items))
	return slices.DeleteFunc(items, func(item json.RawMessage) bool {
		was := seen[string(item)]
		seen[string(item)] = true
		return was
	})
}

// addPage adds the items of one page and its cache hints. A result without the
// array is no empty list.
func (c *conn) addPage(out *Listing, result []byte, field string, page int) error {
	raw := member(result, field)
	if raw == nil || raw[0] != '[' {
		return protocolError("LIST_INVALID", "the server's list has no array of "+field)
	}
	s := scanner{data: raw}
	err := s.array(1, func() error {
		item, err := s.raw(2)
		if err != nil {
			return err
		}
		if len(out.Items) >= c.pool.limits.ListItems {
			return errTooLarge
		}
		// Copied, so that one kept item does not keep the whole page.
		out.Items = append(out.Items, bytes.Clone(item))
		return nil
	})
	if err != nil {
		return protocolError("LIST_TOO_LONG", "the server's list has too many items").Cause(err)
	}
	if c.era != EraModern {
		return nil
	}
	ttl := time.Duration(0)
	if ms, err := strconv.ParseUint(string(member(result, "ttlMs")), 10, 40); err == nil {
		ttl = time.Duration(ms) * time.Millisecond
	}
	scope, _ := text(member(result, "cacheScope"))
	if page == 0 {
		out.TTL = ttl
		if scope == "public" {
			out.Scope = scope
		}
		return nil
	}
	out.TTL = min(out.TTL, ttl)
	if scope != "public" {
		out.Scope = "private"
	}
	return nil
}

// leaveOutInvalid moves tools whose header marks break the rules to Rejected.
func (l *Listing) leaveOutInvalid() {
	kept := l.Items[:0]
	for _, item := range l.Items {
		if err := checkHeaderMarks(item); err != nil {
			l.Rejected = append(l.Rejected, Rejection{Item: item, Reason: shorten(err.Error(), 300)})
			continue
		}
		kept = append(kept, item)
	}
	l.Items = kept
}
