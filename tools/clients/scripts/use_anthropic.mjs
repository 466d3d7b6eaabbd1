// The examples for the anthropic package of JavaScript, which asks /v1/messages.

import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { API_KEY, BASE_URL, MODEL, QUESTION, WEATHER_QUESTION, checkCapital, checkObeyed, checkStreamed, run } from "./features.mjs";

const ROOT_URL = BASE_URL.replace(/\/v1$/, "");
const client = new Anthropic({ baseURL: ROOT_URL, apiKey: API_KEY });

const base = { model: MODEL, max_tokens: 200, temperature: 0 };
const question = { ...base, messages: [{ role: "user", content: QUESTION }] };
const properties = { city: { type: "string" }, unit: { enum: ["celsius", "fahrenheit"] } };
const input_schema = { type: "object", properties, required: ["city", "unit"], additionalProperties: false };
const tools = [{ name: "get_weather", description: "Report the weather.", input_schema }];
const weatherQuestion = { ...base, messages: [{ role: "user", content: WEATHER_QUESTION }], tools };

async function text() {
  checkCapital((await client.messages.create(question)).content[0].text);
}

async function stream() {
  const parts = [];
  const whole = await client.messages.stream(question).on("text", (part) => parts.push(part)).finalMessage();
  checkStreamed(parts, whole.content[0].text);
}

async function tools_streamed() {
  const answer = await client.messages.stream({ ...weatherQuestion, tool_choice: { type: "any" } }).finalMessage();
  assert.equal(answer.stop_reason, "tool_use");
  answer.content.forEach((call) => checkObeyed(call.input));
  const runs = [];
  const run = (input) => runs.push(input) && "It is 18 degrees.";
  const runnable = [{ ...tools[0], run, parse: (input) => input }];
  const question = { ...weatherQuestion, tools: runnable, tool_choice: { type: "any" }, max_iterations: 2 };
  for await (const events of client.beta.messages.toolRunner({ ...question, stream: true })) await events.done();
  assert(runs.length >= 2, `${runs.length} calls`);
  runs.forEach(checkObeyed);
}

async function auto() {
  assert((await client.messages.create(weatherQuestion)).content.length);
}

await run(text, stream, tools_streamed, auto);
