// Vercel's ai package with @ai-sdk/anthropic, which asks /v1/messages.

import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { Output, generateText, streamText, tool } from "ai";
import { z } from "zod";
import { tryModels } from "./ai_sdk.mjs";
import { casesOfModels, checkBatch, checkCases } from "./ai_sdk_cases.mjs";
import { API_KEY, BASE_URL, MODEL, QUESTION, UNITS, WEATHER_QUESTION, checkCapital, checkObeyed } from "./features.mjs";

const anthropic = createAnthropic({ baseURL: BASE_URL, apiKey: API_KEY });
const model = anthropic(MODEL);

const base = { model, temperature: 0, maxOutputTokens: 100, maxRetries: 0 };
const asked = { ...base, prompt: QUESTION };
const withOptions = (options) => ({ providerOptions: { anthropic: options } });
const weather = tool({
  description: "Report the weather.",
  inputSchema: z.object({ city: z.string().max(20), unit: z.enum(UNITS) }),
});
const required = { ...base, prompt: WEATHER_QUESTION, tools: { weather }, toolChoice: "required" };

const casesOfMessages = {
  async options() {
    const options = { metadata: { userId: "user" }, serviceTier: "auto", effort: "low", sendReasoning: false };
    checkCapital((await generateText({ ...asked, ...withOptions(options) })).text);
  },
  async thinking() {
    const thinking = { type: "enabled", budgetTokens: 1024 };
    assert(
      (await generateText({ ...asked, temperature: undefined, maxOutputTokens: 50, ...withOptions({ thinking }) }))
        .text,
    );
    assert(
      (await generateText({ ...asked, temperature: undefined, ...withOptions({ thinking: { type: "adaptive" } }) }))
        .text,
    );
    assert((await generateText({ ...asked, ...withOptions({ thinking: { type: "disabled" } }) })).text);
  },
  async cache_control() {
    const cached = withOptions({ cacheControl: { type: "ephemeral", ttl: "1h" } });
    const content = [{ type: "text", text: QUESTION, ...cached }];
    const messages = [{ role: "user", content, ...cached }];
    const instructions = { role: "system", content: "You are a helpful assistant who knows all capitals.", ...cached };
    const tools = { weather: tool({ ...weather, ...cached }) };
    const request = { ...base, instructions, messages, tools, toolChoice: "none" };
    await generateText(request);
    const { usage } = await generateText(request);
    assert(usage.inputTokenDetails.cacheReadTokens > 0, JSON.stringify(usage));
  },
  async one_call_at_a_time() {
    const { toolCalls } = await generateText({ ...required, ...withOptions({ disableParallelToolUse: true }) });
    assert.equal(toolCalls.length, 1);
  },
  async pings() {
    for await (const part of streamText({ ...asked, ...withOptions({ includePings: true }) }).stream) {
      if (part.type === "error") throw part.error;
    }
  },
  async forms_of_structured_outputs() {
    const output = Output.object({ schema: z.object({ name: z.string().max(20), is_capital: z.boolean() }) });
    for (const structuredOutputMode of ["outputFormat", "jsonTool"]) {
      for (const toolStreaming of [true, false]) {
        const options = withOptions({ structuredOutputMode, toolStreaming });
        assert.equal(typeof (await generateText({ ...asked, output, ...options })).output.name, "string");
        assert.equal(typeof (await streamText({ ...asked, output, ...options }).output).name, "string");
      }
    }
  },
  async calls_that_are_streamed_at_the_end() {
    const { toolCalls } = streamText({ ...required, ...withOptions({ toolStreaming: false }) });
    (await toolCalls).forEach((call) => checkObeyed(call.input));
  },
  async tools_that_anthropic_defines() {
    const { bash_20250124, memory_20250818, textEditor_20250728 } = anthropic.tools;
    const tools = {
      bash: bash_20250124({}),
      memory: memory_20250818({}),
      str_replace_based_edit_tool: textEditor_20250728({}),
    };
    const request = { ...base, prompt: "List the files.", tools };
    assert((await generateText(request)).text);
    const forced = { type: "tool", toolName: "bash" };
    const error = await generateText({ ...request, toolChoice: forced }).catch((one) => one);
    assert.equal(error.statusCode, 400);
    assert.match(error.message, /only Anthropic's models know/);
  },
  async text_document() {
    const data = new TextEncoder().encode("Paris is the capital of France.");
    const file = {
      type: "file",
      mediaType: "text/plain",
      data,
      ...withOptions({ title: "Facts", context: "Geography" }),
    };
    checkCapital(
      (await generateText({ ...base, messages: [{ role: "user", content: [file, { type: "text", text: QUESTION }] }] }))
        .text,
    );
  },
  async thinking_in_the_history() {
    const content = [
      { type: "reasoning", text: "An easy one.", ...withOptions({ signature: "signature" }) },
      { type: "reasoning", text: "", ...withOptions({ redactedData: "data" }) },
      { type: "text", text: "Paris." },
    ];
    const messages = [
      { role: "user", content: QUESTION },
      { role: "assistant", content },
      { role: "user", content: "And of Italy?" },
    ];
    assert((await generateText({ ...base, messages })).text);
  },
  async system_messages_between_others() {
    const messages = [
      { role: "user", content: "Hello." },
      { role: "assistant", content: "Hello!" },
      { role: "system", content: "", ...withOptions({ effort: "high" }) },
      { role: "user", content: QUESTION },
      { role: "system", content: "Answer with one sentence.", ...withOptions({ clearAt: "next_user_message" }) },
    ];
    checkCapital((await generateText({ ...base, allowSystemInMessages: true, messages })).text);
  },
  async tools_that_change() {
    const time = tool({
      description: "Report the time.",
      inputSchema: z.object({}),
      ...withOptions({ deferLoading: true }),
    });
    const toolChanges = [
      { type: "tool_addition", toolName: "time" },
      { type: "tool_removal", toolName: "weather" },
    ];
    const messages = [
      { role: "user", content: QUESTION },
      { role: "system", content: "", ...withOptions({ toolChanges }) },
    ];
    const { content } = await generateText({
      ...base,
      allowSystemInMessages: true,
      messages,
      tools: { weather, time },
    });
    assert(content.length > 0);
  },
  async a_batch() {
    await checkBatch(anthropic);
  },
  async edits_of_the_context() {
    const contextManagement = {
      edits: [{ type: "clear_tool_uses_20250919", trigger: { type: "input_tokens", value: 5000 } }],
    };
    checkCapital((await generateText({ ...asked, ...withOptions({ contextManagement }) })).text);
  },
};

async function documented() {
  const { json, ...cases } = casesOfModels(anthropic, MODEL, ["topP", "presencePenalty", "frequencyPenalty", "seed"]);
  await checkCases({ ...cases, ...casesOfMessages }); // The provider asks for JSON of no schema in words only.
}

await tryModels(model, undefined, false, documented);
