// What else the documentation of Vercel's ai package and of its providers shows, with a case for each feature. A case
// fails by throwing. checkCases() tries all cases, and names those that fail.

import assert from "node:assert/strict";
import {
  APICallError,
  NoObjectGeneratedError,
  Output,
  ToolLoopAgent,
  convertToModelMessages,
  dynamicTool,
  embed,
  generateText,
  experimental_getBatchResults as getBatchResults,
  experimental_getBatchStatus as getBatchStatus,
  experimental_startBatch as startBatch,
  hasToolCall,
  isStepCount,
  jsonSchema,
  simulateStreamingMiddleware,
  streamText,
  tool,
  wrapLanguageModel,
} from "ai";
import { z } from "zod";
import { BASE_URL, MODEL, QUESTION, UNITS, WEATHER_QUESTION, checkCapital, checkObeyed } from "./features.mjs";

const DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";
const City = z.object({ name: z.string().max(20), is_capital: z.boolean() });

export async function checkCases(cases) {
  const failed = [];
  for (const [name, check] of Object.entries(cases)) {
    try {
      await check();
      console.error(`${name}: passed`);
    } catch (error) {
      console.error(`${name}: ${error.stack}`);
      failed.push(`${name} (${error.name}: ${error.message})`);
    }
  }
  assert.equal(failed.length, 0, `${failed.length} of ${Object.keys(cases).length} cases failed: ${failed.join("; ")}`);
}

