-- +goose Up

-- Every replica looks whether what it is connected to is still registered.
GRANT SELECT (tenant_id, server_id, state, registration) ON servers TO bulkhead_system;
CREATE POLICY system_servers ON servers FOR SELECT TO bulkhead_system USING (true);
