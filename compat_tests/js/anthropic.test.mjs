// Vercel's AI SDK 6 with its Anthropic provider, which reads every answer by schemas of its own.

import assert from "node:assert/strict";
import { test } from "node:test";
import { createAnthropic } from "@ai-sdk/anthropic";
import { APICallError, generateText, Output, stepCountIs, streamText, tool } from "ai6";
import { z } from "zod";

const anthropic = createAnthropic({ baseURL: process.env.OPENAI_BASE_URL, apiKey: "unused" });
const model = anthropic("demo-chat");
const prompt = "What is the capital of France?";
const weather = "What is the weather in Paris?";
const tools = {
  get_weather: tool({
    description: "Get the weather of a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => `${city}: 18 degrees, sunny`,
  }),
};
const asked = { model, maxOutputTokens: 128, maxRetries: 0 };

async function streamed(options) {
  const failures = [];
  const stream = streamText({ ...asked, ...options, onError: ({ error }) => failures.push(error) });
  const answer = {
    text: await stream.text,
    finishReason: await stream.finishReason,
    usage: await stream.usage,
    steps: await stream.steps,
    output: options.output && (await stream.output),
  };
  assert.deepEqual(failures, []);
  return answer;
}

const ways = { whole: (options) => generateText({ ...asked, ...options }), streamed };

for (const [way, ask] of Object.entries(ways)) {
  test(`${way}: a question is answered, and its tokens counted`, async () => {
    const answer = await ask({ prompt });
    assert.match(answer.text, /Paris/);
    assert.equal(answer.finishReason, "stop");
    assert.ok(answer.usage.inputTokens > 0 && answer.usage.outputTokens > 0);
  });

  test(`${way}: a system prompt and earlier turns are read`, async () => {
    const messages = [
      { role: "user", content: prompt },
      { role: "assistant", content: "The capital of France is Paris." },
      { role: "user", content: [{ type: "text", text: prompt }] },
    ];
    assert.match((await ask({ system: "Be brief.", messages })).text, /Paris/);
  });

  test(`${way}: an answer is cut at its length`, async () => {
    const answer = await ask({ prompt, maxOutputTokens: 2 });
    assert.equal(answer.finishReason, "length");
  });

  test(`${way}: a stop sequence ends it`, async () => {
    const answer = await ask({ prompt, stopSequences: ["Paris"] });
    assert.doesNotMatch(answer.text, /Paris/);
  });

  test(`${way}: sampling is asked for`, async () => {
    assert.match((await ask({ prompt, temperature: 0, topK: 1 })).text, /Paris/);
  });

  test(`${way}: a tool is called`, async () => {
    const answer = await ask({ prompt: weather, tools });
    assert.equal(answer.finishReason, "tool-calls");
    assert.deepEqual(answer.steps[0].toolCalls[0].input, { city: "Paris" });
  });

  test(`${way}: its result is read`, async () => {
    const answer = await ask({ prompt: weather, tools, stopWhen: stepCountIs(2) });
    assert.equal(answer.steps.length, 2);
    assert.match(answer.text, /18 degrees/);
  });

  test(`${way}: a tool can be required, named and forbidden`, async () => {
    for (const toolChoice of ["required", { type: "tool", toolName: "get_weather" }]) {
      assert.equal((await ask({ prompt, tools, toolChoice })).steps[0].toolCalls.length, 1);
    }
    const none = await ask({ prompt: weather, tools, toolChoice: "none" });
    assert.equal(none.steps[0].toolCalls.length, 0);
  });

  test(`${way}: an object is held to its schema`, async () => {
    const schema = z.object({ name: z.string(), age: z.number().int() });
    const output = Output.object({ schema });
    const answer = await ask({ prompt: "Anna is 31 years old.", output });
    assert.ok(schema.safeParse(answer.output).success);
  });

  test(`${way}: thinking is asked for of a model that cannot`, async () => {
    const thinking = { type: "enabled", budgetTokens: 1024 };
    const answer = await ask({ prompt, providerOptions: { anthropic: { thinking } } });
    assert.match(answer.text, /Paris/);
  });
}

test("a prompt's cached tokens are told", async () => {
  const cached = {
    role: "system",
    content: "Be precise. ".repeat(60),
    providerOptions: { anthropic: { cacheControl: { type: "ephemeral" } } },
  };
  const messages = [cached, { role: "user", content: prompt }];
  await ways.whole({ messages });
  assert.ok((await ways.whole({ messages })).usage.cachedInputTokens > 0);
});

test("a refusal is the provider's own error", async () => {
  await assert.rejects(ways.whole({ model: anthropic("nobody"), prompt }), (error) => {
    assert.ok(APICallError.isInstance(error));
    assert.equal(error.statusCode, 404);
    assert.match(error.message, /nobody/);
    return true;
  });
});
