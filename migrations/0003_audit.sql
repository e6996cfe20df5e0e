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

-- What the server's role may not do to entries, and grants cannot say: they
-- come without a place in the chain, get one once, and then stay as they are.
-- +goose StatementBegin
CREATE FUNCTION refuse_audit_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'audit entries are sealed once, by an update' USING ERRCODE = 'insufficient_privilege';
END $$;
-- +goose StatementEnd
CREATE TRIGGER entries_come_unsealed BEFORE INSERT ON audit_entries FOR EACH ROW
  WHEN (current_user = 'bulkhead_app'
    AND (NEW.sequence IS NOT NULL OR NEW.previous_digest <> '' OR NEW.digest <> ''))
  EXECUTE FUNCTION refuse_audit_change();
CREATE TRIGGER entries_are_sealed_once BEFORE UPDATE ON audit_entries FOR EACH ROW
  WHEN (current_user = 'bulkhead_app' AND (OLD.sequence IS NOT NULL OR NEW.sequence IS NULL))
  EXECUTE FUNCTION refuse_audit_change();

-- The sealer finds chains that are due for a checkpoint.
GRANT SELECT (tenant_id, uncovered_since) ON audit_heads TO bulkhead_system;
CREATE POLICY system_heads ON audit_heads FOR SELECT TO bulkhead_system USING (true);
