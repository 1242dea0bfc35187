// Every answer of every wire, held by the TypeScript compiler to the types that the vendors' SDKs
// declare: no field is missing, none is null that the real API leaves out.

import assert from "node:assert/strict";
import { join } from "node:path";
import { test } from "node:test";
import ts from "typescript";

const base = process.env.OPENAI_BASE_URL;
const file = join(import.meta.dirname, "answers.ts"); // in memory only
const messages = [{ role: "user", content: "What is the capital of France?" }];
const weather = [{ role: "user", content: "What is the weather in Paris?" }];
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const get_weather = { name: "get_weather", description: "Get the weather of a city.", parameters };
const schema = { type: "object", properties: { capital: { type: "string" } } };
const common = { model: "demo-chat" };
const chat = { ...common, messages };
const called = { ...common, messages: weather, tools: [{ type: "function", function: get_weather }] };
const completion = { ...common, prompt: "Paris is", max_tokens: 4 };
const message = { ...common, messages, max_tokens: 64 };
const used = {
  ...common,
  max_tokens: 64,
  messages: weather,
  tools: [{ name: "get_weather", input_schema: parameters }],
};
const response = { ...common, input: messages[0].content };
const responded = {
  ...common,
  input: weather[0].content,
  tools: [{ type: "function", strict: true, ...get_weather }],
};
const rain = { type: "predicate", instructions: "It rains." };
const decision = { ...common, input: "The sky is grey.", questions: [rain] };
const embeddings = { model: "all-minilm-l6-v2", input: ["one", "two"] };

// A whole answer's type, and that of a stream's events.
const WHOLE = [
  ["/chat/completions", chat, "OpenAI.ChatCompletion"],
  ["/chat/completions", { ...chat, n: 2, logprobs: true, top_logprobs: 2 }, "OpenAI.ChatCompletion"],
  ["/chat/completions", called, "OpenAI.ChatCompletion"],
  ["/chat/completions", { ...chat, response_format: { type: "json_object" } }, "OpenAI.ChatCompletion"],
  ["/completions", { ...completion, logprobs: 2 }, "OpenAI.Completion"],
  ["/completions", completion, "OpenAI.Completion"],
  ["/responses", response, "Wire<OpenAI.Responses.Response>"],
  ["/responses", { ...response, max_output_tokens: 1 }, "Wire<OpenAI.Responses.Response>"],
  ["/responses", responded, "Wire<OpenAI.Responses.Response>"],
  ["/responses", { ...response, text: { format: { type: "json_schema", name: "a", schema } } },
    "Wire<OpenAI.Responses.Response>"],
  ["/responses/input_tokens", response, "OpenAI.Responses.InputTokenCountResponse"],
  ["/embeddings", embeddings, "OpenAI.CreateEmbeddingResponse"],
  ["/decisions", decision, "OpenAI.Decision"],
  ["/messages", message, "Message"],
  ["/messages", { ...message, max_tokens: 1 }, "Message"],
  ["/messages", { ...message, stop_sequences: ["Paris"] }, "Message"],
  ["/messages", used, "Message"],
  ["/messages", { ...message, thinking: { type: "adaptive" } }, "Message"],
  ["/messages/count_tokens", { ...common, messages }, "Anthropic.MessageTokensCount"],
  ["/messages", {}, "Anthropic.ErrorResponse"],
  ["/chat/completions", {}, "{ error: OpenAI.ErrorObject }"],
];
const STREAMS = [
  ["/chat/completions", { ...chat, stream_options: { include_usage: true } }, "OpenAI.ChatCompletionChunk"],
  ["/chat/completions", { ...chat, logprobs: true }, "OpenAI.ChatCompletionChunk"],
  ["/chat/completions", called, "OpenAI.ChatCompletionChunk"],
  ["/completions", completion, "CompletionChunk"],
  ["/responses", response, "Wire<OpenAI.Responses.ResponseStreamEvent>"],
  ["/responses", responded, "Wire<OpenAI.Responses.ResponseStreamEvent>"],
  ["/messages", message, "MessageEvent"],
  ["/messages", used, "MessageEvent"],
];

