package sessions

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/audit"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/resource"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

const (
	// DefaultTTL and the bounds of a session's life.
	DefaultTTL = 8 * time.Hour
	minTTL     = time.Minute
	maxTTL     = 7 * 24 * time.Hour
	// maxServers bounds the servers of one session.
	maxServers = 100
	// sessionTTL is how long a cached session holds after Postgres last confirmed
	// it (design 8); dispatch transactions always read the row.
	sessionTTL        = 5 * time.Second
	maxCachedSessions = 20_000
)

// Session is one user's working space with a set of servers.
type Session struct {
	ID         string
	KeyID      string
	Subject    tenant.Subject
	Groups     []string
	Project    string
	ServerIDs  []string
	State      string
	CreateTime time.Time
	ExpireTime time.Time
	CloseTime  *time.Time

	// serverNames has the name for each of ServerIDs, "" for one that has none.
	serverNames []string
	// calls counts the session's admitted calls: what the database knew when the
	// session was read, and what this replica admitted since.
	calls *atomic.Int64
}

// Dry returns a session that exists nowhere: open, with one server and no calls.
// It is what a dry run decides in.
func Dry(subject tenant.Subject, serverID string) *Session {
	return &Session{ID: "dry-run", Subject: subject, ServerIDs: []string{serverID}, State: "OPEN",
		ExpireTime: time.Now().Add(minTTL), calls: new(atomic.Int64)}
}

// Open reports whether the session takes calls at this time.
func (s *Session) Open(now time.Time) bool { return s.State == "OPEN" && now.Before(s.ExpireTime) }

// Has reports whether the session was opened with this server.
func (s *Session) Has(serverID string) bool { return slices.Contains(s.ServerIDs, serverID) }

// visible reports whether the session exists for the caller: it is that of the
// subject it acts for, and its credential is for every server of the session, as
// it would have to be to open it.
func (s *Session) visible(p tenant.Principal) bool {
	return !p.Subject.IsZero() && s.Subject == p.Subject &&
		!slices.ContainsFunc(s.serverNames, func(name string) bool { return !p.MayUse(name) })
}

// Calls returns the number of admitted calls known to this replica.
func (s *Session) Calls() int64 { return s.calls.Load() }

// Admitted counts one more admitted call.
func (s *Session) Admitted() { s.calls.Add(1) }

