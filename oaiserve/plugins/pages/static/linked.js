// Makes links of the ids of requests in sentences.

import { element } from "./show.js";
import { pageOf } from "./sse.js";

// Returns the parts of a sentence, in which these ids of requests lead to their pages.
export function linked(sentence, ids) {
  const parts = sentence.split(/([\w.-]*[\w-])/);
  return parts.map((part) => (ids.includes(part) ? element("a", { href: pageOf(part) }, part) : part));
}
