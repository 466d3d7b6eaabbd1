// The prompts that an empty chat suggests. The demo model answers each sensibly: `python -m tools.demo_answers` shows how.

import { element } from "./show.js";

const NUM_SHOWN = 4;

export const EXAMPLES = [
  "What is the capital of France?",
  "Why is the sky blue? Answer in three sentences.",
  "Give me three tips for a good night's sleep.",
  "What do bees do for plants?",
  "Why is exercise good for the heart?",
  "What are the benefits of walking every day?",
  "What is photosynthesis?",
  "Describe a sunset in two sentences.",
  "Describe a forest in the morning.",
  "Write the opening sentence of a mystery novel.",
  "Suggest a title for a book about the sea.",
  "Write a slogan for a bakery.",
  "What does HTML stand for?",
  "Write a Python function that checks whether a number is even.",
  "What is democracy?",
  "Write a short poem about the sea.",
  "Write a haiku about rain.",
  "What is the difference between weather and climate?",
  "What is machine learning?",
  "What is a black hole?",
];

const BEGINNINGS = [
  "The capital of France is",
  "Once upon a time, in a house by the sea,",
  "To bake bread, you need the following:\n\n1.",
  "def is_even(number):\n",
];

// Returns buttons of some examples, others in each new chat: of texts to continue, if the models only `complete` these.
// `send(text)` is called when one is pressed.
export function exampleButtons(complete, send) {
  const left = complete ? [...BEGINNINGS] : [...EXAMPLES];
  return Array.from({ length: NUM_SHOWN }, () => {
    const [text] = left.splice(Math.floor(Math.random() * left.length), 1);
    const button = element("button", { type: "button" }, text);
    button.addEventListener("click", () => send(text));
    return button;
  });
}
