package catalog

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/bulkhead-mcp/bulkhead/internal/audit"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
	"github.com/bulkhead-mcp/bulkhead/internal/webhooks"
)

// episodeQuiet is how long nothing must be noticed for the next notice to begin an
// episode of its own.
const episodeQuiet = time.Hour

// kindOfEvent names the audit entry of each event.
var kindOfEvent = map[string]string{"downgrade_refused": audit.SecurityDowngradeRefused, "origin_refused": audit.SecurityOriginRefused}

// Refused records that something about a server was refused that a security team
// wants to see: downgrade_refused or origin_refused. An episode, over all
// connections and replicas, has one audit entry; first reports whether this call
// wrote it. A registration of 0 is the present one.
func (s *Service) Refused(ctx context.Context, t tenant.ID, serverID string, registration int64, event string) (first bool, err error) {
	kind, ok := kindOfEvent[event]
	if !ok {
		return false, fault.Wrap(errEncoding, "record the event "+event)
	}
	err = s.o.DB.InTx(ctx, t, func(ctx context.Context, tx tenant.Tx) error {
		first = false
		v, err := oneServer(ctx, tx, `server_id = $2 AND state = 'ACTIVE'`, serverID)
		if err != nil {
			return err
		}
		if registration == 0 {
			registration = v.Registration
		}
		begins, err := noteEpisode(ctx, tx, serverID, registration, event)
		if err != nil || !begins {
			return err
		}
		details, err := json.Marshal(struct {
			Name            string `json:"name"`
			Origin          string `json:"origin"`
			Registration    int64  `json:"registration"`
			NewestVersion   string `json:"newestVersion,omitempty"`
			ProtocolVersion string `json:"protocolVersion,omitempty"`
		}{v.Name, v.Origin, registration, v.NewestVersion, v.ProtocolVersion})
		if err != nil {
			return fault.Wrap(err, "encode audit details")
		}
		first = true
		_, err = s.o.Recorder.Append(ctx, tx, audit.Entry{Kind: kind, ServerID: serverID, Actor: "system", Details: details})
		if err != nil || s.o.Announcer == nil {
			return err
		}
		// The type of the event is the kind of the audit entry.
		return s.o.Announcer.Announce(ctx, tx, webhooks.Event{Type: webhooks.Type(kind), Data: webhooks.SecurityData{
			ServerID: serverID, Server: v.Name, Registration: registration}})
	})
	if fault.Is(err, fault.NotFound) || errors.Is(err, pgx.ErrNoRows) {
		return false, nil // it was deleted meanwhile
	}
	return first && err == nil, err
}

// noteEpisode notes an event and reports whether an episode begins with it.
func noteEpisode(ctx context.Context, tx tenant.Tx, serverID string, registration int64, event string) (begins bool, err error) {
	var goesOn bool
	err = tx.QueryRow(ctx, `
		SELECT last_time > clock_timestamp() - $5 * interval '1 microsecond' AND registration = $4
		  FROM security_episodes WHERE tenant_id = $1 AND server_id = $2 AND event = $3 FOR UPDATE`,
		tx.Tenant(), serverID, event, registration, episodeQuiet.Microseconds()).Scan(&goesOn)
	known := err == nil
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return false, err
	}
	var inserted bool
	err = tx.QueryRow(ctx, `
		INSERT INTO security_episodes AS e (tenant_id, server_id, event, registration, last_time)
		VALUES ($1, $2, $3, $4, clock_timestamp())
		ON CONFLICT (tenant_id, server_id, event) DO UPDATE
		   SET last_time = excluded.last_time, registration = excluded.registration
		RETURNING xmax = 0`, tx.Tenant(), serverID, event, registration).Scan(&inserted)
	// Without a row of before, whoever inserted the first one began the episode.
	return known && !goesOn || !known && inserted, err
}

// Learned remembers the era and the version that a connection to a server proved,
// for all replicas and for the time after a restart. What is learned of an earlier
// registration is of no interest.
func (s *Service) Learned(ctx context.Context, t tenant.ID, serverID string, registration int64, era, version string) error {
	changed := false
	err := s.o.DB.InTx(ctx, t, func(ctx context.Context, tx tenant.Tx) error {
		tag, err := tx.Exec(ctx, `
			UPDATE servers SET era = $4, protocol_version = $5, newest_version = greatest(newest_version, $5), update_time = now()
			 WHERE tenant_id = $1 AND server_id = $2 AND registration = $3 AND state = 'ACTIVE'
			   AND ((era, protocol_version) IS DISTINCT FROM ($4, $5) OR newest_version < $5)`,
			t, serverID, registration, era, version)
		changed = tag.RowsAffected() > 0
		return err
	})
	if err == nil && changed {
		s.announce(ctx, t, serverID)
	}
	return err
}
