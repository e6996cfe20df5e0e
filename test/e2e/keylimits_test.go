package e2e

import (
	"slices"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/bulkhead-mcp/bulkhead/internal/demo"
	"github.com/bulkhead-mcp/bulkhead/internal/mcptest"
	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// limits is a tenant in which calls of two servers and of three people wait:
// alice and bob of the default space, and an alice of another one.
type limits struct {
	*world
	t *testing.T
	// alices has both servers, hers the calendar only; both are alice's.
	alices, hers string
	// The waiting calls: of alice at each server, of bob, of the other alice.
	calendar, scripted, bobs, others *pb.Call
	// elsewhere is a denied call of alice at the scripted server, made in the
	// session that holds the calendar only.
	elsewhere *pb.Call
}

func newLimits(t *testing.T, w *world) *limits {
	l := &limits{world: w, t: t}
	w.calendar(startDemo(t, demo.Options{}))
	_, s := w.scripted(t, mcptest.Modern, plainTool)
	w.review(s, nil, toolRule{name: "act", effect: "write", consent: "call"})
	l.alices, l.hers = w.session(w.alice, "calendar", "scripted"), w.session(w.alice, "calendar")
	other := w.client(w.key(&pb.CreateKeyRequest{DisplayName: "other", Role: pb.Key_SERVICE, SubjectSpace: "other"}), "Bulkhead-User", "alice")
	l.calendar = w.ask(w.alice, l.alices, "calendar", demo.CreateDraftEvent, draft("x"))
	l.bobs = w.ask(w.bob, w.session(w.bob, "calendar"), "calendar", demo.CreateDraftEvent, draft("x"))
	l.others = w.ask(other, w.session(other, "calendar"), "calendar", demo.CreateDraftEvent, draft("x"))
	var err error
	l.scripted, err = w.alice.CreateCall(w.ctx, &pb.CreateCallRequest{SessionId: l.alices, Server: "scripted", Tool: "act",
		Arguments: raw(obj{"secret": 1}), RequestId: "scripted-1"})
	must(t, err)
	wantState(t, l.scripted, pb.Call_CONSENT_REQUIRED)
	l.elsewhere = w.propose(w.alice, l.hers, "scripted", "act", obj{})
	wantState(t, l.elsewhere, pb.Call_DENIED)
	return l
}

// A key that an admin limited sees and does what its limits leave, and the rest
// does not exist for it.
func TestKeyLimits(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		l := newLimits(t, w)
		l.approvers()
		l.service()
		l.wholeTenant()
		l.lastAdmin()
		w.verified()
	})
}

func (l *limits) approvers() {
	all := map[string]*pb.Call{"calendar": l.calendar, "scripted": l.scripted, "bob's": l.bobs, "the other alice's": l.others}
	for name, c := range map[string]struct {
		key  *pb.CreateKeyRequest
		sees []string
	}{
		"no limit":      {&pb.CreateKeyRequest{}, []string{"bob's", "calendar", "scripted", "the other alice's"}},
		"servers":       {&pb.CreateKeyRequest{Servers: []string{"calendar"}}, []string{"bob's", "calendar", "the other alice's"}},
		"users":         {&pb.CreateKeyRequest{UserPatterns: []string{"bob"}}, []string{"bob's"}},
		"a pattern":     {&pb.CreateKeyRequest{UserPatterns: []string{"x*", "a*e"}}, []string{"calendar", "scripted", "the other alice's"}},
		"no LIKE":       {&pb.CreateKeyRequest{UserPatterns: []string{"b_b", "%"}}, nil},
		"another space": {&pb.CreateKeyRequest{SubjectSpace: "other"}, []string{"the other alice's"}},
		"the default":   {&pb.CreateKeyRequest{SubjectSpace: "default"}, []string{"bob's", "calendar", "scripted"}},
		"all of them": {&pb.CreateKeyRequest{SubjectSpace: "default", UserPatterns: []string{"a*"}, Servers: []string{"calendar"}},
			[]string{"calendar"}},
	} {
		c.key.DisplayName, c.key.Role = name, pb.Key_APPROVER
		approver := l.client(l.key(c.key))
		var listed []string
		for _, v := range l.consents(approver) {
			for what, call := range all {
				if call.GetConsent().GetConsentId() == v {
					listed = append(listed, what)
				}
			}
		}
		if slices.Sort(listed); !slices.Equal(listed, c.sees) {
			l.t.Errorf("%s: lists %q, want %q", name, listed, c.sees)
		}
		for what, call := range all {
			id := call.GetConsent().GetConsentId()
			_, err := approver.GetConsent(l.ctx, &pb.GetConsentRequest{ConsentId: id})
			if slices.Contains(c.sees, what) {
				must(l.t, err)
				continue
			}
			l.absent(name+": get "+what, err)
			for _, d := range []pb.DecideConsentRequest_Decision{pb.DecideConsentRequest_APPROVE, pb.DecideConsentRequest_DENY} {
				_, err = approver.DecideConsent(l.ctx, &pb.DecideConsentRequest{ConsentId: id, Decision: d})
				l.absent(name+": decide "+what, err)
			}
		}
	}
	bobs := l.client(l.key(&pb.CreateKeyRequest{DisplayName: "bob's", Role: pb.Key_APPROVER, UserPatterns: []string{"bob"}}))
	_, err := bobs.DecideConsent(l.ctx, &pb.DecideConsentRequest{ConsentId: l.bobs.GetConsent().GetConsentId(), Decision: pb.DecideConsentRequest_APPROVE})
	must(l.t, err)
	wantState(l.t, l.ended(l.bob, l.bobs), pb.Call_SUCCEEDED)
}

