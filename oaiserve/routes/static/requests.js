// Lists the last requests.

import { showMain, start } from "./page.js";
import { byId, element, setStatus, showProblem } from "./show.js";
import { request } from "./sse.js";

async function load() {
  try {
    const { requests } = await (await request("debug/requests")).json();
    showMain();
    showProblem("");
    setStatus("live", "Connected");
    byId("no-requests").hidden = requests.length > 0;
    byId("requests").replaceChildren(
      ...requests.map(({ request_id: id }) => element("li", {}, element("a", { href: `requests/${encodeURIComponent(id)}` }, id))),
    );
  } catch (error) {
    if (!error.needsKey) showProblem(error.message);
  }
}

start(load);
