package authz

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/audit"
	"github.com/bulkhead-mcp/bulkhead/internal/contract"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/resource"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// Record is one stored revision of a server's contract.
type Record struct {
	ServerID     string
	ServerName   string
	Revision     int
	ContractID   string
	State        string
	Source       []byte
	Canonical    []byte
	CreatedBy    string
	CreateTime   time.Time
	ActivateTime *time.Time
	RetireTime   *time.Time
}

// Active is the contract in force for a server, compiled.
type Active struct {
	Contract *contract.Contract
	Revision int
}

// Voider voids what was agreed under other contracts of a server.
type Voider interface {
	VoidServer(ctx context.Context, tx tenant.Tx, serverID, keepContract, reason string) error
}

// Recorder keeps audit entries in the transaction of what they record.
type Recorder interface {
	Append(ctx context.Context, tx tenant.Tx, e audit.Entry) (string, error)
}

// activeTTL is how long a cached contract holds after Postgres last confirmed it
// (design 8); dispatch transactions always read the row.
const (
	activeTTL       = 5 * time.Second
	maxCachedActive = 5_000
	maxCachedOlder  = 1_000
	maxRevisions    = 10_000
)

type serverKey struct {
	tenant tenant.ID
	server string
}

type cachedActive struct {
	active *Active // nil when the server has none
	until  time.Time
}

// Service stores contracts.
type Service struct {
	db     *tenant.DB
	voider Voider
	rec    Recorder
	now    func() time.Time
	// OnActivate is told after the commit of an activation, to tell other
	// replicas. It may be nil.
	OnActivate func(t tenant.ID, serverID string)

	mu    sync.Mutex
	cache map[serverKey]cachedActive // at most maxCachedActive
	older map[revisionKey]*Active    // at most maxCachedOlder; revisions never change
}

// NewService returns the store of contracts.
func NewService(db *tenant.DB, voider Voider, rec Recorder) (*Service, error) {
	if db == nil || voider == nil || rec == nil {
		return nil, errors.New("authz: database, voider and recorder are needed")
	}
	return &Service{db: db, voider: voider, rec: rec, now: time.Now,
		cache: map[serverKey]cachedActive{}, older: map[revisionKey]*Active{}}, nil
}

// Create stores a contract as the server's next revision, a draft. The source is
// YAML or JSON and must be for this server's name, origin and transport.
func (s *Service) Create(ctx context.Context, p tenant.Principal, server string, source []byte, requestID string) (Record, error) {
	c, err := contract.Parse(source)
	if err != nil {
		return Record{}, err
	}
	sum := sha256.Sum256(source)
	var out Record
	err = s.db.InTx(ctx, p.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		reg, err := lockServer(ctx, tx, p, server)
		if err != nil {
			return err
		}
		if err := reg.fits(c); err != nil {
			return err
		}
		next := reg.last + 1
		if next > maxRevisions {
			return fault.New(fault.Exhausted, "TOO_MANY_REVISIONS", "a server has at most %d contract revisions", maxRevisions)
		}
		earlier, err := tenant.RememberCreate(ctx, tx, "contract", p.KeyID+"/"+reg.id, requestID, hex.EncodeToString(sum[:]), fmt.Sprint(next))
		if err != nil {
			return err
		}
		if earlier != "" {
			_, err = fmt.Sscan(earlier, &next)
		} else {
			err = s.insert(ctx, tx, p, reg, c, source, next)
		}
		if err != nil {
			return err
		}
		out, err = readRecord(ctx, tx, reg.id, next)
		return err
	})
	return out, err
}

func (s *Service) insert(ctx context.Context, tx tenant.Tx, p tenant.Principal, reg registration, c *contract.Contract, source []byte, revision int) error {
	_, err := tx.Exec(ctx, `
		INSERT INTO contracts (tenant_id, server_id, revision, contract_id, source, canonical, created_by)
		VALUES ($1, $2, $3, $4, $5, $6, $7)`,
		tx.Tenant(), reg.id, revision, c.ID, source, c.Canonical, p.Actor())
	if err != nil {
		return err
	}
	return s.record(ctx, tx, p, "contract.created", reg.id, c.ID, revision)
}

func (s *Service) record(ctx context.Context, tx tenant.Tx, p tenant.Principal, kind, serverID, contractID string, revision int) error {
	_, err := s.rec.Append(ctx, tx, audit.Entry{Kind: kind, ServerID: serverID, Actor: p.Actor(), Time: s.now(),
		Details: fmt.Appendf(nil, `{"contractId":%q,"revision":%d}`, contractID, revision)})
	return err
}

// registration is what a contract must agree with.
type registration struct {
	id, name, origin, transport string
	last                        int
}

func (r registration) fits(c *contract.Contract) error {
	var bad []fault.Field
	if c.Server != r.name {
		bad = append(bad, fault.Field{Path: "server", Rule: fmt.Sprintf("must be %q, the server's name", r.name)})
	}
	if c.Origin != r.origin {
		bad = append(bad, fault.Field{Path: "origin", Rule: fmt.Sprintf("must be %q, where the server is registered", r.origin)})
	}
	if string(c.Transport) != r.transport {
		bad = append(bad, fault.Field{Path: "transport", Rule: fmt.Sprintf("must be %s, as the server is registered", r.transport)})
	}
	if len(bad) > 0 {
		return fault.InvalidFields(bad...)
	}
	return nil
}

