-- +goose Up

-- A replica is alive while its heartbeat is; epochs are never used twice.
CREATE TABLE replicas (
  epoch      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  name       text NOT NULL,
  state      text NOT NULL DEFAULT 'ALIVE' CHECK (state IN ('ALIVE', 'DEAD', 'STOPPED')),
  start_time timestamptz NOT NULL DEFAULT now(),
  heartbeat  timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE calls (
  tenant_id           text NOT NULL REFERENCES tenants,
  call_id             text PRIMARY KEY,
  session_id          text NOT NULL REFERENCES sessions,
  key_id              text NOT NULL,
  subject_source      text NOT NULL,
  subject             text NOT NULL,
  server_id           text NOT NULL,
  server_name         text NOT NULL,
  origin              text NOT NULL,
  kind                text NOT NULL CHECK (kind IN ('TOOL', 'RESOURCE', 'PROMPT')),
  name                text NOT NULL,
  request_id          text NOT NULL,
  request_digest      text NOT NULL,
  arguments           bytea NOT NULL,
  arguments_digest    text NOT NULL,
  state               text NOT NULL CHECK (state IN ('DENIED', 'CONSENT_REQUIRED', 'AUTHORIZATION_REQUIRED',
                        'DISPATCHING', 'INPUT_REQUIRED', 'SUCCEEDED', 'FAILED', 'CANCELLED', 'UNCERTAIN')),
  reason              text NOT NULL DEFAULT '',
  revision            integer NOT NULL DEFAULT 1,
  decision            bytea NOT NULL,
  contract_id         text NOT NULL DEFAULT '',
  contract_revision   integer NOT NULL DEFAULT 0,
  catalog_revision    text NOT NULL DEFAULT '',
  catalog_context     text NOT NULL DEFAULT '',
  definition_digest   text NOT NULL DEFAULT '',
  definition_observed timestamptz,
  effect              text NOT NULL DEFAULT '',
  consent_rule        text NOT NULL DEFAULT '',
  consent_id          text NOT NULL DEFAULT '',
  grant_id            text NOT NULL DEFAULT '',
  attempt             integer NOT NULL DEFAULT 0,
  replica_epoch       bigint NOT NULL DEFAULT 0,
  send_by             timestamptz,
  ceiling_time        timestamptz,
  cancel_requested    boolean NOT NULL DEFAULT false,
  idempotency_key     text NOT NULL DEFAULT '',
  result              bytea,
  error               bytea,
  side_effect_id      text NOT NULL DEFAULT '',
  findings            text[] NOT NULL DEFAULT '{}',
  receipt             text NOT NULL DEFAULT '',
  -- resolve_after is when a status query may speak about an uncertain call.
  resolve_after       timestamptz,
  resolve_tries       integer NOT NULL DEFAULT 0,
  negotiation_us      bigint NOT NULL DEFAULT 0,
  discovery_us        bigint NOT NULL DEFAULT 0,
  decision_us         bigint NOT NULL DEFAULT 0,
  execution_us        bigint NOT NULL DEFAULT 0,
  create_time         timestamptz NOT NULL DEFAULT now(),
  update_time         timestamptz NOT NULL DEFAULT now(),
  finish_time         timestamptz
);
CREATE UNIQUE INDEX calls_by_request ON calls (tenant_id, subject_source, subject, request_id);
CREATE INDEX calls_by_session ON calls (tenant_id, session_id, call_id);
CREATE INDEX calls_open ON calls (state, replica_epoch)
  WHERE state IN ('CONSENT_REQUIRED', 'AUTHORIZATION_REQUIRED', 'DISPATCHING', 'INPUT_REQUIRED', 'UNCERTAIN');

CREATE INDEX calls_due ON calls (resolve_after) WHERE state = 'UNCERTAIN' AND resolve_after IS NOT NULL;

CREATE TABLE attempts (
  tenant_id     text NOT NULL,
  call_id       text NOT NULL REFERENCES calls,
  attempt       integer NOT NULL,
  replica_epoch bigint NOT NULL,
  phase         text NOT NULL DEFAULT '' CHECK (phase IN ('', 'NOT_SENT', 'MAYBE_SENT', 'ANSWERED')),
  outcome       text NOT NULL DEFAULT '',
  detail        text NOT NULL DEFAULT '',
  send_by       timestamptz,
  start_time    timestamptz NOT NULL DEFAULT now(),
  end_time      timestamptz,
  -- evidence is an answer that came when the call was no longer this attempt's.
  evidence      bytea,
  evidence_time timestamptz,
  PRIMARY KEY (tenant_id, call_id, attempt)
);

CREATE TABLE consents (
  tenant_id         text NOT NULL REFERENCES tenants,
  consent_id        text PRIMARY KEY,
  call_id           text NOT NULL,
  session_id        text NOT NULL,
  subject_source    text NOT NULL,
  subject           text NOT NULL,
  server_id         text NOT NULL,
  server_name       text NOT NULL,
  origin            text NOT NULL,
  kind              text NOT NULL,
  name              text NOT NULL,
  effect            text NOT NULL,
  rule              text NOT NULL CHECK (rule IN ('SESSION', 'CALL')),
  definition_digest text NOT NULL,
  arguments_digest  text NOT NULL,
  contract_id       text NOT NULL,
  contract_revision integer NOT NULL,
  scopes            text[] NOT NULL DEFAULT '{}',
  account_version   bigint NOT NULL DEFAULT 0,
  state             text NOT NULL DEFAULT 'PENDING'
                      CHECK (state IN ('PENDING', 'APPROVED', 'DENIED', 'EXPIRED', 'VOID', 'CONSUMED')),
  decided_by        text NOT NULL DEFAULT '',
  decided_how       text NOT NULL DEFAULT '',
  reason            text NOT NULL DEFAULT '',
  create_time       timestamptz NOT NULL DEFAULT now(),
  expire_time       timestamptz NOT NULL,
  decide_time       timestamptz
);
CREATE UNIQUE INDEX consents_one_for_call ON consents (tenant_id, call_id);
CREATE INDEX consents_open ON consents (state, expire_time) WHERE state IN ('PENDING', 'APPROVED');
CREATE INDEX consents_by_server ON consents (tenant_id, server_id, name) WHERE state IN ('PENDING', 'APPROVED');
CREATE INDEX consents_by_tenant ON consents (tenant_id, consent_id);

CREATE TABLE grants (
  tenant_id         text NOT NULL REFERENCES tenants,
  grant_id          text PRIMARY KEY,
  consent_id        text NOT NULL,
  session_id        text NOT NULL,
  subject_source    text NOT NULL,
  subject           text NOT NULL,
  server_id         text NOT NULL,
  kind              text NOT NULL,
  name              text NOT NULL,
  definition_digest text NOT NULL,
  contract_id       text NOT NULL,
  account_version   bigint NOT NULL DEFAULT 0,
  state             text NOT NULL DEFAULT 'ACTIVE' CHECK (state IN ('ACTIVE', 'REVOKED', 'VOID', 'EXPIRED')),
  uses_limit        integer,
  uses_reserved     integer NOT NULL DEFAULT 0 CHECK (uses_reserved >= 0),
  uses_spent        integer NOT NULL DEFAULT 0 CHECK (uses_spent >= 0),
  create_time       timestamptz NOT NULL DEFAULT now(),
  expire_time       timestamptz NOT NULL,
  end_time          timestamptz,
  CHECK (uses_limit IS NULL OR uses_reserved + uses_spent <= uses_limit)
);
CREATE INDEX grants_by_binding ON grants (tenant_id, session_id, server_id, name) WHERE state = 'ACTIVE';
CREATE INDEX grants_by_server ON grants (tenant_id, server_id, name) WHERE state = 'ACTIVE';
