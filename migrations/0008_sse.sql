-- +goose Up
-- Servers reached by HTTP+SSE, for which a tenant registers them on purpose.
ALTER TABLE servers DROP CONSTRAINT servers_transport_check;
ALTER TABLE servers ADD CONSTRAINT servers_transport_check CHECK (transport IN ('HTTP', 'SSE', 'STDIO'));
