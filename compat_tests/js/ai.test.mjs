// Vercel's AI SDK with its default OpenAI provider, which speaks the Responses API and, from the
// second turn on, sends what it was answered by reference.

import assert from "node:assert/strict";
import { test } from "node:test";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, Output, streamText, tool } from "ai";
import { z } from "zod";

const bodies = [];
const openai = createOpenAI({
  baseURL: process.env.OPENAI_BASE_URL,
  apiKey: "unused",
  fetch: (url, options) => {
    bodies.push(JSON.parse(options.body));
    return fetch(url, options);
  },
});
const model = openai("demo-chat");
const question = { role: "user", content: "What is the capital of France?" };

test("a conversation of two turns goes by reference", async () => {
  const first = await generateText({ model, messages: [question] });
  assert.match(first.text, /Paris/);
  const messages = [question, ...first.response.messages, question];
  const second = await generateText({ model, messages });
  assert.match(second.text, /Paris/);
  const sent = bodies.at(-1).input.map((item) => item.type ?? item.role);
  assert.deepEqual(sent, ["user", "item_reference", "user"]);
  assert.ok(second.usage.inputTokens > first.usage.inputTokens);
});

test("a streamed conversation goes by reference too", async () => {
  const first = streamText({ model, messages: [question] });
  assert.match(await first.text, /Paris/);
  const messages = [question, ...(await first.response).messages, question];
  const second = streamText({ model, messages });
  assert.match(await second.text, /Paris/);
  assert.ok(bodies.at(-1).input.some((item) => item.type === "item_reference"));
});

test("a tool is called, and its result read, in one conversation", async () => {
  const asked = [];
  const answer = await generateText({
    model,
    messages: [{ role: "user", content: "What is the weather in Paris?" }],
    tools: {
      get_weather: tool({
        description: "Get the current weather in a city.",
        inputSchema: z.object({ city: z.string() }),
        execute: async ({ city }) => {
          asked.push(city);
          return { city, weather: "sunny" };
        },
      }),
    },
    toolChoice: "required",
    stopWhen: ({ steps }) => steps.length === 2,
  });
  assert.ok(asked.length >= 1);
  assert.equal(answer.steps.length, 2);
  const kinds = bodies.at(-1).input.map((item) => item.type ?? item.role);
  assert.ok(kinds.includes("function_call_output"));
});

test("an object is held to its schema", async () => {
  const schema = z.object({ name: z.string(), age: z.number().int().min(0).max(120) });
  const output = Output.object({ schema });
  const answer = await generateText({ model, output, prompt: "Anna is 31 years old." });
  assert.ok(schema.safeParse(answer.output).success);
});

test("the previous response is gone on from by its id", async () => {
  const first = await generateText({ model, messages: [question] });
  const { responseId } = first.providerMetadata.openai;
  const second = await generateText({
    model,
    messages: [question],
    providerOptions: { openai: { previousResponseId: responseId } },
  });
  assert.match(second.text, /Paris/);
  assert.ok(second.usage.inputTokens > first.usage.inputTokens);
});
