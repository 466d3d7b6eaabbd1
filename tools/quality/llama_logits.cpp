// Writes the logits of a text's tokens as llama.cpp computes them: llama_logits MODEL CACHE THREADS [BATCH ...]
//
// CACHE is the type of keys and values, f16 or q8_0. Standard input has the number of tokens, their ids, the number of
// rows and the positions of these. Standard output gets the bytes of a row as an integer of 32 bits, and float32 [vocab]
// for each row: first as parts of a prompt, and then once for each BATCH, as decodes of that number of sequences. For
// each BATCH, a line of standard error has the least CPU time of a step: seconds BATCH SECONDS

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <iostream>
#include <vector>

#include "llama.h"

namespace {

constexpr int CHUNK = 512;  // tokens of a step of a prompt

[[noreturn]] void fail(const char* what) {
  fprintf(stderr, "%s\n", what);
  exit(1);
}

std::vector<int> read_numbers() {
  size_t count = 0;
  std::cin >> count;
  std::vector<int> numbers(count);
  for (int& number : numbers) std::cin >> number;
  return numbers;
}

struct Run {
  llama_context* context;
  int vocab_size;
  std::vector<int> ids;
  llama_batch batch = llama_batch_init(CHUNK, 0, 1);
  double least_seconds = 0.0;  // of a step's CPU time; 0: no step yet

  void clear() { batch.n_tokens = 0; }

  void add(int position, int sequence, bool is_wanted) {
    const int i = batch.n_tokens++;
    batch.token[i] = ids[size_t(position)];
    batch.pos[i] = position;
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = sequence;
    batch.logits[i] = is_wanted;
  }

  void compute() {
    const clock_t began = clock();  // CPU time of all threads
    if (llama_decode(context, batch)) fail("llama.cpp could not compute a step");
    llama_synchronize(context);
    const double seconds = double(clock() - began) / CLOCKS_PER_SEC;
    least_seconds = least_seconds ? std::min(least_seconds, seconds) : seconds;
    for (int i = 0; i < batch.n_tokens; i++)
      if (batch.logits[i]) fwrite(llama_get_logits_ith(context, i), sizeof(float), size_t(vocab_size), stdout);
  }

  void prompt(const std::vector<int>& rows) {
    for (size_t first = 0; first < ids.size(); first += CHUNK) {
      clear();
      for (size_t i = first; i < std::min(ids.size(), first + CHUNK); i++)
        add(int(i), 0, std::binary_search(rows.begin(), rows.end(), int(i)));
      compute();
    }
  }

  // Computes each row again as the next token of a sequence of its own, which has the keys and values before it.
  void decodes(const std::vector<int>& rows, size_t together) {
    llama_memory_t memory = llama_get_memory(context);
    for (size_t first = 0; first < rows.size(); first += together) {
      clear();
      const size_t end = std::min(rows.size(), first + together);
      for (size_t i = first; i < end; i++) {
        const int sequence = int(i - first) + 1;
        llama_memory_seq_cp(memory, 0, sequence, 0, rows[i]);
        add(rows[i], sequence, true);
      }
      compute();
      for (size_t i = first; i < end; i++) llama_memory_seq_rm(memory, int(i - first) + 1, -1, -1);
    }
  }
};

}  // namespace

int main(int count, char** arguments) {
  if (count < 4) fail("llama_logits MODEL CACHE THREADS [BATCH ...]");
  std::vector<size_t> batches;
  for (int i = 4; i < count; i++) batches.push_back(size_t(atol(arguments[i])));
  size_t most = 1;
  for (size_t batch : batches) most = std::max(most, batch);
  Run run{};
  run.ids = read_numbers();
  const std::vector<int> rows = read_numbers();
  llama_backend_init();
  llama_model* model = llama_model_load_from_file(arguments[1], llama_model_default_params());
  if (!model) fail("llama.cpp could not load the model");
  llama_context_params options = llama_context_default_params();
  options.n_ctx = uint32_t((run.ids.size() + most + 255) / 256 * 256);
  options.n_batch = options.n_ubatch = CHUNK;
  options.n_threads = options.n_threads_batch = atoi(arguments[3]);
  options.n_seq_max = uint32_t(most) + 1;
  options.kv_unified = options.swa_full = true;
  if (!strcmp(arguments[2], "q8_0")) options.type_k = options.type_v = GGML_TYPE_Q8_0;
  run.context = llama_init_from_model(model, options);
  if (!run.context) fail("llama.cpp could not make a context");
  run.vocab_size = llama_vocab_n_tokens(llama_model_get_vocab(model));
  const int row_bytes = run.vocab_size * int(sizeof(float));
  fwrite(&row_bytes, sizeof(row_bytes), 1, stdout);
  run.prompt(rows);
  for (size_t batch : batches) {
    run.least_seconds = 0.0;
    run.decodes(rows, batch);
    fprintf(stderr, "seconds %zu %.6f\n", batch, run.least_seconds);
  }
  return 0;
}
