package catalog

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// seen is a row of catalog_current: what one context saw last and how listing
// goes on. Times are turned into durations by the database, whose clock alone
// counts.
type seen struct {
	context       string
	revisionID    string // empty before the first list
	contentDigest string
	registration  int64
	generation    int64 // of the list that was stored
	invalidated   int64 // lists up to this generation are out of date
	observed      time.Time
	age           time.Duration
	ttl           time.Duration
	staleReason   string
	hidden        bool
	lister        string        // the replica that lists now, or empty
	lease         time.Duration // what is left to it
	failures      int
	retry         time.Duration // what is left of the wait after failures
}

// view is what PostgreSQL says about a slot: the context's own row and the one
// that all contexts of the tenant share.
type view struct {
	own, public seen
}

// effective returns the row whose list counts: the later one of this
// registration, nil when there is none.
func (v *view) effective(registration int64) *seen {
	var best *seen
	for _, r := range []*seen{&v.own, &v.public} {
		if r.revisionID != "" && r.registration == registration && (best == nil || r.generation > best.generation) {
			best = r
		}
	}
	return best
}

const seenColumns = `c.context, COALESCE(c.revision_id, ''), COALESCE(r.content_digest, ''), c.registration,
	c.generation, c.invalidated, COALESCE(c.observe_time, 'epoch'),
	COALESCE((EXTRACT(EPOCH FROM clock_timestamp() - c.observe_time) * 1000000)::bigint, 0),
	c.ttl_ms, c.stale_reason, c.hidden, c.lister,
	COALESCE((EXTRACT(EPOCH FROM c.lease_time - clock_timestamp()) * 1000000)::bigint, 0), c.failures,
	COALESCE((EXTRACT(EPOCH FROM c.retry_time - clock_timestamp()) * 1000000)::bigint, 0)`

const seenFrom = ` FROM catalog_current c
	LEFT JOIN catalog_revisions r ON r.tenant_id = c.tenant_id AND r.revision_id = c.revision_id
	WHERE c.tenant_id = $1 AND c.server_id = $2 AND c.kind = $3`

func scanSeen(row pgx.CollectableRow) (r seen, err error) {
	var age, ttl, lease, retry int64
	err = row.Scan(&r.context, &r.revisionID, &r.contentDigest, &r.registration, &r.generation, &r.invalidated,
		&r.observed, &age, &ttl, &r.staleReason, &r.hidden, &r.lister, &lease, &r.failures, &retry)
	r.age = max(0, time.Duration(age)*time.Microsecond)
	r.ttl = time.Duration(ttl) * time.Millisecond
	r.lease = time.Duration(lease) * time.Microsecond
	r.retry = time.Duration(retry) * time.Microsecond
	return r, err
}

// readView reads the rows of a slot in one round trip.
func (s *Service) readView(ctx context.Context, k slotKey) (v view, err error) {
	public := publicName(s.o.Declared)
	err = s.o.DB.Read(ctx, k.tenant, func(b *pgx.Batch) {
		b.Queue(`SELECT `+seenColumns+seenFrom+` AND c.context = ANY ($4)`,
			k.tenant, k.server, k.kind, []string{k.context, public}).Query(func(rows pgx.Rows) error {
			list, err := pgx.CollectRows(rows, scanSeen)
			v.fill(list, public)
			return err
		})
	})
	return v, err
}

func (v *view) fill(rows []seen, public string) {
	for _, r := range rows {
		if r.context == public {
			v.public = r
		} else {
			v.own = r
		}
	}
}

// leaseTime is how long one replica may keep the others from listing. A list
// that takes longer may be made twice; its generation decides which counts. It
// is well below Options.Wait, so that the lease of a replica that died while it
// listed does not use up the wait of those who come after it.
const leaseTime = 4 * time.Second

// errNotNow undoes a lease that is not to be used.
var errNotNow = errors.New("catalog: no list is to be made now")

