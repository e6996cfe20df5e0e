package sessions

import (
	"context"
	"encoding/json"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/mark3labs/mcp-go/mcp"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
)

// verdict is what a probe with server/discover showed.
type verdict struct {
	modern bool
	// definite means that the server itself gave the sign, so that it may be
	// remembered. Silence and failures are no signs.
	definite bool
	// offered are the versions that the server named, if it did.
	offered []string
	caps    []byte
	info    []byte
}

// negotiate settles era and version with the server of a fresh connection. Only
// what proves an era is remembered for the registration: a sign-in, a rate limit,
// an outage or silence never is.
func (c *conn) negotiate(ctx context.Context) error {
	note := c.pool.era(c.key, c.target)
	known := note.version
	switch {
	case len(c.target.legacyVersions()) == 0 && !c.target.allowed(mcp.ProtocolVersion20260728):
		return protocolError("VERSION_UNSUPPORTED", "the contract allows no protocol version that this build speaks")
	case c.target.Transport == TransportSSE && len(c.target.legacyVersions()) == 0:
		return protocolError("VERSION_UNSUPPORTED", "the contract allows no protocol version that can be spoken over HTTP+SSE")
	case c.target.Transport == TransportSSE:
		err := c.initialize(ctx, nil, known)
		if err == nil {
			c.pool.noteEra(c.key, c.version, true)
		}
		return err
	case !c.target.allowed(mcp.ProtocolVersion20260728):
		return c.initialize(ctx, nil, known)
	case note.legacy:
		err := c.initialize(ctx, nil, known)
		if f, ok := fault.As(err); !ok || f.Layer != fault.Protocol {
			return err
		}
		// The server is not what it was.
		c.pool.forgetEra(c.key)
		c.leaveSession(ctx)
	}
	v, err := c.probe(ctx, known)
	if err != nil {
		return err
	}
	if v.modern {
		return c.discovered(v)
	}
	if len(c.target.legacyVersions()) == 0 && v.definite {
		return protocolError("VERSION_UNSUPPORTED", "the server speaks none of the protocol versions in its contract")
	}
	if err := c.mayFallBack(v, known); err != nil {
		return err
	}
	if err := c.initialize(ctx, v.offered, known); err != nil {
		return err
	}
	if v.definite {
		c.pool.noteEra(c.key, c.version, true)
	}
	return nil
}

// maxSilent is how often in a row a server that is known to be modern may give no
// sign before it is taken for another server than it was.
const maxSilent = 3

// mayFallBack says why a server that did not prove to be modern is not asked to
// initialize. No sign is no downgrade: slow starts and failures pass.
func (c *conn) mayFallBack(v verdict, known string) error {
	modern := mcp.IsModernProtocol(known)
	switch {
	case v.definite && modern && c.target.DowngradeForbidden:
		return downgraded(known)
	case v.definite:
	case c.target.DowngradeForbidden, len(c.target.legacyVersions()) == 0:
		return failure(fault.Unavailable, fault.Transport, "ERA_UNKNOWN", "the server did not show which protocol it speaks, and its contract forbids to guess")
	case modern && c.pool.silent(c.key) < maxSilent:
		return failure(fault.Unavailable, fault.Transport, "ERA_UNKNOWN", "the server did not show which protocol it speaks; it spoke a newer one before than would be tried now")
	}
	return nil
}

func downgraded(known string) error {
	return protocolError("DOWNGRADE_REFUSED", "the server fell back to an older protocol version than before").With("known", known)
}

func (c *conn) discovered(v verdict) error {
	c.era, c.version = EraModern, mcp.ProtocolVersion20260728
	c.wire.speak(c.era, c.version)
	c.enter(StateNegotiated)
	c.learn(v.caps, v.info)
	c.enter(StateDiscovered)
	c.pool.noteEra(c.key, c.version, false)
	return nil
}

// discover sends one server/discover.
func (c *conn) discover(ctx context.Context) (reply, error) {
	c.wire.speak(EraModern, mcp.ProtocolVersion20260728)
	id := c.nextID.Add(1)
	hold := c.pool.lease(c.key.Tenant)
	defer hold.release() // only small parts of the answer are kept, as copies
	return c.wire.exchange(ctx, &exchange{
		id: id, method: string(mcp.MethodServerDiscover), hold: hold, limit: c.pool.limits.ListBytes,
		body:    encodeRequest(id, string(mcp.MethodServerDiscover), nil, c.pool.meta[c.target.Declare.index()], nil),
		headers: map[string]string{mcp.HeaderMethod: string(mcp.MethodServerDiscover)}, patient: true,
	})
}