// Admit counts one more call unless the session has used its most, as far as
// this replica knows. It reports whether the call is admitted.
func (s *Session) Admit(most int64) bool {
	for {
		n := s.calls.Load()
		if n >= most {
			return false
		}
		if s.calls.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// ServerRef names a server registration.
type ServerRef struct {
	ID   string
	Name string
}

// Servers finds registrations for sessions that open.
type Servers interface {
	// Find returns the registrations of these names or ids; one that does not
	// exist is an error that names it.
	Find(ctx context.Context, t tenant.ID, namesOrIDs []string) ([]ServerRef, error)
	// Contracted returns every registration with an active contract, at most limit.
	Contracted(ctx context.Context, t tenant.ID, limit int) ([]ServerRef, error)
}

// Voider voids what people agreed to for a session that closes.
type Voider interface {
	VoidSession(ctx context.Context, tx tenant.Tx, sessionID, reason string) error
}

// Recorder keeps audit entries in the transaction of what they record.
type Recorder interface {
	Append(ctx context.Context, tx tenant.Tx, e audit.Entry) (string, error)
}

// Store owns the rows of sessions.
type Store struct {
	db      *tenant.DB
	servers Servers
	voider  Voider
	rec     Recorder
	now     func() time.Time
	// OnClose is told after the commit of a close, to end its connections and to
	// tell other replicas. It may be nil.
	OnClose func(t tenant.ID, sessionID string)

	mu    sync.Mutex
	cache map[sessionKey]*cachedSession // at most maxCachedSessions
}

type sessionKey struct {
	tenant tenant.ID
	id     string
}

type cachedSession struct {
	session *Session
	until   time.Time
}

// NewStore returns the store of session rows.
func NewStore(db *tenant.DB, servers Servers, voider Voider, rec Recorder) (*Store, error) {
	if db == nil || servers == nil || voider == nil || rec == nil {
		return nil, errors.New("sessions: database, servers, voider and recorder are needed")
	}
	return &Store{db: db, servers: servers, voider: voider, rec: rec, now: time.Now, cache: map[sessionKey]*cachedSession{}}, nil
}

// OpenRequest asks for a session. No servers means every server with an active
// contract that the credential may use. TTL is between a minute and seven days;
// zero means DefaultTTL.
type OpenRequest struct {
	Servers   []string
	TTL       time.Duration
	RequestID string
}

// Create opens a session for the subject that the caller acts for.
func (s *Store) Create(ctx context.Context, p tenant.Principal, r OpenRequest) (*Session, error) {
	if p.Subject.IsZero() {
		return nil, fault.New(fault.Invalid, "USER_REQUIRED", "a session belongs to a user: name one in the Bulkhead-User header")
	}
	if r.TTL == 0 {
		r.TTL = DefaultTTL
	}
	if r.TTL < minTTL || r.TTL > maxTTL {
		return nil, fault.Field1("ttl", "must be between %s and %s", minTTL, maxTTL)
	}
	refs, err := s.resolve(ctx, p, r.Servers)
	if err != nil {
		return nil, err
	}
	ids := make([]string, len(refs))
	for i, ref := range refs {
		ids[i] = ref.ID
	}
	id := resource.NewID(resource.Session)
	var out *Session
	err = s.db.InTx(ctx, p.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		earlier, err := tenant.RememberCreate(ctx, tx, "session", p.Subject.String(), r.RequestID, tenant.BodyDigest(r), id)
		if err != nil {
			return err
		}
		if earlier != "" {
			was, err := readSession(ctx, tx, earlier)
			if err == nil && !was.visible(p) {
				return fault.New(fault.Exists, "REQUEST_ID_REUSED", "requestId was used for another session")
			}
			out = was
			return err
		}
		out, err = s.insert(ctx, tx, p, id, ids, r.TTL)
		return err
	})
	return out, err
}

func (s *Store) insert(ctx context.Context, tx tenant.Tx, p tenant.Principal, id string, servers []string, ttl time.Duration) (*Session, error) {
	groups := p.Groups
	if groups == nil {
		groups = []string{}
	}
	_, err := tx.Exec(ctx, `
		INSERT INTO sessions (tenant_id, session_id, key_id, subject_source, subject, groups, project, server_ids, expire_time)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, now() + $9::interval)`,
		tx.Tenant(), id, p.KeyID, p.Subject.Source, p.Subject.Value, groups, p.Project, servers, ttl)
	if err != nil {
		return nil, err
	}
	_, err = s.rec.Append(ctx, tx, audit.Entry{Kind: "session.opened", SessionID: id, Subject: p.Subject, Actor: p.Actor(),
		Time: s.now(), Details: fmt.Appendf(nil, `{"servers":%d}`, len(servers))})
	if err != nil {
		return nil, err
	}
	return readSession(ctx, tx, id)
}

func (s *Store) resolve(ctx context.Context, p tenant.Principal, names []string) (refs []ServerRef, err error) {
	if len(names) > maxServers {
		return nil, fault.Field1("servers", "must have at most %d entries", maxServers)
	}
	if len(names) == 0 {
		refs, err = s.servers.Contracted(ctx, p.Tenant, maxServers)
		refs = slices.DeleteFunc(refs, func(r ServerRef) bool { return !p.MayUse(r.Name) })
		return refs, err
	}
	refs, err = s.servers.Find(ctx, p.Tenant, names)
	if err != nil {
		return nil, err
	}
	seen := map[string]bool{}
	for i, r := range refs {
		if seen[r.ID] {
			return nil, fault.Field1(fmt.Sprintf("servers[%d]", i), "names a server twice")
		}
		if !p.MayUse(r.Name) {
			return nil, fault.New(fault.Denied, "SERVER_NOT_ALLOWED", "this credential is not for server %q", r.Name)
		}
		seen[r.ID] = true
	}
	return refs, nil
}

const sessionColumns = `s.session_id, s.key_id, s.subject_source, s.subject, s.groups, s.project, s.server_ids, s.state,
	s.create_time, s.expire_time, s.close_time, COALESCE(u.calls, 0), ` + sessionNames

// The names of a session's servers, of deleted ones too. A name never changes.
const sessionNames = `ARRAY(SELECT COALESCE(v.name, '') FROM unnest(s.server_ids) AS m (id)
	LEFT JOIN servers v ON v.tenant_id = s.tenant_id AND v.server_id = m.id)`

const sessionFrom = ` FROM sessions s LEFT JOIN session_usage u ON u.tenant_id = s.tenant_id AND u.session_id = s.session_id `

func scanSession(row pgx.CollectableRow) (*Session, error) {
	s := &Session{calls: new(atomic.Int64)}
	var n int64
	err := row.Scan(&s.ID, &s.KeyID, &s.Subject.Source, &s.Subject.Value, &s.Groups, &s.Project, &s.ServerIDs, &s.State,
		&s.CreateTime, &s.ExpireTime, &s.CloseTime, &n, &s.serverNames)
	s.calls.Store(n)
	return s, err
}

var errSessionNotFound = fault.New(fault.NotFound, "SESSION_NOT_FOUND", "no such session")

func readSession(ctx context.Context, tx tenant.Tx, id string) (*Session, error) {
	rows, err := tx.Query(ctx, `SELECT `+sessionColumns+sessionFrom+`WHERE s.tenant_id = $1 AND s.session_id = $2`, tx.Tenant(), id)
	if err != nil {
		return nil, err
	}
	out, err := pgx.CollectExactlyOneRow(rows, scanSession)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, errSessionNotFound
	}
	return out, err
}

