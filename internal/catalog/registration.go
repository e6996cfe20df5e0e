package catalog

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/audit"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/postgres"
	"github.com/bulkhead-mcp/bulkhead/internal/resource"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

const serverColumns = `server_id, name, display_name, transport, url, runtime, origin, isolation,
	shared_state_acknowledged, authorization_mode, registration, era, protocol_version, newest_version,
	COALESCE(active_contract, 0), active_contract_id, state = 'DELETED', create_time, update_time`

func scanServer(row pgx.CollectableRow) (v Server, err error) {
	err = row.Scan(&v.ID, &v.Name, &v.DisplayName, &v.Transport, &v.URL, &v.Runtime, &v.Origin, &v.Isolation,
		&v.SharedStateAcknowledged, &v.AuthorizationMode, &v.Registration, &v.Era, &v.ProtocolVersion, &v.NewestVersion,
		&v.ActiveContract, &v.ActiveContractID, &v.Deleted, &v.CreateTime, &v.UpdateTime)
	return v, err
}

var errNoServer = fault.New(fault.NotFound, "SERVER_NOT_FOUND", "no such server")

// CreateServer registers a server for the caller's tenant. Nothing is sent to
// it. A repeat with the same requestID returns the registration as it is now;
// the same requestID with another body and a name in use are fault.Exists.
func (s *Service) CreateServer(ctx context.Context, p tenant.Principal, spec ServerSpec, requestID string) (Server, error) {
	v, err := s.server(spec)
	if err != nil {
		return Server{}, err
	}
	v.ID = resource.NewID(resource.Server)
	err = s.o.DB.InTx(ctx, p.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		earlier, err := tenant.RememberCreate(ctx, tx, "server", p.KeyID, requestID, tenant.BodyDigest(spec), v.ID)
		if err != nil {
			return err
		}
		if earlier != "" {
			v, err = oneServer(ctx, tx, `server_id = $2`, earlier)
			return err
		}
		if err := insertServer(ctx, tx, v); err != nil {
			return err
		}
		if err := s.record(ctx, tx, p, audit.ServerCreated, v, nil); err != nil {
			return err
		}
		v, err = oneServer(ctx, tx, `server_id = $2`, v.ID)
		return err
	})
	if err != nil {
		return Server{}, err
	}
	return v, nil
}

func insertServer(ctx context.Context, tx tenant.Tx, v Server) error {
	var n int
	err := tx.QueryRow(ctx, `SELECT count(*) FROM servers WHERE tenant_id = $1 AND state = 'ACTIVE'`, tx.Tenant()).Scan(&n)
	if err != nil {
		return err
	}
	if n >= MaxServers {
		return fault.New(fault.Exhausted, "TOO_MANY_SERVERS", "a tenant has at most %d servers", MaxServers)
	}
	_, err = tx.Exec(ctx, `
		INSERT INTO servers (tenant_id, server_id, name, display_name, transport, url, runtime, origin, isolation,
		                     shared_state_acknowledged, authorization_mode, registration)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)`,
		tx.Tenant(), v.ID, v.Name, v.DisplayName, v.Transport, v.URL, v.Runtime, v.Origin, v.Isolation,
		v.SharedStateAcknowledged, v.AuthorizationMode, v.Registration)
	if postgres.Constraint(err) == "servers_by_name" {
		return fault.New(fault.Exists, "SERVER_NAME_TAKEN", "a server named %s exists already", v.Name)
	}
	return err
}

// record writes an audit entry about a registration. The URL stays out: its path
// and query may hold what the tenant takes for a secret.
func (s *Service) record(ctx context.Context, tx tenant.Tx, p tenant.Principal, kind string, v Server, changed []string) error {
	details, err := json.Marshal(struct {
		Name         string    `json:"name"`
		Transport    Transport `json:"transport"`
		Origin       string    `json:"origin"`
		Isolation    Isolation `json:"isolation"`
		Registration int64     `json:"registration"`
		Changed      []string  `json:"changed,omitempty"`
	}{v.Name, v.Transport, v.Origin, v.Isolation, v.Registration, changed})
	if err != nil {
		return fault.Wrap(err, "encode audit details")
	}
	_, err = s.o.Recorder.Append(ctx, tx, audit.Entry{Kind: kind, ServerID: v.ID, Actor: p.Actor(),
		Subject: p.Subject, Details: details})
	return err
}

