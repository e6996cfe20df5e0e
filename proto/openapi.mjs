// Finishes the generated OpenAPI document: what protoc-gen-openapiv2 cannot know about Bulkhead.
// Json is any JSON value, callers authenticate by a bearer, and a service key names its user in headers.
import { readFileSync, writeFileSync } from "node:fs";

const file = process.argv[2];
const doc = JSON.parse(readFileSync(file, "utf8"));

doc.info = {
  title: "Bulkhead",
  version: "v1",
  description:
    "An MCP host for many tenants. Errors are google.rpc.Status with ErrorInfo (reason, domain, metadata), " +
    "BadRequest and RetryInfo. Unknown members, duplicate names, null and enum numbers are refused.",
};
doc.consumes = ["application/json"];
doc.produces = ["application/json"];
doc.securityDefinitions = {
  bearer: { type: "apiKey", in: "header", name: "Authorization", description: "Bearer <API key>" },
};
doc.security = [{ bearer: [] }];
doc.definitions.Json = { description: "Any JSON value, kept byte for byte." };

const headers = [
  ["Bulkhead-User", "The user that a service key acts for: percent-encoded UTF-8, 1 to 256 printable characters."],
  ["Bulkhead-Groups", "The user's groups, separated by commas, each percent-encoded UTF-8."],
  ["Bulkhead-Project", "The project that the user works in, percent-encoded UTF-8."],
];
doc.parameters = Object.fromEntries(
  headers.map(([name, description]) => [name, { name, in: "header", required: false, type: "string", description }]),
);
const refs = headers.map(([name]) => ({ $ref: `#/parameters/${name}` }));
for (const item of Object.values(doc.paths)) {
  for (const operation of Object.values(item)) {
    operation.parameters = [...(operation.parameters ?? []), ...refs];
  }
}

writeFileSync(file, JSON.stringify(doc, null, 2) + "\n");
