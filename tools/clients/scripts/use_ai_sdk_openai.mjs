// Vercel's ai package with @ai-sdk/openai over responses, which it asks by default, and over chat and completions.

import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { Output, generateText, isStepCount, streamText, tool, uploadFile } from "ai";
import { z } from "zod";
import { tryModels } from "./ai_sdk.mjs";
import { casesOfCompletions, casesOfEmbeddings, casesOfModels, checkBatch, checkCases } from "./ai_sdk_cases.mjs";
import {
  API_KEY,
  BASE_URL,
  EMBEDDER,
  EMBEDDINGS_URL,
  MODEL,
  QUESTION,
  UNITS,
  WEATHER_QUESTION,
  checkCapital,
  checkObeyed,
} from "./features.mjs";

const openai = createOpenAI({ baseURL: BASE_URL, apiKey: API_KEY });
const model = openai(MODEL);
const embeddings = createOpenAI({ baseURL: EMBEDDINGS_URL, apiKey: API_KEY });
const embedder = embeddings.embeddingModel(EMBEDDER);

const base = { maxRetries: 0, temperature: 0, maxOutputTokens: 100 };
const chat = { ...base, model: openai.chat(MODEL), prompt: QUESTION };
const asked = { ...base, model, prompt: QUESTION };
const withOptions = (options) => ({ providerOptions: { openai: options } });
const weather = tool({
  description: "Report the weather.",
  inputSchema: z.object({ city: z.string().max(20), unit: z.enum(UNITS) }),
});
const time = tool({ description: "Report the time.", inputSchema: z.object({}) });
const parameters = { type: "object", properties: {}, additionalProperties: false };

const casesOfChat = {
  async logprobs() {
    for (const logprobs of [true, 3]) {
      const whole = await generateText({ ...chat, ...withOptions({ logprobs }) });
      const streamed = streamText({ ...chat, ...withOptions({ logprobs }) });
      await streamed.consumeStream();
      const ofStream = (await streamed.providerMetadata).openai.logprobs;
      assert.equal(whole.providerMetadata.openai.logprobs.length, ofStream.length);
      assert.equal(ofStream.map(({ token }) => token).join(""), whole.text);
    }
  },
  async options() {
    const options = {
      logitBias: { 5: -100 },
      user: "user",
      store: false,
      metadata: { key: "value" },
      serviceTier: "auto",
      textVerbosity: "low",
      promptCacheKey: "key",
      promptCacheOptions: { mode: "implicit", ttl: "30m" },
      safetyIdentifier: "user",
      maxCompletionTokens: 100,
      prediction: { type: "content", content: "The capital of France is Paris." },
    };
    checkCapital((await generateText({ ...chat, ...withOptions(options) })).text);
    assert((await generateText({ ...chat, ...withOptions({ promptCacheRetention: "24h" }) })).text);
  },
  async settings_of_a_reasoning_model() {
    const options = { forceReasoning: true, reasoningEffort: "low" };
    const { text, usage } = await generateText({
      ...chat,
      temperature: undefined,
      instructions: "Be brief.",
      ...withOptions(options),
    });
    assert(text);
    assert(usage.outputTokenDetails.reasoningTokens >= 0);
  },
  async one_call_at_a_time() {
    const request = { ...chat, prompt: WEATHER_QUESTION, tools: { weather }, toolChoice: "required" };
    const { toolCalls } = await generateText({ ...request, ...withOptions({ parallelToolCalls: false }) });
    assert.equal(toolCalls.length, 1);
  },
  async schema_that_is_not_strict() {
    const output = Output.object({ schema: z.object({ name: z.string().max(20), size: z.number().int().optional() }) });
    assert.equal(
      typeof (await generateText({ ...chat, output, ...withOptions({ strictJsonSchema: false }) })).output.name,
      "string",
    );
  },
  async names_of_participants() {
    const message = (name, content) => ({ role: "user", content, ...withOptions({ name }) });
    const messages = [message("alice", "I like blue."), message("bob", "I like green. What do we like?")];
    assert((await generateText({ ...base, model: chat.model, messages })).text);
  },
};