// selector returns the condition for an id or a name. The two cannot be mixed
// up: an id holds an underscore.
func selector(idOrName string) string {
	if resource.IsID(resource.Server, idOrName) {
		return `server_id = $2 AND state = 'ACTIVE'`
	}
	return `name = $2 AND state = 'ACTIVE'`
}

func oneServer(ctx context.Context, tx tenant.Tx, where string, args ...any) (Server, error) {
	rows, err := tx.Query(ctx, `SELECT `+serverColumns+` FROM servers WHERE tenant_id = $1 AND `+where,
		append([]any{tx.Tenant()}, args...)...)
	if err != nil {
		return Server{}, err
	}
	v, err := pgx.CollectExactlyOneRow(rows, scanServer)
	if errors.Is(err, pgx.ErrNoRows) {
		return Server{}, errNoServer
	}
	return v, err
}

// GetServer returns a registration of the caller's tenant by id or name. One
// that the caller's credential is not for does not exist for it. The answer may
// be five seconds old; writes look again.
func (s *Service) GetServer(ctx context.Context, p tenant.Principal, idOrName string) (Server, error) {
	v, err := s.lookup(ctx, p.Tenant, idOrName)
	if err != nil {
		return Server{}, err
	}
	if !p.MayUse(v.Name) {
		return Server{}, errNoServer
	}
	return v, nil
}

type serverKey struct {
	tenant   tenant.ID
	idOrName string
}

type cachedServer struct {
	server Server
	at     time.Time
	drops  uint64
}

func (s *Service) lookup(ctx context.Context, t tenant.ID, idOrName string) (Server, error) {
	k := serverKey{t, idOrName}
	now := s.o.Now()
	if c, ok := s.servers.get(k); ok && now.Sub(c.at) < confirmFor && c.drops == s.dropCount(c.server.ID) {
		return c.server, nil
	}
	before := s.dropped.Load()
	var v Server
	err := s.o.DB.InTx(ctx, t, func(ctx context.Context, tx tenant.Tx) (err error) {
		v, err = oneServer(ctx, tx, selector(idOrName), idOrName)
		return err
	})
	if err != nil {
		s.servers.delete(k)
		return Server{}, err
	}
	// What was read may be older than a signal that came meanwhile.
	drops := s.dropCount(v.ID)
	if before == s.dropped.Load() {
		s.servers.put(k, cachedServer{server: v, at: now, drops: drops}, 1)
	}
	return v, nil
}

// ListServers returns at most limit registrations of the caller's tenant after
// the given name, in the order of names.
func (s *Service) ListServers(ctx context.Context, p tenant.Principal, after string, limit int) (vs []Server, err error) {
	allowed := p.Servers
	if allowed == nil {
		allowed = []string{}
	}
	err = s.o.DB.InTx(ctx, p.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		rows, err := tx.Query(ctx, `
			SELECT `+serverColumns+`
			  FROM servers
			 WHERE tenant_id = $1 AND state = 'ACTIVE' AND name > $2 COLLATE "C"
			   AND (cardinality($3::text[]) = 0 OR name = ANY ($3))
			 ORDER BY name COLLATE "C"
			 LIMIT $4`, tx.Tenant(), after, allowed, min(max(limit, 1), MaxServers))
		if err != nil {
			return err
		}
		vs, err = pgx.CollectRows(rows, scanServer)
		return err
	})
	return vs, err
}

