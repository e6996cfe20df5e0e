package conformance

// scenario is one that is run, at one revision of the protocol.
type scenario struct {
	name, version string
	// skips are names of checks that may be skipped because the revision has no
	// such message. Every other check must be a success.
	skips []string
	// lacks says what is missing where the scenario does not pass yet.
	lacks string
}

// scenarios are those that need no authorization. All must pass but those that
// lack something, which must not.
var scenarios = []scenario{
	{name: "initialize", version: "2025-06-18"},
	{name: "initialize", version: "2025-11-25"},
	{name: "tools_call", version: "2025-06-18"},
	{name: "tools_call", version: "2025-11-25"},
	{name: "tools_call", version: "2026-07-28"},
	{name: "elicitation-sep1034-client-defaults", version: "2025-11-25"},
	{name: "sse-retry", version: "2025-11-25"},
	{name: "request-metadata", version: "2026-07-28"},
	{name: "sep-2322-client-request-state", version: "2026-07-28"},
	// 2026-07-28 has no handshake (Basic Protocol, Versioning): a client that sent
	// one of these two would break the protocol.
	{name: "http-standard-headers", version: "2026-07-28",
		skips: []string{"ClientMcpMethodHeader_initialize", "ClientMcpMethodHeader_notifications_initialized"}},
	{name: "http-custom-headers", version: "2026-07-28"},
	{name: "http-invalid-tool-headers", version: "2026-07-28"},
	{name: "json-schema-ref-no-deref", version: "2026-07-28"},
	{name: "json-schema-2020-12-preservation", version: "2025-11-25"},
	{name: "json-schema-2020-12-preservation", version: "2026-07-28"},
}

// notOffered are scenarios of extensions that we do not declare. Under the
// protocol (Extensions, Negotiation) neither side may use an extension that the
// other did not declare, so there is nothing to test.
var notOffered = map[string]string{
	"sep-2640-client-no-prefetch":        "the extension io.modelcontextprotocol/skills is not declared",
	"sep-2640-client-verify-digest":      "the extension io.modelcontextprotocol/skills is not declared",
	"sep-2640-client-verify-size":        "the extension io.modelcontextprotocol/skills is not declared",
	"sep-2640-client-verify-frontmatter": "the extension io.modelcontextprotocol/skills is not declared",
}

// needOAuth are scenarios that need a client of OAuth, which is not there yet.
var needOAuth = []string{
	"auth/metadata-default",
	"auth/metadata-var1",
	"auth/metadata-var2",
	"auth/metadata-var3",
	"auth/basic-cimd",
	"auth/scope-from-www-authenticate",
	"auth/scope-from-scopes-supported",
	"auth/scope-omitted-when-undefined",
	"auth/scope-step-up",
	"auth/scope-retry-limit",
	"auth/token-endpoint-auth-basic",
	"auth/token-endpoint-auth-post",
	"auth/token-endpoint-auth-none",
	"auth/pre-registration",
	"auth/2025-03-26-oauth-metadata-backcompat",
	"auth/2025-03-26-oauth-endpoint-fallback",
	"auth/resource-mismatch",
	"auth/offline-access-scope",
	"auth/offline-access-not-supported",
	"auth/authorization-server-migration",
	"auth/iss-supported",
	"auth/iss-not-advertised",
	"auth/iss-supported-missing",
	"auth/iss-wrong-issuer",
	"auth/iss-unexpected",
	"auth/iss-normalized",
	"auth/metadata-issuer-mismatch",
	"auth/client-credentials-jwt",
	"auth/client-credentials-basic",
	"auth/enterprise-managed-authorization",
	"auth/dpop",
	"auth/dpop-nonce",
	"auth/wif-jwt-bearer",
}