const casesOfResponses = {
  async logprobs() {
    const whole = await generateText({ ...asked, ...withOptions({ logprobs: 3 }) });
    const streamed = streamText({ ...asked, ...withOptions({ logprobs: 3 }) });
    await streamed.consumeStream();
    for (const metadata of [whole.providerMetadata, await streamed.providerMetadata]) {
      assert.equal(
        metadata.openai.logprobs
          .flat()
          .map(({ token }) => token)
          .join(""),
        whole.text,
      );
    }
  },
  async options() {
    const options = {
      store: false,
      metadata: { key: "value" },
      user: "user",
      serviceTier: "auto",
      textVerbosity: "low",
      truncation: "auto",
      promptCacheKey: "key",
      promptCacheOptions: { mode: "implicit", ttl: "30m" },
      safetyIdentifier: "user",
      maxToolCalls: 3,
      instructions: "Answer with a sentence.",
      include: ["message.output_text.logprobs"],
      systemMessageMode: "developer",
      textFormat: { type: "text" },
    };
    checkCapital((await generateText({ ...asked, ...withOptions(options) })).text);
  },
  async settings_of_a_reasoning_model() {
    const options = {
      forceReasoning: true,
      reasoningEffort: "low",
      reasoningSummary: "auto",
      include: ["reasoning.encrypted_content"],
    };
    const { text } = await generateText({
      ...asked,
      temperature: undefined,
      instructions: "Be brief.",
      ...withOptions(options),
    });
    assert(text);
  },
  async a_conversation() {
    const request = (path, body) =>
      fetch(`${BASE_URL}/${path}`, {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: JSON.stringify(body),
      });
    const { id: conversation } = await (await request("conversations", {})).json();
    const first = await generateText({ ...asked, ...withOptions({ conversation }) });
    const second = await generateText({ ...asked, prompt: "And of Italy?", ...withOptions({ conversation }) });
    assert(second.usage.inputTokens > first.usage.totalTokens);
  },
  async result_of_a_call_after_the_response_before() {
    const request = { ...base, model, tools: { weather } };
    const first = await generateText({ ...request, prompt: WEATHER_QUESTION, toolChoice: "required" });
    const { responseId: previousResponseId } = first.providerMetadata.openai;
    const results = first.toolCalls.map(({ toolCallId, toolName }) => ({
      type: "tool-result",
      toolCallId,
      toolName,
      output: { type: "text", value: "18 degrees" },
    }));
    const messages = [{ role: "tool", content: results }];
    const second = await generateText({
      ...request,
      messages,
      toolChoice: "none",
      ...withOptions({ previousResponseId }),
    });
    assert(second.text);
  },
  async cache_diagnostics() {
    const { providerMetadata } = await generateText(asked);
    const promptCacheOptions = { comparisonResponseId: providerMetadata.openai.responseId };
    const second = await generateText({ ...asked, ...withOptions({ promptCacheOptions }) });
    assert.equal(second.providerMetadata.openai.promptCacheDiagnostics.type, "cache_hit");
  },
  async allowed_tools() {
    const request = { ...asked, prompt: WEATHER_QUESTION, tools: { weather, time } };
    const allowedTools = { toolNames: ["time"], mode: "required" };
    const { toolCalls } = await generateText({
      ...request,
      ...withOptions({ allowedTools, parallelToolCalls: false }),
    });
    assert.deepEqual(
      toolCalls.map(({ toolName }) => toolName),
      ["time"],
    );
  },
  async custom_tool() {
    const inputs = [];
    const format = { type: "grammar", syntax: "regex", definition: "SELECT [a-z]{1,8}" };
    const execute = async (input) => (inputs.push(input), "7");
    const tools = { write_sql: openai.tools.customTool({ description: "Query the table.", format, execute }) };
    const request = { ...asked, prompt: "How many rows are there?", tools };
    const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" });
    const { text } = await generateText({ ...request, prepareStep, stopWhen: isStepCount(2) });
    const parts = [];
    for await (const part of streamText({ ...request, toolChoice: "required" }).stream) parts.push(part);
    assert(parts.some(({ type }) => type === "tool-input-delta"));
    assert(text && inputs.length >= 2);
    inputs.forEach((input) => assert.match(input, /^SELECT [a-z]{1,8}$/));
  },
  async tools_that_are_added_later() {
    const hidden = tool({ ...time, ...withOptions({ omitFromRequestTools: true }) });
    const additionalTools = [{ type: "function", name: "time", description: "Report the time.", parameters }];
    const messages = [
      { role: "user", content: WEATHER_QUESTION },
      {
        role: "assistant",
        content: [
          { type: "tool-call", toolCallId: "call_1", toolName: "weather", input: { city: "Paris", unit: "celsius" } },
        ],
      },
      {
        role: "tool",
        content: [
          {
            type: "tool-result",
            toolCallId: "call_1",
            toolName: "weather",
            output: { type: "text", value: "18 degrees" },
            ...withOptions({ additionalTools }),
          },
        ],
      },
    ];
    const request = { ...base, model, tools: { weather, time: hidden } };
    const added = await generateText({ ...request, messages });
    messages[2].content[0].providerOptions = {};
    assert(added.usage.inputTokens > (await generateText({ ...request, messages })).usage.inputTokens);
  },
  async asynchronous_tool() {
    const background = tool({ ...weather, ...withOptions({ async: true }) });
    const { toolCalls } = await generateText({
      ...asked,
      prompt: WEATHER_QUESTION,
      tools: { weather: background },
      toolChoice: "required",
    });
    toolCalls.forEach((call) => checkObeyed(call.input));
  },
  async tool_of_the_shell() {
    const tools = {
      local_shell: openai.tools.localShell({}),
      shell: openai.tools.shell({}),
      apply_patch: openai.tools.applyPatch({}),
    };
    assert((await generateText({ ...asked, tools })).text);
  },
  async hosted_tools_are_refused() {
    const tools = { web_search: openai.tools.webSearch({}) };
    const error = await generateText({ ...asked, tools, toolChoice: { type: "tool", toolName: "web_search" } }).catch(
      (one) => one,
    );
    assert.equal(error.statusCode, 400, error.message);
    assert.match(error.message, /OpenAI's servers/);
  },
  async compaction() {
    const options = { store: false, contextManagement: [{ type: "compaction", compactThreshold: 2000 }] };
    checkCapital((await generateText({ ...asked, ...withOptions(options) })).text);
    const { content } = await generateText({ ...asked, ...withOptions({ store: false, compactionTrigger: true }) });
    assert(
      content.some(({ kind }) => kind === "openai.compaction"),
      JSON.stringify(content),
    );
  },
  async a_batch() {
    await checkBatch(openai);
  },
  async an_uploaded_text() {
    const data = new TextEncoder().encode("The capital of France is Paris.");
    const { providerReference } = await uploadFile({
      api: openai.files(),
      data,
      filename: "facts.txt",
      mediaType: "text/plain",
    });
    const file = { type: "file", mediaType: "text/plain", data: { type: "reference", reference: providerReference } };
    const messages = [{ role: "user", content: [file, { type: "text", text: QUESTION }] }];
    checkCapital(
      (await generateText({ ...base, model, messages, ...withOptions({ passThroughUnsupportedFiles: true }) })).text,
    );
  },
};

async function documented() {
  const notSent = ["topK", "presencePenalty", "frequencyPenalty", "seed", "stopSequences"]; // over responses
  const named = (name, cases) =>
    Object.fromEntries(Object.entries(cases).map(([key, check]) => [`${name}: ${key}`, check]));
  await checkCases({
    ...named("responses", casesOfModels(openai, MODEL, notSent)),
    ...named("responses", casesOfResponses),
    ...named("chat", casesOfModels(openai.chat, MODEL, ["topK"])),
    ...named("chat", casesOfChat),
    ...named("completions", casesOfCompletions(openai.completion(MODEL))),
    ...named("embeddings", casesOfEmbeddings(embedder)),
  });
}

await tryModels(model, embedder, true, documented);