// Get returns the caller's session from memory when Postgres confirmed it within
// the last five seconds. A session of another subject, or with a server that the
// caller's credential is not for, does not exist for the caller.
func (s *Store) Get(ctx context.Context, p tenant.Principal, id string) (*Session, error) {
	if !resource.IsID(resource.Session, id) {
		return nil, errSessionNotFound
	}
	k := sessionKey{p.Tenant, id}
	s.mu.Lock()
	c := s.cache[k]
	s.mu.Unlock()
	if c == nil || s.now().After(c.until) {
		var err error
		if c, err = s.load(ctx, k); err != nil {
			return nil, err
		}
	}
	if !c.session.visible(p) {
		return nil, errSessionNotFound
	}
	return c.session, nil
}

func (s *Store) load(ctx context.Context, k sessionKey) (*cachedSession, error) {
	c := &cachedSession{until: s.now().Add(sessionTTL)}
	err := s.db.Read(ctx, k.tenant, func(b *pgx.Batch) {
		b.Queue(`SELECT `+sessionColumns+sessionFrom+`WHERE s.tenant_id = $1 AND s.session_id = $2`, k.tenant, k.id).
			Query(func(rows pgx.Rows) (err error) {
				c.session, err = pgx.CollectExactlyOneRow(rows, scanSession)
				return err
			})
	})
	if fault.Is(err, fault.NotFound) {
		return nil, errSessionNotFound
	}
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if old := s.cache[k]; old != nil {
		// Calls that are admitted but not yet committed are in the old count only, and
		// those who hold the old session go on counting there.
		raise(old.session.calls, c.session.calls.Load())
		c.session.calls = old.session.calls
	}
	if len(s.cache) >= maxCachedSessions {
		clear(s.cache)
	}
	s.cache[k] = c
	return c, nil
}

func raise(counter *atomic.Int64, to int64) {
	for {
		n := counter.Load()
		if n >= to || counter.CompareAndSwap(n, to) {
			return
		}
	}
}

