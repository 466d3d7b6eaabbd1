// The examples for the openai package of JavaScript.

import assert from "node:assert/strict";
import fs from "node:fs";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import {
  API_KEY, BASE_URL, EMBEDDER, EMBEDDINGS_URL, MODEL, QUESTION, SOUND, SPEECH_URL, TEXTS, TRANSCRIBER,
  WEATHER_QUESTION, checkCapital, checkObeyed, checkStreamed, checkVectors, run,
} from "./features.mjs";

const client = new OpenAI({ baseURL: BASE_URL, apiKey: API_KEY });

const base = { model: MODEL, temperature: 0, max_tokens: 200 };
const question = { ...base, messages: [{ role: "user", content: QUESTION }] };
const weatherQuestion = { ...base, messages: [{ role: "user", content: WEATHER_QUESTION }] };
const City = z.object({ name: z.string(), country: z.string(), is_capital: z.boolean() });
const GetWeather = z.object({ city: z.string(), unit: z.enum(["celsius", "fahrenheit"]) });
const getWeather = zodFunction({ name: "get_weather", description: "Report the weather.", parameters: GetWeather });
const forced = { type: "function", function: { name: "get_weather" } };

async function text() {
  checkCapital((await client.chat.completions.create(question)).choices[0].message.content);
}

async function stream() {
  const parts = [];
  for await (const chunk of await client.chat.completions.create({ ...question, stream: true })) {
    parts.push(chunk.choices[0]?.delta.content ?? "");
  }
  checkStreamed(parts, (await client.chat.completions.create(question)).choices[0].message.content);
}

async function tools() {
  const request = { ...weatherQuestion, tools: [getWeather] };
  const { message } = (await client.chat.completions.create({ ...request, tool_choice: forced })).choices[0];
  assert.equal(message.tool_calls.length, 1);
  const [call] = message.tool_calls;
  checkObeyed(JSON.parse(call.function.arguments));
  const result = { role: "tool", tool_call_id: call.id, content: "It is 18 degrees." };
  const answer = await client.chat.completions.create({ ...request, messages: [...request.messages, message, result] });
  assert(answer.choices[0].message.content);
}

async function tools_streamed() {
  const deltas = [];
  const events = client.chat.completions.stream({ ...weatherQuestion, tools: [getWeather], tool_choice: "required" });
  events.on("tool_calls.function.arguments.delta", (delta) => deltas.push(delta));
  const { message } = (await events.finalChatCompletion()).choices[0];
  assert(deltas.length > 1);
  message.tool_calls.forEach((call) => checkObeyed(call.function.parsed_arguments));
}

async function auto() {
  const calls = [];
  const tool = {
    type: "function",
    function: {
      name: "get_weather",
      description: "Report the weather.",
      parameters: z.toJSONSchema(GetWeather),
      parse: JSON.parse,
      function: (call) => (calls.push(call), "It is 18 degrees."),
    },
  };
  assert(await client.chat.completions.runTools({ ...weatherQuestion, tools: [tool] }).finalContent());
  calls.forEach(checkObeyed);
}

async function structured() {
  const request = { ...question, response_format: zodResponseFormat(City, "city") };
  City.parse((await client.chat.completions.parse(request)).choices[0].message.parsed);
}

async function responses() {
  const asked = { model: MODEL, temperature: 0, max_output_tokens: 200 };
  const first = await client.responses.create({ ...asked, input: QUESTION });
  const parts = [];
  for await (const event of await client.responses.create({ ...asked, input: QUESTION, stream: true })) {
    if (event.type === "response.output_text.delta") parts.push(event.delta);
  }
  checkStreamed(parts, first.output_text);
  const second = await client.responses.create({ ...asked, input: "And of Italy?", previous_response_id: first.id });
  assert(second.output_text);
  assert(second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens);
}

async function embeddings() {
  const embedder = new OpenAI({ baseURL: EMBEDDINGS_URL, apiKey: API_KEY });
  const { data } = await embedder.embeddings.create({ model: EMBEDDER, input: TEXTS }); // asks for base64 by itself
  await checkVectors(data.map((item) => item.embedding));
}

async function speech() {
  const listener = new OpenAI({ baseURL: SPEECH_URL, apiKey: API_KEY }).audio;
  const sound = () => ({ file: fs.createReadStream(SOUND), model: TRANSCRIBER });
  const whole = (await listener.transcriptions.create(sound())).text;
  checkCapital(whole);
  const deltas = [];
  for await (const event of await listener.transcriptions.create({ ...sound(), stream: true })) {
    if (event.type === "transcript.text.delta") deltas.push(event.delta);
    else assert.equal(event.text, whole);
  }
  assert.equal(deltas.join(""), whole);
  const inWords = { response_format: "verbose_json", timestamp_granularities: ["word"] };
  const { words } = await listener.transcriptions.create({ ...sound(), ...inWords });
  assert.deepEqual(words.map((word) => word.word), whole.split(" "));
  assert((await listener.translations.create(sound())).text);
}

await run(text, stream, tools, tools_streamed, auto, structured, responses, embeddings, speech);
