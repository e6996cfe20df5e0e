package main

import (
	"fmt"
	"slices"
)

// spread is the median of the rounds with the least and the greatest value.
type spread struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

func spreadOf(values []float64) spread {
	v := slices.Sorted(slices.Values(values))
	if len(v) == 0 {
		return spread{}
	}
	mid := v[len(v)/2]
	if len(v)%2 == 0 {
		mid = (mid + v[len(v)/2-1]) / 2
	}
	return spread{Median: mid, Min: v[0], Max: v[len(v)-1]}
}

// result is one target of one case over all rounds.
type result struct {
	Case           string `json:"case"`
	Callers        int    `json:"callers"`
	Target         string `json:"target"`
	Calls          int    `json:"calls"`
	Errors         int    `json:"errors"`
	CallsPerSecond spread `json:"callsPerSecond"`
	P50            spread `json:"p50Ms"`
	P90            spread `json:"p90Ms"`
	P99            spread `json:"p99Ms"`
	// CPU time for a call, in milliseconds: the target's own processes, and beside
	// it PostgreSQL with all its processes, Redis, the MCP server and this client.
	CPUOwn      spread `json:"cpuOwnMs"`
	CPUPostgres spread `json:"cpuPostgresMs"`
	CPURedis    spread `json:"cpuRedisMs"`
	CPUUpstream spread `json:"cpuUpstreamMs"`
	CPUClient   spread `json:"cpuClientMs"`
	// ForeignCPUShare is what other processes of the machine used meanwhile.
	ForeignCPUShare spread `json:"foreignCpuShare"`
}

// goal is a promise that a run can hold or break.
type goal struct {
	Goal  int     `json:"goal"`
	What  string  `json:"what"`
	Limit float64 `json:"limit"`
	// AtLeast says that more is better.
	AtLeast bool   `json:"atLeast,omitempty"`
	Value   spread `json:"value"`
	Met     bool   `json:"met"`
}

// series holds the samples of every target by case, callers and target, a round
// after the other.
type series map[place][]sample

type place struct {
	name    string
	callers int
	target  string
}

func (s series) result(p place) result {
	r := result{Case: p.name, Callers: p.callers, Target: p.target}
	take := func(f func(sample) float64) spread {
		var v []float64
		for _, x := range s[p] {
			v = append(v, f(x))
		}
		return spreadOf(v)
	}
	for _, x := range s[p] {
		r.Calls, r.Errors = r.Calls+x.Calls, r.Errors+x.Errors
	}
	r.CallsPerSecond = take(func(x sample) float64 { return x.CallsPerSecond })
	r.P50 = take(func(x sample) float64 { return x.P50 })
	r.P90 = take(func(x sample) float64 { return x.P90 })
	r.P99 = take(func(x sample) float64 { return x.P99 })
	r.CPUOwn = take(func(x sample) float64 { return x.CPUOwn })
	r.CPUPostgres = take(func(x sample) float64 { return x.CPUPostgres })
	r.CPURedis = take(func(x sample) float64 { return x.CPURedis })
	r.CPUUpstream = take(func(x sample) float64 { return x.CPUUpstream })
	r.CPUClient = take(func(x sample) float64 { return x.CPUClient })
	r.ForeignCPUShare = take(func(x sample) float64 { return x.ForeignCPUShare })
	return r
}

// ratios compares samples of the same round.
func (s series) ratios(name string, callers int, f func(at func(target string) sample) float64) spread {
	var v []float64
	for i := range s[place{name, callers, direct}] {
		v = append(v, f(func(target string) sample {
			if all := s[place{name, callers, target}]; i < len(all) {
				return all[i]
			}
			return sample{}
		}))
	}
	return spreadOf(v)
}

// goals judges what was measured.
func (s series) goals(callers []int, d *idle) []goal {
	var out []goal
	add := func(n int, what string, limit float64, atLeast bool, v spread) {
		g := goal{Goal: n, What: what, Limit: limit, AtLeast: atLeast, Value: v, Met: v.Median <= limit}
		if atLeast {
			g.Met = v.Median >= limit
		}
		out = append(out, g)
	}
	for _, over := range []string{overREST, overGRPC} {
		for _, n := range callers {
			s.readGoals(over, n, add)
		}
	}
	for _, l := range []struct {
		name  string
		limit float64
	}{{caseList + " 100", 0.3}, {caseList + " 1000", 1.5}} {
		if p := (place{l.name, 1, overREST}); len(s[p]) > 0 {
			add(6, l.name+": own CPU, ms", l.limit, false, s.result(p).CPUOwn)
			add(6, l.name+": upstream CPU, ms", 0.01, false, s.result(p).CPUUpstream)
		}
	}
	if len(s[place{caseLarge, 4, overREST}]) > 0 {
		add(7, "64 KiB result: own CPU ÷ reverse proxy's", 5, false, s.ratios(caseLarge, 4, func(at func(string) sample) float64 {
			return at(overREST).CPUOwn / at(reverseProxy).CPUOwn
		}))
	}
	if d != nil {
		one := func(x float64) spread { return spread{x, x, x} }
		add(9, "idle connection with its event stream: live heap and stacks, KiB", 65, false, one(d.LiveBytes/1024))
		add(10, "resident memory at start, MiB", 60, false, one(d.ResidentMiBStart))
	}
	return out
}

func (s series) readGoals(over string, n int, add func(int, string, float64, bool, spread)) {
	if len(s[place{caseRead, n, over}]) == 0 {
		return
	}
	ratio := func(f func(at func(string) sample) float64) spread { return s.ratios(caseRead, n, f) }
	if n == 16 || n == 64 {
		add(1, title(over, n, "own CPU ÷ reverse proxy's"), 1.5, false,
			ratio(func(at func(string) sample) float64 { return at(over).CPUOwn / at(reverseProxy).CPUOwn }))
	}
	if n == 64 {
		add(2, title(over, n, "calls per second ÷ direct"), 0.30, true,
			ratio(func(at func(string) sample) float64 { return at(over).CallsPerSecond / at(direct).CallsPerSecond }))
		add(4, title(over, n, "p99 ÷ direct"), 2.5, false,
			ratio(func(at func(string) sample) float64 { return at(over).P99 / at(direct).P99 }))
	}
	if n == 1 {
		add(3, title(over, n, "added p50 ÷ reverse proxy's"), 1.2, false, ratio(func(at func(string) sample) float64 {
			return (at(over).P50 - at(direct).P50) / (at(reverseProxy).P50 - at(direct).P50)
		}))
	}
}

func title(over string, callers int, what string) string {
	return fmt.Sprintf("read over %s, callers %d: %s", over, callers, what)
}
