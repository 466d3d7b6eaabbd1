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
class SelectiveScan : public Operation {
 public:
  SelectiveScan(Buffer<float>& x, Buffer<float>& times, Buffer<float>& vectors, Buffer<T>& out, Selection selection,
                long layer)
      : x_(x), times_(times), vectors_(vectors), out_(out), s_(selection),
        state_{layer, 1, selection.channels * selection.state_dim} {}
  long items(const StepInput& step, int) const noexcept override { return step.num_sequences * blocks(); }
  void run(const StepInput& step, int, long item) noexcept override {
    const long sequence = item / blocks(), first = item % blocks() * AT_ONCE, dim = s_.state_dim;
    const long last = std::min(first + AT_ONCE, s_.channels);
    float* state = state_.of(step, sequence);
    const TokenRange tokens(step, sequence);
    for (long row = tokens.first; row < tokens.last; row++) {
      alignas(64) float b[MAX_SELECTIVE_DIM], c[MAX_SELECTIVE_DIM];
      s_.b_norm(vectors_.row(row) + s_.first, b);
      s_.c_norm(vectors_.row(row) + s_.first + dim, c);
      const float *x = x_.row(row), *gates = x + s_.channels;
      for (long channel = first; channel < last; channel += LANES) {
        const f32x16 own = load(x + channel), time = softplus(load(times_.row(row) + channel));
        alignas(64) float times[LANES], added[LANES], sums[LANES];
        store(times, time);
        store(added, time * own);
        for (int lane = 0; lane < LANES; lane++) {
          float* at = state + (channel + lane) * dim;
          const float* speeds = s_.speeds + (channel + lane) * dim;
          f32x16 products = splat(0);
          for (long i = 0; i < dim; i += LANES) {
            const f32x16 s = exp(times[lane] * load(speeds + i)) * load(at + i) + added[lane] * load(b + i);
            store(at + i, s);
            products += s * load(c + i);
          }
          sums[lane] = sum(products);
        }
        const f32x16 y = load(sums) + load(s_.skips + channel) * own;
        store(out_.row(row) + channel, y * activate(Activation::silu, load(gates + channel)));
      }
    }
  }

 private:
  static constexpr long AT_ONCE = 256;  // channels
  long blocks() const { return (s_.channels + AT_ONCE - 1) / AT_ONCE; }
  Buffer<float>&x_, &times_, &vectors_;
  Buffer<T>& out_;
  Selection s_;
  State<float> state_;
};

}  // namespace oaiserve
