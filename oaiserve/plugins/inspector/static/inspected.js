// Loads the tokens of a request when the part for them on its page is opened.

import { requestId } from "./request.js";
import { byId } from "./show.js";

byId("sent").addEventListener("toggle", async () => {
  if (!byId("sent").open) return;
  const { showTokens } = await import("./inspector.js");
  await showTokens(byId("tokens"), requestId());
});
