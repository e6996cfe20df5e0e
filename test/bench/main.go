// Command bench measures Bulkhead beside the MCP server itself and beside a bare
// Go reverse proxy, all in one run, and prints one JSON document. It brings a
// PostgreSQL, a Redis, the demo calendars and the server, each as a process of
// its own, so that their CPU times are told apart. Everything is on: keys,
// contract, validation, a connection for each user, the record and the audit in
// PostgreSQL with its flushes, a log line for each request.
//
// Each round measures every target in turn, in the opposite order of the round
// before; the report holds medians of the rounds with the least and the greatest
// value, and ratios of samples of the same round. Numbers of different runs do
// not compare; ratios do.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/redis"
)

// Commands of this program's own children.
const (
	proxyCommand = "reverse-proxy"
	redisCommand = "redis"
)

// options are the flags.
type options struct {
	server  string
	rounds  int
	during  time.Duration
	callers []int
	cases   []string
	targets []string
	idle    int
	tenants int
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := command(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func command(ctx context.Context, args []string) error {
	if len(args) > 1 && args[0] == proxyCommand {
		return serveProxy(ctx, args[1])
	}
	if len(args) > 0 && args[0] == redisCommand {
		return serveRedis(ctx)
	}
	o, err := parse(args)
	if err != nil {
		return err
	}
	out, err := measureAll(ctx, o)
	if err != nil {
		return err
	}
	e := json.NewEncoder(os.Stdout)
	e.SetIndent("", " ")
	return e.Encode(out)
}

func parse(args []string) (o options, err error) {
	f := flag.NewFlagSet("bench", flag.ContinueOnError)
	f.StringVar(&o.server, "server", "", "the server's binary; empty to build it")
	f.IntVar(&o.rounds, "rounds", 5, "rounds")
	f.DurationVar(&o.during, "time", 1200*time.Millisecond, "time of one measurement")
	f.IntVar(&o.idle, "idle", 500, "idle connections to hold")
	f.IntVar(&o.tenants, "tenants", 2, "tenants that the callers belong to; one replica takes 2,000 requests a second of each")
	callers := f.String("callers", "1,16,64", "numbers of callers of the read")
	cases := f.String("cases", strings.Join([]string{caseRead, caseList, caseLarge, caseIdle}, ","), "cases to measure")
	targets := f.String("targets", strings.Join([]string{direct, reverseProxy, overREST, overGRPC}, ","), "targets to measure; goals need all")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	for s := range strings.SplitSeq(*callers, ",") {
		n, err := strconv.Atoi(s)
		if err != nil || n < 1 || n > 256 {
			return o, fmt.Errorf("-callers: %q is not a number from 1 to 256", s)
		}
		o.callers = append(o.callers, n)
	}
	o.cases, o.targets = strings.Split(*cases, ","), strings.Split(*targets, ",")
	if o.rounds < 1 || o.tenants < 1 || o.idle < 1 {
		return o, errors.New("-rounds, -tenants and -idle must be at least 1")
	}
	return o, nil
}

// document is what is printed.
type document struct {
	Time     time.Time `json:"time"`
	Seconds  float64   `json:"seconds"`
	Go       string    `json:"go"`
	CPUs     int       `json:"cpus"`
	Redis    string    `json:"redis"`
	Rounds   int       `json:"rounds"`
	LoadMean string    `json:"loadAverage"`
	Results  []result  `json:"results"`
	Idle     *idle     `json:"idle,omitempty"`
	Goals    []goal    `json:"goals"`
}

func measureAll(ctx context.Context, o options) (doc *document, err error) {
	began := time.Now()
	average, _ := os.ReadFile("/proc/loadavg") // missing on a machine without it
	w, err := newWorld(ctx, o.server, o.tenants)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	doc = &document{Time: began.UTC(), Go: runtime.Version(), CPUs: runtime.NumCPU(), Redis: w.redisKind, Rounds: o.rounds,
		LoadMean: strings.TrimSpace(string(average))}
	if slices.Contains(o.cases, caseIdle) {
		// First, while the process has done nothing else.
		d, err := w.idle(ctx, o.idle)
		if err != nil {
			return nil, err
		}
		doc.Idle = &d
	}
	cases, err := w.cases(ctx, o)
	if err != nil {
		return nil, err
	}
	all, order, err := w.rounds(ctx, o, cases)
	if err != nil {
		return nil, err
	}
	for _, p := range order {
		doc.Results = append(doc.Results, all.result(p))
	}
	doc.Goals = all.goals(o.callers, doc.Idle)
	doc.Seconds = time.Since(began).Seconds()
	return doc, nil
}

func (w *world) cases(ctx context.Context, o options) (cases []bench, err error) {
	for _, name := range o.cases {
		var more []bench
		switch name {
		case caseRead:
			more, err = w.readCases(ctx, o.callers)
		case caseList:
			more, err = w.listCases(ctx)
		case caseLarge:
			more, err = w.largeCases(ctx)
		case caseIdle:
		default:
			err = fmt.Errorf("there is no case %q", name)
		}
		if err != nil {
			return nil, err
		}
		cases = append(cases, more...)
	}
	for i := range cases {
		cases[i].targets = slices.DeleteFunc(cases[i].targets, func(t target) bool { return !slices.Contains(o.targets, t.name) })
	}
	return cases, nil
}

// rounds measures every target of every case once in each round.
func (w *world) rounds(ctx context.Context, o options, cases []bench) (series, []place, error) {
	all := series{}
	var order []place
	for round := range o.rounds {
		for _, c := range cases {
			targets := slices.Clone(c.targets)
			if round%2 == 1 {
				slices.Reverse(targets)
			}
			for _, t := range targets {
				p := place{c.name, c.callers, t.name}
				s, err := w.measure(ctx, t, c.callers, o.during/4, o.during)
				if err != nil {
					return nil, nil, fmt.Errorf("%s of %s at %d callers: %w", c.name, t.name, c.callers, err)
				}
				all[p] = append(all[p], s)
			}
		}
	}
	for _, c := range cases {
		for _, t := range c.targets {
			order = append(order, place{c.name, c.callers, t.name})
		}
	}
	return all, order, nil
}

// serveProxy is the bare reverse proxy that Bulkhead is compared with.
func serveProxy(ctx context.Context, to string) error {
	u, err := url.Parse(to)
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	proxy := &httputil.ReverseProxy{
		Rewrite:   func(r *httputil.ProxyRequest) { r.SetURL(u) },
		Transport: &http.Transport{MaxIdleConnsPerHost: 256, DisableCompression: true},
	}
	fmt.Println("http://" + l.Addr().String())
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// Without it net/http ends the request's body at the answer's first flush,
		// and the transport then drops the connection to the server.
		if err := http.NewResponseController(w).EnableFullDuplex(); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		proxy.ServeHTTP(w, r)
	})}
	return serveUntil(ctx, func() error { return srv.Serve(l) }, func() { srv.Close() })
}

// serveRedis is the in-process Redis of development mode in a process of its own.
func serveRedis(ctx context.Context) error {
	e, err := redis.StartEmbedded()
	if err != nil {
		return err
	}
	fmt.Println(e.URL())
	<-ctx.Done()
	e.Close()
	return nil
}

func serveUntil(ctx context.Context, serve func() error, end func()) error {
	defer context.AfterFunc(ctx, end)()
	if err := serve(); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