// Cases for a language model of any provider. `modelOf` makes one from a name; `unsupported` names settings that the
// provider does not send.
export function casesOfModels(modelOf, name, unsupported = []) {
  const model = modelOf(name);
  const base = { model, temperature: 0, maxOutputTokens: 100, maxRetries: 0 };
  const asked = { ...base, prompt: QUESTION };
  const calls = [];
  const weather = tool({
    description: "Report the weather in a city.",
    inputSchema: z.object({ city: z.string().max(20), unit: z.enum(UNITS) }),
    execute: async (input) => (calls.push(input), `It is 18 degrees ${input.unit} in ${input.city}.`),
  });
  const time = tool({ description: "Report the time.", inputSchema: z.object({}), execute: async () => "It is noon." });
  const weatherAsked = { ...base, prompt: WEATHER_QUESTION, tools: { weather, time } };
  const required = { type: "tool", toolName: "weather" };
  const once = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? required : "none" });

  // The answer to a call that was made before, whose result is `output`.
  const answerTo = (output, tools = { weather }) =>
    generateText({
      ...base,
      tools,
      toolChoice: "none",
      messages: [
        { role: "user", content: WEATHER_QUESTION },
        {
          role: "assistant",
          content: [
            { type: "text", text: "I look it up." },
            { type: "tool-call", toolCallId: "call_1", toolName: "weather", input: { city: "Paris", unit: "celsius" } },
          ],
        },
        { role: "tool", content: [{ type: "tool-result", toolCallId: "call_1", toolName: "weather", output }] },
      ],
    });

  return {
    async instructions_and_history() {
      const messages = [
        { role: "user", content: QUESTION },
        { role: "assistant", content: [{ type: "text", text: "Paris." }] },
        {
          role: "user",
          content: [
            { type: "text", text: "And " },
            { type: "text", text: "of Italy?" },
          ],
        },
      ];
      const whole = await generateText({ ...base, instructions: "You answer with a word.", messages });
      const short = await generateText({ ...base, messages: messages.slice(0, 1) });
      assert(whole.text);
      assert(whole.usage.inputTokens > short.usage.inputTokens);
    },
    async settings() {
      const settings = {
        temperature: 0.5,
        topP: 0.9,
        topK: 20,
        presencePenalty: 0.1,
        frequencyPenalty: 0.1,
        seed: 7,
        stopSequences: ["\n\n"],
      };
      const usable = Object.fromEntries(Object.entries(settings).filter(([key]) => !unsupported.includes(key)));
      const { warnings, text } = await generateText({ ...asked, ...usable });
      assert(text);
      assert.deepEqual(warnings ?? [], []);
      if (usable.seed !== undefined) assert.equal((await generateText({ ...asked, ...usable })).text, text);
    },
    async stop_sequence() {
      if (unsupported.includes("stopSequences")) return;
      const stopSequences = ["Paris"];
      const whole = await generateText({ ...asked, stopSequences });
      const streamed = streamText({ ...asked, stopSequences });
      assert.equal(await streamed.text, whole.text);
      assert(!whole.text.includes("Paris") && whole.text.length > 0, `it is '${whole.text}'`);
      assert.equal(whole.finishReason, "stop");
    },
    async usage_and_response() {
      const whole = await generateText(asked);
      const streamed = streamText(asked);
      await streamed.consumeStream();
      const usage = await streamed.usage;
      for (const each of [whole.usage, usage]) {
        assert(each.inputTokens > 0 && each.outputTokens > 0, JSON.stringify(each));
        assert.equal(each.totalTokens, each.inputTokens + each.outputTokens);
        assert(each.inputTokenDetails.cacheReadTokens >= 0, JSON.stringify(each));
      }
      assert.deepEqual([usage.inputTokens, usage.outputTokens], [whole.usage.inputTokens, whole.usage.outputTokens]);
      assert(usage.inputTokenDetails.cacheReadTokens > 0, JSON.stringify(usage));
      for (const response of [whole.response, await streamed.response]) {
        assert.equal(response.modelId, name);
        assert(response.id && response.timestamp instanceof Date && response.headers["content-type"]);
      }
      assert.equal(await streamed.finishReason, whole.finishReason);
    },
    async finish_for_length() {
      const whole = await generateText({ ...asked, maxOutputTokens: 3 });
      const streamed = streamText({ ...asked, maxOutputTokens: 3 });
      assert.equal(await streamed.text, whole.text);
      assert.deepEqual([whole.finishReason, await streamed.finishReason], ["length", "length"]);
      assert.equal(whole.usage.outputTokens, 3);
    },
    async parts_of_a_stream() {
      const types = [];
      for await (const part of streamText({ ...asked, include: { rawChunks: true } }).stream) types.push(part.type);
      const counted = types.filter(
        (type, i) => type !== types[i - 1] && !["custom", "raw", "text-delta"].includes(type),
      );
      assert.deepEqual(counted, ["start", "start-step", "text-start", "text-end", "finish-step", "finish"]);
      assert(types.includes("raw"));
    },
    async abort() {
      const end = new AbortController();
      let aborted = false;
      const streamed = streamText({
        ...asked,
        maxOutputTokens: 1000,
        abortSignal: end.signal,
        onAbort: () => (aborted = true),
      });
      for await (const part of streamed.stream) if (part.type === "text-delta") end.abort();
      assert(aborted);
      await assert.rejects(generateText({ ...asked, abortSignal: AbortSignal.abort() }), { name: "AbortError" });
      assert((await generateText({ ...asked, maxOutputTokens: 5 })).text);
    },
    async callbacks() {
      const seen = [];
      const streamed = streamText({
        ...weatherAsked,
        stopWhen: isStepCount(2),
        prepareStep: once,
        onChunk: ({ chunk }) => seen.push(chunk.type),
        onStepEnd: ({ stepNumber }) => seen.push(`step ${stepNumber}`),
        onEnd: ({ steps }) => seen.push(`${steps.length} steps`),
      });
      await streamed.consumeStream();
      for (const one of ["tool-call", "tool-result", "step 0", "text-delta", "step 1", "2 steps"]) {
        assert(seen.includes(one), `no ${one} in ${[...new Set(seen)]}`);
      }
    },
    async middleware() {
      const wrapped = wrapLanguageModel({ model, middleware: simulateStreamingMiddleware() });
      assert.equal(await streamText({ ...asked, model: wrapped }).text, (await generateText(asked)).text);
    },
    async object_streamed() {
      const { partialOutputStream, output } = streamText({ ...asked, output: Output.object({ schema: City }) });
      const partial = [];
      for await (const one of partialOutputStream) partial.push(one);
      City.parse(await output);
      assert.deepEqual(partial.at(-1), await output);
    },
    async object_of_a_nested_schema() {
      const Country = z.object({
        capital: City,
        neighbours: z.array(City).max(2),
        area: z.number().int().min(1).max(99).nullable(),
        kind: z.enum(["a", "b"]),
      });
      const output = Output.object({ schema: Country, name: "country", description: "A country." });
      Country.parse((await generateText({ ...asked, maxOutputTokens: 300, output })).output);
    },
    async object_of_a_json_schema() {
      const properties = { name: { type: "string", maxLength: 20 }, size: { enum: ["small", "large"] } };
      const schema = jsonSchema({
        type: "object",
        properties,
        required: ["name", "size"],
        additionalProperties: false,
      });
      const { output } = await generateText({ ...asked, output: Output.object({ schema }) });
      assert(typeof output.name === "string" && ["small", "large"].includes(output.size), JSON.stringify(output));
    },
    async array() {
      const streamed = streamText({
        ...asked,
        maxOutputTokens: 200,
        output: Output.array({ element: City, maxItems: 2 }),
      });
      const elements = [];
      try {
        for await (const element of streamed.elementStream) elements.push(element);
        assert.deepEqual(elements, await streamed.output);
      } catch (error) {
        // A small model can go on with the array until its tokens end.
        if (!NoObjectGeneratedError.isInstance(error) || (await streamed.finishReason) !== "length") throw error;
      }
      elements.forEach((element) => City.parse(element));
      assert(elements.length > 0);
    },
    async choice() {
      const options = ["Paris", "Rome"];
      assert(options.includes((await generateText({ ...asked, output: Output.choice({ options }) })).output));
    },
    async json() {
      const prompt = "Write a JSON object with the key city, whose value is Paris.";
      const { output } = await generateText({ ...asked, prompt, output: Output.json() });
      assert.equal(typeof output, "object");
    },
    async tool_required() {
      calls.length = 0;
      const { toolCalls, finishReason } = await generateText({ ...weatherAsked, toolChoice: "required" });
      assert(toolCalls.length > 0);
      assert.equal(finishReason, "tool-calls");
      for (const call of toolCalls) assert(call.toolName in weatherAsked.tools && !call.invalid && call.toolCallId);
      calls.forEach(checkObeyed);
    },
    async tool_none() {
      const { toolCalls, text } = await generateText({ ...weatherAsked, toolChoice: "none" });
      assert.equal(toolCalls.length, 0);
      assert(text);
    },
    async tool_without_arguments() {
      const { toolCalls } = await generateText({ ...weatherAsked, toolChoice: { type: "tool", toolName: "time" } });
      assert.deepEqual(toolCalls[0].input, {});
    },
    async active_tools() {
      const { toolCalls } = await generateText({ ...weatherAsked, activeTools: ["time"], toolChoice: "required" });
      assert(toolCalls.every((call) => call.toolName === "time") && toolCalls.length > 0);
    },
    async strict_tool_with_examples() {
      const strict = tool({ ...weather, strict: true, inputExamples: [{ input: { city: "Rome", unit: "celsius" } }] });
      const { toolCalls } = await generateText({ ...weatherAsked, tools: { weather: strict }, toolChoice: "required" });
      toolCalls.forEach((call) => checkObeyed(call.input));
      assert(toolCalls.length > 0);
    },
    async dynamic_tool() {
      const inputSchema = jsonSchema({
        type: "object",
        properties: { query: { type: "string", maxLength: 20 } },
        required: ["query"],
      });
      const search = dynamicTool({ description: "Search.", inputSchema, execute: async () => ({ found: [] }) });
      const { toolCalls } = await generateText({ ...weatherAsked, tools: { search }, toolChoice: "required" });
      assert(toolCalls[0].dynamic && typeof toolCalls[0].input.query === "string");
    },
    async tool_input_streamed() {
      const parts = [];
      for await (const part of streamText({ ...weatherAsked, toolChoice: required }).stream) {
        if (part.type === "error") throw part.error;
        parts.push(part);
      }
      for (const call of parts.filter(({ type }) => type === "tool-call")) {
        const ofCall = (type) => parts.filter((part) => part.type === type && part.id === call.toolCallId);
        assert.deepEqual([ofCall("tool-input-start").length, ofCall("tool-input-end").length], [1, 1]);
        assert.deepEqual(
          JSON.parse(
            ofCall("tool-input-delta")
              .map(({ delta }) => delta)
              .join(""),
          ),
          call.input,
        );
      }
      assert(parts.some(({ type }) => type === "tool-result"));
    },
    async steps_until_a_condition() {
      const bounded = { ...weatherAsked, toolChoice: "required" };
      assert.equal(
        (await generateText({ ...bounded, stopWhen: [hasToolCall("weather", "time"), isStepCount(4)] })).steps.length,
        1,
      );
      const { steps, responseMessages } = await generateText({ ...bounded, stopWhen: isStepCount(2) });
      assert.equal(steps.length, 2);
      assert.deepEqual(
        responseMessages.map(({ role }) => role),
        ["assistant", "tool", "assistant", "tool"],
      );
      assert(
        (
          await generateText({
            ...base,
            tools: bounded.tools,
            toolChoice: "none",
            messages: [{ role: "user", content: WEATHER_QUESTION }, ...responseMessages],
          })
        ).text,
      );
    },
    async agent() {
      const agent = new ToolLoopAgent({
        ...base,
        instructions: "You are a helpful assistant.",
        tools: { weather },
        prepareStep: once,
        stopWhen: isStepCount(3),
      });
      const { steps, text } = await agent.generate({ prompt: WEATHER_QUESTION });
      assert(text && steps.length === 2, `${steps.length} steps`);
      const streamed = await agent.stream({ prompt: WEATHER_QUESTION });
      assert.equal(await streamed.text, text);
    },
    async error_of_a_tool() {
      const failing = tool({
        ...weather,
        execute: async () => {
          throw new Error("no network");
        },
      });
      const { steps } = await generateText({
        ...weatherAsked,
        tools: { weather: failing },
        prepareStep: once,
        stopWhen: isStepCount(2),
      });
      assert(steps[0].content.some(({ type }) => type === "tool-error"));
      assert(steps[1].text);
    },
    async results_of_tools() {
      for (const output of [
        { type: "text", value: "18 degrees" },
        { type: "json", value: { degrees: 18, hours: [1, 2] } },
        { type: "error-text", value: "no network" },
        { type: "error-json", value: { code: 7 } },
        { type: "execution-denied", reason: "not allowed" },
        {
          type: "content",
          value: [
            { type: "text", text: "18 " },
            { type: "text", text: "degrees" },
          ],
        },
      ]) {
        assert((await answerTo(output)).text, output.type);
      }
    },
    async reasoning_in_the_history() {
      const messages = [
        { role: "user", content: QUESTION },
        {
          role: "assistant",
          content: [
            { type: "reasoning", text: "An easy one." },
            { type: "text", text: "Paris." },
          ],
        },
        { role: "user", content: "And of Italy?" },
      ];
      assert((await generateText({ ...base, messages })).text);
    },
    async messages_of_a_user_interface() {
      const { text } = await generateText({
        ...base,
        messages: await convertToModelMessages([{ id: "1", role: "user", parts: [{ type: "text", text: QUESTION }] }]),
      });
      checkCapital(text);
    },
    async a_picture_is_refused() {
      const content = [
        { type: "text", text: "What is this?" },
        { type: "file", mediaType: "image/png", data: DOT },
      ];
      const error = await generateText({ ...base, messages: [{ role: "user", content }] }).catch((one) => one);
      checkRefused(error, 400, /image/i);
    },
    async unknown_model() {
      const other = { ...asked, model: modelOf("no-such-model") };
      checkRefused(await generateText(other).catch((error) => error), 404, /no-such-model/);
      const errors = [];
      await streamText({ ...other, onError: ({ error }) => errors.push(error) }).consumeStream();
      checkRefused(errors[0], 404, /no-such-model/);
    },
    async invalid_setting() {
      checkRefused(
        await generateText({ ...asked, maxOutputTokens: 1e9, topP: 1.5 }).catch((error) => error),
        400,
        /top_p/,
      );
    },
    async prompt_that_is_too_long() {
      const { data } = await (await fetch(`${BASE_URL}/models`)).json();
      const prompt = "word ".repeat(data[0].max_model_len);
      checkRefused(await generateText({ ...asked, prompt }).catch((error) => error), 400, /context|long|token/i);
    },
  };
}