// consents lists the ids of what a client sees, one a page.
func (l *limits) consents(c *client) (ids []string) {
	in := &pb.ListConsentsRequest{PageSize: 1}
	for {
		res, err := c.ListConsents(l.ctx, in)
		must(l.t, err)
		for _, v := range res.GetConsents() {
			ids = append(ids, v.GetConsentId())
		}
		if in.PageToken = res.GetNextPageToken(); in.PageToken == "" {
			return ids
		}
		if len(res.GetConsents()) != 1 {
			l.t.Fatalf("a page of %d before the last one", len(res.GetConsents()))
		}
	}
}

func (l *limits) absent(what string, err error) {
	l.t.Helper()
	if codeOf(err) != codes.NotFound {
		l.t.Errorf("%s: %v, want NOT_FOUND", what, err)
	}
}

func (l *limits) service() {
	t, ctx := l.t, l.ctx
	key := l.key(&pb.CreateKeyRequest{DisplayName: "calendar only", Role: pb.Key_SERVICE, Servers: []string{"calendar"}, MayDecide: true})
	alice := l.client(key, "Bulkhead-User", "alice")
	call, consent := l.scripted.GetCallId(), l.scripted.GetConsent().GetConsentId()
	for what, try := range map[string]func() error{
		"get call":    func() error { _, err := alice.GetCall(ctx, &pb.GetCallRequest{CallId: call}); return err },
		"cancel call": func() error { _, err := alice.CancelCall(ctx, &pb.CancelCallRequest{CallId: call}); return err },
		"get consent": func() error { _, err := alice.GetConsent(ctx, &pb.GetConsentRequest{ConsentId: consent}); return err },
		"decide": func() error {
			_, err := alice.DecideConsent(ctx, &pb.DecideConsentRequest{ConsentId: consent, Decision: pb.DecideConsentRequest_APPROVE})
			return err
		},
		"list calls":  func() error { _, err := alice.ListCalls(ctx, &pb.ListCallsRequest{SessionId: l.alices}); return err },
		"list tools":  func() error { _, err := alice.ListTools(ctx, &pb.ListToolsRequest{SessionId: l.alices}); return err },
		"get session": func() error { _, err := alice.GetSession(ctx, &pb.GetSessionRequest{SessionId: l.alices}); return err },
		"close session": func() error {
			_, err := alice.CloseSession(ctx, &pb.CloseSessionRequest{SessionId: l.alices})
			return err
		},
		"list connections": func() error {
			_, err := alice.ListConnections(ctx, &pb.ListConnectionsRequest{SessionId: l.alices})
			return err
		},
		"propose": func() error {
			_, err := alice.CreateCall(ctx, &pb.CreateCallRequest{SessionId: l.hers, Server: "scripted", Tool: "act"})
			return err
		},
	} {
		l.absent(what, try())
	}
	// The request id of a call that it may not see is taken, and that is all it learns.
	_, err := alice.CreateCall(ctx, &pb.CreateCallRequest{SessionId: l.hers, Server: "calendar", Tool: demo.GetAvailability, RequestId: "scripted-1"})
	if codeOf(err) != codes.AlreadyExists || !slices.Equal(fieldsOf(err), []string{""}) || infoOf(err).GetMetadata()["callId"] != "" {
		t.Errorf("a foreign request id: %v %q %v", err, fieldsOf(err), infoOf(err).GetMetadata())
	}
	list, err := alice.ListSessions(ctx, &pb.ListSessionsRequest{})
	must(t, err)
	if ss := list.GetSessions(); len(ss) != 1 || ss[0].GetSessionId() != l.hers {
		t.Errorf("sessions: %v", ss)
	}
	calls, err := alice.ListCalls(ctx, &pb.ListCallsRequest{SessionId: l.hers})
	must(t, err)
	if len(calls.GetCalls()) != 0 {
		t.Errorf("calls of another server: %v", calls)
	}
	if ids := l.consents(alice); !slices.Equal(ids, []string{l.calendar.GetConsent().GetConsentId()}) {
		t.Errorf("consents: %q", ids)
	}
	// What is within the limits works, and what is not is as it was.
	_, err = alice.CancelCall(ctx, &pb.CancelCallRequest{CallId: l.calendar.GetCallId()})
	must(t, err)
	_, err = alice.CloseSession(ctx, &pb.CloseSessionRequest{SessionId: l.hers})
	must(t, err)
	now, err := l.alice.GetCall(ctx, &pb.GetCallRequest{CallId: call})
	must(t, err)
	wantState(t, now, pb.Call_CONSENT_REQUIRED)
	calls, err = l.alice.ListCalls(ctx, &pb.ListCallsRequest{SessionId: l.hers})
	must(t, err)
	if cs := calls.GetCalls(); len(cs) != 1 || cs[0].GetCallId() != l.elsewhere.GetCallId() {
		t.Errorf("alice's calls: %v", cs)
	}
}

