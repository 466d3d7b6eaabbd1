// What layers keep of a sequence in place of keys and values, or beside them: the states of a step's sequences.
//
// A state has up to two parts: the last inputs of a convolution, and what a recurrence carries from token to token. The
// caller owns their memory, a pool in which each sequence has a place. Each token changes the state, so the tokens of a
// sequence are computed one after the other, in prompts as in decodes: then no number depends on how a prompt was cut.
// Different sequences, heads and channels are independent, and threads share these.
#pragma once

#include "operations.h"

namespace oaiserve {

// One part of the state that a layer keeps of each sequence: `size` numbers.
template <class E>
struct State {
  long layer;  // among those that keep a state
  long part;   // 0: of the convolution, 1: of the recurrence
  long size;
  E* of(const StepInput& step, long sequence) const {
    return static_cast<E*>(step.states[2 * layer + part]) + step.state_places[sequence] * size;
  }
};

// The tokens that a step has of a sequence: from `first` to before `last`.
struct TokenRange {
  long first, last;
  TokenRange(const StepInput& step, long sequence)
      : first(step.query_start[sequence]), last(step.query_start[sequence + 1]) {}
};

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

// -- the causal convolution before a recurrence, or in place of one: each channel by itself, over its last few inputs

constexpr int MIN_TAPS = 2, MAX_TAPS = 8;

// y = activation(sum of the last `taps` inputs, each times its weight, + bias) of `channels` numbers of a row, in place.
// Some families multiply the inputs, and the outputs, by other numbers of the row.
// The channels are the first numbers of a row. Convolution in library.py has the same layout.
struct Convolution {
  long channels, taps;
  const float *weight, *bias;  // [taps][channels], from the oldest input to the newest; [channels] or null
  Activation activation;
  long before, after;  // the first of those that multiply the inputs, and the outputs; -1: none do
  long layer;          // among those that keep a state
};

// The part of a state is T[channels][taps], from the oldest input to the newest. Inputs are rounded to T when they come: an
// input that is still at hand must be the number that a state would have.
template <class T>
struct Convolve {
  Buffer<float>& x;
  Convolution by;

  long items(const StepInput& step, int) const { return step.num_sequences * blocks(step); }
  void run(const StepInput& step, int, long item) const {
    const long count = blocks(step), sequence = item / count, block = item % count, groups = by.channels / LANES;
    const long first = groups * block / count * LANES, last = groups * (block + 1) / count * LANES;
    convolve_with<MIN_TAPS>(step, sequence, first, last);
  }

  // The number of blocks that the channels are cut into, for the average sequence of the step.
  long blocks(const StepInput& step) const {
    const long values = step.num_tokens * by.channels / step.num_sequences;
    return std::clamp(values / (ITEM_VALUES / 4), 1L, by.channels / LANES);
  }

  template <int TAPS>
  void convolve_with(const StepInput& step, long sequence, long first, long last) const {
    if (by.taps == TAPS) return convolve<TAPS>(step, sequence, first, last);
    if constexpr (TAPS < MAX_TAPS) convolve_with<TAPS + 1>(step, sequence, first, last);
  }

  // Computes some channels. Their last inputs are in a ring, whose oldest ones a new token replaces.
  template <int TAPS>
  void convolve(const StepInput& step, long sequence, long first, long last) const {
    const TokenRange tokens(step, sequence);
    for (; first < last; first += AT_ONCE) {
      const long count = std::min(AT_ONCE, last - first);
      T* state = State<T>{by.layer, 0, by.channels * TAPS}.of(step, sequence) + first * TAPS;
      alignas(64) T ring[TAPS][AT_ONCE];
      T* inputs[TAPS];  // from the oldest to the newest
      for (int tap = 0; tap < TAPS; tap++) inputs[tap] = ring[tap];
      for (long channel = 0; channel < count; channel++)
        for (int tap = 0; tap < TAPS; tap++) ring[tap][channel] = state[channel * TAPS + tap];
      for (long row = tokens.first; row < tokens.last; row++) {
        T* newest = inputs[0];
        for (int tap = 0; tap + 1 < TAPS; tap++) inputs[tap] = inputs[tap + 1];
        inputs[TAPS - 1] = newest;
        float* numbers = x.row(row);
        for (long i = 0; i < count; i += LANES) {
          const long channel = first + i;
          f32x16 input = load(numbers + channel);
          if (by.before >= 0) input *= load(numbers + by.before + channel);
          store(newest + i, input);
          f32x16 y = by.bias ? load(by.bias + channel) : splat(0);
          for (int tap = 0; tap < TAPS; tap++) y += load(inputs[tap] + i) * load(by.weight + tap * by.channels + channel);
          y = activate(by.activation, y);
          if (by.after >= 0) y *= load(numbers + by.after + channel);
          store(numbers + channel, y);
        }
      }
      for (long channel = 0; channel < count; channel++)
        for (int tap = 0; tap < TAPS; tap++) state[channel * TAPS + tap] = inputs[tap][channel];
    }
  }

  static constexpr long AT_ONCE = 256;  // channels, whose rings and weights stay in L1
};

}  // namespace oaiserve
