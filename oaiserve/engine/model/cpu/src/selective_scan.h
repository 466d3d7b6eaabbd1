// The recurrence of the first Mamba.
//
// Each channel has a state of `state_dim` numbers, each with a speed of its own. For a number x of the channel, and the
// vectors B and C that all channels share:
//   state = exp(time * speeds) state + time x B;   y = state C + skip x
// How long a token lasts, its time, is another number for each channel.
#pragma once

#include "states.h"

namespace oaiserve {

constexpr long MAX_SELECTIVE_DIM = 256;

struct Selection {
  long channels, state_dim;
  long first;                  // of B in a row of vectors, which C follows
  Normalize b_norm, c_norm;    // without a weight: none
  const float *speeds, *skips;  // [channels][state_dim]; [channels]
};

// out = y * silu(gate). A row of x has x and then the gates; times are those before their softplus.
template <class T>
struct SelectiveScan {
  static constexpr long AT_ONCE = 256;  // channels
  Buffer<float>&rows_of_x, &rows_of_times, &vectors;
  Buffer<T>& out;
  Selection by;
  long layer;

  long blocks() const { return (by.channels + AT_ONCE - 1) / AT_ONCE; }
  long items(const StepInput& step, int) const { return step.num_sequences * blocks(); }
  void run(const StepInput& step, int, long item) const {
    const long sequence = item / blocks(), first = item % blocks() * AT_ONCE, dim = by.state_dim;
    const long last = std::min(first + AT_ONCE, by.channels);
    float* state = State<float>{layer, 1, by.channels * dim}.of(step, sequence);
    const TokenRange tokens(step, sequence);
    for (long row = tokens.first; row < tokens.last; row++) {
      alignas(64) float b[MAX_SELECTIVE_DIM], c[MAX_SELECTIVE_DIM];
      by.b_norm(vectors.row(row) + by.first, b);
      by.c_norm(vectors.row(row) + by.first + dim, c);
      const float *x = rows_of_x.row(row), *gates = x + by.channels;
      for (long channel = first; channel < last; channel += LANES) {
        const f32x16 own = load(x + channel), time = softplus(load(rows_of_times.row(row) + channel));
        alignas(64) float times[LANES], added[LANES], sums[LANES];
        store(times, time);
        store(added, time * own);
        for (int lane = 0; lane < LANES; lane++) {
          float* at = state + (channel + lane) * dim;
          const float* speeds = by.speeds + (channel + lane) * dim;
          f32x16 products = splat(0);
          for (long i = 0; i < dim; i += LANES) {
            const f32x16 s = exp(times[lane] * load(speeds + i)) * load(at + i) + added[lane] * load(b + i);
            store(at + i, s);
            products += s * load(c + i);
          }
          sums[lane] = sum(products);
        }
        const f32x16 y = load(sums) + load(by.skips + channel) * own;
        store(out.row(row) + channel, y * activate(Activation::silu, load(gates + channel)));
      }
    }
  }
};

}  // namespace oaiserve
