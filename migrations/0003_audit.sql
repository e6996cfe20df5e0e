-- +goose Up

-- Entries come with the transaction of what they record; the sealer gives the
-- committed ones their place in the chain. Details are sealed under the
-- tenant's key and enter the chain by digest only.
CREATE TABLE audit_entries (
  tenant_id       text NOT NULL REFERENCES tenants,
  audit_entry_id  text PRIMARY KEY,
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
  digest          text NOT NULL DEFAULT ''
);
CREATE UNIQUE INDEX audit_entries_by_sequence ON audit_entries (tenant_id, sequence) WHERE sequence IS NOT NULL;
CREATE INDEX audit_entries_unsealed ON audit_entries (tenant_id, ordinal) WHERE sequence IS NULL;
CREATE INDEX audit_entries_by_call ON audit_entries (tenant_id, call_id) WHERE call_id <> '';

CREATE TABLE audit_heads (
  tenant_id   text PRIMARY KEY REFERENCES tenants,
  sequence    bigint NOT NULL DEFAULT 0,
  digest      text NOT NULL DEFAULT '',
  update_time timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE audit_checkpoints (
  tenant_id   text NOT NULL REFERENCES tenants,
  sequence    bigint NOT NULL,
  digest      text NOT NULL,
  key_id      text NOT NULL,
  signature   bytea NOT NULL,
  create_time timestamptz NOT NULL,
  PRIMARY KEY (tenant_id, sequence)
);
