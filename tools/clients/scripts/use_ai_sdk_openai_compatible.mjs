// Vercel's ai package with @ai-sdk/openai-compatible.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { tryModels } from "./ai_sdk.mjs";
import { casesOfCompletions, casesOfEmbeddings, casesOfModels, checkCases } from "./ai_sdk_cases.mjs";
import { API_KEY, BASE_URL, EMBEDDER, EMBEDDINGS_URL, MODEL } from "./features.mjs";

const local = createOpenAICompatible({
  name: "local", baseURL: BASE_URL, apiKey: API_KEY,
  supportsStructuredOutputs: true, includeUsage: true,
});
const model = local(MODEL);
const embeddings = createOpenAICompatible({ name: "embeddings", baseURL: EMBEDDINGS_URL, apiKey: API_KEY });
const embedder = embeddings.embeddingModel(EMBEDDER);

async function documented() {
  await checkCases({
    ...casesOfModels(local, MODEL, ["topK"]),
    ...casesOfCompletions(local.completionModel(MODEL)),
    ...casesOfEmbeddings(embedder),
  });
}

await tryModels(model, embedder, false, documented);
