// What the JavaScript scripts share: the servers' addresses, and the JSON lines in which they report.
//
// A script is started with what those in Python are started with, which features.py names.
// Its examples are functions that are named after the features that they try; an example fails by throwing.

import assert from "node:assert/strict";

export const [BASE_URL, MODEL, EMBEDDINGS_URL, EMBEDDER, , SPEECH_URL, SOUND] = process.argv.slice(2);
export const TRANSCRIBER = "whisper-1";
export const API_KEY = "none";
export const QUESTION = "What is the capital of France?";
export const WEATHER_QUESTION = "What is the weather in Paris, in celsius?";
export const UNITS = ["celsius", "fahrenheit"];
export const TEXTS = ["a cat sleeps", "a dog barks", "a cat sleeps"];
const MOST_CHARACTERS = 400; // of an error
const SKIPPED = (process.env.SKIPPED_EXAMPLES ?? "").split(" ");

export async function run(...all) {
  const examples = all.filter((example) => !SKIPPED.includes(example.name));
  const write = (line) => process.stdout.write(JSON.stringify(line) + "\n");
  console.log = console.info = console.debug = console.error; // what the client prints goes to stderr
  write({ features: examples.map((example) => example.name) });
  for (const example of examples) {
    const line = { feature: example.name };
    try {
      await example();
    } catch (error) {
      line.error = `${error.name}: ${error.message}`.replace(/\s+/g, " ").slice(0, MOST_CHARACTERS);
    }
    write(line);
  }
}

export function checkCapital(text) {
  assert(text?.includes("Paris"), `the answer is '${text}'`);
}

// The parts of a streamed answer: there are several, and the text is that of the whole answer.
export function checkStreamed(parts, whole) {
  assert(parts.filter(Boolean).length > 1, `the text came in one part: '${parts}'`);
  assert.equal(parts.join(""), whole);
  checkCapital(whole);
}

// The vectors of TEXTS: they are those that the server gives to who asks for plain numbers.
export async function checkVectors(vectors) {
  const body = JSON.stringify({ model: EMBEDDER, input: TEXTS, encoding_format: "float" });
  const headers = { "content-type": "application/json" };
  const { data } = await (await fetch(`${EMBEDDINGS_URL}/embeddings`, { method: "POST", headers, body })).json();
  assert.deepEqual(vectors.map((vector) => vector.length), data.map((item) => item.embedding.length));
  const far = data.some(({ embedding }, i) => embedding.some((value, j) => !(Math.abs(value - vectors[i][j]) < 1e-6)));
  assert(!far, "the vectors differ");
}

export function checkObeyed({ city, unit }) {
  assert(typeof city === "string" && UNITS.includes(unit), `it was called with '${city}', '${unit}'`);
}
