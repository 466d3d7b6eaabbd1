// Sends a chat request and gathers its answer in a step: what the model said, when its tokens came and how sure it was,
// and where the time went.

import { partsOf } from "./show.js";
import { events, request, requestJson } from "./sse.js";

const TOGETHER_MS = 0.3; // events that lie in one read came together
const TRIES = 20; // for the account, which is there shortly after the end
const PAUSE_MS = 150;

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

// Fills the step as the answer comes. What fails is in the step, too.
export async function ask(step, body, signal) {
  try {
    const response = await request("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
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
    else step.error = { message: error.message, param: error.param };
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
  if (chunk.timings) step.phases = Object.entries(chunk.timings.phases_ns);
  if (chunk.prompt_progress) step.progress = { ...chunk.prompt_progress, atMs: performance.now() };
  const choice = chunk.choices?.[0];
  if (!choice) return;
  if (choice.finish_reason) step.finish = choice.finish_reason;
  const { content, reasoning, tool_calls: calls = [] } = choice.delta;
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
  const tokens = choice.logprobs?.content ?? (text ? [{ token: text, logprob: null }] : []);
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

// Returns the phases of a step, and while it is open the one that runs.
export function phasesOf(step) {
  const known = step.phases.reduce((sum, [, ns]) => sum + ns, 0);
  if (!step.isOpen) return known ? step.phases : [["open", (step.tookMs ?? 0) * 1e6]];
  const open = Math.max(0, (performance.now() - step.sentMs) * 1e6 - known);
  const name = step.eventsMs.length ? "decode" : step.progress ? "prefill" : "open";
  return [...step.phases, [name, open]];
}
