package webhooks

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"

	"github.com/bulkhead-mcp/bulkhead/internal/egress"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

const (
	// requestTime bounds one attempt, from the look-up of the name to the end of the
	// answer.
	requestTime = 10 * time.Second
	// maxAnswer is how much of an answer is read; nothing of it is kept.
	maxAnswer = 4 << 10
	// maxJobAttempts bounds how often the queue tries a job that could not say what
	// became of it, as when the database is away. Deliveries count for themselves.
	maxJobAttempts = 10_000
	// againSoon is when a delivery that was cut short by a stop is tried again.
	againSoon = time.Second
	// markFailing is from which failed attempt of a delivery on its endpoint is
	// shown as failing; a single one says little.
	markFailing = 3
	// disableAfter is how long an endpoint must have failed for a delivery that is
	// given up to disable it.
	disableAfter = 5 * 24 * time.Hour
)

// Error says why an attempt failed.
type Error string

// The errors of attempts. What an endpoint answers is not among them: its status
// is kept, its words are not.
const (
	NoError          Error = ""
	BadStatus        Error = "STATUS"
	Redirected       Error = "REDIRECT"
	Gone             Error = "GONE"
	TimedOut         Error = "TIMEOUT"
	Unreachable      Error = "UNREACHABLE"
	BadCertificate   Error = "CERTIFICATE"
	Refused          Error = "ADDRESS_REFUSED"
	EndpointDisabled Error = "ENDPOINT_DISABLED"
)

// deliveryArgs are a job's arguments: ids alone. Its tenant is what row-level
// security goes by.
type deliveryArgs struct {
	Tenant   string `json:"tenant"`
	Endpoint string `json:"endpoint"`
	Delivery string `json:"delivery"`
}

// Kind implements river.JobArgs.
func (deliveryArgs) Kind() string { return "webhook_delivery" }

// deliverer works on jobs.
type deliverer struct {
	river.WorkerDefaults[deliveryArgs]
	s *Service
}

// NextRetry implements river.Worker, for jobs that failed without a word on their
// delivery.
func (d *deliverer) NextRetry(j *river.Job[deliveryArgs]) time.Time {
	return d.s.now().Add(Retry{First: againSoon, Most: time.Minute}.pause(j.Attempt, 0))
}

// Work implements river.Worker: one attempt of one delivery. A delivery that is to
// be tried again, or finds no place, is put off; its row counts the attempts.
func (d *deliverer) Work(ctx context.Context, j *river.Job[deliveryArgs]) error {
	var t tenant.ID
	if err := t.Scan(j.Args.Tenant); err != nil {
		return river.JobCancel(err)
	}
	began := d.s.now()
	if wait, ok := d.s.lanes.take(t, j.Args.Endpoint, began); !ok {
		return river.JobSnooze(wait)
	}
	defer func() { d.s.lanes.give(t, j.Args.Endpoint, d.s.now().Sub(began)) }()
	again, err := d.s.deliver(ctx, t, j.Args.Delivery)
	if err != nil && ctx.Err() == nil {
		d.s.o.Log.WarnContext(ctx, "deliver webhook", "tenant", t, "endpoint", j.Args.Endpoint, "delivery", j.Args.Delivery, "error", detail(err))
	}
	switch {
	case ctx.Err() != nil:
		return river.JobSnooze(againSoon)
	case err != nil:
		// The queue keeps the text of an error where no tenant is.
		return errNotRecorded
	case again > 0:
		return river.JobSnooze(again)
	}
	return nil
}

var errNotRecorded = errors.New("webhooks: the attempt could not be made or recorded")

func detail(err error) string {
	if f, ok := fault.As(err); ok {
		return f.Detail()
	}
	return err.Error()
}

// sending is a delivery with what it takes to send it.
type sending struct {
	delivery, endpoint, event string
	eventType                 Type
	payload                   []byte
	state                     string
	attempts                  int
	nextTime                  *time.Time
	giveUp                    time.Time
	url                       string
	endpointState             string
	secret, previous          []byte
	previousExpire            *time.Time
	failing                   bool
}

// result is what came of an attempt.
type result struct {
	status     int
	err        Error
	retryAfter time.Duration
	at         time.Time
	took       time.Duration
}

