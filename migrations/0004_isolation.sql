-- +goose Up

-- Row-level security for every table that has a tenant_id; a test reads the
-- system catalogs and fails when a later table forgets it.
-- +goose StatementBegin
DO $$
DECLARE
  t text;
BEGIN
  FOR t IN SELECT c.relname FROM pg_class c
             JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = 'tenant_id' AND NOT a.attisdropped
            WHERE c.relkind = 'r' AND c.relnamespace = current_schema()::regnamespace
            ORDER BY c.relname LOOP
    EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', t);
    EXECUTE format('ALTER TABLE %I FORCE ROW LEVEL SECURITY', t);
    EXECUTE format('CREATE POLICY tenant_isolation ON %I TO bulkhead_app'
      ' USING (tenant_id = (SELECT current_tenant())) WITH CHECK (tenant_id = (SELECT current_tenant()))', t);
  END LOOP;
END $$;
-- +goose StatementEnd

GRANT SELECT, INSERT, UPDATE ON keys, servers, contracts, sessions, session_usage, catalog_current,
  calls, attempts, consents, grants, audit_heads TO bulkhead_app;
GRANT SELECT, INSERT ON create_requests, definitions, catalog_revisions, catalog_items,
  audit_entries, audit_checkpoints TO bulkhead_app;
GRANT USAGE ON SEQUENCE catalog_generations TO bulkhead_app;
-- The sealer places entries; nobody changes what they say.
GRANT UPDATE (sequence, previous_digest, digest) ON audit_entries TO bulkhead_app;
-- A row lock needs the right to update one column.
GRANT SELECT, UPDATE (update_time) ON tenants TO bulkhead_app;
GRANT SELECT ON replicas TO bulkhead_app;

-- The system role finds work across tenants and then enters each of them; it
-- reads names and states, never arguments, results or details.
GRANT SELECT, INSERT ON tenants TO bulkhead_system;
GRANT UPDATE (state, update_time) ON tenants TO bulkhead_system;
GRANT SELECT ON keys TO bulkhead_system;
GRANT SELECT (tenant_id, call_id, state, replica_epoch, consent_id, send_by, ceiling_time, update_time, resolve_after, cancel_requested)
  ON calls TO bulkhead_system;
GRANT SELECT (tenant_id, consent_id, call_id, state, expire_time) ON consents TO bulkhead_system;
GRANT SELECT (tenant_id, audit_entry_id, ordinal, sequence) ON audit_entries TO bulkhead_system;
GRANT SELECT, INSERT, UPDATE ON replicas TO bulkhead_system;
CREATE POLICY system_tenants ON tenants TO bulkhead_system USING (true) WITH CHECK (true);
CREATE POLICY system_keys ON keys FOR SELECT TO bulkhead_system USING (true);
CREATE POLICY system_calls ON calls FOR SELECT TO bulkhead_system USING (true);
CREATE POLICY system_consents ON consents FOR SELECT TO bulkhead_system USING (true);
CREATE POLICY system_audit ON audit_entries FOR SELECT TO bulkhead_system USING (true);