// begin takes the lease of a slot and returns the number of the list. It is 0
// when another replica lists, when one has listed since the wish looked, or when
// a failed list must not be repeated yet; force passes over the last two. A
// registration that is not the tenant's present one is a fault.
func (s *Service) begin(ctx context.Context, w wish, force bool) (generation int64, err error) {
	k := w.key
	err = s.o.DB.InTx(ctx, k.tenant, func(ctx context.Context, tx tenant.Tx) error {
		v, err := oneServer(ctx, tx, `server_id = $2 AND state = 'ACTIVE'`, k.server)
		if err != nil {
			return err
		}
		if v.Registration != w.server.Registration {
			return errMoved
		}
		err = tx.QueryRow(ctx, `
			INSERT INTO catalog_current AS c (tenant_id, server_id, context, kind, lister, lease_time, listing)
			VALUES ($1, $2, $3, $4, $5, clock_timestamp() + $6 * interval '1 microsecond', nextval('catalog_generations'))
			ON CONFLICT (tenant_id, server_id, context, kind) DO UPDATE
			   SET lister = excluded.lister, lease_time = excluded.lease_time, listing = excluded.listing
			 WHERE (c.lister = '' OR c.lease_time <= clock_timestamp())
			   AND ($7 OR c.retry_time IS NULL OR c.retry_time <= clock_timestamp())
			RETURNING listing`,
			k.tenant, k.server, k.context, k.kind, s.replica, leaseTime.Microseconds(), force).Scan(&generation)
		if errors.Is(err, pgx.ErrNoRows) {
			return errNotNow
		}
		if err != nil || force {
			return err
		}
		var newest int64
		err = tx.QueryRow(ctx, `
			SELECT max(generation) FROM catalog_current
			 WHERE tenant_id = $1 AND server_id = $2 AND kind = $3 AND context = ANY ($4)`,
			k.tenant, k.server, k.kind, []string{k.context, publicName(s.o.Declared)}).Scan(&newest)
		if err == nil && newest > w.known {
			return errNotNow
		}
		return err
	})
	if errors.Is(err, errNotNow) {
		return 0, nil
	}
	return generation, err
}

// coolDown is how long a list is not tried again after n failures in a row.
func coolDown(n int) time.Duration {
	const least, most = time.Second, 30 * time.Second
	if n > 5 {
		return most
	}
	return min(most, least<<max(0, n-1))
}

// fail ends a list that brought nothing. What was seen before stays; once hidden
// it stays hidden until a list succeeds, since an outage takes no refusal back.
func (s *Service) fail(ctx context.Context, k slotKey, generation int64, reason string, hidden bool) error {
	return s.o.DB.InTx(ctx, k.tenant, func(ctx context.Context, tx tenant.Tx) error {
		var failures int
		err := tx.QueryRow(ctx, `
			SELECT failures FROM catalog_current
			 WHERE tenant_id = $1 AND server_id = $2 AND context = $3 AND kind = $4 AND listing = $5
			   FOR UPDATE`, k.tenant, k.server, k.context, k.kind, generation).Scan(&failures)
		if errors.Is(err, pgx.ErrNoRows) {
			// Another replica began a later list; this one says nothing any more.
			return nil
		}
		if err != nil {
			return err
		}
		_, err = tx.Exec(ctx, `
			UPDATE catalog_current
			   SET lister = '', lease_time = NULL, stale_reason = $5, hidden = hidden OR $6, failures = $7,
			       retry_time = clock_timestamp() + $8 * interval '1 microsecond'
			 WHERE tenant_id = $1 AND server_id = $2 AND context = $3 AND kind = $4`,
			k.tenant, k.server, k.context, k.kind, bounded(reason), hidden, failures+1,
			coolDown(failures+1).Microseconds())
		return err
	})
}

// release gives a lease back without saying anything about the server.
func (s *Service) release(ctx context.Context, k slotKey, generation int64) error {
	return s.o.DB.InTx(ctx, k.tenant, func(ctx context.Context, tx tenant.Tx) error {
		_, err := tx.Exec(ctx, `
			UPDATE catalog_current SET lister = '', lease_time = NULL
			 WHERE tenant_id = $1 AND server_id = $2 AND context = $3 AND kind = $4 AND listing = $5`,
			k.tenant, k.server, k.context, k.kind, generation)
		return err
	})
}

// invalidate marks what contexts saw as out of date: all contexts when contexts
// is nil, all kinds when kinds is.
func invalidate(ctx context.Context, tx tenant.Tx, serverID string, contexts, kinds []string, reason string) error {
	// Rows are locked in one order, here and in swap.
	_, err := tx.Exec(ctx, `
		WITH hit AS (
		  SELECT context, kind
		    FROM catalog_current
		   WHERE tenant_id = $1 AND server_id = $2
		     AND ($3::text[] IS NULL OR context = ANY ($3)) AND ($4::text[] IS NULL OR kind = ANY ($4))
		   ORDER BY context, kind
		     FOR UPDATE
		)
		UPDATE catalog_current c
		   SET invalidated = nextval('catalog_generations'), stale_reason = $5
		  FROM hit
		 WHERE c.tenant_id = $1 AND c.server_id = $2 AND c.context = hit.context AND c.kind = hit.kind`,
		tx.Tenant(), serverID, contexts, kinds, bounded(reason))
	return err
}