// UpdateServer changes a registration. A change of what is connected to, or for
// whom, makes a new registration: the era is forgotten and everything agreed
// about the server is void, in the same transaction.
func (s *Service) UpdateServer(ctx context.Context, p tenant.Principal, idOrName string, up ServerUpdate) (v Server, err error) {
	err = s.o.DB.InTx(ctx, p.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		before, err := s.lockOwn(ctx, tx, p, idOrName)
		if err != nil {
			return err
		}
		after, moved, err := s.apply(before, up)
		if err != nil {
			return err
		}
		changed := changes(before, after)
		if len(changed) == 0 {
			v = before
			return nil
		}
		_, err = tx.Exec(ctx, `
			UPDATE servers
			   SET display_name = $3, url = $4, runtime = $5, origin = $6, isolation = $7,
			       shared_state_acknowledged = $8, authorization_mode = $9, registration = $10,
			       era = $11, protocol_version = $12, newest_version = $13, update_time = now()
			 WHERE tenant_id = $1 AND server_id = $2`,
			tx.Tenant(), after.ID, after.DisplayName, after.URL, after.Runtime, after.Origin, after.Isolation,
			after.SharedStateAcknowledged, after.AuthorizationMode, after.Registration, after.Era, after.ProtocolVersion, after.NewestVersion)
		if err != nil {
			return err
		}
		if moved {
			if err := s.unseat(ctx, tx, after.ID, "the server's registration changed"); err != nil {
				return err
			}
		}
		if err := s.record(ctx, tx, p, audit.ServerUpdated, after, changed); err != nil {
			return err
		}
		v, err = oneServer(ctx, tx, `server_id = $2`, after.ID)
		return err
	})
	if err != nil {
		return Server{}, err
	}
	s.announce(ctx, p.Tenant, v.ID)
	return v, nil
}

// lockOwn takes the server's row, the first lock of writers that void.
func (s *Service) lockOwn(ctx context.Context, tx tenant.Tx, p tenant.Principal, idOrName string) (Server, error) {
	v, err := oneServer(ctx, tx, selector(idOrName)+` FOR UPDATE`, idOrName)
	if err != nil {
		return Server{}, err
	}
	if !p.MayUse(v.Name) {
		return Server{}, errNoServer
	}
	return v, nil
}

// unseat makes every list of a server useless and voids what was agreed about
// it. The server's row is locked; lists come next, then grants and consents.
func (s *Service) unseat(ctx context.Context, tx tenant.Tx, serverID, reason string) error {
	if err := invalidate(ctx, tx, serverID, nil, nil, reason); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, `
		UPDATE catalog_current
		   SET hidden = false, lister = '', failures = 0, retry_time = NULL
		 WHERE tenant_id = $1 AND server_id = $2`, tx.Tenant(), serverID)
	if err != nil {
		return err
	}
	return s.o.Voider.VoidServer(ctx, tx, serverID, "", reason)
}

// changes names the members that differ, as the API writes them.
func changes(a, b Server) []string {
	var out []string
	for _, c := range []struct {
		name    string
		differs bool
	}{
		{"displayName", a.DisplayName != b.DisplayName},
		{b.Transport.urlField(), a.URL != b.URL},
		{"stdio.runtime", a.Runtime != b.Runtime},
		{"isolation", a.Isolation != b.Isolation},
		{"authorization.mode", a.AuthorizationMode != b.AuthorizationMode},
		{"sharedStateAcknowledged", a.SharedStateAcknowledged != b.SharedStateAcknowledged},
	} {
		if c.differs {
			out = append(out, c.name)
		}
	}
	return out
}

// DeleteServer ends a registration and frees its name. Everything agreed about
// the server is void; its calls and its audit stay.
func (s *Service) DeleteServer(ctx context.Context, p tenant.Principal, idOrName string) error {
	var id string
	err := s.o.DB.InTx(ctx, p.Tenant, func(ctx context.Context, tx tenant.Tx) error {
		v, err := s.lockOwn(ctx, tx, p, idOrName)
		if err != nil {
			return err
		}
		id = v.ID
		_, err = tx.Exec(ctx, `
			UPDATE servers
			   SET state = 'DELETED', registration = registration + 1, delete_time = now(), update_time = now()
			 WHERE tenant_id = $1 AND server_id = $2`, tx.Tenant(), v.ID)
		if err != nil {
			return err
		}
		if err := s.unseat(ctx, tx, v.ID, "the server was deleted"); err != nil {
			return err
		}
		return s.record(ctx, tx, p, audit.ServerDeleted, v, nil)
	})
	if err != nil {
		return err
	}
	s.announce(ctx, p.Tenant, id)
	return nil
}

// LockServer reads a registration in the transaction of a dispatch and keeps it
// from changing until the transaction ends. A deleted one is fault.NotFound.
func (s *Service) LockServer(ctx context.Context, tx tenant.Tx, serverID string) (Server, error) {
	return oneServer(ctx, tx, `server_id = $2 AND state = 'ACTIVE' FOR SHARE`, serverID)
}