// probe finds out the era. A server that refuses the very version that was sent
// and names it as supported is asked once more.
func (c *conn) probe(ctx context.Context, known string) (verdict, error) {
	if s, ok := c.wire.(*stdioWire); ok {
		return c.probeChild(ctx, s, known)
	}
	for again := false; ; again = true {
		pctx, cancel := context.WithTimeout(ctx, c.pool.limits.Probe)
		rep, err := c.discover(pctx)
		cancel()
		if ctx.Err() != nil {
			return verdict{}, ended(ctx)
		}
		if !again && err == nil && rep.msg.err != nil && rep.msg.err.Code == mcp.UNSUPPORTED_PROTOCOL_VERSION &&
			slices.Contains(supportedVersions(rep.msg.err.Data, "supported"), mcp.ProtocolVersion20260728) {
			continue
		}
		c.refusal = rep
		return judgeProbe(rep, err)
	}
}

func anyLegacy(offered []string) bool {
	return slices.ContainsFunc(offered, func(v string) bool { return slices.Contains(mcp.LegacyProtocolVersions(), v) })
}

func unknownVersions(offered []string) error {
	return protocolError("VERSION_UNSUPPORTED", "the server speaks no protocol version that this build knows; it names "+
		strconv.Quote(shorten(strings.Join(offered, ", "), 200)))
}

// judgeProbe reads the signs of an era. An error means that there was none.
func judgeProbe(rep reply, err error) (verdict, error) {
	if e := rep.msg.err; e != nil && err == nil {
		switch {
		case e.Code == mcp.UNSUPPORTED_PROTOCOL_VERSION:
			offered := supportedVersions(e.Data, "supported")
			if anyLegacy(offered) {
				return verdict{definite: true, offered: offered}, nil
			}
			return verdict{}, unknownVersions(offered)
		case e.Code == mcp.HEADER_MISMATCH || e.Code == mcp.MISSING_REQUIRED_CLIENT_CAPABILITY:
			return verdict{}, protocolError("DISCOVERY_REFUSED", "the server refused discovery with code "+strconv.FormatInt(e.Code, 10))
		case rep.status == 500:
			return verdict{}, nil
		case rep.status > 500:
			return verdict{}, failure(fault.Unavailable, fault.Server, "SERVER_ERROR", "the server or a proxy before it answered with status "+strconv.Itoa(rep.status))
		}
		return verdict{definite: true}, nil
	}
	if err == nil {
		offered := supportedVersions(rep.msg.result, "supportedVersions")
		if slices.Contains(offered, mcp.ProtocolVersion20260728) {
			return verdict{modern: true, definite: true, caps: member(rep.msg.result, "capabilities"), info: member(member(rep.msg.result, "_meta"), mcp.MetaKeyServerInfo)}, nil
		}
		if len(offered) > 0 && !anyLegacy(offered) {
			return verdict{}, unknownVersions(offered)
		}
		return verdict{definite: true, offered: offered}, nil
	}
	switch f, _ := fault.As(err); {
	case f == nil:
		return verdict{}, err
	case f.Reason == "SERVER_REFUSED": // a 4xx other than 401, 403 and 429
		return verdict{definite: true}, nil
	case rep.status == 500, rep.status >= 200 && rep.status < 300, f.Kind == fault.Deadline, f.Reason == emptyAnswer.Reason:
		// Some legacy servers fail, stay silent or answer a page when they do not know
		// a method. Trying initialize is worth it; believing it is not.
		return verdict{}, nil
	}
	return verdict{}, err
}

// probeChild probes over stdio. A child may take long to start, so the wait for an
// answer counts from its first byte; after that, or after half the time there is,
// initialize is sent behind the probe and the first good answer decides.
func (c *conn) probeChild(ctx context.Context, s *stdioWire, known string) (verdict, error) {
	type outcome struct {
		rep reply
		err error
	}
	done := make(chan outcome, 1)
	dctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		rep, err := c.discover(dctx)
		done <- outcome{rep, err}
	}()
	half := c.pool.limits.Connect / 2
	if d, ok := ctx.Deadline(); ok {
		half = time.Until(d) / 2
	}
	first := min(c.pool.limits.Probe, half)
	if mcp.IsModernProtocol(known) {
		// A slow start says nothing against what the server proved before, and there is
		// no other handshake to keep time for.
		half = time.Hour
		first = half
	}
	patience := time.NewTimer(half)
	defer patience.Stop()
	alive := s.alive
	for {
		select {
		case o := <-done:
			if o.err != nil && ctx.Err() != nil {
				return verdict{}, ended(ctx)
			}
			return judgeProbe(o.rep, o.err)
		case <-alive:
			alive = nil
			patience.Reset(first)
		case <-patience.C:
			cancel()
			o := <-done
			if o.err == nil {
				return judgeProbe(o.rep, nil)
			}
			if ctx.Err() != nil {
				return verdict{}, ended(ctx)
			}
			return verdict{}, nil
		}
	}
}