var errServerNotFound = fault.New(fault.NotFound, "SERVER_NOT_FOUND", "no such server")

// lockServer locks a registration. One that the caller's credential is not for
// does not exist for it.
func lockServer(ctx context.Context, tx tenant.Tx, p tenant.Principal, nameOrID string) (r registration, err error) {
	if !isSelector(nameOrID) {
		return r, errServerNotFound
	}
	err = tx.QueryRow(ctx, `SELECT server_id, name, origin, transport FROM servers
		WHERE tenant_id = $1 AND (server_id = $2 OR name = $2) AND state = 'ACTIVE' FOR UPDATE`,
		tx.Tenant(), nameOrID).Scan(&r.id, &r.name, &r.origin, &r.transport)
	if errors.Is(err, pgx.ErrNoRows) {
		return r, errServerNotFound
	}
	if err != nil {
		return r, err
	}
	if !p.MayUse(r.name) {
		return registration{}, errServerNotFound
	}
	err = tx.QueryRow(ctx, `SELECT COALESCE(max(revision), 0) FROM contracts WHERE tenant_id = $1 AND server_id = $2`,
		tx.Tenant(), r.id).Scan(&r.last)
	return r, err
}

// Activate makes a revision govern calls, retires the one before, and voids what
// was agreed under another contract. Activating the active one changes nothing.
func (s *Service) Activate(ctx context.Context, p tenant.Principal, server string, revision int) (Record, error) {
	var out Record
	err := s.db.InTx(ctx, p.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		reg, err := lockServer(ctx, tx, p, server)
		if err != nil {
			return err
		}
		out, err = readRecord(ctx, tx, reg.id, revision)
		if err != nil || out.State == "ACTIVE" {
			return err
		}
		c, err := contract.Parse(out.Source)
		if err != nil {
			return err
		}
		if err := reg.fits(c); err != nil {
			return err
		}
		if err := s.activate(ctx, tx, p, reg, out); err != nil {
			return err
		}
		out, err = readRecord(ctx, tx, reg.id, revision)
		return err
	})
	return out, err
}

func (s *Service) activate(ctx context.Context, tx tenant.Tx, p tenant.Principal, reg registration, r Record) error {
	b := &pgx.Batch{}
	b.Queue(`UPDATE contracts SET state = 'RETIRED', retire_time = clock_timestamp()
		WHERE tenant_id = $1 AND server_id = $2 AND state = 'ACTIVE'`, tx.Tenant(), reg.id)
	b.Queue(`UPDATE contracts SET state = 'ACTIVE', activate_time = clock_timestamp(), retire_time = NULL
		WHERE tenant_id = $1 AND server_id = $2 AND revision = $3`, tx.Tenant(), reg.id, r.Revision)
	b.Queue(`UPDATE servers SET active_contract = $3, active_contract_id = $4, update_time = clock_timestamp()
		WHERE tenant_id = $1 AND server_id = $2`, tx.Tenant(), reg.id, r.Revision, r.ContractID)
	if err := tx.SendBatch(ctx, b).Close(); err != nil {
		return err
	}
	if err := s.voider.VoidServer(ctx, tx, reg.id, r.ContractID, "another contract was activated"); err != nil {
		return err
	}
	if err := s.record(ctx, tx, p, "contract.activated", reg.id, r.ContractID, r.Revision); err != nil {
		return err
	}
	tx.AfterCommit(func() {
		s.Forget(p.Tenant, reg.id)
		if s.OnActivate != nil {
			s.OnActivate(p.Tenant, reg.id)
		}
	})
	return nil
}

const recordColumns = `c.server_id, s.name, c.revision, c.contract_id, c.state, c.source, c.canonical, c.created_by,
	c.create_time, c.activate_time, c.retire_time`

const recordFrom = ` FROM contracts c JOIN servers s ON s.tenant_id = c.tenant_id AND s.server_id = c.server_id `

func scanRecord(row pgx.CollectableRow) (r Record, err error) {
	err = row.Scan(&r.ServerID, &r.ServerName, &r.Revision, &r.ContractID, &r.State, &r.Source, &r.Canonical, &r.CreatedBy,
		&r.CreateTime, &r.ActivateTime, &r.RetireTime)
	return r, err
}

func readRecord(ctx context.Context, tx tenant.Tx, serverID string, revision int) (Record, error) {
	rows, err := tx.Query(ctx, `SELECT `+recordColumns+recordFrom+`
		WHERE c.tenant_id = $1 AND c.server_id = $2 AND c.revision = $3`, tx.Tenant(), serverID, revision)
	if err != nil {
		return Record{}, err
	}
	r, err := pgx.CollectExactlyOneRow(rows, scanRecord)
	if errors.Is(err, pgx.ErrNoRows) {
		return Record{}, fault.New(fault.NotFound, "CONTRACT_NOT_FOUND", "no such contract revision")
	}
	return r, err
}