// deliver makes one attempt and records it. It returns how long to wait before
// the next one, 0 for never.
func (s *Service) deliver(ctx context.Context, t tenant.ID, id string) (time.Duration, error) {
	d, err := s.loadSending(ctx, t, id)
	if err != nil || d == nil || d.state != Pending {
		return 0, err
	}
	if d.nextTime != nil {
		if early := d.nextTime.Sub(s.now()); early > 0 {
			return early, nil // the job was taken from one that died after it had recorded
		}
	}
	r := result{at: s.now(), err: EndpointDisabled}
	if d.endpointState == Active {
		if r, err = s.post(ctx, t, d); err != nil {
			return 0, err
		}
	}
	if ctx.Err() != nil {
		return 0, ctx.Err()
	}
	again, err := s.recordAttempt(ctx, t, d, r)
	if err == nil {
		s.o.Observe(t, outcomeWord(r.err, again))
	}
	return again, err
}

func outcomeWord(e Error, again time.Duration) string {
	switch {
	case e == NoError:
		return "delivered"
	case again > 0:
		return "failed"
	}
	return "given_up"
}

// loadSending returns nil for a delivery that does not exist.
func (s *Service) loadSending(ctx context.Context, t tenant.ID, id string) (*sending, error) {
	if err := s.enterStore(ctx); err != nil {
		return nil, err
	}
	defer s.leaveStore()
	var d sending
	found := true
	err := s.o.DB.Read(ctx, t, func(b *pgx.Batch) {
		b.Queue(`SELECT d.webhook_delivery_id, d.webhook_endpoint_id, d.webhook_event_id, v.type, v.payload, d.state, d.attempts,
			d.next_time, d.give_up_time, e.url, e.state, e.secret, e.previous_secret, e.previous_expire_time, e.failing_since IS NOT NULL
			FROM webhook_deliveries d JOIN webhook_events v USING (tenant_id, webhook_event_id)
			JOIN webhook_endpoints e USING (tenant_id, webhook_endpoint_id)
			WHERE d.tenant_id = $1 AND d.webhook_delivery_id = $2`, t, id).QueryRow(func(row pgx.Row) error {
			err := row.Scan(&d.delivery, &d.endpoint, &d.event, &d.eventType, &d.payload, &d.state, &d.attempts, &d.nextTime, &d.giveUp,
				&d.url, &d.endpointState, &d.secret, &d.previous, &d.previousExpire, &d.failing)
			if errors.Is(err, pgx.ErrNoRows) {
				found, err = false, nil
			}
			return err
		})
	})
	if err != nil || !found {
		return nil, fault.Wrap(err, "read delivery")
	}
	return &d, nil
}

