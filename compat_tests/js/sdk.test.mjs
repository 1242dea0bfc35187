// The OpenAI JavaScript SDK, unchanged, against the gateway at OPENAI_BASE_URL.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";

const client = new OpenAI({ apiKey: "unused", maxRetries: 0 });
const model = "demo-chat";
const messages = [{ role: "user", content: "What is the capital of France?" }];
const weather = {
  name: "get_weather",
  description: "Get the current weather in a city.",
  parameters: {
    type: "object",
    properties: { city: { type: "string" } },
    required: ["city"],
    additionalProperties: false,
  },
};
const person = {
  name: "person",
  strict: true,
  schema: {
    type: "object",
    properties: { name: { type: "string" }, age: { type: "integer", minimum: 0, maximum: 120 } },
    required: ["name", "age"],
    additionalProperties: false,
  },
};

test("a chat answer is whole, and counted", async () => {
  const answer = await client.chat.completions.create({ model, messages });
  assert.match(answer.choices[0].message.content, /Paris/);
  assert.equal(answer.choices[0].finish_reason, "stop");
  const { prompt_tokens, completion_tokens, total_tokens } = answer.usage;
  assert.equal(prompt_tokens + completion_tokens, total_tokens);
});

test("a chat stream says the same, with usage last", async () => {
  const whole = await client.chat.completions.create({ model, messages });
  const stream = await client.chat.completions.create({
    model, messages, stream: true, stream_options: { include_usage: true },
  });
  let text = "", usage;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.deepEqual(usage, whole.usage);
});

test("the stream helper gathers the answer", async () => {
  const final = await client.chat.completions.stream({ model, messages }).finalChatCompletion();
  assert.match(final.choices[0].message.content, /Paris/);
});

test("leaving a stream early is no error", async () => {
  const stream = await client.chat.completions.create({ model, messages, stream: true });
  for await (const chunk of stream) {
    assert.equal(chunk.object, "chat.completion.chunk");
    break;
  }
});

test("a tool is called, and its result goes back in", async () => {
  const asked = [{ role: "user", content: "What is the weather in Paris?" }];
  const tools = [{ type: "function", function: weather }];
  const first = await client.chat.completions.create({ model, messages: asked, tools });
  assert.equal(first.choices[0].finish_reason, "tool_calls");
  const [call] = first.choices[0].message.tool_calls;
  assert.equal(call.function.name, "get_weather");
  assert.deepEqual(JSON.parse(call.function.arguments), { city: "Paris" });
  const second = await client.chat.completions.create({
    model,
    tools,
    messages: [
      ...asked,
      first.choices[0].message,
      { role: "tool", tool_call_id: call.id, content: '{"temperature": 21, "sky": "sunny"}' },
    ],
  });
  assert.ok(second.choices[0].message.content);
});

test("the runner goes through the loop by itself", async () => {
  const cities = [];
  const runner = client.chat.completions.runTools({
    model,
    messages: [{ role: "user", content: "What is the weather in Paris?" }],
    tools: [
      {
        type: "function",
        function: {
          ...weather,
          parse: JSON.parse,
          function: ({ city }) => {
            cities.push(city);
            return '{"temperature": 21, "sky": "sunny"}';
          },
        },
      },
    ],
    stream: true,
  });
  assert.ok(await runner.finalContent());
  assert.deepEqual(cities, ["Paris"]);
});

test("structured output parses, and fits", async () => {
  const answer = await client.chat.completions.parse({
    model,
    messages: [{ role: "user", content: "Anna is 31 years old." }],
    response_format: { type: "json_schema", json_schema: person },
  });
  const { name, age } = JSON.parse(answer.choices[0].message.content);
  assert.equal(typeof name, "string");
  assert.ok(Number.isInteger(age) && age >= 0 && age <= 120);
});

test("embeddings come as base64 by default, and are the same as floats", async () => {
  const asked = { model: "text-embedding-3-small", input: ["A dog.", "A puppy."] };
  const byDefault = await client.embeddings.create(asked);
  const asFloats = await client.embeddings.create({ ...asked, encoding_format: "float" });
  assert.equal(byDefault.data.length, 2);
  for (const [index, item] of byDefault.data.entries()) {
    assert.equal(item.embedding.length, 384);
    const floats = Float32Array.from(asFloats.data[index].embedding);
    assert.deepEqual(Float32Array.from(item.embedding), floats);
  }
});

test("models are listed and found", async () => {
  const names = [];
  for await (const listed of client.models.list()) names.push(listed.id);
  assert.ok(names.includes(model) && names.includes("text-embedding-3-small"));
  assert.equal((await client.models.retrieve(model)).id, model);
});

test("a response is whole", async () => {
  const response = await client.responses.create({ model, input: messages[0].content });
  assert.equal(response.status, "completed");
  assert.match(response.output_text, /Paris/);
});

test("a response streams to the same text", async () => {
  const input = messages[0].content;
  const whole = await client.responses.create({ model, input });
  const stream = await client.responses.create({ model, input, stream: true });
  const types = [];
  let text = "";
  for await (const event of stream) {
    types.push(event.type);
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  assert.equal(types[0], "response.created");
  assert.equal(types.at(-1), "response.completed");
  assert.equal(text, whole.output_text);
});

test("a structured response parses, and fits", async () => {
  const response = await client.responses.parse({
    model,
    input: "Anna is 31 years old.",
    text: { format: { type: "json_schema", ...person } },
  });
  assert.deepEqual(Object.keys(JSON.parse(response.output_text)), ["name", "age"]);
});

test("errors arrive with their class, code and request id", async () => {
  await assert.rejects(client.chat.completions.create({ model: "no-such-model", messages }), (error) => {
    assert.ok(error instanceof OpenAI.NotFoundError);
    assert.equal(error.code, "model_not_found");
    assert.match(error.requestID, /^req-/);
    return true;
  });
});
