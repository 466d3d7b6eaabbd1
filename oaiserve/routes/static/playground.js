// Streams one chat answer and shows its phases: those in the headers, the one that runs, and in the end all of them.

import { showDetail } from "./detail.js";
import { duration, element, fillBar, phaseCells } from "./show.js";
import { events, request } from "./sse.js";

const byId = (id) => document.getElementById(id);

export class Playground {
  constructor() {
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("chat-form").requestSubmit();
    });
    byId("stop").addEventListener("click", () => this.abort?.abort());
    byId("chat-detail").addEventListener("click", () => showDetail(this.requestId));
  }

  async send() {
    const answer = byId("answer");
    answer.textContent = "";
    answer.classList.remove("error");
    this.#setBusy(true);
    this.abort = new AbortController();
    this.startedMs = performance.now();
    this.known = [];
    this.firstTokenMs = this.timings = null;
    this.numChunks = 0;
    const ticking = setInterval(() => this.#showPhases(), 100);
    try {
      const response = await request("v1/chat/completions", {
        method: "POST",
        headers: { "content-type": "application/json" },
        signal: this.abort.signal,
        body: JSON.stringify({
          messages: [{ role: "user", content: byId("prompt").value }],
          max_completion_tokens: Number(byId("max-tokens").value),
          temperature: Number(byId("temperature").value),
          stream: true,
          stream_options: { include_usage: true, include_timings: true },
        }),
      });
      this.requestId = response.headers.get("x-request-id");
      this.known = serverTiming(response.headers.get("server-timing") ?? "");
      this.firstTokenMs = performance.now();
      for await (const { data } of events(response)) {
        if (data !== "[DONE]") this.#take(JSON.parse(data), answer);
      }
    } catch (error) {
      if (error.name !== "AbortError") {
        answer.textContent += error.message;
        answer.classList.add("error");
      }
    } finally {
      clearInterval(ticking);
      this.endedMs = performance.now();
      this.#setBusy(false);
      this.#showPhases();
    }
  }

  #take(chunk, answer) {
    if (chunk.error) throw new Error(chunk.error.message);
    const text = chunk.choices[0]?.delta?.content;
    if (text) {
      answer.append(text);
      this.numChunks++;
    }
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
      if (!this.isBusy) return `Stopped after ${duration(totalNs / 1e9)}.`;
      return this.firstTokenMs === null ? "Sent; no token yet." : `${this.numChunks} chunks so far.`;
    }
    const { cached_tokens: cached, time_to_first_token_ns: ttft } = this.timings;
    const tokens = this.usage ? `${this.usage.prompt_tokens} prompt tokens (${cached} cached), ${this.usage.completion_tokens} generated. ` : "";
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