function checkRefused(error, statusCode, message) {
  assert(APICallError.isInstance(error), `it is ${error}`);
  assert.equal(error.statusCode, statusCode, error.message);
  assert.match(error.message, message);
  assert(!error.isRetryable);
}

export async function checkBatch(provider) {
  const requests = [
    { id: "france", type: "text", model: MODEL, prompt: QUESTION, temperature: 0, maxOutputTokens: 50 },
  ];
  const batch = await startBatch({ provider, requests });
  while ((await getBatchStatus({ provider, batch })).status === "pending") {
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  const results = [];
  for await (const result of getBatchResults({ provider, batch })) results.push(result);
  assert.deepEqual(
    results.map(({ id, status }) => [id, status]),
    [["france", "succeeded"]],
  );
  checkCapital(results[0].text);
}

// Cases for the model of /v1/completions.
export function casesOfCompletions(model) {
  const asked = { model, temperature: 0, maxOutputTokens: 20, maxRetries: 0, prompt: "The capital of France is" };
  return {
    async completion() {
      const { text, usage, finishReason } = await generateText(asked);
      assert(text && usage.outputTokens > 0 && ["length", "stop"].includes(finishReason));
      const streamed = streamText(asked);
      assert.equal(await streamed.text, text);
    },
    async completion_with_a_stop_sequence() {
      const whole = await generateText(asked);
      const stop = whole.text.slice(5, 10);
      const { text, finishReason } = await generateText({ ...asked, stopSequences: [stop] });
      assert.equal(text, whole.text.slice(0, whole.text.indexOf(stop)));
      assert.equal(finishReason, "stop");
    },
  };
}

export function casesOfEmbeddings(model) {
  return {
    async embedding_and_its_usage() {
      const { embedding, usage } = await embed({ model, value: "a cat sleeps", maxRetries: 0 });
      assert(embedding.length > 0 && usage.tokens > 0);
    },
  };
}
