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
  bool fades_by_row;  // whether a head has key_dim decays, for the rows of S; otherwise it has one
  float rate_factor;
  long keys() const { return key_heads * key_dim; }
  long decays() const { return value_heads * (fades_by_row ? key_dim : 1); }
};

// Scales queries and keys to length 1, and queries by 1 / sqrt(key_dim) in addition, and makes rates and decays of the
// numbers that these follow from:
//   rate = sigmoid(number) * factor;   decay = exp(speed * softplus(number + bias))
struct PrepareDelta {
  static constexpr long WORK = 16;  // a decay takes as long as this number of simple values
  Buffer<float>&rows_of_x, &rows_of_rates, &rows_of_decays;
  DeltaHeads heads;
  const float *speeds, *biases;  // [heads.decays()]

  long work() const { return 2 * heads.keys() + WORK * heads.decays(); }
  void row(const StepInput&, long row) const {
    const long dim = heads.key_dim;
    for (long head = 0; head < 2 * heads.key_heads; head++) {
      float* x = rows_of_x.row(row) + head * dim;
      f32x16 squares = splat(0);
      for (long i = 0; i < dim; i += LANES) squares += load(x + i) * load(x + i);
      float scale = 1.0f / std::sqrt(sum(squares) + 1e-6f);
      if (head < heads.key_heads) scale /= std::sqrt(float(dim));
      for (long i = 0; i < dim; i += LANES) store(x + i, load(x + i) * scale);
    }
    float *rates = rows_of_rates.row(row), *decays = rows_of_decays.row(row) + heads.first_decay;
    for (long i = 0; i < heads.value_heads; i += LANES) {
      const Part part(i, heads.value_heads);
      part.store(sigmoid(part.load(rates)) * heads.rate_factor, rates);
    }
    for (long i = 0; i < heads.decays(); i += LANES) {
      const Part part(i, heads.decays());
      part.store(exp(part.load(speeds) * softplus(part.load(decays) + part.load(biases))), decays);
    }
  }
};

// Computes the recurrence, for what the convolution and PrepareDelta have made of x. Outputs take the place of values.
//
// The columns of S are independent. For a prompt, a few columns at a time are copied and computed for all
// tokens, since these stay in L1 where whole rows would not. A single token reads S in the order of memory.
template <bool FADES_BY_ROW>
struct DeltaRule {
  Buffer<float>&x, &rates, &rows_of_decays;
  DeltaHeads heads;
  long layer;

  long items(const StepInput& step, int) const { return step.num_sequences * heads.value_heads; }
  void run(const StepInput& step, int, long item) const {
    const long sequence = item / heads.value_heads, head = item % heads.value_heads, width = heads.value_dim;
    const State<float> states{layer, 1, heads.value_heads * heads.key_dim * width};
    float* state = states.of(step, sequence) + head * heads.key_dim * width;
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

  static constexpr int COPIED = 4, AT_ONCE = WIDTH == 16 ? 8 : 4;  // vectors; their sums are in registers

  template <int VECTORS>
  void in_copy(float* state, long column, long head, TokenRange tokens) const {
    constexpr size_t BYTES = VECTORS * WIDTH * sizeof(float);
    alignas(64) float copy[MAX_STATE_KEY_DIM * VECTORS * WIDTH];
    for (long i = 0; i < heads.key_dim; i++)
      memcpy(copy + i * VECTORS * WIDTH, state + i * heads.value_dim, BYTES);
    columns<VECTORS>(copy, VECTORS * WIDTH, column, head, tokens);
    for (long i = 0; i < heads.key_dim; i++)
      memcpy(state + i * heads.value_dim, copy + i * VECTORS * WIDTH, BYTES);
  }

  // `state` has the columns from `column` on, and its rows are `stride` apart.
  template <int VECTORS>
  void columns(float* state, long stride, long column, long head, TokenRange tokens) const {
    const long dim = heads.key_dim, key_head = head / (heads.value_heads / heads.key_heads);
    for (long row = tokens.first; row < tokens.last; row++) {
      float *query = x.row(row) + key_head * dim, *key = query + heads.keys();
      float* value = x.row(row) + 2 * heads.keys() + head * heads.value_dim + column;
      const float rate = rates.row(row)[head];
      const float* decays = rows_of_decays.row(row) + heads.first_decay + head * (FADES_BY_ROW ? dim : 1);
      const float decay = FADES_BY_ROW ? 1.0f : decays[0];  // decay of the read row, unless rows have faded before
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
};

}  // namespace oaiserve
