// A server of 2026-07-28 with every feature that the TypeScript library has. The
// features are as small as can be; what speaks the protocol is the library.
// Run as: modern.mjs http | stdio.
import { createServer } from 'node:http';
import { Readable } from 'node:stream';
import {
  McpServer, ResourceTemplate, completable, createMcpHandler, fromJsonSchema, inputRequired, inputResponse,
} from '@modelcontextprotocol/server';
import { serveStdio } from '@modelcontextprotocol/server/stdio';
import { z } from 'zod/v4';

const over = process.argv[2];
// What outlives one request: tools that were added, calls that were cancelled,
// what a held call waits for.
const grown = [];
const notes = new Map([['one', 'the first note'], ['two', 'the second note']]);
let held = 0;
let cancelled = 0;
let release = () => {};
let changed; // how open subscriptions are told, set below

const text = (t) => ({ content: [{ type: 'text', text: t }] });
const object = (properties, ...required) => fromJsonSchema({ type: 'object', properties, required });
const nothing = object({});

function build() {
  const server = new McpServer({ name: 'modern-fixture', version: '1.0.0' }, {
    capabilities: { tools: { listChanged: true }, prompts: { listChanged: true }, resources: { listChanged: true, subscribe: true },
      completions: {}, logging: {} },
    // Long enough that only a notice of change makes anybody list again.
    cacheHints: { 'tools/list': { ttlMs: 600_000, cacheScope: 'private' } },
  });
  tools(server);
  questions(server);
  for (const name of grown) later(server, name);
  server.registerResource('first', 'note://book/one', { mimeType: 'text/plain' }, note);
  server.registerResource('notes', new ResourceTemplate('note://book/{name}', {
    list: undefined, complete: { name: (begin) => [...notes.keys()].filter((n) => n.startsWith(begin)) },
  }), { mimeType: 'text/plain' }, note);
  server.registerPrompt('summarize', {
    description: 'Sum up a note', argsSchema: z.object({ tone: completable(z.string(), (begin) => ['dry', 'droll', 'warm'].filter((t) => t.startsWith(begin))) }),
  }, ({ tone }) => ({ messages: [{ role: 'user', content: { type: 'text', text: `Sum up in a ${tone} tone.` } }] }));
  return server;
}

function later(server, name) {
  server.registerTool(name, { description: 'Came later', inputSchema: nothing }, () => text(name));
}

function note(uri) {
  const found = notes.get(uri.pathname.slice(1));
  if (found === undefined) throw new Error(`no note ${uri.href}`);
  return { contents: [{ uri: uri.href, mimeType: 'text/plain', text: found }] };
}

function tools(server) {
  const tool = (name, inputSchema, run) => server.registerTool(name, { description: name, inputSchema }, run);
  tool('echo', object({ message: { type: 'string' } }, 'message'), ({ message }) => text(message));
  tool('region', object({ region: { type: 'string', 'x-mcp-header': 'Region' } }, 'region'),
    ({ region }, ctx) => text(`${region} in the body, ${ctx.http?.req?.headers.get('mcp-param-region') ?? 'nothing'} in the header`));
  tool('fail', nothing, () => { throw new Error('it failed'); });
  tool('hold', nothing, async (_, ctx) => {
    const progressToken = ctx.mcpReq._meta?.progressToken;
    const { signal } = ctx.mcpReq;
    held++;
    const ended = new Promise((done) => {
      release = () => done('released');
      signal.addEventListener('abort', () => { cancelled++; done('cancelled'); });
    });
    for (let progress = 1; progress <= 2 && progressToken !== undefined; progress++) {
      await ctx.mcpReq.notify({ method: 'notifications/progress', params: { progressToken, progress, total: 3, message: `step ${progress}` } });
    }
    await ctx.mcpReq.log('warning', { holding: true }, 'fixture');
    return text(await ended);
  });
  tool('release', nothing, () => { release(); return text('done'); });
  tool('counts', nothing, () => text(`${held} held, ${cancelled} cancelled`));
  tool('grow', object({ name: { type: 'string' } }, 'name'), ({ name }) => {
    grown.push(name);
    changed.tools(server, name);
    return text('grown');
  });
  tool('write-note', object({ name: { type: 'string' }, text: { type: 'string' } }, 'name', 'text'), ({ name, text: t }) => {
    notes.set(name, t);
    changed.resource(server, `note://book/${name}`);
    return text('written');
  });
}

// questions are tools that cannot answer before they were answered themselves.
function questions(server) {
  const ask = (name, request, read) => server.registerTool(name, { description: name, inputSchema: nothing }, (_, ctx) => {
    const view = inputResponse(ctx.mcpReq.inputResponses, 'q');
    if (view.kind === 'missing') return inputRequired({ inputRequests: { q: request }, requestState: `state of ${name}` });
    return text(`${read(view)}; state: ${ctx.mcpReq.requestState()}`);
  });
  ask('order', inputRequired.elicit({ mode: 'form', message: 'Which size?', requestedSchema: {
    type: 'object', properties: { size: { type: 'string', enum: ['S', 'M', 'L'], default: 'M' }, gift: { type: 'boolean' } }, required: ['size'] } }),
  (v) => (v.action === 'accept' ? `size ${v.content.size}` : v.action));
  ask('sample', inputRequired.createMessage({ maxTokens: 20, messages: [{ role: 'user', content: { type: 'text', text: 'Say hello' } }] }),
    (v) => `the model said ${v.result.content.text}`);
  ask('where', inputRequired.listRoots(), (v) => `roots ${v.roots.map((r) => r.uri).join(' ')}`);
}

if (over === 'stdio') {
  changed = { tools: later, resource: (s, uri) => s.server.sendResourceUpdated({ uri }) };
  serveStdio(build, { legacy: 'reject' });
} else {
  const handler = createMcpHandler(build, { legacy: 'reject' });
  changed = { tools: () => handler.notify.toolsChanged(), resource: (_, uri) => handler.notify.resourceUpdated(uri) };
  createServer(async (req, res) => {
    const gone = new AbortController();
    res.on('close', () => gone.abort());
    const answer = await handler.fetch(new Request(`http://${req.headers.host}${req.url}`, {
      method: req.method, headers: req.headers, signal: gone.signal, duplex: 'half', body: req.method === 'POST' ? Readable.toWeb(req) : undefined,
    })).catch((e) => new Response(String(e), { status: 500 }));
    res.writeHead(answer.status, Object.fromEntries(answer.headers));
    res.flushHeaders();
    if (answer.body) Readable.fromWeb(answer.body).on('error', () => res.destroy()).pipe(res);
    else res.end();
  }).listen(0);
}
