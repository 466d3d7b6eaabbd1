// The examples for Vercel's ai package, with the models of its providers. One asks responses, and one has no
// embeddings. `documented` are a provider's further cases.

import assert from "node:assert/strict";
import { Output, embedMany, generateText, isStepCount, streamText, tool } from "ai";
import { z } from "zod";
import {
  QUESTION, TEXTS, UNITS, WEATHER_QUESTION, checkCapital, checkObeyed, checkStreamed, checkVectors, run,
} from "./features.mjs";

export async function tryModels(model, embedder, asksResponses, documented) {
  const base = { model, temperature: 0, maxOutputTokens: 200, maxRetries: 0 };
  const calls = [];
  const weather = tool({
    description: "Report the weather in a city.",
    inputSchema: z.object({ city: z.string(), unit: z.enum(UNITS) }),
    execute: async (input) => (calls.push(input), `It is 18 degrees ${input.unit} in ${input.city}.`),
  });
  const asked = { ...base, prompt: WEATHER_QUESTION, tools: { weather }, stopWhen: isStepCount(3) };
  const forcedFirst = ({ stepNumber }) =>
    stepNumber === 0 ? { toolChoice: { type: "tool", toolName: "weather" } } : { toolChoice: "none" };

  async function text() {
    checkCapital((await generateText({ ...base, prompt: QUESTION })).text);
  }

  async function stream() {
    const parts = [];
    const result = streamText({ ...base, prompt: QUESTION, onError: ({ error }) => { throw error; } });
    for await (const part of result.textStream) parts.push(part);
    checkStreamed(parts, (await generateText({ ...base, prompt: QUESTION })).text);
  }

  async function tools() {
    calls.length = 0;
    const result = await generateText({ ...asked, prepareStep: forcedFirst });
    assert(calls.length > 0);
    calls.forEach(checkObeyed);
    assert(result.text);
  }

  async function tools_streamed() {
    calls.length = 0;
    const deltas = [];
    const result = streamText({ ...asked, prepareStep: forcedFirst });
    for await (const part of result.stream) {
      if (part.type === "error") throw part.error;
      if (part.type === "tool-input-delta") deltas.push(part);
    }
    assert(deltas.length > 1);
    assert(calls.length > 0);
    calls.forEach(checkObeyed);
  }

  async function auto() {
    calls.length = 0;
    const result = await generateText(asked);
    assert(result.text || calls.length > 0);
    calls.forEach(checkObeyed);
  }

  async function structured() {
    const schema = z.object({ name: z.string(), country: z.string(), is_capital: z.boolean() });
    const result = await generateText({ ...base, prompt: QUESTION, output: Output.object({ schema }) });
    schema.parse(result.output);
  }

  async function responses() {
    const first = await generateText({ ...base, prompt: QUESTION });
    const { responseId } = first.providerMetadata.openai;
    const providerOptions = { openai: { previousResponseId: responseId } };
    const second = await generateText({ ...base, prompt: "And of Italy?", providerOptions });
    assert(second.text);
    assert(second.usage.inputTokens > first.usage.totalTokens);
  }

  async function embeddings() {
    await checkVectors((await embedMany({ model: embedder, values: TEXTS, maxRetries: 0 })).embeddings);
  }

  const examples = [text, stream, tools, tools_streamed, auto, structured];
  await run(...examples, ...(asksResponses ? [responses] : []), ...(embedder ? [embeddings] : []), documented);
}
