package api

import (
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
	pb "github.com/bulkhead-mcp/bulkhead/proto/gen/bulkhead/v1"
)

// rule says who may call a method and how long it may take.
type rule struct {
	roles []tenant.Role
	// own marks methods on users' rows: a service key must name its user.
	own bool
	// decides marks methods that a service key may call only with mayDecide.
	decides bool
	// limit ends the request; zero means defaultLimit.
	limit time.Duration
}

const (
	defaultLimit = 30 * time.Second
	// Waiting methods answer after at most 60 s by themselves.
	waitLimit   = 75 * time.Second
	serverLimit = 60 * time.Second
	verifyLimit = 5 * time.Minute
)

var (
	operators = []tenant.Role{tenant.RoleOperator}
	admins    = []tenant.Role{tenant.RoleAdmin}
	readers   = []tenant.Role{tenant.RoleAdmin, tenant.RoleService, tenant.RoleUser}
	users     = []tenant.Role{tenant.RoleService, tenant.RoleUser}
	deciders  = []tenant.Role{tenant.RoleApprover, tenant.RoleUser, tenant.RoleService}
	auditors  = []tenant.Role{tenant.RoleAuditor, tenant.RoleAdmin}
)

// rules is the table of methods and roles. A method without an entry is
// refused, and a test fails.
var rules = map[string]rule{
	pb.TenantService_CreateTenant_FullMethodName: {roles: operators},
	pb.TenantService_GetTenant_FullMethodName:    {roles: operators},
	pb.TenantService_ListTenants_FullMethodName:  {roles: operators},

	pb.KeyService_CreateKey_FullMethodName: {roles: admins},
	pb.KeyService_ListKeys_FullMethodName:  {roles: admins},
	pb.KeyService_DeleteKey_FullMethodName: {roles: admins},

	pb.ServerService_CreateServer_FullMethodName:    {roles: admins},
	pb.ServerService_GetServer_FullMethodName:       {roles: readers},
	pb.ServerService_ListServers_FullMethodName:     {roles: readers},
	pb.ServerService_UpdateServer_FullMethodName:    {roles: admins},
	pb.ServerService_DeleteServer_FullMethodName:    {roles: admins},
	pb.ServerService_ProbeServer_FullMethodName:     {roles: admins, limit: serverLimit},
	pb.ServerService_ListDefinitions_FullMethodName: {roles: admins, limit: serverLimit},

	pb.ContractService_CreateContract_FullMethodName:   {roles: admins},
	pb.ContractService_GetContract_FullMethodName:      {roles: admins},
	pb.ContractService_ListContracts_FullMethodName:    {roles: admins},
	pb.ContractService_ActivateContract_FullMethodName: {roles: admins},
	pb.ContractService_CheckContract_FullMethodName:    {roles: admins, limit: serverLimit},

	pb.SessionService_OpenSession_FullMethodName:     {roles: users, own: true},
	pb.SessionService_GetSession_FullMethodName:      {roles: users, own: true},
	pb.SessionService_ListSessions_FullMethodName:    {roles: users, own: true},
	pb.SessionService_CloseSession_FullMethodName:    {roles: users, own: true},
	pb.SessionService_ListConnections_FullMethodName: {roles: users, own: true},

	pb.CatalogService_ListTools_FullMethodName: {roles: users, own: true, limit: serverLimit},

	pb.CatalogService_ListResources_FullMethodName:         {roles: users, own: true, limit: serverLimit},
	pb.CatalogService_ListResourceTemplates_FullMethodName: {roles: users, own: true, limit: serverLimit},
	pb.CatalogService_ListPrompts_FullMethodName:           {roles: users, own: true, limit: serverLimit},
	pb.CatalogService_CreateCompletion_FullMethodName:      {roles: users, own: true, limit: serverLimit},

	pb.CatalogService_CreateResourceSubscription_FullMethodName: {roles: users, own: true, limit: serverLimit},
	pb.CatalogService_ListResourceSubscriptions_FullMethodName:  {roles: users, own: true},
	pb.CatalogService_DeleteResourceSubscription_FullMethodName: {roles: users, own: true},

	pb.CallService_CreateCall_FullMethodName: {roles: users, own: true, limit: waitLimit},
	pb.CallService_GetCall_FullMethodName:    {roles: users, own: true, limit: waitLimit},
	pb.CallService_ListCalls_FullMethodName:  {roles: users, own: true},
	pb.CallService_CancelCall_FullMethodName: {roles: users, own: true},

	pb.CallService_ListInteractions_FullMethodName:   {roles: users, own: true},
	pb.CallService_RespondInteraction_FullMethodName: {roles: users, own: true},

	pb.EventService_StreamSessionEvents_FullMethodName: {roles: users, own: true},
	pb.EventService_StreamCallEvents_FullMethodName:    {roles: users, own: true},
	pb.EventService_IssueEventTicket_FullMethodName:    {roles: users, own: true},

	pb.ConsentService_ListConsents_FullMethodName:  {roles: deciders, own: true},
	pb.ConsentService_GetConsent_FullMethodName:    {roles: deciders, own: true},
	pb.ConsentService_DecideConsent_FullMethodName: {roles: deciders, own: true, decides: true},

	pb.WebhookService_CreateWebhookEndpoint_FullMethodName: {roles: admins},
	pb.WebhookService_ListWebhookEndpoints_FullMethodName:  {roles: admins},
	pb.WebhookService_GetWebhookEndpoint_FullMethodName:    {roles: admins},
	pb.WebhookService_UpdateWebhookEndpoint_FullMethodName: {roles: admins},
	pb.WebhookService_DeleteWebhookEndpoint_FullMethodName: {roles: admins},
	pb.WebhookService_RotateWebhookSecret_FullMethodName:   {roles: admins},
	pb.WebhookService_TestWebhookEndpoint_FullMethodName:   {roles: admins},
	pb.WebhookService_ListWebhookDeliveries_FullMethodName: {roles: admins},
	pb.WebhookService_RedeliverWebhook_FullMethodName:      {roles: admins},

	pb.AuditService_ListAuditEntries_FullMethodName:   {roles: auditors},
	pb.AuditService_VerifyAuditEntries_FullMethodName: {roles: auditors, limit: verifyLimit},
}

// permit applies a rule to a caller.
func (r rule) permit(p tenant.Principal) error {
	allowed := false
	for _, role := range r.roles {
		allowed = allowed || role == p.Role
	}
	if !allowed {
		return fault.New(fault.Denied, "ROLE_NOT_ALLOWED", "this method is not for the role %s", p.Role)
	}
	if p.Role != tenant.RoleOperator && p.Tenant.IsZero() {
		return fault.New(fault.Denied, "TENANT_REQUIRED", "the credential belongs to no tenant")
	}
	acts := p.Role == tenant.RoleService || p.Role == tenant.RoleUser
	if r.own && acts && p.Subject.IsZero() {
		return fault.New(fault.Denied, "USER_REQUIRED", "name the user with the header %s", headerUser)
	}
	if r.decides && p.Role == tenant.RoleService && !p.MayDecide {
		return fault.New(fault.Denied, "PROPOSER_MAY_NOT_DECIDE", "a service key decides only when an admin gave it mayDecide")
	}
	return nil
}

func (r rule) deadline() time.Duration {
	if r.limit == 0 {
		return defaultLimit
	}
	return r.limit
}