// `output_text` is what the SDK itself adds, wherever a response stands; in one that is not done
// OpenAI's API says that usage is null, and its types that it may be left out. The type of a completion's
// chunks is that of whole ones, which always have ended. Anthropic's text blocks say that citations
// may be null, but its API leaves them out, and Vercel's provider takes no null.
const HEAD = `
import OpenAI from "openai";
import Anthropic from "@anthropic-ai/sdk";
type Mutable<T> = { -readonly [K in keyof T]: Mutable<T[K]> };
declare function exact<const T>(value: T): Mutable<T>;
type Own<T> = T extends OpenAI.Responses.Response
  ? Omit<T, "output_text" | "usage"> & { usage: OpenAI.Responses.ResponseUsage | null }
  : T;
type Wire<T> = T extends { response: OpenAI.Responses.Response }
  ? Omit<T, "response"> & { response: Own<T["response"]> }
  : Own<T>;
type Uncited<T> = T extends Anthropic.TextBlock
  ? Omit<T, "citations"> & { citations?: Anthropic.TextCitation[] }
  : T extends { content_block: Anthropic.ContentBlock }
    ? Omit<T, "content_block"> & { content_block: Uncited<T["content_block"]> }
    : T;
type Message = Omit<Anthropic.Message, "content"> & { content: Uncited<Anthropic.ContentBlock>[] };
type MessageEvent = Uncited<Anthropic.RawMessageStreamEvent>;
type Choice = Omit<OpenAI.CompletionChoice, "finish_reason">
  & { finish_reason: OpenAI.CompletionChoice["finish_reason"] | null };
type CompletionChunk = Omit<OpenAI.Completion, "choices"> & { choices: Choice[] };
`;

const headers = { "content-type": "application/json", "anthropic-version": "2023-06-01" };

function post(path, body) {
  return fetch(base + path, { method: "POST", headers, body: JSON.stringify(body) });
}

async function events(path, body) {
  const text = await (await post(path, { ...body, stream: true })).text();
  const data = text.split("\n").filter((line) => line.startsWith("data: ")).map((l) => l.slice(6));
  // Pings are in no SDK's types: their readers skip them.
  return data.filter((d) => d !== "[DONE]").map((d) => JSON.parse(d)).filter((e) => e.type !== "ping");
}

function complaints(lines) {
  const options = {
    strict: true,
    exactOptionalPropertyTypes: true,
    noEmit: true,
    skipLibCheck: true,
    target: ts.ScriptTarget.ES2022,
    module: ts.ModuleKind.NodeNext,
    moduleResolution: ts.ModuleResolutionKind.NodeNext,
    types: [],
  };
  const host = ts.createCompilerHost(options);
  const { fileExists, readFile } = host;
  const source = HEAD + lines.join("\n");
  host.fileExists = (name) => name === file || fileExists(name);
  host.readFile = (name) => (name === file ? source : readFile(name));
  const program = ts.createProgram([file], options, host);
  const parsed = program.getSourceFile(file);
  return ts.getPreEmitDiagnostics(program, parsed).map((found) => {
    const { line } = parsed.getLineAndCharacterOfPosition(found.start);
    return `${source.split("\n")[line]}\n${ts.flattenDiagnosticMessageText(found.messageText, "\n")}`;
  });
}

const typed = (answer, type, index) =>
  `export const a${index}: ${type} = exact(${JSON.stringify(answer)});`;

test("the compiler sees a null and a missing field", () => {
  const name = { id: "m", object: "model", created: 1 };
  const bad = [{ ...name, owned_by: null }, name].map((m, i) => typed(m, "OpenAI.Model", i));
  const text = { type: "text", text: "a" };
  bad.push(typed({ ...text, citations: null }, "Uncited<Anthropic.TextBlock>", 2));
  const said = { role: "assistant", content: "a", refusal: null };
  bad.push(typed({ ...said, tool_calls: null }, "OpenAI.ChatCompletionMessage", 3));
  const good = [
    typed(text, "Uncited<Anthropic.TextBlock>", 4),
    typed(said, "OpenAI.ChatCompletionMessage", 5),
  ];
  assert.equal(complaints([...bad, ...good]).length, bad.length);
});

test("whole answers are of their types", async () => {
  const lines = [];
  for (const [path, body, type] of WHOLE) {
    lines.push(typed(await (await post(path, body)).json(), type, lines.length));
  }
  for (const model of (await (await fetch(`${base}/models`)).json()).data) {
    lines.push(typed(model, "OpenAI.Model", lines.length));
  }
  const { data } = await (await fetch(`${base}/models`, { headers })).json();
  assert.ok(data.length > 0);
  for (const model of data) lines.push(typed(model, "Anthropic.ModelInfo", lines.length));
  assert.deepEqual(complaints(lines), []);
});

test("every event of a stream is of its type", async () => {
  const lines = [];
  for (const [path, body, type] of STREAMS) {
    const told = await events(path, body);
    assert.ok(told.length > 2);
    for (const event of told) lines.push(typed(event, type, lines.length));
  }
  assert.deepEqual(complaints(lines), []);
});
