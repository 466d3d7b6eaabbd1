// Runs the chat page.

import { Chat } from "./chat.js";
import { showMain, start } from "./page.js";
import { setStatus } from "./show.js";
import { request, ROOT } from "./sse.js";

const RETRY_MS = 2000;
const chat = new Chat();

async function load() {
  try {
    const { data } = await (await request("v1/models")).json();
    showMain();
    chat.offer(data);
    setStatus("live", "Connected");
  } catch (error) {
    if (error.needsKey) return;
    setStatus("lost", "No connection; trying again");
    setTimeout(load, RETRY_MS);
  }
}

if (location.hash === "#live") location.replace(new URL("dashboard", ROOT)); // where earlier versions had it
start(load);
