-- +goose Up

-- A task belongs to one call: a server that gives two calls of one connection the
-- same id is not followed for the second. The key is a digest of the connection
-- and the id; rows from before have none.

ALTER TABLE call_tasks ADD COLUMN task_key bytea CHECK (length(task_key) = 32);
CREATE UNIQUE INDEX call_tasks_key ON call_tasks (tenant_id, task_key) WHERE open;