// wholeTenant: keys for the whole tenant take no limit that they would not keep.
func (l *limits) wholeTenant() {
	for _, role := range []pb.Key_Role{pb.Key_ADMIN, pb.Key_AUDITOR} {
		for field, in := range map[string]*pb.CreateKeyRequest{
			"servers":      {Servers: []string{"calendar"}},
			"userPatterns": {UserPatterns: []string{"bob"}},
			"subjectSpace": {SubjectSpace: "other"},
		} {
			in.DisplayName, in.Role = "limited", role
			_, err := l.admin.CreateKey(l.ctx, in)
			wantField(l.t, err, field)
		}
	}
	// No other role makes keys, so that no key has more than its maker held.
	for who, c := range map[string]*client{"service": l.alice, "approver": l.approver, "auditor": l.auditor} {
		if _, err := c.CreateKey(l.ctx, &pb.CreateKeyRequest{DisplayName: "x", Role: pb.Key_SERVICE}); codeOf(err) != codes.PermissionDenied {
			l.t.Errorf("%s makes a key: %v", who, err)
		}
	}
}

func (l *limits) lastAdmin() {
	res, err := l.admin.ListKeys(l.ctx, &pb.ListKeysRequest{PageSize: 200})
	must(l.t, err)
	var first string
	for _, k := range res.GetKeys() {
		if k.GetRole() == pb.Key_ADMIN {
			first = k.GetKeyId()
		}
	}
	_, err = l.admin.DeleteKey(l.ctx, &pb.DeleteKeyRequest{KeyId: first})
	if codeOf(err) != codes.FailedPrecondition || reasonOf(err) != "LAST_ADMIN_KEY" {
		l.t.Errorf("the last admin key: %v %s", err, reasonOf(err))
	}
	second, err := l.admin.CreateKey(l.ctx, &pb.CreateKeyRequest{DisplayName: "second", Role: pb.Key_ADMIN})
	must(l.t, err)
	admin := l.client(second.GetSecret())
	_, err = admin.DeleteKey(l.ctx, &pb.DeleteKeyRequest{KeyId: first})
	must(l.t, err)
	if _, err = admin.DeleteKey(l.ctx, &pb.DeleteKeyRequest{KeyId: second.GetKeyId()}); codeOf(err) != codes.FailedPrecondition {
		l.t.Errorf("the last admin key revokes itself: %v", err)
	}
	_, err = admin.ListKeys(l.ctx, &pb.ListKeysRequest{})
	must(l.t, err)
}

func infoOf(err error) *errdetails.ErrorInfo {
	for _, d := range status.Convert(err).Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok {
			return info
		}
	}
	return nil
}

func reasonOf(err error) string { return infoOf(err).GetReason() }
