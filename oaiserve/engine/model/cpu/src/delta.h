// Gated delta nets, as Qwen3-Next, Qwen3.5 and OLMo Hybrid have them in most of their layers, and Kimi Linear.
//
// The state of a head is a matrix S [key_dim][value_dim] of float32, a memory of values under keys. A token lets it
// fade, looks up what it has under its key, and moves that towards its own value; its output is what it has under its
// query:
//   S = decay S;   S += key (value - key S) * rate;   out = query S
// Several heads of values share a head of queries and keys. The decay is one number, or one for each row of S.
#pragma once

#include "packs.h"
#include "states.h"

namespace oaiserve {

constexpr long MAX_STATE_KEY_DIM = 256;

// The numbers of a token are a row with the queries and keys of all key heads, and then the values of all value heads;
// a row with a rate of each value head; and, in the same row or another one, from `first_decay` on, its decays.
struct DeltaHeads {
  long key_heads, value_heads, key_dim, value_dim, first_decay;
  bool fades_by_row;  // of S: a head has key_dim decays, else one
  float rate_factor;
  long keys() const { return key_heads * key_dim; }
  long decays() const { return value_heads * (fades_by_row ? key_dim : 1); }
};

// Scales queries and keys to length 1, and queries by 1 / sqrt(key_dim) in addition, and makes rates and decays of the
// numbers that these follow from:
//   rate = sigmoid(number) * factor;   decay = exp(speed * softplus(number + bias))
class PrepareDelta : public Operation {
 public:
  PrepareDelta(Buffer<float>& x, Buffer<float>& rates, Buffer<float>& decays, DeltaHeads heads, const float* speeds,
               const float* biases)
      : x_(x), rates_(rates), decays_(decays), heads_(heads), speeds_(speeds), biases_(biases) {}
  long items(const StepInput& step, int) const noexcept override { return row_items(step.num_tokens, 2 * heads_.keys()); }
  void run(const StepInput& step, int, long item) noexcept override {
    const RowRange rows(item, step.num_tokens, 2 * heads_.keys());
    const long dim = heads_.key_dim;
    for (long row = rows.first; row < rows.last; row++) {
      for (long head = 0; head < 2 * heads_.key_heads; head++) {
        float* x = x_.row(row) + head * dim;
        f32x16 squares = splat(0);
        for (long i = 0; i < dim; i += LANES) squares += load(x + i) * load(x + i);
        float scale = 1.0f / std::sqrt(sum(squares) + 1e-6f);
        if (head < heads_.key_heads) scale /= std::sqrt(float(dim));
        for (long i = 0; i < dim; i += LANES) store(x + i, load(x + i) * scale);
      }
      float *rates = rates_.row(row), *decays = decays_.row(row) + heads_.first_decay;
      for (long i = 0; i < heads_.value_heads; i += LANES) {
        const Part part(i, heads_.value_heads);
        part.store(sigmoid(part.load(rates)) * heads_.rate_factor, rates);
      }
      for (long i = 0; i < heads_.decays(); i += LANES) {
        const Part part(i, heads_.decays());
        part.store(exp(part.load(speeds_) * softplus(part.load(decays) + part.load(biases_))), decays);
      }
    }
  }

 private:
  // Up to LANES numbers of an array, from `first` on.
  struct Part {
    long first;
    size_t bytes;
    Part(long first, long count) : first(first), bytes(size_t(std::min<long>(LANES, count - first)) * sizeof(float)) {}
    f32x16 load(const float* from) const {
      f32x16 v{};
      memcpy(&v, from + first, bytes);
      return v;
    }
    void store(f32x16 v, float* to) const { memcpy(to + first, &v, bytes); }
  };

  Buffer<float>&x_, &rates_, &decays_;
  DeltaHeads heads_;
  const float *speeds_, *biases_;  // [heads.decays()]
};

// Computes the recurrence, for what the convolution and PrepareDelta have made of x. Outputs take the place of values.
//
// The columns of S are independent. Of a prompt, a few of them are copied and computed for all tokens before the next
// ones, since these stay in L1 where whole rows would not. A single token reads S in the order of memory.
template <bool FADES_BY_ROW>
class DeltaRule : public Operation {
 public:
  DeltaRule(Buffer<float>& x, Buffer<float>& rates, Buffer<float>& decays, DeltaHeads heads, long layer)
      : x_(x), rates_(rates), decays_(decays), heads_(heads),
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
      const float rate = rates_.row(row)[head];
      const float* decays = decays_.row(row) + heads_.first_decay + head * (FADES_BY_ROW ? dim : 1);
      const float decay = FADES_BY_ROW ? 1.0f : decays[0];  // of what is read, unless its rows have faded before
      Vector found[VECTORS] = {}, read[VECTORS] = {};  // under the key, and under the query
      f32x16 products = splat(0);
      for (long i = 0; i < dim; i += LANES) products += load(query + i) * load(key + i);
      for (long i = 0; i < dim; i++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
          Vector s = load_vector<Vector>(state + i * stride + v * WIDTH);
          if constexpr (FADES_BY_ROW) s *= decays[i];
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
          const float fade = FADES_BY_ROW ? decays[i] : decay;
          const Vector s = multiply_add(change[v], key[i] - Vector{}, fade * load_vector<Vector>(at));
          memcpy(at, &s, sizeof(s));
        }
    }
  }

  Buffer<float>&x_, &rates_, &decays_;
  DeltaHeads heads_;
  State<float> state_;
};

}  // namespace oaiserve
