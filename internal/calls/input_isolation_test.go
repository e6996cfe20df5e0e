package calls

import "encoding/json"

// someInteraction is a question that was put to alice.
const someInteraction = "int_00000000000000000000000001"

// ask puts a question to the call's user in the tables alone.
func (w *world) ask(c *Call) {
	w.t.Helper()
	w.exec(`INSERT INTO call_inputs (tenant_id, call_id, round, phase, expire_time) VALUES ($1, $2, 1, 'WAITING', now() + interval '1 hour')`, c.Tenant, c.ID)
	w.exec(`INSERT INTO interactions (tenant_id, interaction_id, call_id, round, kind, state, request, expire_time)
		VALUES ($1, $2, $3, 1, 'ELICITATION_FORM', 'PENDING', '\x00', now() + interval '1 hour')`, c.Tenant, someInteraction, c.ID)
}

func init() {
	isolationCases["calls.Interactions"] = func(x *stranger) {
		got, err := x.Interactions(x.ctx, x.user, x.waiting.ID)
		x.notFound("interactions", err)
		if len(got) > 0 {
			x.t.Errorf("%s: %+v", x.who, got)
		}
	}
	isolationCases["calls.Respond"] = func(x *stranger) {
		for _, a := range []Answer{{Action: Decline}, {Action: Accept, Content: json.RawMessage(`{}`)}} {
			_, err := x.Respond(x.ctx, x.user, x.waiting.ID, someInteraction, a)
			x.notFound("respond", err)
		}
	}
}
