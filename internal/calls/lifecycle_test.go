package calls

import (
	"slices"
	"testing"
)

func TestRead_IsRecordedWithItsOutcomeInOneCommit(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	c := sc.propose("read")
	if c.State != Succeeded || !c.Recorded || c.Receipt == "" || string(c.Result) != okResult || len(c.Attempts) != 1 {
		t.Fatalf("%+v", c)
	}
	got := sc.get(c.ID)
	if got.State != Succeeded || got.Receipt != c.Receipt || got.Revision != c.Revision || len(got.Attempts) != 1 ||
		got.Attempts[0].Phase != Answered || got.Attempts[0].EndTime == nil {
		t.Fatalf("%+v", got)
	}
	if k := w.kinds(c.ID); !slices.Equal(k, []string{"call.finished"}) {
		t.Fatalf("audit: %v", k)
	}
	w.verify(sc.alice.Tenant)
}

func TestWrite_AsksIsApprovedAndRunsOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sc := w.scene(w.node(quick()))
	c := sc.propose("write_call")
	if c.State != ConsentRequired || c.ConsentID == "" || c.ConsentExpire == nil || len(w.sender.all()) != 0 {
		t.Fatalf("%+v", c)
	}
	sc.decide(c, true)
	c = sc.until(c.ID, Succeeded)
	if w.sender.count("write_call") != 1 || c.Receipt == "" || len(c.Attempts) != 1 || c.Attempts[0].SendBy == nil {
		t.Fatalf("%d sends, %+v", w.sender.count("write_call"), c)
	}
	want := []string{"consent.requested", "call.proposed", "consent.decided", "call.dispatched", "call.finished"}
	if k := w.kinds(c.ID); !slices.Equal(k, want) {
		t.Fatalf("audit: %v", k)
	}
	w.verify(sc.alice.Tenant)
}
