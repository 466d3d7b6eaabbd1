// The activation functions of transformers' ACT2FN that decoders use, for sixteen float32 values at a time.
//
// They are always inlined. GCC by itself stops inlining when a source has grown by two fifths, and a call for each sixteen
// values took 6 % of a step of 64 rows with AVX2, whose vectors of sixteen are passed in memory.
#pragma once

#include "simd.h"

namespace oaiserve {

// ACTIVATIONS in library.py has the same order.
enum class Activation : int64_t { none, silu, gelu, gelu_tanh, relu, relu2, sigmoid };

[[gnu::always_inline]] inline f32x16 sigmoid(f32x16 x) { return 1.0f / (1.0f + exp(-x)); }
[[gnu::always_inline]] inline f32x16 tanh(f32x16 x) { return 1.0f - 2.0f / (1.0f + exp(2.0f * x)); }

// log(1 + e^x), which for small e^x must not lose what the sum rounds away: hence the last factor.
[[gnu::always_inline]] inline f32x16 softplus(f32x16 x) {
  const f32x16 small = exp(select(x < 0.0f, x, -x)), sum = 1.0f + small;
  const f32x16 rest = sum - 1.0f;
  const f32x16 log_of_sum = select(rest > 0.0f, log(sum) * (small / rest), small);
  return select(x < 0.0f, splat(0.0f), x) + log_of_sum;
}

// Formula 7.1.26 of Abramowitz and Stegun, whose error is at most 1.5e-7.
[[gnu::always_inline]] inline f32x16 erf(f32x16 x) {
  f32x16 magnitude = select(x < 0.0f, -x, x);
  f32x16 t = 1.0f / (1.0f + 0.3275911f * magnitude);
  f32x16 p = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
  f32x16 out = 1.0f - p * exp(-magnitude * magnitude);
  return select(x < 0.0f, -out, out);
}

[[gnu::always_inline]] inline f32x16 activate(Activation activation, f32x16 x) {
  switch (activation) {
    case Activation::none:
      return x;
    case Activation::silu:
      return x * sigmoid(x);
    case Activation::gelu:
      return 0.5f * x * (1.0f + erf(x * 0.70710678f));
    case Activation::gelu_tanh:
      return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));  // 0.5 (1 + tanh(y)) is sigmoid(2 y)
    case Activation::relu:
      return max(splat(0.0f), x);  // NaN stays NaN
    case Activation::relu2: {
      f32x16 positive = max(splat(0.0f), x);
      return positive * positive;
    }
    case Activation::sigmoid:
      return sigmoid(x);
  }
  return x;
}

}  // namespace oaiserve
