-- +goose Up

-- What happened in a session, for those who follow it: names, states and
-- revisions, never arguments or results. An event is written by the transaction
-- of what it tells, by the triggers below, so that no writer can forget it.
CREATE TABLE session_events (
  ordinal        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  tenant_id      text NOT NULL REFERENCES tenants,
  session_id     text NOT NULL,
  -- n counts the session's events without a hole, in the order of their commits.
  -- It is NULL only within the transaction that writes the event.
  n              bigint,
  kind           text NOT NULL CHECK (kind IN ('call.changed', 'consent.requested', 'consent.decided',
                   'interaction.requested', 'interaction.ended', 'resource.updated')),
  call_id        text NOT NULL DEFAULT '',
  consent_id     text NOT NULL DEFAULT '',
  interaction_id text NOT NULL DEFAULT '',
  state          text NOT NULL DEFAULT '',
  revision       integer NOT NULL DEFAULT 0,
  server         text NOT NULL DEFAULT '',
  uri            text NOT NULL DEFAULT '',
  create_time    timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE UNIQUE INDEX session_events_in_order ON session_events (tenant_id, session_id, n);
CREATE INDEX session_events_new ON session_events (tenant_id) WHERE n IS NULL;
CREATE INDEX session_events_by_age ON session_events USING brin (create_time);

-- The counter of a session's events, and up to which of them were removed.
CREATE TABLE session_event_heads (
  tenant_id  text NOT NULL REFERENCES tenants,
  session_id text NOT NULL,
  last       bigint NOT NULL,
  floor      bigint NOT NULL DEFAULT 0,
  PRIMARY KEY (tenant_id, session_id)
) WITH (fillfactor = 50);

-- A ticket opens one stream once, instead of a credential. who is the user that
-- the key which asked for it acts for.
CREATE TABLE event_tickets (
  tenant_id   text NOT NULL REFERENCES tenants,
  ticket_hash bytea PRIMARY KEY,
  session_id  text NOT NULL,
  key_id      text NOT NULL,
  who         bytea NOT NULL,
  expire_time timestamptz NOT NULL
);
CREATE INDEX event_tickets_of_session ON event_tickets (tenant_id, session_id);

-- The events of a transaction get their numbers at its commit, all at once: the
-- counters are then its last locks, taken in one order, and held for the commit
-- alone.
-- +goose StatementBegin
CREATE FUNCTION number_session_events() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
  s   record;
  top bigint;
BEGIN
  PERFORM FROM session_events WHERE ordinal = NEW.ordinal AND n IS NULL;
  IF NOT FOUND THEN
    RETURN NULL;
  END IF;
  FOR s IN SELECT session_id, count(*) AS events FROM session_events
            WHERE tenant_id = NEW.tenant_id AND n IS NULL GROUP BY session_id ORDER BY session_id LOOP
    INSERT INTO session_event_heads AS h (tenant_id, session_id, last) VALUES (NEW.tenant_id, s.session_id, s.events)
      ON CONFLICT (tenant_id, session_id) DO UPDATE SET last = h.last + excluded.last
      RETURNING last INTO top;
    UPDATE session_events e SET n = top - s.events + o.place
      FROM (SELECT ordinal, row_number() OVER (ORDER BY ordinal) AS place FROM session_events
             WHERE tenant_id = NEW.tenant_id AND n IS NULL AND session_id = s.session_id) o
     WHERE e.ordinal = o.ordinal;
  END LOOP;
  RETURN NULL;
END $$;

CREATE FUNCTION tell_call_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO session_events (tenant_id, session_id, kind, call_id, state, revision, server)
    VALUES (NEW.tenant_id, NEW.session_id, 'call.changed', NEW.call_id, NEW.state, NEW.revision, NEW.server_name);
  RETURN NULL;
END $$;

CREATE FUNCTION tell_consent() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO session_events (tenant_id, session_id, kind, call_id, consent_id, state, server)
    VALUES (NEW.tenant_id, NEW.session_id, TG_ARGV[0], NEW.call_id, NEW.consent_id, NEW.state, NEW.server_name);
  RETURN NULL;
END $$;

CREATE FUNCTION tell_interaction() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO session_events (tenant_id, session_id, kind, call_id, interaction_id, state, server)
    SELECT NEW.tenant_id, c.session_id, TG_ARGV[0], NEW.call_id, NEW.interaction_id, NEW.state, c.server_name
      FROM calls c WHERE c.tenant_id = NEW.tenant_id AND c.call_id = NEW.call_id;
  RETURN NULL;
END $$;

CREATE FUNCTION tell_resource_updated() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO session_events (tenant_id, session_id, kind, state, server, uri)
    VALUES (NEW.tenant_id, NEW.session_id, 'resource.updated', NEW.state, NEW.server_name, NEW.uri);
  RETURN NULL;
END $$;
-- +goose StatementEnd

CREATE CONSTRAINT TRIGGER events_are_numbered AFTER INSERT ON session_events
  DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION number_session_events();
CREATE TRIGGER call_is_told AFTER INSERT ON calls FOR EACH ROW EXECUTE FUNCTION tell_call_changed();
CREATE TRIGGER call_change_is_told AFTER UPDATE ON calls FOR EACH ROW
  WHEN (OLD.revision <> NEW.revision OR OLD.state <> NEW.state) EXECUTE FUNCTION tell_call_changed();
CREATE TRIGGER consent_is_told AFTER INSERT ON consents FOR EACH ROW
  EXECUTE FUNCTION tell_consent('consent.requested');
CREATE TRIGGER decision_is_told AFTER UPDATE ON consents FOR EACH ROW
  WHEN (OLD.state = 'PENDING' AND NEW.state <> 'PENDING') EXECUTE FUNCTION tell_consent('consent.decided');
CREATE TRIGGER question_is_told AFTER INSERT ON interactions FOR EACH ROW
  WHEN (NEW.state = 'PENDING') EXECUTE FUNCTION tell_interaction('interaction.requested');
CREATE TRIGGER question_end_is_told AFTER UPDATE ON interactions FOR EACH ROW
  WHEN (OLD.state = 'PENDING' AND NEW.state <> 'PENDING') EXECUTE FUNCTION tell_interaction('interaction.ended');
CREATE TRIGGER resource_is_told AFTER UPDATE ON resource_subscriptions FOR EACH ROW
  WHEN (OLD.updates <> NEW.updates OR OLD.state = 'ACTIVE' AND NEW.state = 'LOST') EXECUTE FUNCTION tell_resource_updated();

-- +goose StatementBegin
DO $$
DECLARE
  t text;
BEGIN
  FOREACH t IN ARRAY ARRAY['session_events', 'session_event_heads', 'event_tickets'] LOOP
    EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', t);
    EXECUTE format('ALTER TABLE %I FORCE ROW LEVEL SECURITY', t);
    EXECUTE format('CREATE POLICY tenant_isolation ON %I TO bulkhead_app'
      ' USING (tenant_id = (SELECT current_tenant())) WITH CHECK (tenant_id = (SELECT current_tenant()))', t);
  END LOOP;
END $$;
-- +goose StatementEnd
GRANT SELECT, INSERT, DELETE ON session_events, event_tickets TO bulkhead_app;
GRANT UPDATE (n) ON session_events TO bulkhead_app;
GRANT SELECT, INSERT, UPDATE ON session_event_heads TO bulkhead_app;

-- The system role finds the tenant of a ticket.
GRANT SELECT (tenant_id, ticket_hash) ON event_tickets TO bulkhead_system;
CREATE POLICY system_tickets ON event_tickets FOR SELECT TO bulkhead_system USING (true);
