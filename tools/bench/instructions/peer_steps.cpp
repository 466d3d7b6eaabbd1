// Answers prompts with llama.cpp on one thread: PROGRAM MODEL PROMPT_TOKENS ANSWER_TOKENS. The counter's sections are a
// prompt, and the steps of the answer's tokens after the first.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "llama.h"
#include "products.h"

namespace {

// The prompt that our_steps.py also has for this number.
std::vector<llama_token> prompt_of(long number, long count) {
  std::vector<llama_token> tokens(count);
  for (long i = 0; i < count; i++) tokens[i] = llama_token(1000 + (number * count + i) * 7 % 20000);
  return tokens;
}

// Computes the tokens, and returns the likeliest next one.
llama_token step(llama_context* context, std::vector<llama_token> tokens, int vocabulary) {
  if (llama_decode(context, llama_batch_get_one(tokens.data(), int32_t(tokens.size())))) std::exit(4);
  const float* const logits = llama_get_logits_ith(context, -1);
  return llama_token(std::max_element(logits, logits + vocabulary) - logits);
}

}  // namespace

int main(int, char** arguments) {
  const long num_prompt_tokens = std::atol(arguments[2]), num_answer_tokens = std::atol(arguments[3]);
  llama_backend_init();
  llama_model* const model = llama_model_load_from_file(arguments[1], llama_model_default_params());
  if (!model) return 3;
  llama_context_params params = llama_context_default_params();
  params.n_ctx = 1024;
  params.n_batch = params.n_ubatch = 512;
  params.n_threads = params.n_threads_batch = 1;
  llama_context* const context = llama_init_from_model(model, params);
  const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
  for (const long number : {0, 1}) {  // The first prompt also pays for what a process does once.
    llama_memory_clear(llama_get_memory(context), true);
    if (number) mark();
    llama_token next = step(context, prompt_of(number, num_prompt_tokens), vocabulary);
    if (number) mark(), mark();
    for (long i = 0; i < num_answer_tokens; i++) next = step(context, {next}, vocabulary);
    if (number) mark();
  }
  std::printf("%s\n", llama_print_system_info());
}
