// Anthropic's JavaScript SDK, unchanged, against the gateway at ANTHROPIC_BASE_URL.

import assert from "node:assert/strict";
import { test } from "node:test";
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ apiKey: "unused", maxRetries: 0 });
const model = "demo-chat";
const max_tokens = 128;
const messages = [{ role: "user", content: "What is the capital of France?" }];
const weather = [{ role: "user", content: "What is the weather in Paris?" }];
const tool = {
  name: "get_weather",
  description: "Get the weather of a city.",
  input_schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
};

test("a message is whole, and counted", async () => {
  const message = await client.messages.create({ model, max_tokens, messages });
  assert.match(message.content[0].text, /Paris/);
  assert.equal(message.stop_reason, "end_turn");
  const counted = await client.messages.countTokens({ model, messages });
  const { input_tokens, cache_read_input_tokens, cache_creation_input_tokens } = message.usage;
  const read = input_tokens + cache_read_input_tokens + cache_creation_input_tokens;
  assert.equal(read, counted.input_tokens);
  assert.match(message._request_id, /^req-/);
});

test("a stream says the same", async () => {
  const whole = await client.messages.create({ model, max_tokens, messages });
  const kinds = [];
  let text = "";
  for await (const event of await client.messages.create({ model, max_tokens, messages, stream: true })) {
    kinds.push(event.type);
    if (event.type === "content_block_delta") text += event.delta.text;
  }
  assert.equal(text, whole.content[0].text);
  assert.deepEqual(kinds.slice(0, 2), ["message_start", "content_block_start"]);
  assert.deepEqual(kinds.slice(-3), ["content_block_stop", "message_delta", "message_stop"]);
});

test("the stream helper adds the message up", async () => {
  const whole = await client.messages.create({ model, max_tokens, messages });
  const final = await client.messages.stream({ model, max_tokens, messages }).finalMessage();
  assert.deepEqual(final.content[0].text, whole.content[0].text);
  assert.equal(final.usage.output_tokens, whole.usage.output_tokens);
});

test("leaving a stream early is no error", async () => {
  const stream = await client.messages.create({ model, max_tokens, messages, stream: true });
  for await (const event of stream) if (event.type === "content_block_delta") break;
});

test("a call, its result, and the answer", async () => {
  const asked = { model, max_tokens, tools: [tool] };
  const first = await client.messages.stream({ ...asked, messages: weather }).finalMessage();
  assert.equal(first.stop_reason, "tool_use");
  const call = first.content.at(-1);
  assert.deepEqual(call.input, { city: "Paris" });
  const second = await client.messages.create({
    ...asked,
    messages: [
      ...weather,
      { role: "assistant", content: first.content },
      { role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: "18 degrees, sunny" }] },
    ],
  });
  assert.match(second.content[0].text, /18 degrees/);
});

test("the tool runner goes round by itself", async () => {
  const asked = [];
  const final = await client.beta.messages.toolRunner({
    model, max_tokens, messages: weather,
    tools: [{
      ...tool,
      run: async ({ city }) => { asked.push(city); return "18 degrees, sunny"; },
      parse: (input) => input,
    }],
  });
  assert.deepEqual(asked, ["Paris"]);
  assert.match(final.content[0].text, /18 degrees/);
});

test("a stop sequence is named", async () => {
  const stop_sequences = ["Paris"];
  const cut = await client.messages.create({ model, max_tokens, messages, stop_sequences });
  assert.deepEqual([cut.stop_reason, cut.stop_sequence], ["stop_sequence", "Paris"]);
});

test("a refusal is an error of its kind, whole and streamed", async () => {
  for (const stream of [false, true]) {
    const asked = client.messages.create({ model: "nobody", max_tokens, messages, stream });
    await assert.rejects(asked, (error) => {
      assert.ok(error instanceof Anthropic.NotFoundError);
      assert.equal(error.error.error.type, "not_found_error");
      assert.match(error.requestID, /^req-/);
      return true;
    });
  }
});
