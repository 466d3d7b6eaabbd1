// Shows the account of the request that the address names.

import { account } from "./detail.js";
import { showMain, start } from "./page.js";
import { byId, setStatus, showProblem } from "./show.js";
import { request } from "./sse.js";

const id = location.pathname.split("/").at(-1); // encoded, as it is needed again

async function load() {
  byId("detail-title").textContent = decodeURIComponent(id);
  try {
    const response = await request(`debug/requests/${id}`, { headers: { accept: "application/json" } });
    showMain();
    showProblem("");
    setStatus("live", "Connected");
    byId("detail-body").replaceChildren(...account(await response.json()));
  } catch (error) {
    if (!error.needsKey) showProblem(error.message);
  }
}

start(load);