// Get returns one revision of a server that is named or identified.
func (s *Service) Get(ctx context.Context, p tenant.Principal, server string, revision int) (out Record, err error) {
	err = s.db.InTx(ctx, p.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		id, err := serverID(ctx, tx, p, server)
		if err != nil {
			return err
		}
		out, err = readRecord(ctx, tx, id, revision)
		return err
	})
	return out, err
}

// List returns at most limit revisions below before (0 means from the newest),
// newest first.
func (s *Service) List(ctx context.Context, p tenant.Principal, server string, before, limit int) (out []Record, err error) {
	err = s.db.InTx(ctx, p.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		id, err := serverID(ctx, tx, p, server)
		if err != nil {
			return err
		}
		rows, err := tx.Query(ctx, `SELECT `+recordColumns+recordFrom+`
			WHERE c.tenant_id = $1 AND c.server_id = $2 AND ($3 = 0 OR c.revision < $3)
			ORDER BY c.revision DESC LIMIT $4`, tx.Tenant(), id, before, limit)
		if err != nil {
			return err
		}
		out, err = pgx.CollectRows(rows, scanRecord)
		return err
	})
	return out, err
}

func serverID(ctx context.Context, tx tenant.Tx, p tenant.Principal, nameOrID string) (string, error) {
	if !isSelector(nameOrID) {
		return "", errServerNotFound
	}
	var id, name string
	err := tx.QueryRow(ctx, `SELECT server_id, name FROM servers WHERE tenant_id = $1 AND (server_id = $2 OR name = $2)
		AND state = 'ACTIVE'`, tx.Tenant(), nameOrID).Scan(&id, &name)
	if errors.Is(err, pgx.ErrNoRows) || err == nil && !p.MayUse(name) {
		return "", errServerNotFound
	}
	return id, err
}

// isSelector reports whether s can name a registration at all.
func isSelector(s string) bool { return resource.IsServerName(s) || resource.IsID(resource.Server, s) }

// Active returns the contract in force for a server, nil when there is none,
// from memory when Postgres confirmed it within the last five seconds.
func (s *Service) Active(ctx context.Context, t tenant.ID, serverID string) (*Active, error) {
	k := serverKey{t, serverID}
	s.mu.Lock()
	c, ok := s.cache[k]
	s.mu.Unlock()
	if ok && s.now().Before(c.until) {
		return c.active, nil
	}
	return s.load(ctx, k, c.active)
}

func (s *Service) load(ctx context.Context, k serverKey, old *Active) (*Active, error) {
	until := s.now().Add(activeTTL)
	var id string
	var revision int
	var source []byte
	err := s.db.Read(ctx, k.tenant, func(b *pgx.Batch) {
		b.Queue(`SELECT contract_id, revision, source FROM contracts
			WHERE tenant_id = $1 AND server_id = $2 AND state = 'ACTIVE'`, k.tenant, k.server).
			QueryRow(func(row pgx.Row) error { return row.Scan(&id, &revision, &source) })
	})
	var active *Active
	switch {
	case fault.Is(err, fault.NotFound):
	case err != nil:
		return nil, err
	case old != nil && old.Contract.ID == id && old.Revision == revision:
		active = old // compiled once and kept by revision
	default:
		c, err := contract.Parse(source)
		if err != nil {
			return nil, fault.Wrap(err, "compile stored contract")
		}
		active = &Active{Contract: c, Revision: revision}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.cache) >= maxCachedActive {
		clear(s.cache)
	}
	s.cache[k] = cachedActive{active: active, until: until}
	return active, nil
}

// Forget drops a server's contract from memory, for a signal of its change.
func (s *Service) Forget(t tenant.ID, serverID string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.cache, serverKey{t, serverID})
}

type revisionKey struct {
	serverKey
	revision int
}

// At returns one stored revision compiled, whatever its state, for work that was
// decided under it. It is fault.NotFound when there is none.
func (s *Service) At(ctx context.Context, t tenant.ID, serverID string, revision int) (*Active, error) {
	if a, err := s.Active(ctx, t, serverID); err != nil {
		return nil, err
	} else if a != nil && a.Revision == revision {
		return a, nil
	}
	k := revisionKey{serverKey{t, serverID}, revision}
	s.mu.Lock()
	a := s.older[k]
	s.mu.Unlock()
	if a != nil {
		return a, nil
	}
	var source []byte
	err := s.db.Read(ctx, t, func(b *pgx.Batch) {
		b.Queue(`SELECT source FROM contracts WHERE tenant_id = $1 AND server_id = $2 AND revision = $3`, t, serverID, revision).
			QueryRow(func(row pgx.Row) error { return row.Scan(&source) })
	})
	if err != nil {
		return nil, err
	}
	c, err := contract.Parse(source)
	if err != nil {
		return nil, fault.Wrap(err, "compile stored contract")
	}
	a = &Active{Contract: c, Revision: revision}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.older) >= maxCachedOlder {
		clear(s.older)
	}
	s.older[k] = a
	return a, nil
}
