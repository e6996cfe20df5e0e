package catalog

import (
	"context"
	"encoding/json"
	"maps"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/audit"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
	"github.com/bulkhead-mcp/bulkhead/internal/webhooks"
)

// made is one list on its way into the tables.
type made struct {
	key        slotKey
	server     Server
	scope      Context
	generation int64
	content    *content
	public     bool
	ttlMillis  int64
	started    int64 // microseconds since the list began, until the swap
}

// errMoved says that the registration changed while the list was made.
var errMoved = fault.New(fault.Conflict, "SERVER_CHANGED", "the server's registration changed meanwhile; try again")

// swap makes a list the one that its context sees, unless one that began later
// is there already, in one transaction with everything that follows from it:
// definitions that changed or vanished void what was agreed about them. It
// returns how many did.
func (s *Service) swap(ctx context.Context, l *made) (changed int, err error) {
	err = s.o.DB.InTx(ctx, l.key.tenant, func(ctx context.Context, tx tenant.Tx) error {
		changed = 0
		// Locks: server, then lists in the order of contexts, then what voiding takes.
		now, err := s.LockServer(ctx, tx, l.key.server)
		if err != nil {
			return err
		}
		if now.Registration != l.server.Registration {
			return errMoved
		}
		v, err := s.lockView(ctx, tx, l)
		if err != nil {
			return err
		}
		target := &v.own
		if l.public {
			target = &v.public
		}
		if target.generation > l.generation {
			return s.settle(ctx, tx, l)
		}
		if err := insertRevision(ctx, tx, l.content); err != nil {
			return err
		}
		changed, err = s.voidChanged(ctx, tx, l, v, target)
		if err != nil {
			return err
		}
		if err := s.store(ctx, tx, l, v); err != nil {
			return err
		}
		return s.settle(ctx, tx, l)
	})
	return changed, err
}

// lockView locks the rows of the slot; for a public list the shared row is made
// when it is missing.
func (s *Service) lockView(ctx context.Context, tx tenant.Tx, l *made) (v view, err error) {
	public := publicName(s.o.Declared)
	if l.public {
		_, err = tx.Exec(ctx, `INSERT INTO catalog_current (tenant_id, server_id, context, kind)
			VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING`, tx.Tenant(), l.key.server, public, l.key.kind)
		if err != nil {
			return v, err
		}
	}
	rows, err := tx.Query(ctx, `SELECT `+seenColumns+seenFrom+` AND c.context = ANY ($4)
		ORDER BY c.context FOR UPDATE OF c`, tx.Tenant(), l.key.server, l.key.kind, []string{l.key.context, public})
	if err != nil {
		return v, err
	}
	found, err := pgx.CollectRows(rows, scanSeen)
	v.fill(found, public)
	return v, err
}

// settle ends the lease and the failures of the context that listed.
func (s *Service) settle(ctx context.Context, tx tenant.Tx, l *made) error {
	_, err := tx.Exec(ctx, `
		UPDATE catalog_current
		   SET lister = '', lease_time = NULL, failures = 0, retry_time = NULL, hidden = false,
		       stale_reason = CASE WHEN invalidated > $5 THEN stale_reason ELSE '' END
		 WHERE tenant_id = $1 AND server_id = $2 AND context = $3 AND kind = $4 AND listing = $5`,
		tx.Tenant(), l.key.server, l.key.context, l.key.kind, l.generation)
	return err
}

// store writes the row that now holds the list. A mark that came while the list
// was made stays: the list may miss what it announced.
func (s *Service) store(ctx context.Context, tx tenant.Tx, l *made, v view) error {
	target := l.key.context
	public := publicName(s.o.Declared)
	if l.public {
		target = public
	}
	_, err := tx.Exec(ctx, `
		UPDATE catalog_current
		   SET revision_id = $5, registration = $6, generation = $7, ttl_ms = $8,
		       observe_time = clock_timestamp() - $9 * interval '1 microsecond',
		       invalidated = GREATEST(invalidated, $10),
		       stale_reason = CASE WHEN GREATEST(invalidated, $10) > $7 THEN stale_reason ELSE '' END
		 WHERE tenant_id = $1 AND server_id = $2 AND context = $3 AND kind = $4`,
		tx.Tenant(), l.key.server, target, l.key.kind, l.content.id, l.server.Registration, l.generation,
		l.ttlMillis, l.started, v.own.invalidated)
	if err != nil || l.public || v.public.revisionID == "" || v.public.invalidated > v.public.generation {
		return err
	}
	// The server shares this list no longer; the other contexts ask for their own.
	return invalidate(ctx, tx, l.key.server, []string{public}, []string{l.key.kind}, "the server no longer shares its list")
}

