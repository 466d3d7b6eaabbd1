// Vercel's ai package with @ai-sdk/openai over responses, which it asks by default.

import { createOpenAI } from "@ai-sdk/openai";
import { tryModels } from "./ai_sdk.mjs";
import { API_KEY, BASE_URL, EMBEDDER, EMBEDDINGS_URL, MODEL } from "./features.mjs";

const openai = createOpenAI({ baseURL: BASE_URL, apiKey: API_KEY });
const model = openai(MODEL);
const embeddings = createOpenAI({ baseURL: EMBEDDINGS_URL, apiKey: API_KEY });
const embedder = embeddings.embeddingModel(EMBEDDER);

await tryModels(model, embedder, true);
