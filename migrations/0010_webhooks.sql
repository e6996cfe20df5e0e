-- +goose Up

-- Where a tenant wants to be told of what happens, and of what. An endpoint that
-- was deleted keeps its row for its deliveries, without its secrets.
CREATE TABLE webhook_endpoints (
  tenant_id            text NOT NULL REFERENCES tenants,
  webhook_endpoint_id  text PRIMARY KEY,
  display_name         text NOT NULL DEFAULT '',
  url                  text NOT NULL,
  event_types          text[] NOT NULL,
  state                text NOT NULL DEFAULT 'ACTIVE' CHECK (state IN ('ACTIVE', 'DISABLED', 'DELETED')),
  disabled_reason      text NOT NULL DEFAULT '',
  -- The secrets are sealed. The previous one signs too until its time is over.
  secret               bytea NOT NULL,
  previous_secret      bytea,
  previous_expire_time timestamptz,
  -- failing_since is when deliveries began to fail without one that came through.
  failing_since        timestamptz,
  failing_error        text NOT NULL DEFAULT '',
  created_by           text NOT NULL,
  create_time          timestamptz NOT NULL DEFAULT now(),
  update_time          timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX webhook_endpoints_of_tenant ON webhook_endpoints (tenant_id, webhook_endpoint_id);

-- What is told, as it is sent: ids, names, states and digests.
CREATE TABLE webhook_events (
  tenant_id        text NOT NULL REFERENCES tenants,
  webhook_event_id text PRIMARY KEY,
  type             text NOT NULL,
  payload          bytea NOT NULL,
  create_time      timestamptz NOT NULL DEFAULT now()
);

-- One event on its way to one endpoint.
CREATE TABLE webhook_deliveries (
  tenant_id           text NOT NULL REFERENCES tenants,
  webhook_delivery_id text PRIMARY KEY,
  webhook_endpoint_id text NOT NULL REFERENCES webhook_endpoints,
  webhook_event_id    text NOT NULL REFERENCES webhook_events,
  state               text NOT NULL DEFAULT 'PENDING' CHECK (state IN ('PENDING', 'DELIVERED', 'FAILED')),
  -- error is why it failed, or failed last.
  error               text NOT NULL DEFAULT '',
  attempts            integer NOT NULL DEFAULT 0,
  -- next_time is when it is tried next; NULL when it is not tried any more.
  next_time           timestamptz,
  give_up_time        timestamptz NOT NULL,
  create_time         timestamptz NOT NULL DEFAULT now(),
  finish_time         timestamptz
);
CREATE INDEX webhook_deliveries_of_endpoint ON webhook_deliveries (tenant_id, webhook_endpoint_id, webhook_delivery_id DESC);

CREATE TABLE webhook_attempts (
  tenant_id           text NOT NULL REFERENCES tenants,
  webhook_delivery_id text NOT NULL REFERENCES webhook_deliveries,
  attempt             integer NOT NULL,
  -- status is that of the answer; 0 when there was none.
  status              integer NOT NULL,
  error               text NOT NULL DEFAULT '',
  duration_us         bigint NOT NULL,
  attempt_time        timestamptz NOT NULL,
  PRIMARY KEY (webhook_delivery_id, attempt)
);

-- +goose StatementBegin
DO $$
DECLARE
  t text;
BEGIN
  FOREACH t IN ARRAY ARRAY['webhook_endpoints', 'webhook_events', 'webhook_deliveries', 'webhook_attempts'] LOOP
    EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', t);
    EXECUTE format('ALTER TABLE %I FORCE ROW LEVEL SECURITY', t);
    EXECUTE format('CREATE POLICY tenant_isolation ON %I TO bulkhead_app'
      ' USING (tenant_id = (SELECT current_tenant())) WITH CHECK (tenant_id = (SELECT current_tenant()))', t);
  END LOOP;
END $$;
-- +goose StatementEnd
GRANT SELECT, INSERT, UPDATE ON webhook_endpoints, webhook_deliveries TO bulkhead_app;
GRANT SELECT, INSERT ON webhook_events, webhook_attempts TO bulkhead_app;

-- The queue's tables are made by the queue's own migrations, which follow under
-- the same lock and then say who may do what with them.
CREATE SCHEMA river;
GRANT USAGE ON SCHEMA river TO bulkhead_app, bulkhead_system;