// initialize makes the legacy handshake. offered are the versions that the server
// named before, none if it did not.
func (c *conn) initialize(ctx context.Context, offered []string, known string) error {
	versions := c.target.legacyVersions()
	want := versions[0]
	if remembered := c.pool.era(c.key, c.target).offer; remembered != "" && len(offered) == 0 {
		offered = []string{remembered}
	}
	for _, v := range versions {
		if slices.Contains(offered, v) {
			want = v
			break
		}
	}
	c.declared = c.target.Declare.inHandshake(want)
	c.wire.speak(EraLegacy, "")
	params, err := json.Marshal(map[string]any{"protocolVersion": want, "capabilities": json.RawMessage(c.declared.legacy(want)), "clientInfo": c.pool.clientInfo})
	if err != nil {
		return fault.Wrap(err, "encode initialize")
	}
	id := c.nextID.Add(1)
	hold := c.pool.lease(c.key.Tenant)
	defer hold.release()
	rep, err := c.wire.exchange(ctx, &exchange{
		id: id, method: string(mcp.MethodInitialize), hold: hold, limit: c.pool.limits.ListBytes, patient: true,
		body: encodeRequest(id, string(mcp.MethodInitialize), params, nil, nil),
	})
	if w, ok := c.wire.(*httpWire); ok {
		w.enter(rep.sessionID) // also of a handshake that fails, so that its session is deleted
	}
	if err != nil || rep.msg.err != nil {
		if older := c.olderNamed(&rep, want); older != nil {
			c.steppedDown = true
			return c.initialize(ctx, older, known)
		}
		if err != nil {
			c.refusal = rep
		}
		return c.handshakeRefused(ctx, &rep, err)
	}
	version, _ := text(member(rep.msg.result, "protocolVersion"))
	switch {
	case !slices.Contains(mcp.LegacyProtocolVersions(), version):
		return protocolError("VERSION_UNSUPPORTED", "the server answered initialize with a protocol version that has no handshake or is unknown")
	case !c.target.allowed(version):
		return protocolError("VERSION_UNSUPPORTED", "the server speaks a protocol version that its contract does not allow").With("version", version)
	case c.target.DowngradeForbidden && version < known:
		return downgraded(known)
	}
	c.era, c.version, c.fellBack = EraLegacy, version, version < known
	if c.steppedDown {
		c.pool.noteOffer(c.key, version)
	}
	c.wire.speak(c.era, c.version)
	c.enter(StateNegotiated)
	c.learn(member(rep.msg.result, "capabilities"), member(rep.msg.result, "serverInfo"))
	defer c.enter(StateInitialized)
	if err := c.wire.notify(ctx, encodeNotification(string(mcp.MethodNotificationInitialized), "{}")); err != nil {
		if ctx.Err() != nil || c.target.Transport == TransportStdio {
			return err
		}
		// The handshake is done; servers that choke on the notification work anyway.
		c.pool.log.WarnContext(ctx, "server refused notifications/initialized", "tenant", c.key.Tenant.String(), "server", c.key.Server, "error", err)
	}
	return c.askForLogs(ctx)
}

// askForLogs asks a legacy server for its log messages, once. That it refuses them
// is no reason to do without the server.
func (c *conn) askForLogs(ctx context.Context) error {
	level := levelOf(c.target.LogLevel)
	if level == 0 || c.offers&offersLogging == 0 {
		return nil
	}
	c.logLevel.Store(int32(level)) // messages may come before the answer
	id := c.nextID.Add(1)
	hold := c.pool.lease(c.key.Tenant)
	defer hold.release()
	rep, err := c.wire.exchange(ctx, &exchange{
		id: id, method: string(mcp.MethodSetLogLevel), hold: hold, limit: envelopeSlack,
		body: encodeRequest(id, string(mcp.MethodSetLogLevel), []byte(`{"level":"`+logLevels[level-1]+`"}`), nil, nil),
	})
	if err == nil && rep.msg.err == nil {
		return nil
	}
	c.logLevel.Store(0)
	if ctx.Err() != nil || rep.renew && err != nil {
		return err
	}
	c.pool.log.InfoContext(ctx, "server refused logging/setLevel", "tenant", c.key.Tenant.String(), "server", c.key.Server, "error", err)
	return nil
}

// supportedVersions reads an array of strings from a member of an object.
func supportedVersions(raw []byte, name string) []string {
	s := scanner{data: member(raw, name)}
	var out []string
	err := s.array(0, func() error {
		v, err := s.raw(1)
		if t, ok := text(v); ok && len(out) < 64 {
			out = append(out, t)
		}
		return err
	})
	if err != nil {
		return nil
	}
	return out
}
