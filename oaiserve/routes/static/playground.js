// Streams one chat answer and shows its phases: those in the headers, the one that runs, and in the end all of them.

import { Answer } from "./answer.js";
import { showDetail } from "./detail.js";
import { Question } from "./question.js";
import { byId, duration, fillBar, phaseCells } from "./show.js";
import { events, request } from "./sse.js";

export class Playground {
  #question = new Question();

  constructor() {
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (!this.isBusy) this.send(); // a key may submit the form while its button is disabled
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("chat-form").requestSubmit();
    });
    byId("stop").addEventListener("click", () => this.abort?.abort());
    byId("chat-detail").addEventListener("click", () => showDetail(this.requestId));
  }

  async send() {
    const body = this.#question.body();
    if (body === null) return;
    const answer = new Answer(byId("answer"), "response_format" in body);
    this.#setBusy(true);
    this.abort = new AbortController();
    this.startedMs = performance.now();
    this.known = [];
    this.requestId = this.firstTokenMs = this.timings = this.usage = this.finishReason = null;
    this.numChunks = 0;
    const ticking = setInterval(() => this.#showPhases(), 100);
    try {
      const response = await request("v1/chat/completions", {
        method: "POST",
        headers: { "content-type": "application/json" },
        signal: this.abort.signal,
        body: JSON.stringify(body),
      });
      this.requestId = response.headers.get("x-request-id");
      this.known = serverTiming(response.headers.get("server-timing") ?? "");
      this.firstTokenMs = performance.now();
      for await (const { data } of events(response)) {
        if (data !== "[DONE]") this.#take(JSON.parse(data), answer);
      }
    } catch (error) {
      if (error.name !== "AbortError") answer.fail(error);
    } finally {
      clearInterval(ticking);
      answer.finish(this.finishReason);
      this.endedMs = performance.now();
      this.#setBusy(false);
      this.#showPhases();
    }
  }

  #take(chunk, answer) {
    if (chunk.error) return answer.fail(chunk.error);
    const choice = chunk.choices[0];
    if (choice && answer.take(choice.delta)) this.numChunks++;
    if (choice?.finish_reason) this.finishReason = choice.finish_reason;
    if (chunk.timings) this.timings = chunk.timings;
    if (chunk.usage) this.usage = chunk.usage;
  }

  #showPhases() {
    const nowMs = this.isBusy ? performance.now() : this.endedMs;
    const phases = this.timings ? Object.entries(this.timings.phases_ns) : [...this.known];
    if (this.isBusy || !this.timings) {
      const since = this.firstTokenMs ?? this.startedMs;
      phases.push([this.firstTokenMs === null ? "open" : "decode", (nowMs - since) * 1e6]);
    }
    const total = phases.reduce((sum, [, ns]) => sum + ns, 0);
    fillBar(byId("chat-bar"), phases, total);
    byId("chat-phases").hidden = false;
    byId("chat-phases").tBodies[0].replaceChildren(
      ...phases.map(([name, ns]) => (name === "open" ? phaseCells("open", ns) : phaseCells(name, ns))),
    );
    byId("chat-summary").textContent = this.#summary(total);
    byId("chat-detail").hidden = this.isBusy || !this.requestId;
  }

  #summary(totalNs) {
    if (!this.timings) {
      if (!this.isBusy) return `Ended after ${duration(totalNs / 1e9)}.`;
      return this.firstTokenMs === null ? "Sent; no token yet." : `${this.numChunks} chunks so far.`;
    }
    const { cached_tokens: cached, time_to_first_token_ns: ttft } = this.timings;
    const thought = this.usage?.completion_tokens_details?.reasoning_tokens;
    const generated = `${this.usage?.completion_tokens} generated${thought ? `, ${thought} of them reasoning` : ""}`;
    const tokens = this.usage ? `${this.usage.prompt_tokens} prompt tokens (${cached} cached), ${generated}. ` : "";
    return `${tokens}First token after ${duration(ttft / 1e9)}, the whole answer after ${duration(totalNs / 1e9)}, measured by the server.`;
  }

  #setBusy(isBusy) {
    this.isBusy = isBusy;
    byId("send").disabled = isBusy;
    byId("stop").disabled = !isBusy;
    byId("answer").setAttribute("aria-busy", String(isBusy));
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