// insertRevision stores the content unless it is there. Definitions that exist
// keep the bytes that were seen first: _meta, which the digest leaves out, may
// differ at each list. Then c has other bytes than it came with, and is stored
// only when this call made the rows.
func insertRevision(ctx context.Context, tx tenant.Tx, c *content) error {
	var known bool
	err := tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM catalog_revisions WHERE tenant_id = $1 AND revision_id = $2)`,
		tx.Tenant(), c.id).Scan(&known)
	if err != nil || known {
		return err
	}
	if err := insertDefinitions(ctx, tx, c); err != nil {
		return err
	}
	c.encoded = c.append(nil, true)
	digest := contentDigest(c.encoded)
	capabilities := c.capabilities
	if capabilities == nil {
		capabilities = []byte{}
	}
	tag, err := tx.Exec(ctx, `
		INSERT INTO catalog_revisions (tenant_id, revision_id, server_id, kind, protocol_version, era,
		                               capabilities, findings, content_digest)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)
		ON CONFLICT DO NOTHING`,
		tx.Tenant(), c.id, c.serverID, c.kind, c.protocolVersion, c.era, capabilities,
		findingTexts(c.findings), digest)
	if err != nil || tag.RowsAffected() == 0 {
		return err
	}
	c.stored = true
	if len(c.definitions) == 0 {
		return nil
	}
	return insertItems(ctx, tx, c)
}

func insertItems(ctx context.Context, tx tenant.Tx, c *content) error {
	n := len(c.definitions)
	names, digests, quarantines, findings := make([]string, n), make([]string, n), make([]string, n), make([]string, n)
	for i := range c.definitions {
		d := &c.definitions[i]
		names[i], digests[i], quarantines[i] = d.Name, d.Digest, d.Quarantine
		// unnest takes arrays of one dimension, so findings travel as JSON.
		text, err := json.Marshal(findingTexts(d.Findings))
		if err != nil {
			return fault.Wrap(err, "encode findings")
		}
		findings[i] = string(text)
	}
	_, err := tx.Exec(ctx, `
		INSERT INTO catalog_items (tenant_id, revision_id, position, name, digest, quarantine, findings)
		SELECT $1, $2, ordinality, name, digest, quarantine, ARRAY(SELECT jsonb_array_elements_text(findings::jsonb))
		  FROM unnest($3::text[], $4::text[], $5::text[], $6::text[])
		       WITH ORDINALITY AS i (name, digest, quarantine, findings, ordinality)`,
		tx.Tenant(), c.id, names, digests, quarantines, findings)
	return err
}

// insertDefinitions stores the definitions by digest and takes over the bytes of
// those that were there.
func insertDefinitions(ctx context.Context, tx tenant.Tx, c *content) error {
	first := map[string]*Definition{}
	for i := range c.definitions {
		if d := &c.definitions[i]; first[d.Digest] == nil {
			first[d.Digest] = d
		}
	}
	// One order for all writers, so that they wait for each other in a line.
	digests := slices.Sorted(maps.Keys(first))
	names, raws := make([]string, len(digests)), make([][]byte, len(digests))
	for i, digest := range digests {
		names[i], raws[i] = first[digest].Name, first[digest].Raw
		if raws[i] == nil {
			raws[i] = []byte{}
		}
	}
	tag, err := tx.Exec(ctx, `
		INSERT INTO definitions (tenant_id, server_id, digest, kind, name, raw)
		SELECT $1, $2, digest, $3, name, raw
		  FROM unnest($4::text[], $5::text[], $6::bytea[]) AS d (digest, name, raw)
		ON CONFLICT DO NOTHING`, tx.Tenant(), c.serverID, c.kind, digests, names, raws)
	if err != nil {
		return err
	}
	if tag.RowsAffected() == int64(len(digests)) && len(digests) == len(c.definitions) {
		return nil
	}
	rows, err := tx.Query(ctx, `SELECT digest, raw FROM definitions
		WHERE tenant_id = $1 AND server_id = $2 AND digest = ANY ($3)`, tx.Tenant(), c.serverID, digests)
	if err != nil {
		return err
	}
	stored := map[string][]byte{}
	var digest string
	var raw []byte
	_, err = pgx.ForEachRow(rows, []any{&digest, &raw}, func() error {
		stored[digest] = slices.Clone(raw)
		return nil
	})
	if err != nil {
		return err
	}
	for i := range c.definitions {
		c.definitions[i].Raw = stored[c.definitions[i].Digest]
	}
	return nil
}

// maxChangeEntries bounds the audit entries of one list; the last one counts the
// rest, and the two revisions hold all of it.
const maxChangeEntries = 200

// change is a name whose definition is not what it was; now is empty when it
// vanished or is in quarantine.
type change struct{ name, was, now string }

// voidChanged compares the list with what its readers saw before.
func (s *Service) voidChanged(ctx context.Context, tx tenant.Tx, l *made, v view, target *seen) (int, error) {
	total := 0
	before := v.effective(l.server.Registration)
	if target.revisionID != "" && target.registration == l.server.Registration {
		subject := l.scope.subject()
		if l.public {
			subject = nil
		}
		n, err := s.voidAgainst(ctx, tx, l, target.revisionID, subject)
		if err != nil {
			return 0, err
		}
		total += n
	}
	if before != nil && before != target && before.revisionID != target.revisionID {
		n, err := s.voidAgainst(ctx, tx, l, before.revisionID, l.scope.subject())
		if err != nil {
			return 0, err
		}
		total += n
	}
	return total, nil
}

func (s *Service) voidAgainst(ctx context.Context, tx tenant.Tx, l *made, revisionID string, subject *tenant.Subject) (int, error) {
	if revisionID == l.content.id || !binds(l.key.kind) {
		return 0, nil
	}
	rows, err := tx.Query(ctx, `
		SELECT name, digest
		  FROM catalog_items
		 WHERE tenant_id = $1 AND revision_id = $2 AND quarantine = ''
		 ORDER BY name`, tx.Tenant(), revisionID)
	if err != nil {
		return 0, err
	}
	now := l.content.digests()
	var changes []change
	var c change
	_, err = pgx.ForEachRow(rows, []any{&c.name, &c.was}, func() error {
		if c.now = now[c.name]; c.now != c.was {
			changes = append(changes, c)
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	for i, c := range changes {
		err := s.o.Voider.VoidDefinition(ctx, tx, l.key.server, subject, callKind(l.key.kind), c.name, c.was,
			"the server changed this definition")
		if err != nil {
			return 0, err
		}
		if i < maxChangeEntries {
			if err := s.recordChange(ctx, tx, l, subject, c, revisionID, 0); err != nil {
				return 0, err
			}
		}
	}
	if more := len(changes) - maxChangeEntries; more > 0 {
		if err := s.recordChange(ctx, tx, l, subject, change{}, revisionID, more); err != nil {
			return 0, err
		}
	}
	return len(changes), nil
}

func (s *Service) recordChange(ctx context.Context, tx tenant.Tx, l *made, subject *tenant.Subject, c change, was string, more int) error {
	details, err := json.Marshal(struct {
		Kind        string `json:"kind"`
		Name        string `json:"name,omitempty"`
		OldDigest   string `json:"oldDigest,omitempty"`
		NewDigest   string `json:"newDigest,omitempty"`
		OldRevision string `json:"oldRevision"`
		NewRevision string `json:"newRevision"`
		Context     string `json:"context"`
		More        int    `json:"more,omitempty"`
	}{l.key.kind, c.name, c.was, c.now, was, l.content.id, l.key.context, more})
	if err != nil {
		return fault.Wrap(err, "encode audit details")
	}
	e := audit.Entry{Kind: audit.DefinitionChanged, ServerID: l.key.server, Actor: "system", Details: details}
	if subject != nil {
		e.Subject = *subject
	}
	if _, err = s.o.Recorder.Append(ctx, tx, e); err != nil || s.o.Announcer == nil {
		return err
	}
	return s.o.Announcer.Announce(ctx, tx, webhooks.Event{Type: webhooks.DefinitionChanged, Data: webhooks.DefinitionData{
		ServerID: l.key.server, Server: l.server.Name, Kind: callKind(l.key.kind), Name: c.name, OldDigest: c.was, NewDigest: c.now, More: more}})
}

// binds reports whether something may be agreed to about a definition of this kind.
// Resources are named by their URIs alone, so that their lists may change freely.
func binds(k Kind) bool { return k == Tool || k == Prompt }

// callKind is the word for a kind in calls, consents and grants.
func callKind(k Kind) string {
	if k == Prompt {
		return "PROMPT"
	}
	return "TOOL"
}

// digests returns the digest of each callable name.
func (c *content) digests() map[string]string {
	out := make(map[string]string, len(c.definitions))
	for i := range c.definitions {
		if d := &c.definitions[i]; d.Callable() {
			out[d.Name] = d.Digest
		}
	}
	return out
}
