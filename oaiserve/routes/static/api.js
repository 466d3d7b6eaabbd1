// Runs the page about the API.

import { showMain, start } from "./page.js";
import { setStatus } from "./show.js";

start(() => {
  showMain();
  setStatus("live", "Connected");
});
