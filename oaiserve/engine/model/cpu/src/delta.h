// Gated delta nets, as Qwen3-Next and Qwen3.5 have them in most of their layers.
//
// The state of a head is a matrix S [key_dim][value_dim] of float32, a memory of values under keys. A token lets it
// fade, looks up what it has under its key, and moves that towards its own value; its output is what it has under its
// query:
//   S = decay S;   S += key (value - key S) * rate;   out = query S
// Several heads of values share a head of queries and keys.
#pragma once

#include "packs.h"
#include "states.h"

namespace oaiserve {

constexpr long MAX_STATE_KEY_DIM = 256;

// The numbers of a token are a row with the queries and keys of all key heads, and then the values of all value heads.
struct DeltaHeads {
  long key_heads, value_heads, key_dim, value_dim;
  long keys() const { return key_heads * key_dim; }
};

// Scales queries and keys to length 1, and queries by 1 / sqrt(key_dim) in addition. A row of `rates` has two numbers of
// each value head, first all rates before their sigmoid, and then what the decays follow from:
//   rate = sigmoid(rate);   decay = exp(speed * softplus(number + bias))
class PrepareDelta : public Operation {
 public:
  PrepareDelta(Buffer<float>& x, Buffer<float>& rates, DeltaHeads heads, const float* speeds, const float* biases)
      : x_(x), rates_(rates), heads_(heads), speeds_(speeds), biases_(biases) {}
  long items(const StepInput& step, int) const noexcept override { return row_items(step.num_tokens, 2 * heads_.keys()); }
  void run(const StepInput& step, int, long item) noexcept override {
    const RowRange rows(item, step.num_tokens, 2 * heads_.keys());
    const long dim = heads_.key_dim, count = heads_.value_heads;
    for (long row = rows.first; row < rows.last; row++) {
      for (long head = 0; head < 2 * heads_.key_heads; head++) {
        float* x = x_.row(row) + head * dim;
        f32x16 squares = splat(0);
        for (long i = 0; i < dim; i += LANES) squares += load(x + i) * load(x + i);
        float scale = 1.0f / std::sqrt(sum(squares) + 1e-6f);
        if (head < heads_.key_heads) scale /= std::sqrt(float(dim));
        for (long i = 0; i < dim; i += LANES) store(x + i, load(x + i) * scale);
      }
      float *rates = rates_.row(row), *decays = rates + count;
      for (long head = 0; head < count; head += LANES) {
        const long some = std::min<long>(LANES, count - head);
        const auto part = [&](const float* from) {
          f32x16 v{};
          memcpy(&v, from + head, size_t(some) * sizeof(float));
          return v;
        };
        const f32x16 rate = sigmoid(part(rates));
        const f32x16 decay = exp(part(speeds_) * softplus(part(decays) + part(biases_)));
        memcpy(rates + head, &rate, size_t(some) * sizeof(float));
        memcpy(decays + head, &decay, size_t(some) * sizeof(float));
      }
    }
  }

 private:
  Buffer<float>&x_, &rates_;
  DeltaHeads heads_;
  const float *speeds_, *biases_;  // [value_heads]
};

// Computes the recurrence, for what the convolution and PrepareDelta have made of x. Outputs take the place of values.
//
// The columns of S are independent. Of a prompt, a few of them are copied and computed for all tokens before the next
// ones, since these stay in L1 where whole rows would not. A single token reads S in the order of memory.
class DeltaRule : public Operation {
 public:
  DeltaRule(Buffer<float>& x, Buffer<float>& rates, DeltaHeads heads, long layer)
      : x_(x), rates_(rates), heads_(heads),
        state_{layer, 1, heads.value_heads * heads.key_dim * heads.value_dim} {}
  long items(const StepInput& step, int) const noexcept override { return step.num_sequences * heads_.value_heads; }
  void run(const StepInput& step, int, long item) noexcept override {
    const long sequence = item / heads_.value_heads, head = item % heads_.value_heads, width = heads_.value_dim;
    float* state = state_.of(step, sequence) + head * heads_.key_dim * width;
    const TokenRange tokens(step, sequence);
    long column = 0;
    if (tokens.last - tokens.first == 1) {
      for (; column + AT_ONCE * WIDTH <= width; column += AT_ONCE * WIDTH)
        columns<AT_ONCE>(state + column, width, column, head, tokens);
      for (; column < width; column += WIDTH) columns<1>(state + column, width, column, head, tokens);
    } else {
      for (; column + COPIED * WIDTH <= width; column += COPIED * WIDTH)
        in_copy<COPIED>(state + column, column, head, tokens);
      for (; column < width; column += WIDTH) in_copy<1>(state + column, column, head, tokens);
    }
  }

 private:
  static constexpr int COPIED = 4, AT_ONCE = WIDTH == 16 ? 8 : 4;  // vectors; their sums are in registers

  template <int VECTORS>
  void in_copy(float* state, long column, long head, TokenRange tokens) {
    constexpr size_t BYTES = VECTORS * WIDTH * sizeof(float);
    alignas(64) float copy[MAX_STATE_KEY_DIM * VECTORS * WIDTH];
    for (long i = 0; i < heads_.key_dim; i++)
      memcpy(copy + i * VECTORS * WIDTH, state + i * heads_.value_dim, BYTES);
    columns<VECTORS>(copy, VECTORS * WIDTH, column, head, tokens);
    for (long i = 0; i < heads_.key_dim; i++)
      memcpy(state + i * heads_.value_dim, copy + i * VECTORS * WIDTH, BYTES);
  }

  // `state` has the columns from `column` on, and its rows are `stride` apart.
  template <int VECTORS>
  void columns(float* state, long stride, long column, long head, TokenRange tokens) {
    const long dim = heads_.key_dim, key_head = head / (heads_.value_heads / heads_.key_heads);
    for (long row = tokens.first; row < tokens.last; row++) {
      float *query = x_.row(row) + key_head * dim, *key = query + heads_.keys();
      float* value = x_.row(row) + 2 * heads_.keys() + head * heads_.value_dim + column;
      const float rate = rates_.row(row)[head], decay = rates_.row(row)[heads_.value_heads + head];
      Vector found[VECTORS] = {}, read[VECTORS] = {};  // under the key, and under the query
      f32x16 products = splat(0);
      for (long i = 0; i < dim; i += LANES) products += load(query + i) * load(key + i);
      for (long i = 0; i < dim; i++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
          const Vector s = load_vector<Vector>(state + i * stride + v * WIDTH);
          found[v] = multiply_add(s, key[i] - Vector{}, found[v]);
          read[v] = multiply_add(s, query[i] - Vector{}, read[v]);
        }
      const float same = sum(products);
      Vector change[VECTORS];
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) {
        const Vector missing = multiply_add(found[v], -decay - Vector{}, load_vector<Vector>(value + v * WIDTH));
        change[v] = missing * rate;
        const Vector out = multiply_add(change[v], same - Vector{}, decay * read[v]);
        memcpy(value + v * WIDTH, &out, sizeof(out));
      }
      for (long i = 0; i < dim; i++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
          float* at = state + i * stride + v * WIDTH;
          const Vector s = multiply_add(change[v], key[i] - Vector{}, decay * load_vector<Vector>(at));
          memcpy(at, &s, sizeof(s));
        }
    }
  }

  Buffer<float>&x_, &rates_;
  DeltaHeads heads_;
  State<float> state_;
};

}  // namespace oaiserve
