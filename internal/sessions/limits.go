package sessions

import "time"

// Limits bound everything that servers can make this package hold or wait for.
// The zero value of a member means its default.
type Limits struct {
	// Connect bounds connecting and negotiating, default 30 s.
	Connect time.Duration
	// Probe bounds the wait for the answer to server/discover over HTTP, and for the
	// endpoint that a server of HTTP+SSE names first, default 10 s. On stdio it counts from the first byte the child writes, because
	// starting may take long and says nothing about its era.
	Probe time.Duration
	// Call bounds a request that brings no time-out of its own, default 60 s.
	Call time.Duration
	// ResultBytes bounds a result for which the request sets no limit, default 16 MiB.
	ResultBytes int64
	// AnswerBytes and TenantAnswerBytes bound what is read and held of answers at a
	// time, in the process and for a tenant: 256 MiB and 64 MiB. The first 64 KiB of
	// each answer do not count.
	AnswerBytes, TenantAnswerBytes int64
	// ListBytes, ListItems and ListPages bound one listing: 16 MiB, 5000, 200.
	ListBytes            int64
	ListItems, ListPages int
	// NoiseBytes bounds what a stream may carry beside the answer, default 8 MiB. Of
	// HTTP+SSE, whose stream lasts, and of a child's output it is for each minute.
	NoiseBytes int64
	// EventLines bounds the lines of one event, default 65536.
	EventLines int
	// ServerRequests bounds what a server may ask on one stream in a minute, and of
	// people during one call, default 64.
	ServerRequests int
	// LineBytes bounds one line of a child's output and one event of HTTP+SSE, default
	// 16 MiB. A longer one ends the connection.
	LineBytes int64
	// StderrBytes bounds what is logged of a child's diagnostics, default 64 KiB.
	StderrBytes int64
	// DiagnosticBytes bounds what a child may write to standard error in a minute,
	// default 64 MiB. More ends the connection.
	DiagnosticBytes int64
	// Write bounds the wait for a child to take a message, default 10 s.
	Write time.Duration
	// Grace is the wait after closing a child's input, and again after SIGTERM,
	// before the next stronger step; default 2 s.
	Grace time.Duration
	// InFlight bounds the requests at one time on one connection, default 256.
	InFlight int
	// Tenant and Total bound the connections of a tenant and of the process:
	// 2000 and 20000.
	Tenant, Total int
	// Server bounds the connections of a tenant to one server, 1000, so that one
	// server cannot use up what its tenant has.
	Server int
	// Queue bounds the calls that wait for their turn on a connection that serves one
	// at a time, default 64.
	Queue int
	// TenantProcesses and Processes bound the children: 32 and 256.
	TenantProcesses, Processes int
	// ServerProcesses bounds the children of one server of a tenant: 16.
	ServerProcesses int
	// Idle ends a connection that nobody used for so long, default 5 min.
	Idle time.Duration
	// Lifetime ends a connection that is so old once it has nothing in flight,
	// default 8 h.
	Lifetime time.Duration
	// Ping is how long a legacy connection with an open stream or pipe may idle before
	// its server is asked whether it is still there, default 1 min; less than 0 never
	// asks. Two pings without an answer end the connection.
	Ping time.Duration
	// Backoff and MaxBackoff are the first and the greatest pause after a failure
	// to connect, 250 ms and 1 min, doubled each time, with jitter.
	Backoff, MaxBackoff time.Duration
	// Reopen and MaxReopen are the same for the stream of changes, 1 s and 5 min.
	Reopen, MaxReopen time.Duration
	// Coalesce is the least time between two reports of changes for one key, 1 s.
	Coalesce time.Duration
}

func (l Limits) withDefaults() Limits {
	def(&l.Connect, 30*time.Second)
	def(&l.Probe, 10*time.Second)
	def(&l.Call, time.Minute)
	def(&l.ResultBytes, 16<<20)
	def(&l.AnswerBytes, 256<<20)
	def(&l.TenantAnswerBytes, 64<<20)
	def(&l.ListBytes, 16<<20)
	def(&l.ListItems, 5000)
	def(&l.ListPages, 200)
	def(&l.NoiseBytes, 8<<20)
	def(&l.EventLines, 1<<16)
	def(&l.ServerRequests, 64)
	def(&l.LineBytes, 16<<20)
	def(&l.StderrBytes, 64<<10)
	def(&l.DiagnosticBytes, 64<<20)
	def(&l.Write, 10*time.Second)
	def(&l.Grace, 2*time.Second)
	def(&l.InFlight, 256)
	def(&l.Tenant, 2000)
	def(&l.Total, 20000)
	def(&l.Server, 1000)
	def(&l.Queue, 64)
	def(&l.TenantProcesses, 32)
	def(&l.Processes, 256)
	def(&l.ServerProcesses, 16)
	def(&l.Idle, 5*time.Minute)
	def(&l.Lifetime, 8*time.Hour)
	if l.Ping == 0 {
		l.Ping = time.Minute
	}
	def(&l.Backoff, 250*time.Millisecond)
	def(&l.MaxBackoff, time.Minute)
	def(&l.Reopen, time.Second)
	def(&l.MaxReopen, 5*time.Minute)
	def(&l.Coalesce, time.Second)
	return l
}

func def[T int | int64 | time.Duration](v *T, d T) {
	if *v <= 0 {
		*v = d
	}
}

// Bounds that are not worth a setting.
const (
	// envelopeSlack is what a message may have around its result.
	envelopeSlack = 64 << 10
	// refusalBytes bounds the body of an HTTP refusal.
	refusalBytes = 256 << 10
	// maxSaid bounds what is kept of a refusal's text.
	maxSaid = 1 << 10
	// maxRepaired bounds a message whose bytes that are no UTF-8 are replaced; a larger
	// one is refused.
	maxRepaired = 1 << 20
	// maxChallenge bounds a WWW-Authenticate header that is kept.
	maxChallenge = 8 << 10
	// maxSessionID bounds an Mcp-Session-Id.
	maxSessionID = 1024
	// maxCursor bounds a cursor of a list.
	maxCursor = 8 << 10
	// maxHops bounds same-origin redirects of one request.
	maxHops = 3
	// maxRetryAfter bounds a pause that a server asks for.
	maxRetryAfter = time.Hour
	// batchMessages bounds the messages of one batch of revision 2025-03-26.
	batchMessages = 256
	// resumes bounds the attempts in a row to take up a legacy stream that bring no
	// new event.
	resumes = 16
	// endedKept is how many ended connections are still told about.
	endedKept = 256
)