// Forget drops a session from memory, for a signal of its change elsewhere.
func (s *Store) Forget(t tenant.ID, id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.cache, sessionKey{t, id})
}

// List returns at most limit of the caller's sessions after the given id, newest
// last, closed ones too.
func (s *Store) List(ctx context.Context, p tenant.Principal, after string, limit int) (out []*Session, err error) {
	if p.Subject.IsZero() {
		return nil, nil
	}
	err = s.db.InTx(ctx, p.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		rows, err := tx.Query(ctx, `SELECT `+sessionColumns+sessionFrom+`
			WHERE s.tenant_id = $1 AND s.subject_source = $2 AND s.subject = $3 AND s.session_id > $4
			AND (COALESCE(cardinality($6::text[]), 0) = 0 OR `+sessionNames+` <@ $6)
			ORDER BY s.session_id LIMIT $5`, tx.Tenant(), p.Subject.Source, p.Subject.Value, after, limit, p.Servers)
		if err != nil {
			return err
		}
		out, err = pgx.CollectRows(rows, scanSession)
		return err
	})
	return out, err
}

// Close ends a session: nothing more is dispatched in it, what was agreed in it
// is void, and its waiting calls are denied. Closing twice is no error.
func (s *Store) Close(ctx context.Context, p tenant.Principal, id string) (out *Session, err error) {
	if p.Subject.IsZero() || !resource.IsID(resource.Session, id) {
		return nil, errSessionNotFound
	}
	err = s.db.InTx(ctx, p.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		var state string
		err := tx.QueryRow(ctx, `SELECT state FROM sessions WHERE tenant_id = $1 AND session_id = $2
			AND subject_source = $3 AND subject = $4 FOR UPDATE`, tx.Tenant(), id, p.Subject.Source, p.Subject.Value).Scan(&state)
		if errors.Is(err, pgx.ErrNoRows) {
			return errSessionNotFound
		}
		if err != nil {
			return err
		}
		ses, err := readSession(ctx, tx, id)
		if err != nil {
			return err
		}
		if !ses.visible(p) {
			return errSessionNotFound
		}
		if state == "OPEN" {
			if err := s.close(ctx, tx, p, id); err != nil {
				return err
			}
		}
		out, err = readSession(ctx, tx, id)
		return err
	})
	return out, err
}

func (s *Store) close(ctx context.Context, tx tenant.Tx, p tenant.Principal, id string) error {
	_, err := tx.Exec(ctx, `UPDATE sessions SET state = 'CLOSED', close_time = clock_timestamp()
		WHERE tenant_id = $1 AND session_id = $2`, tx.Tenant(), id)
	if err != nil {
		return err
	}
	if err := s.voider.VoidSession(ctx, tx, id, "the session was closed"); err != nil {
		return err
	}
	_, err = s.rec.Append(ctx, tx, audit.Entry{Kind: "session.closed", SessionID: id, Subject: p.Subject, Actor: p.Actor(),
		Time: s.now(), Details: []byte(`{}`)})
	if err != nil {
		return err
	}
	tx.AfterCommit(func() {
		s.Forget(p.Tenant, id)
		if s.OnClose != nil {
			s.OnClose(p.Tenant, id)
		}
	})
	return nil
}

// CountCalls adds to the session's durable count inside a transaction and
// returns the new total.
func CountCalls(ctx context.Context, tx tenant.Tx, sessionID string, n int) (total int64, err error) {
	err = tx.QueryRow(ctx, countCalls, tx.Tenant(), sessionID, n).Scan(&total)
	return total, err
}

const countCalls = `INSERT INTO session_usage AS u (tenant_id, session_id, calls) VALUES ($1, $2, $3)
	ON CONFLICT (tenant_id, session_id) DO UPDATE SET calls = u.calls + excluded.calls RETURNING calls`

// QueueCount is CountCalls for a batch whose results nobody reads.
func QueueCount(b *pgx.Batch, t tenant.ID, sessionID string, n int) {
	b.Queue(countCalls, t, sessionID, n)
}
