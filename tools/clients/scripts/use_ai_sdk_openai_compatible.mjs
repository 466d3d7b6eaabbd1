// Vercel's ai package with @ai-sdk/openai-compatible.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { tryModel } from "./ai_sdk.mjs";
import { API_KEY, BASE_URL, MODEL } from "./features.mjs";

const local = createOpenAICompatible({
  name: "local", baseURL: BASE_URL, apiKey: API_KEY, supportsStructuredOutputs: true,
});
const model = local(MODEL);

await tryModel(model);