// readContent reads a revision from its rows.
func (s *Service) readContent(ctx context.Context, t tenant.ID, id string) (*content, error) {
	var c *content
	err := s.o.DB.Read(ctx, t, func(b *pgx.Batch) {
		b.Queue(`
			SELECT server_id, kind, protocol_version, era, capabilities, findings
			  FROM catalog_revisions
			 WHERE tenant_id = $1 AND revision_id = $2`, t, id).QueryRow(func(row pgx.Row) error {
			c = &content{}
			var findings []string
			err := row.Scan(&c.serverID, &c.kind, &c.protocolVersion, &c.era, &c.capabilities, &findings)
			c.findings = parseFindings(findings)
			return err
		})
		b.Queue(`
			SELECT i.name, i.digest, i.quarantine, i.findings, d.raw
			  FROM catalog_items i
			  JOIN catalog_revisions r ON r.tenant_id = i.tenant_id AND r.revision_id = i.revision_id
			  JOIN definitions d ON d.tenant_id = i.tenant_id AND d.server_id = r.server_id AND d.digest = i.digest
			 WHERE i.tenant_id = $1 AND i.revision_id = $2
			 ORDER BY i.position`, t, id).Query(func(rows pgx.Rows) error {
			var err error
			c.definitions, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (Definition, error) {
				d := Definition{Kind: c.kind}
				var findings []string
				err := row.Scan(&d.Name, &d.Digest, &d.Quarantine, &findings, &d.Raw)
				d.Findings = parseFindings(findings)
				return d, err
			})
			return err
		})
	})
	if err != nil {
		return nil, err
	}
	c.seal()
	c.encoded = c.append(nil, true)
	if c.id != id {
		return nil, fault.Wrap(errEncoding, "catalog revision "+id+" does not have the content of its id")
	}
	return c, nil
}

// Pinned is a definition as the dispatch transaction finds it.
type Pinned struct {
	// RevisionID is the revision that counts now; empty when nothing was seen.
	RevisionID   string
	Registration int64
	// Digest is empty when the name is not offered or is in quarantine.
	Digest string
	// Age is how long ago the list was begun, by the clock of the database.
	Age time.Duration
	// Stale says that the list is known to be out of date, StaleReason why.
	Stale       bool
	StaleReason string
}

// LockDefinition reads what a context, named as in Revision.Context, sees of one
// definition, in the transaction of a dispatch, and keeps it from changing until
// the transaction ends. It comes after LockServer.
func (s *Service) LockDefinition(ctx context.Context, tx tenant.Tx, serverID, contextName, kind, name string) (Pinned, error) {
	var p Pinned
	var age int64
	err := tx.QueryRow(ctx, `
		SELECT COALESCE(c.revision_id, ''), c.registration,
		       COALESCE((EXTRACT(EPOCH FROM clock_timestamp() - c.observe_time) * 1000000)::bigint, 0),
		       c.invalidated > c.generation OR c.hidden, c.stale_reason
		  FROM catalog_current c
		 WHERE c.tenant_id = $1 AND c.server_id = $2 AND c.context = $3 AND c.kind = $4
		   FOR SHARE`, tx.Tenant(), serverID, contextName, kind).
		Scan(&p.RevisionID, &p.Registration, &age, &p.Stale, &p.StaleReason)
	if errors.Is(err, pgx.ErrNoRows) {
		return Pinned{Stale: true, StaleReason: "nothing was listed yet"}, nil
	}
	if err != nil {
		return Pinned{}, err
	}
	p.Age = time.Duration(age) * time.Microsecond
	err = tx.QueryRow(ctx, `
		SELECT digest FROM catalog_items
		 WHERE tenant_id = $1 AND revision_id = $2 AND name = $3 AND quarantine = ''`,
		tx.Tenant(), p.RevisionID, name).Scan(&p.Digest)
	if errors.Is(err, pgx.ErrNoRows) {
		err = nil
	}
	return p, err
}