func (s *Service) enterStore(ctx context.Context) error {
	select {
	case s.storing <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *Service) leaveStore() { <-s.storing }

// post sends the event once. Its error is one of ours; what goes wrong on the way
// or at the endpoint is in the result.
func (s *Service) post(ctx context.Context, t tenant.ID, d *sending) (result, error) {
	// The address was checked when it was set; the policy may be another now.
	u, err := s.o.Egress.CheckURL("url", d.url)
	if err != nil {
		return result{err: Refused, at: s.now()}, nil
	}
	secrets, err := s.openSecrets(ctx, t, d)
	if err != nil {
		return result{}, err
	}
	r := result{at: s.now()}
	ctx, cancel := context.WithTimeout(ctx, requestTime)
	defer cancel()
	res, err := s.o.Egress.Pin(u).Do(request(ctx, u, d, signatures(secrets, d.event, r.at, d.payload), r.at))
	if err == nil {
		r.status = res.StatusCode
		r.err = judge(res.StatusCode)
		r.retryAfter = retryAfter(res.Header.Get("Retry-After"), s.now())
		// Read to keep the connection, and no further; nobody looks at it.
		_, _ = io.CopyN(io.Discard, res.Body, maxAnswer)
		res.Body.Close() //nolint:errcheck // the status is all that counts
	} else {
		r.err = errorOf(ctx, err)
	}
	r.took = s.now().Sub(r.at)
	return r, nil
}

func request(ctx context.Context, u *url.URL, d *sending, signature string, at time.Time) *http.Request {
	req := (&http.Request{
		Method: http.MethodPost, URL: u, Host: u.Host, ContentLength: int64(len(d.payload)), Body: io.NopCloser(bytes.NewReader(d.payload)),
		Header: http.Header{"Content-Type": {"application/json"}, "User-Agent": {"bulkhead-webhooks"}},
	}).WithContext(ctx)
	req.Header.Set(headerID, d.event)
	req.Header.Set(headerTimestamp, strconv.FormatInt(at.Unix(), 10))
	req.Header.Set(headerSignature, signature)
	return req
}

func judge(status int) Error {
	switch {
	case status >= 200 && status < 300:
		return NoError
	case status >= 300 && status < 400:
		return Redirected
	case status == http.StatusGone:
		return Gone
	}
	return BadStatus
}

func errorOf(ctx context.Context, err error) Error {
	switch f := egress.Fault(ctx, err); f.Reason {
	case "EGRESS_REFUSED":
		return Refused
	case "TIMEOUT":
		return TimedOut
	case "CERTIFICATE_INVALID":
		return BadCertificate
	}
	return Unreachable
}

// retryAfter reads seconds or a date; 0 when it says nothing that can be read.
func retryAfter(v string, now time.Time) time.Duration {
	if n, err := strconv.ParseUint(v, 10, 31); err == nil {
		return time.Duration(n) * time.Second
	}
	if at, err := http.ParseTime(v); err == nil {
		return max(0, at.Sub(now))
	}
	return 0
}

// recordAttempt writes down an attempt and what follows from it, unless another
// job has done so.
func (s *Service) recordAttempt(ctx context.Context, t tenant.ID, d *sending, r result) (again time.Duration, err error) {
	if err := s.enterStore(ctx); err != nil {
		return 0, err
	}
	defer s.leaveStore()
	now := s.now()
	state := Delivered
	if r.err != NoError {
		state = Failed
		pause := s.o.Retry.pause(d.attempts+1, r.retryAfter)
		if r.err != Gone && r.err != EndpointDisabled && !now.Add(pause).After(d.giveUp) {
			state, again = Pending, pause
		}
	}
	var next, finish *time.Time
	if state == Pending {
		at := now.Add(again)
		next = &at
	} else {
		finish = &now
	}
	err = s.o.DB.InTx(ctx, t, func(ctx context.Context, tx tenant.Tx) error {
		tag, err := tx.Exec(ctx, `UPDATE webhook_deliveries SET state = $3, error = $4, attempts = attempts + 1, next_time = $5, finish_time = $6
			WHERE tenant_id = $1 AND webhook_delivery_id = $2 AND state = 'PENDING' AND attempts = $7`,
			tx.Tenant(), d.delivery, state, string(r.err), next, finish, d.attempts)
		if err != nil || tag.RowsAffected() == 0 {
			return err
		}
		_, err = tx.Exec(ctx, `INSERT INTO webhook_attempts (tenant_id, webhook_delivery_id, attempt, status, error, duration_us, attempt_time)
			VALUES ($1, $2, $3, $4, $5, $6, $7)`, tx.Tenant(), d.delivery, d.attempts+1, r.status, string(r.err), r.took.Microseconds(), r.at)
		if err != nil {
			return err
		}
		return s.recordHealth(ctx, tx, d, r, state)
	})
	return again, fault.Wrap(err, "record delivery")
}

// recordHealth keeps what the endpoint's deliveries say about it. An endpoint that
// is gone, or that has failed for days, is disabled.
func (s *Service) recordHealth(ctx context.Context, tx tenant.Tx, d *sending, r result, state string) error {
	switch {
	case r.err == EndpointDisabled:
		return nil
	case r.err == NoError:
		if !d.failing {
			return nil
		}
		_, err := tx.Exec(ctx, `UPDATE webhook_endpoints SET failing_since = NULL, failing_error = ''
			WHERE tenant_id = $1 AND webhook_endpoint_id = $2 AND failing_since IS NOT NULL`, tx.Tenant(), d.endpoint)
		return err
	case state == Pending && d.attempts+1 < markFailing:
		return nil
	}
	_, err := tx.Exec(ctx, `UPDATE webhook_endpoints SET failing_since = COALESCE(failing_since, $3), failing_error = $4
		WHERE tenant_id = $1 AND webhook_endpoint_id = $2 AND (failing_since IS NULL OR failing_error <> $4)`,
		tx.Tenant(), d.endpoint, r.at, string(r.err))
	if err != nil || state != Failed {
		return err
	}
	reason := string(r.err)
	if r.err != Gone {
		reason = reasonFailing
	}
	tag, err := tx.Exec(ctx, `UPDATE webhook_endpoints SET state = 'DISABLED', disabled_reason = $3, update_time = now()
		WHERE tenant_id = $1 AND webhook_endpoint_id = $2 AND state = 'ACTIVE' AND ($4 OR failing_since <= $5)`,
		tx.Tenant(), d.endpoint, reason, r.err == Gone, s.now().Add(-disableAfter))
	if err != nil || tag.RowsAffected() == 0 {
		return err
	}
	tx.AfterCommit(func() { s.forget(tx.Tenant()) })
	return s.o.Recorder.Record(ctx, tx, tenant.Event{Kind: "webhook_endpoint.disabled", Actor: "system",
		Details: map[string]any{"webhookEndpointId": d.endpoint, "reason": reason}})
}

// reasonFailing is why an endpoint is disabled that answered nothing well for
// days; reasonAdmin, that an admin wants it so.
const (
	reasonFailing = "FAILING"
	reasonAdmin   = "ADMIN"
)
