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

}  // namespace oaiserve
