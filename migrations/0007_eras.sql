-- +goose Up

-- newest_version is the newest protocol version that any connection proved under
-- this registration; era and protocol_version are what the last one spoke.
ALTER TABLE servers ADD COLUMN newest_version text NOT NULL DEFAULT '';
UPDATE servers SET newest_version = protocol_version;

-- What a security team wants to see of a server: the audit has one entry for an
-- episode, however many connections and replicas notice it.
CREATE TABLE security_episodes (
  tenant_id    text NOT NULL REFERENCES tenants,
  server_id    text NOT NULL REFERENCES servers,
  event        text NOT NULL,
  registration bigint NOT NULL,
  last_time    timestamptz NOT NULL,
  PRIMARY KEY (tenant_id, server_id, event)
);
ALTER TABLE security_episodes ENABLE ROW LEVEL SECURITY;
ALTER TABLE security_episodes FORCE ROW LEVEL SECURITY;
CREATE POLICY tenant_isolation ON security_episodes TO bulkhead_app
  USING (tenant_id = (SELECT current_tenant())) WITH CHECK (tenant_id = (SELECT current_tenant()));
GRANT SELECT, INSERT, UPDATE ON security_episodes TO bulkhead_app;

-- The trace that the proposal came with (W3C trace context); empty for none.
ALTER TABLE calls ADD COLUMN trace_parent text NOT NULL DEFAULT '';
ALTER TABLE calls ADD COLUMN trace_state text NOT NULL DEFAULT '';
