// Shows what clients got, waited for, and made others wait for, and how to give the others more.

import { bytes } from "./costs.js";
import { keepLoading } from "./page.js";
import { showRows } from "./rows.js";
import { byId, choice, count, duration, element, number, percent } from "./show.js";
import { requestJson, requestsOf } from "./sse.js";

const EVERY_MS = 2000;
const WINDOWS = [[60, "1 min"], [300, "5 min"], [900, "15 min"], [3600, "1 h"]]; // in seconds
const OTHERS = "other"; // the clients without rows of their own
const LESS = 0.25; // the share that is proposed: a quarter of what others get
let seconds = 300;

const fetchNow = () => requestJson(`debug/clients?seconds=${seconds}`);

function show({ clients }) {
  byId("clients").hidden = clients.length === 0;
  byId("no-clients").hidden = clients.length > 0;
  byId("no-clients").textContent = "No request ended in this time.";
  const hasCosts = clients.some(({ machine_ns: ns }) => ns !== null); // Foreign engines have none.
  const engineNs = clients.reduce((sum, { machine_ns: ns }) => sum + ns, 0);
  for (const head of document.querySelectorAll("#clients .cost")) head.hidden = !hasCosts;
  showRows(byId("client-rows"), clients.map((client) => Object.assign(row(client, hasCosts, engineNs), { key: client.client })));
  advise(clients.find(({ delayed_ns: ns, client }) => ns > 0 && client !== OTHERS), hasCosts);
  return EVERY_MS;
}

function row(client, hasCosts, engineNs) {
  const { client: name, machine_ns: machineNs, prompt_tokens: prompt, cached_tokens: cached } = client;
  const costs = [
    ["Engine time", `${duration(machineNs / 1e9)}, ${percent(machineNs / Math.max(1, engineNs))}`],
    ["KV cache", `${bytes(client.kv_byte_seconds)}·s`],
  ];
  const cells = [
    ["Made others wait", duration(client.delayed_ns / 1e9), client.delayed_ns ? "number harm" : "number"],
    ["Waited for others", duration(client.waited_ns / 1e9)],
    ...(hasCosts ? costs : []),
    ["Prompts", `${number(prompt)}, ${number(cached)} cached`],
    ["Answers", number(client.completion_tokens)],
    ["Requests", client.rejected ? `${count(client.requests)}, ${count(client.rejected)} rejected` : count(client.requests)],
  ];
  const text = name || "without a key";
  const link = name === OTHERS ? text : element("a", { href: requestsOf(name) }, text);
  return element("tr", {}, element("th", { scope: "row" }, link), ...cells.map(([label, value, kind]) => element("td", { "data-label": label, class: kind ?? "number" }, value)));
}

// Says which commands give the other clients more, when one has made them wait. Shares divide the time of an engine whose
// costs are known.
function advise(client, hasCosts) {
  byId("advice").hidden = true;
  if (!client) return;
  const { client: name, delayed_ns: ns, requests } = client;
  const perMinute = Math.ceil((requests * 60) / seconds / 2); // 0 where none has ended, which would take the limit away
  byId("advice-text").textContent = `${name || "Clients without a key"} made others wait ${duration(ns / 1e9)} in all.`;
  const limit = `oaiserve keys limit ${name}`;
  const fewer = perMinute ? [[`${limit} --requests-per-minute ${perMinute}`, "half of what it sent per minute in this time"]] : [];
  const share = hasCosts ? [[`${limit} --share ${LESS}`, "it gets a quarter of what another client gets that wants as much"]] : [];
  const commands = name
    ? [...share, ...fewer]
    : [["oaiserve keys add NAME", "gives a client a key, by which it can be told from others and limited"]];
  const rows = commands.map(([command, effect]) => element("li", {}, element("code", {}, command), element("span", { class: "note" }, effect)));
  showRows(byId("commands"), rows.map((row, place) => Object.assign(row, { key: commands[place][0] })));
  byId("advice").hidden = commands.length === 0;
}

const load = keepLoading(fetchNow, show);
byId("windows").replaceWith(
  choice("Time", WINDOWS, seconds, (value) => {
    seconds = Number(value);
    load();
  }),
);
