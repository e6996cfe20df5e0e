-- +goose Up

-- What a server asked in the middle of a call, and what it was answered. The
-- question and the answer are sealed; an answer is given once.
CREATE TABLE interactions (
  tenant_id      text NOT NULL REFERENCES tenants,
  interaction_id text PRIMARY KEY,
  call_id        text NOT NULL REFERENCES calls,
  round          integer NOT NULL,
  -- server_key names it among the questions of one round; empty for a question of
  -- a legacy server, which has a round of its own.
  server_key     text NOT NULL DEFAULT '',
  kind           text NOT NULL CHECK (kind IN ('ELICITATION_FORM', 'ELICITATION_URL', 'SAMPLING', 'ROOTS')),
  state          text NOT NULL CHECK (state IN ('PENDING', 'ANSWERED', 'DECLINED', 'CANCELLED', 'EXPIRED', 'WITHDRAWN')),
  -- refusal says why the host answered a question by itself.
  refusal        text NOT NULL DEFAULT '',
  request        bytea NOT NULL,
  response       bytea,
  -- held_epoch is the replica that keeps a legacy server's request open for it.
  held_epoch     bigint NOT NULL DEFAULT 0,
  -- sent says that a task's server was told the answer.
  sent           boolean NOT NULL DEFAULT false,
  answered_by    text NOT NULL DEFAULT '',
  answered_how   text NOT NULL DEFAULT '',
  create_time    timestamptz NOT NULL DEFAULT now(),
  expire_time    timestamptz NOT NULL,
  answer_time    timestamptz
);
CREATE UNIQUE INDEX interactions_of_call ON interactions (tenant_id, call_id, round, server_key);

-- How far a call's questions are; one row for a call that was asked anything.
CREATE TABLE call_inputs (
  tenant_id     text NOT NULL REFERENCES tenants,
  call_id       text PRIMARY KEY REFERENCES calls,
  round         integer NOT NULL,
  -- WAITING for answers, READY to go on, SENT with them, HELD by the replica that
  -- keeps a legacy request open, TASK whose server is told them, ENDED.
  phase         text NOT NULL CHECK (phase IN ('WAITING', 'READY', 'SENT', 'HELD', 'TASK', 'ENDED')),
  -- plain says that the request is repeated as it was, without the answers.
  plain         boolean NOT NULL DEFAULT false,
  -- request_state is the server's, sealed, byte for byte; NULL when it sent none.
  request_state bytea,
  ask_time      timestamptz NOT NULL DEFAULT now(),
  expire_time   timestamptz NOT NULL,
  due_time      timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX call_inputs_ready ON call_inputs (due_time) WHERE phase = 'READY';
CREATE INDEX call_inputs_waiting ON call_inputs (expire_time) WHERE phase IN ('WAITING', 'READY');
CREATE INDEX call_inputs_held ON call_inputs (call_id) WHERE phase = 'HELD';

-- A call that its server made a task: whichever replica is alive looks after it.
CREATE TABLE call_tasks (
  tenant_id      text NOT NULL REFERENCES tenants,
  call_id        text PRIMARY KEY REFERENCES calls,
  -- task is the server's id of it, sealed: it may be as good as a password.
  task           bytea NOT NULL,
  open           boolean NOT NULL DEFAULT true,
  status         text NOT NULL,
  status_message text NOT NULL DEFAULT '',
  poll_ms        bigint NOT NULL,
  next_poll      timestamptz NOT NULL,
  -- claim_until is until when one replica alone looks after it.
  claim_until    timestamptz NOT NULL DEFAULT '-infinity',
  -- end_time is when the server forgets it; NULL when it keeps it for ever.
  end_time       timestamptz,
  -- round is that of its questions, for all of its life.
  round          integer NOT NULL,
  -- cancel_time is when the server was asked to stop it.
  cancel_time    timestamptz,
  start_time     timestamptz NOT NULL DEFAULT now(),
  update_time    timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX call_tasks_due ON call_tasks (next_poll) WHERE open;

-- The newest progress and log lines of a call, as the server sent them.
CREATE TABLE call_notices (
  tenant_id   text NOT NULL REFERENCES tenants,
  call_id     text PRIMARY KEY REFERENCES calls,
  notices     bytea NOT NULL,
  update_time timestamptz NOT NULL DEFAULT now()
);

-- +goose StatementBegin
DO $$
DECLARE
  t text;
BEGIN
  FOREACH t IN ARRAY ARRAY['interactions', 'call_inputs', 'call_tasks', 'call_notices'] LOOP
    EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', t);
    EXECUTE format('ALTER TABLE %I FORCE ROW LEVEL SECURITY', t);
    EXECUTE format('CREATE POLICY tenant_isolation ON %I TO bulkhead_app'
      ' USING (tenant_id = (SELECT current_tenant())) WITH CHECK (tenant_id = (SELECT current_tenant()))', t);
    EXECUTE format('GRANT SELECT, INSERT, UPDATE ON %I TO bulkhead_app', t);
  END LOOP;
END $$;
-- +goose StatementEnd

-- The system role finds what is due; it reads no question and no answer.
GRANT SELECT (tenant_id, call_id, phase, expire_time, due_time) ON call_inputs TO bulkhead_system;
GRANT SELECT (tenant_id, call_id, open, next_poll, claim_until) ON call_tasks TO bulkhead_system;
GRANT SELECT (tenant_id, call_id, session_id) ON calls TO bulkhead_system;
GRANT SELECT (tenant_id, session_id, state) ON sessions TO bulkhead_system;
CREATE POLICY system_inputs ON call_inputs FOR SELECT TO bulkhead_system USING (true);
CREATE POLICY system_tasks ON call_tasks FOR SELECT TO bulkhead_system USING (true);
CREATE POLICY system_sessions ON sessions FOR SELECT TO bulkhead_system USING (true);
