-- +goose Up

-- Roles are cluster-wide: two databases that migrate at once may race here.
-- +goose StatementBegin
DO $$
DECLARE
  r text;
BEGIN
  FOREACH r IN ARRAY ARRAY['bulkhead_app', 'bulkhead_system'] LOOP
    BEGIN
      EXECUTE format('CREATE ROLE %I NOLOGIN NOSUPERUSER NOBYPASSRLS', r);
    EXCEPTION WHEN duplicate_object OR unique_violation THEN
      NULL;
    END;
  END LOOP;
END $$;
-- +goose StatementEnd

-- current_tenant is the tenant of this transaction, NULL when none was set.
CREATE FUNCTION current_tenant() RETURNS text
  LANGUAGE sql STABLE PARALLEL SAFE
  AS $$ SELECT nullif(current_setting('app.tenant_id', true), '') $$;

CREATE TABLE tenants (
  tenant_id      text PRIMARY KEY,
  display_name   text NOT NULL,
  state          text NOT NULL DEFAULT 'ACTIVE' CHECK (state IN ('ACTIVE', 'SUSPENDED')),
  data_key       bytea NOT NULL,
  request_id     text UNIQUE,
  request_digest text NOT NULL DEFAULT '',
  create_time    timestamptz NOT NULL DEFAULT now(),
  update_time    timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE keys (
  tenant_id      text NOT NULL REFERENCES tenants,
  key_id         text PRIMARY KEY,
  display_name   text NOT NULL,
  role           text NOT NULL CHECK (role IN ('ADMIN', 'SERVICE', 'APPROVER', 'AUDITOR')),
  secret_hash    bytea NOT NULL,
  subject_space  text NOT NULL,
  user_patterns  text[] NOT NULL DEFAULT '{}',
  servers        text[] NOT NULL DEFAULT '{}',
  networks       text[] NOT NULL DEFAULT '{}',
  may_decide     boolean NOT NULL DEFAULT false,
  state          text NOT NULL DEFAULT 'ACTIVE' CHECK (state IN ('ACTIVE', 'REVOKED')),
  created_by     text NOT NULL,
  create_time    timestamptz NOT NULL DEFAULT now(),
  expire_time    timestamptz,
  revoke_time    timestamptz
);
CREATE INDEX keys_by_tenant ON keys (tenant_id, key_id);

-- create_requests remembers the requestId of every create but that of calls.
CREATE TABLE create_requests (
  tenant_id   text NOT NULL REFERENCES tenants,
  kind        text NOT NULL,
  actor       text NOT NULL,
  request_id  text NOT NULL,
  body_digest text NOT NULL,
  resource_id text NOT NULL,
  create_time timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (tenant_id, kind, actor, request_id)
);

CREATE TABLE servers (
  tenant_id                 text NOT NULL REFERENCES tenants,
  server_id                 text PRIMARY KEY,
  name                      text NOT NULL,
  display_name              text NOT NULL,
  transport                 text NOT NULL CHECK (transport IN ('HTTP', 'STDIO')),
  url                       text NOT NULL DEFAULT '',
  runtime                   text NOT NULL DEFAULT '',
  origin                    text NOT NULL,
  isolation                 text NOT NULL CHECK (isolation IN ('PER_USER', 'PER_SESSION', 'PER_TENANT')),
  shared_state_acknowledged boolean NOT NULL DEFAULT false,
  authorization_mode        text NOT NULL DEFAULT 'NONE',
  -- registration counts the changes of what is connected to; it keys caches.
  registration              bigint NOT NULL DEFAULT 1,
  era                       text NOT NULL DEFAULT '',
  protocol_version          text NOT NULL DEFAULT '',
  active_contract           integer,
  active_contract_id        text NOT NULL DEFAULT '',
  state                     text NOT NULL DEFAULT 'ACTIVE' CHECK (state IN ('ACTIVE', 'DELETED')),
  create_time               timestamptz NOT NULL DEFAULT now(),
  update_time               timestamptz NOT NULL DEFAULT now(),
  delete_time               timestamptz
);
CREATE UNIQUE INDEX servers_by_name ON servers (tenant_id, name) WHERE state = 'ACTIVE';

CREATE TABLE contracts (
  tenant_id     text NOT NULL REFERENCES tenants,
  server_id     text NOT NULL REFERENCES servers,
  revision      integer NOT NULL,
  contract_id   text NOT NULL,
  source        bytea NOT NULL,
  canonical     bytea NOT NULL,
  state         text NOT NULL DEFAULT 'DRAFT' CHECK (state IN ('DRAFT', 'SHADOW', 'ACTIVE', 'RETIRED')),
  created_by    text NOT NULL,
  create_time   timestamptz NOT NULL DEFAULT now(),
  activate_time timestamptz,
  retire_time   timestamptz,
  PRIMARY KEY (tenant_id, server_id, revision)
);
CREATE UNIQUE INDEX contracts_one_active ON contracts (tenant_id, server_id) WHERE state = 'ACTIVE';

CREATE TABLE sessions (
  tenant_id      text NOT NULL REFERENCES tenants,
  session_id     text PRIMARY KEY,
  key_id         text NOT NULL,
  subject_source text NOT NULL,
  subject        text NOT NULL,
  groups         text[] NOT NULL DEFAULT '{}',
  project        text NOT NULL DEFAULT '',
  server_ids     text[] NOT NULL,
  state          text NOT NULL DEFAULT 'OPEN' CHECK (state IN ('OPEN', 'CLOSED')),
  create_time    timestamptz NOT NULL DEFAULT now(),
  expire_time    timestamptz NOT NULL,
  close_time     timestamptz
);
CREATE INDEX sessions_by_subject ON sessions (tenant_id, subject_source, subject, session_id);

-- How many calls a session has admitted; apart from the session's row, whose
-- locks belong to dispatches.
CREATE TABLE session_usage (
  tenant_id  text NOT NULL REFERENCES tenants,
  session_id text NOT NULL REFERENCES sessions,
  calls      bigint NOT NULL,
  PRIMARY KEY (tenant_id, session_id)
);

-- Definitions are stored raw, once for a server, by digest.
CREATE TABLE definitions (
  tenant_id   text NOT NULL REFERENCES tenants,
  server_id   text NOT NULL REFERENCES servers,
  digest      text NOT NULL,
  kind        text NOT NULL,
  name        text NOT NULL,
  raw         bytea NOT NULL,
  create_time timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (tenant_id, server_id, digest)
);

-- A revision is immutable; its id is a digest of its content, so that all
-- contexts that see the same list share its rows. content_digest is that of its
-- encoding, by which copies outside the database are recognized.
CREATE TABLE catalog_revisions (
  tenant_id        text NOT NULL REFERENCES tenants,
  revision_id      text NOT NULL,
  server_id        text NOT NULL REFERENCES servers,
  kind             text NOT NULL,
  protocol_version text NOT NULL,
  era              text NOT NULL,
  capabilities     bytea NOT NULL,
  findings         text[] NOT NULL DEFAULT '{}',
  content_digest   text NOT NULL,
  create_time      timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (tenant_id, revision_id)
);
CREATE TABLE catalog_items (
  tenant_id   text NOT NULL,
  revision_id text NOT NULL,
  position    integer NOT NULL,
  name        text NOT NULL,
  digest      text NOT NULL,
  quarantine  text NOT NULL DEFAULT '',
  findings    text[] NOT NULL DEFAULT '{}',
  PRIMARY KEY (tenant_id, revision_id, position),
  FOREIGN KEY (tenant_id, revision_id) REFERENCES catalog_revisions
);
CREATE INDEX catalog_items_by_name ON catalog_items (tenant_id, revision_id, name);

-- Numbers the lists and the marks that they are out of date, over all replicas.
CREATE SEQUENCE catalog_generations;

-- What one authorization context saw last. generation orders the lists: one
-- that started earlier never replaces a later one.
CREATE TABLE catalog_current (
  tenant_id    text NOT NULL REFERENCES tenants,
  server_id    text NOT NULL REFERENCES servers,
  context      text NOT NULL,
  kind         text NOT NULL,
  -- The last good list; revision_id is NULL before the first.
  revision_id  text,
  registration bigint NOT NULL DEFAULT 0,
  generation   bigint NOT NULL DEFAULT 0,
  observe_time timestamptz,
  ttl_ms       bigint NOT NULL DEFAULT 0,
  -- Lists up to this generation are out of date. The reason is also that of a
  -- list that failed. hidden: the server refused this context's credentials.
  invalidated  bigint NOT NULL DEFAULT 0,
  stale_reason text NOT NULL DEFAULT '',
  hidden       boolean NOT NULL DEFAULT false,
  -- The list under way, the replica that makes it, and the wait after failures.
  listing      bigint NOT NULL DEFAULT 0,
  lister       text NOT NULL DEFAULT '',
  lease_time   timestamptz,
  failures     integer NOT NULL DEFAULT 0,
  retry_time   timestamptz,
  PRIMARY KEY (tenant_id, server_id, context, kind),
  FOREIGN KEY (tenant_id, revision_id) REFERENCES catalog_revisions
);
