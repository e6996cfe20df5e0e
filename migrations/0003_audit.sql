-- +goose Up

-- Entries come with the transaction of what they record; the sealer gives the
-- committed ones their place in the chain. Details are sealed under the
-- tenant's key and enter the chain by digest only.
CREATE TABLE audit_entries (
  tenant_id       text NOT NULL REFERENCES tenants,
  audit_entry_id  text NOT NULL,
  ordinal         bigint GENERATED ALWAYS AS IDENTITY,
  kind            text NOT NULL,
  session_id      text NOT NULL DEFAULT '',
  call_id         text NOT NULL DEFAULT '',
  consent_id      text NOT NULL DEFAULT '',
  server_id       text NOT NULL DEFAULT '',
  actor           text NOT NULL DEFAULT '',
  subject_source  text NOT NULL DEFAULT '',
  subject         text NOT NULL DEFAULT '',
  details         bytea NOT NULL,
  details_digest  text NOT NULL,
  create_time     timestamptz NOT NULL,
  sequence        bigint,
  previous_digest text NOT NULL DEFAULT '',
  digest          text NOT NULL DEFAULT '',
  -- Sealing updates an indexed column, so that each index is paid for twice:
  -- ids have none, 80 random bits keep them apart.
  PRIMARY KEY (tenant_id, ordinal)
);
-- Ciphertext does not compress; do not try.
ALTER TABLE audit_entries ALTER COLUMN details SET STORAGE EXTERNAL;
CREATE UNIQUE INDEX audit_entries_by_sequence ON audit_entries (tenant_id, sequence) WHERE sequence IS NOT NULL;
CREATE INDEX audit_entries_unsealed ON audit_entries (tenant_id, ordinal) WHERE sequence IS NULL;
CREATE INDEX audit_entries_by_call ON audit_entries (tenant_id, call_id) WHERE call_id <> '';
CREATE INDEX audit_entries_by_session ON audit_entries (tenant_id, session_id, ordinal) WHERE session_id <> '';
-- The three kinds left out are most of the rows; a scan finds those at once.
CREATE INDEX audit_entries_by_kind ON audit_entries (tenant_id, kind, ordinal)
  WHERE kind NOT IN ('call.proposed', 'call.dispatched', 'call.finished');

-- The end of a tenant's chain; who seals holds this row's lock.
-- uncovered_since is the time of the oldest sealed entry after the last
-- checkpoint, NULL when the checkpoint covers the whole chain.
CREATE TABLE audit_heads (
  tenant_id           text PRIMARY KEY REFERENCES tenants,
  sequence            bigint NOT NULL DEFAULT 0,
  digest              text NOT NULL DEFAULT '',
  checkpoint_sequence bigint NOT NULL DEFAULT 0,
  uncovered_since     timestamptz,
  update_time         timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX audit_heads_uncovered ON audit_heads (tenant_id) WHERE uncovered_since IS NOT NULL;

CREATE TABLE audit_checkpoints (
  tenant_id   text NOT NULL REFERENCES tenants,
  sequence    bigint NOT NULL,
  digest      text NOT NULL,
  key_id      text NOT NULL,
  signature   bytea NOT NULL,
  create_time timestamptz NOT NULL,
  PRIMARY KEY (tenant_id, sequence)
);

-- Beyond the tenant's isolation, which the next migration adds: an entry comes
-- without a place in the chain, gets one once, and then stays as it is.
CREATE POLICY entries_come_unsealed ON audit_entries AS RESTRICTIVE FOR INSERT TO bulkhead_app
  WITH CHECK (sequence IS NULL AND previous_digest = '' AND digest = '');
CREATE POLICY entries_are_sealed_once ON audit_entries AS RESTRICTIVE FOR UPDATE TO bulkhead_app
  USING (sequence IS NULL) WITH CHECK (sequence IS NOT NULL);

-- The sealer finds chains that are due for a checkpoint.
GRANT SELECT (tenant_id, uncovered_since) ON audit_heads TO bulkhead_system;
CREATE POLICY system_heads ON audit_heads FOR SELECT TO bulkhead_system USING (true);
