// Sends a chat request and gathers its answer in a step: what the model said, when its tokens came and how sure it was,
// and where the time went.

import { partsOf } from "./shades.js";
import { events, request, requestJson } from "./sse.js";

const TOGETHER_MS = 0.3; // events that lie in one read came together
const TRIES = 20; // for the account, which is there shortly after the end
const PAUSE_MS = 150;
export const COMPLETION_TOKENS = 128; // of a continued text, unless the settings say otherwise

export function newStep(isJson) {
  return {
    message: { content: "", reasoning: "", calls: [] },
    isJson,
    tokens: [], // [text, number of its event, log-probability]
    eventsMs: [], // when each event came, since the request was sent
    phases: [], // [name, nanoseconds, and where its causes are known, what it took alone, and that with its neighbours]
    why: [], // sentences
    isOpen: true,
    sentMs: performance.now(),
  };
}

// Returns whether an answer that was cut off can go on after its text. Reasoning and calls can't.
export function canGoOn({ message: { content, calls } }) {
  return content.trim() !== "" && !calls.length;
}

// Returns a step that was cut off as one that goes on. Its times are as if it hadn't been.
export function reopened(step) {
  for (const name of ["isCut", "isLeft", "isStopped", "isElsewhere", "error", "finish", "usage", "hasAccount"]) delete step[name];
  return Object.assign(step, { isOpen: true, isContinued: true, phases: [], why: [], sentMs: performance.now() - (step.eventsMs.at(-1) ?? 0) });
}

// Returns a chat request's body as that of a request to continue a text, for a model without a chat template.
export function completing({ max_completion_tokens: most = COMPLETION_TOKENS, response_format: _form, tools: _tools, tool_choice: _choice, reasoning_effort: _effort, ...body }, prompt) {
  return { ...body, prompt, max_tokens: most };
}

// Fills the step as the answer comes. What fails is in the step, too.
export async function ask(step, body, signal) {
  try {
    const response = await request("prompt" in body ? "v1/completions" : "v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json", "x-include-reuse": "true" },
      signal,
      body: JSON.stringify(body),
    });
    step.requestId = response.headers.get("x-request-id");
    step.phases = serverTiming(response.headers.get("server-timing") ?? "");
    const decoder = new TextDecoder();
    const hear = (comment) => (step.isMoving ||= comment.startsWith("the answer is about to go on"));
    for await (const { data } of events(response, hear)) {
      step.isMoving = false;
      if (data !== "[DONE]") take(step, JSON.parse(data), decoder);
    }
  } catch (error) {
    if (error.name === "AbortError") step.isStopped = true;
    else step.error = { message: error.message, param: error.param, code: error.code };
  }
  step.isOpen = false;
  step.isMoving = false;
  step.tookMs = performance.now() - step.sentMs;
  if (step.message.reasoning) step.thoughtMs ??= step.tookMs - step.reasonedMs;
  delete step.progress;
  if (step.requestId) await explain(step, body.model);
}

function take(step, chunk, decoder) {
  if (chunk.error) step.error = chunk.error;
  if (chunk.usage) step.usage = chunk.usage;
  if (chunk.timings?.phases_ns) step.phases = Object.entries(chunk.timings.phases_ns);
  if (chunk.prompt_progress) step.progress = { ...chunk.prompt_progress, atMs: performance.now() };
  const choice = chunk.choices?.[0];
  if (!choice) return;
  if (choice.finish_reason) step.finish = choice.finish_reason;
  const { content, reasoning_content: other, reasoning = other, tool_calls: calls = [] } = choice.delta ?? { content: choice.text };
  const { message } = step;
  const nowMs = performance.now() - step.sentMs;
  if (reasoning) step.reasonedMs ??= nowMs;
  if (message.reasoning && (content || calls.length)) step.thoughtMs ??= nowMs - step.reasonedMs;
  message.content += content ?? "";
  message.reasoning += reasoning ?? "";
  let text = `${reasoning ?? ""}${content ?? ""}`;
  for (const { index, id, function: called } of calls) {
    const call = (message.calls[index] ??= { id, name: "", arguments: "" });
    call.name += called?.name ?? "";
    call.arguments += called?.arguments ?? "";
    text += `${called?.name ?? ""}${called?.arguments ?? ""}`;
  }
  const { content: parts, tokens: texts, token_logprobs: logprobs } = choice.logprobs ?? {};
  const tokens = parts ?? texts?.map((token, place) => ({ token, logprob: logprobs[place] })) ?? (text ? [{ token: text, logprob: null }] : []);
  if (!tokens.length) return;
  if (!(nowMs - step.eventsMs.at(-1) < TOGETHER_MS)) step.eventsMs.push(nowMs);
  for (const { token, bytes, logprob } of tokens) {
    const text = bytes ? decoder.decode(Uint8Array.from(bytes), { stream: true }) : token; // one may end in a character
    step.tokens.push([text, step.eventsMs.length - 1, logprob]);
  }
}

// Waits for the account of a request that has ended, which says why it took so long. Not every server shows it, nor to
// every key; then the phases are those that came with the answer.
async function explain(step, model) {
  const id = encodeURIComponent(step.requestId);
  try {
    for (let left = TRIES; left; left--) {
      const { requests } = await requestJson(`debug/requests?id=${id}&limit=1&model=${encodeURIComponent(model)}`);
      if (requests.length) break;
      await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
    }
    const entry = await requestJson(`debug/requests/${id}`);
    step.why = entry.explanation;
    step.whyRequests = entry.explanation_requests;
    step.phases = entry.phases.map((phase) => [phase.name, phase.duration_ns, ...partsOf(phase.causes_ns)]);
    step.hasAccount = true;
  } catch (error) {
    console.info(`No account of ${step.requestId}: ${error.message}`);
  }
}

// Parses the header into pairs of a phase and nanoseconds.
function serverTiming(header) {
  return header
    .split(",")
    .map((part) => part.trim().match(/^(\w+);dur=([\d.]+)/))
    .filter((match) => match !== null)
    .map(([, name, ms]) => [name, Number(ms) * 1e6]);
}

// Returns the phases of a step, and while it is open the one that runs. Where the connection was lost, nothing says how
// long the decode took; then it is the rest of the time that the page knows.
export function phasesOf(step) {
  const known = step.phases.reduce((sum, [, ns]) => sum + ns, 0);
  const isLost = !step.isOpen && !step.hasAccount && step.eventsMs.length && (step.error || step.isStopped || step.isCut);
  if (!step.isOpen && !isLost) return known ? step.phases : [["open", (step.tookMs ?? 0) * 1e6]];
  const untilMs = step.isOpen ? performance.now() - step.sentMs : (step.tookMs ?? step.eventsMs.at(-1));
  const rest = Math.max(0, untilMs * 1e6 - known);
  const name = step.eventsMs.length ? "decode" : step.progress ? "prefill" : "open";
  return [...step.phases, [name, rest]];
}
