-- +goose Up

-- A session's wish to hear when a resource changes. One replica follows it, named
-- by its epoch; 0 when nobody does.
CREATE TABLE resource_subscriptions (
  tenant_id       text NOT NULL REFERENCES tenants,
  subscription_id text PRIMARY KEY,
  session_id      text NOT NULL REFERENCES sessions,
  subject_source  text NOT NULL,
  subject         text NOT NULL,
  server_id       text NOT NULL REFERENCES servers,
  server_name     text NOT NULL,
  uri             text NOT NULL,
  -- ENDED waits for the replica that follows it to stop doing so.
  state           text NOT NULL DEFAULT 'ACTIVE' CHECK (state IN ('ACTIVE', 'LOST', 'ENDED')),
  reason          text NOT NULL DEFAULT '',
  replica_epoch   bigint NOT NULL DEFAULT 0,
  updates         bigint NOT NULL DEFAULT 0,
  -- last_update is when the resource was last said to have changed.
  last_update     timestamptz,
  -- due_time is when it is looked at again; NULL for never.
  due_time        timestamptz,
  create_time     timestamptz NOT NULL DEFAULT now()
);
CREATE UNIQUE INDEX resource_subscriptions_once ON resource_subscriptions (tenant_id, session_id, server_id, uri) WHERE state <> 'ENDED';
CREATE INDEX resource_subscriptions_by_key ON resource_subscriptions (tenant_id, server_id, subject_source, subject);
CREATE INDEX resource_subscriptions_due ON resource_subscriptions (due_time) WHERE due_time IS NOT NULL;

ALTER TABLE resource_subscriptions ENABLE ROW LEVEL SECURITY;
ALTER TABLE resource_subscriptions FORCE ROW LEVEL SECURITY;
CREATE POLICY tenant_isolation ON resource_subscriptions TO bulkhead_app
  USING (tenant_id = (SELECT current_tenant())) WITH CHECK (tenant_id = (SELECT current_tenant()));
GRANT SELECT, INSERT, UPDATE, DELETE ON resource_subscriptions TO bulkhead_app;

-- The system role finds what is due; it reads no URI.
GRANT SELECT (tenant_id, subscription_id, session_id, state, replica_epoch, due_time) ON resource_subscriptions TO bulkhead_system;
GRANT SELECT (expire_time) ON sessions TO bulkhead_system;
CREATE POLICY system_subscriptions ON resource_subscriptions FOR SELECT TO bulkhead_system USING (true);
