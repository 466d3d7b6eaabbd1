// The examples for the ollama package of JavaScript, which asks /api/chat and /api/embed.

import assert from "node:assert/strict";
import { Ollama } from "ollama";
import { BASE_URL, EMBEDDER, EMBEDDINGS_URL, MODEL, QUESTION, TEXTS, WEATHER_QUESTION, checkCapital, checkStreamed, checkVectors, run } from "./features.mjs";

const ROOT_URL = BASE_URL.replace(/\/v1$/, "");
const client = new Ollama({ host: ROOT_URL });

const base = { model: MODEL, options: { temperature: 0, num_predict: 200 } };
const question = { ...base, messages: [{ role: "user", content: QUESTION }] };

async function text() {
  checkCapital((await client.chat(question)).message.content);
  checkCapital((await client.generate({ ...base, prompt: QUESTION })).response);
}

async function stream() {
  const parts = [];
  for await (const part of await client.chat({ ...question, stream: true })) parts.push(part);
  checkStreamed(parts.map((part) => part.message.content), (await client.chat(question)).message.content);
  assert(parts.at(-1).done && parts.at(-1).eval_duration > 0);
}

async function auto() {
  const properties = { city: { type: "string" }, unit: { enum: ["celsius", "fahrenheit"] } };
  const parameters = { type: "object", properties, required: ["city", "unit"] };
  const tools = [{ type: "function", function: { name: "get_weather", description: "Report the weather.", parameters } }];
  const { message } = await client.chat({ ...base, messages: [{ role: "user", content: WEATHER_QUESTION }], tools });
  assert(message.content || message.tool_calls?.length);
}

async function structured() {
  const format = { type: "object", properties: { name: { type: "string" } }, required: ["name"] };
  const { message } = await client.chat({ ...question, format });
  assert.equal(typeof JSON.parse(message.content).name, "string");
}

async function embeddings() {
  const embedder = new Ollama({ host: EMBEDDINGS_URL.replace(/\/v1$/, "") });
  await checkVectors((await embedder.embed({ model: EMBEDDER, input: TEXTS })).embeddings);
}

async function documented() {
  assert.deepEqual((await client.list()).models.map((model) => model.name), [`${MODEL}:latest`]);
  assert((await client.show({ model: MODEL })).capabilities.includes("completion"));
  await assert.rejects(client.chat({ ...question, model: "another" }), /does not exist/);
}

await run(text, stream, auto, structured, embeddings, documented);
