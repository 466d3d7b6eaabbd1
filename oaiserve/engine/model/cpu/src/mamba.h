// The recurrence of Mamba 2.
//
// The state of a head is a matrix S [head_dim][state_dim] of float32. A token lets it fade, and adds its number x of each
// row times a vector B; its output is what S has along a vector C:
//   S = decay S + time x B^T;   y = S C + skip x
// Several heads share B and C. How long a token lasts (`time`) decides both how much it adds and how much fades.
#pragma once

#include "packs.h"
#include "states.h"

namespace oaiserve {

// The numbers of a token are a row with x of all heads, B and C of all groups, and from `times` on those that its times
// follow from, one for each head. Behind these there is room for as many decays.
struct ScanHeads {
  long heads, head_dim, groups, state_dim, times;
  float least_time, most_time;
};

//   time = softplus(number + bias), within the limits;   decay = exp(speed * time)
class PrepareScan : public Operation {
 public:
  PrepareScan(Buffer<float>& x, ScanHeads heads, const float* speeds, const float* biases)
      : x_(x), heads_(heads), speeds_(speeds), biases_(biases) {}
  long items(const StepInput& step, int) const noexcept override { return row_items(step.num_tokens, WORK * heads_.heads); }
  void run(const StepInput& step, int, long item) noexcept override {
    const RowRange rows(item, step.num_tokens, WORK * heads_.heads);
    for (long row = rows.first; row < rows.last; row++) {
      float *times = x_.row(row) + heads_.times, *decays = times + heads_.heads;
      for (long head = 0; head < heads_.heads; head += LANES) {
        const size_t bytes = size_t(std::min<long>(LANES, heads_.heads - head)) * sizeof(float);
        const auto part = [&](const float* from) {
          f32x16 v{};
          memcpy(&v, from + head, bytes);
          return v;
        };
        const f32x16 own = softplus(part(times) + part(biases_));
        const f32x16 time = min(max(own, splat(heads_.least_time)), splat(heads_.most_time));
        const f32x16 decay = exp(part(speeds_) * time);
        memcpy(times + head, &time, bytes);
        memcpy(decays + head, &decay, bytes);
      }
    }
  }

 private:
  static constexpr long WORK = 16;  // a head takes as long as so many simple values
  Buffer<float>& x_;
  ScanHeads heads_;
  const float *speeds_, *biases_;  // [heads]
};

// The sum of the lanes, in the same order for every vector.
inline float total(Vector v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float lanes[WIDTH];
  memcpy(lanes, &v, sizeof(v));
  for (int apart = WIDTH / 2; apart > 0; apart /= 2)
    for (int i = 0; i < apart; i++) lanes[i] += lanes[i + apart];
  return lanes[0];
#endif
}

// Computes the recurrence, for what the convolution and PrepareScan have made of x. Outputs take the place of x.
class Scan : public Operation {
 public:
  Scan(Buffer<float>& x, ScanHeads heads, const float* skips, long layer)
      : x_(x), heads_(heads), skips_(skips), state_{layer, 1, heads.heads * heads.head_dim * heads.state_dim} {}
  long items(const StepInput& step, int) const noexcept override { return step.num_sequences * heads_.heads; }
  void run(const StepInput& step, int, long item) noexcept override {
    const long sequence = item / heads_.heads, head = item % heads_.heads;
    const long dim = heads_.state_dim, group = head / (heads_.heads / heads_.groups);
    float* state = state_.of(step, sequence) + head * heads_.head_dim * dim;
    const TokenRange tokens(step, sequence);
    for (long row = tokens.first; row < tokens.last; row++) {
      float *numbers = x_.row(row), *x = numbers + head * heads_.head_dim;
      const float* b = numbers + heads_.heads * heads_.head_dim + group * dim;
      const float* c = b + heads_.groups * dim;
      const float time = numbers[heads_.times + head], decay = numbers[heads_.times + heads_.heads + head];
      for (long i = 0; i < heads_.head_dim; i += ROWS) rows(state + i * dim, x + i, b, c, time, decay, skips_[head]);
    }
  }

 private:
  static constexpr int ROWS = 4;  // of S, which share what is read of B and C

  void rows(float* state, float* x, const float* b, const float* c, float time, float decay, float skip) const {
    const long dim = heads_.state_dim;
    Vector sums[ROWS] = {}, added[ROWS];
    for (int r = 0; r < ROWS; r++) added[r] = time * x[r] - Vector{};
    for (long i = 0; i < dim; i += WIDTH) {
      const Vector own_b = load_vector<Vector>(b + i), own_c = load_vector<Vector>(c + i);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++) {
        float* at = state + r * dim + i;
        const Vector s = multiply_add(added[r], own_b, decay * load_vector<Vector>(at));
        sums[r] = multiply_add(s, own_c, sums[r]);
        memcpy(at, &s, sizeof(s));
      }
    }
    for (int r = 0; r < ROWS; r++) x[r] = total(sums[r]) + skip * x[r];
  }

  Buffer<float>& x_;
  ScanHeads heads_;
  const float* skips_;  // [heads]
  State<float> state_;
};

}  // namespace oaiserve
