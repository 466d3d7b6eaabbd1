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
struct PrepareScan {
  static constexpr long WORK = 16;  // a head takes as long as this number of simple values
  Buffer<float>& x;
  ScanHeads heads;
  const float *speeds, *biases;  // [heads]

  long work() const { return WORK * heads.heads; }
  void row(const StepInput&, long row) const {
    float *times = x.row(row) + heads.times, *decays = times + heads.heads;
    for (long head = 0; head < heads.heads; head += LANES) {
      const Part part(head, heads.heads);
      const f32x16 own = softplus(part.load(times) + part.load(biases));
      const f32x16 time = min(max(own, splat(heads.least_time)), splat(heads.most_time));
      part.store(time, times);
      part.store(exp(part.load(speeds) * time), decays);
    }
  }
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
struct Scan {
  Buffer<float>& rows_of_x;
  ScanHeads heads;
  const float* skips;  // [heads]
  long layer;

  long items(const StepInput& step, int) const { return step.num_sequences * heads.heads; }
  void run(const StepInput& step, int, long item) const {
    const long sequence = item / heads.heads, head = item % heads.heads;
    const long dim = heads.state_dim, group = head / (heads.heads / heads.groups);
    const State<float> states{layer, 1, heads.heads * heads.head_dim * dim};
    float* state = states.of(step, sequence) + head * heads.head_dim * dim;
    const TokenRange tokens(step, sequence);
    for (long row = tokens.first; row < tokens.last; row++) {
      float *numbers = rows_of_x.row(row), *x = numbers + head * heads.head_dim;
      const float* b = numbers + heads.heads * heads.head_dim + group * dim;
      const float* c = b + heads.groups * dim;
      const float time = numbers[heads.times + head], decay = numbers[heads.times + heads.heads + head];
      for (long i = 0; i < heads.head_dim; i += ROWS) rows(state + i * dim, x + i, b, c, time, decay, skips[head]);
    }
  }

  static constexpr int ROWS = 4;  // rows of S that share each read of B and C

  void rows(float* state, float* x, const float* b, const float* c, float time, float decay, float skip) const {
    const long dim = heads.state_dim;
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
};

}  // namespace oaiserve
