// Quantizes weights to formats of GGUF files, which --quantize int4 does when it loads a model.
//
// To round to the nearest of sixteen steps between a block's extremes loses too much. Here several scales are tried for
// each block; for each, the weights get their nearest codes, and then scale and minimum are fitted to these codes by
// least squares. The scale that leaves the smallest error is taken. No data is needed for that.
#pragma once

#include "blocks.h"
#include "pool.h"

namespace oaiserve {

inline uint16_t float_to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits >= 0x47800000) return uint16_t(sign | (bits > 0x7f800000 ? 0x7e00 : 0x7c00));
  if (bits < 0x38800000) {  // the sum has the bits of a number without exponent at its end
    float sum;
    std::memcpy(&sum, &bits, 4);
    sum += 0.5f;
    std::memcpy(&bits, &sum, 4);
    return uint16_t(sign | (bits - 0x3f000000));
  }
  bits += 0xc8000fff + (bits >> 13 & 1);  // another exponent, and rounded to even
  return uint16_t(sign | bits >> 13);
}

inline float as_half(float value) { return half_to_float(float_to_half(value)); }

// The weights of a block, two vectors, and what comes of a scale that is tried.
using BlockVectors = f32x16[2];

inline f32x16 rounded(f32x16 x) {
  const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23
  return (x + magic) - magic;
}

inline float dot(const BlockVectors& a, const BlockVectors& b) { return sum(a[0] * b[0] + a[1] * b[1]); }

// The entries of the codebook that are nearest to x.
inline f32x16 nearest_entries(f32x16 x) {
  f32x16 entries = splat(CODEBOOK[0]);
  for (int i = 0; i < 15; i++) {
    const f32x16 step = splat(float(CODEBOOK[i + 1] - CODEBOOK[i])), middle = splat((CODEBOOK[i] + CODEBOOK[i + 1]) * 0.5f);
    entries += x > middle ? step : splat(0);
  }
  return entries;
}

inline uint8_t place_in_codebook(float entry) {
  uint8_t place = 0;
  while (CODEBOOK[place] != int(entry)) place++;
  return place;
}

inline void write_nibbles(const uint8_t* codes, uint8_t* out) {
  for (int i = 0; i < 16; i++) out[i] = uint8_t(codes[i] | codes[16 + i] << 4);
}

// Larger weights count more: they are what a product mostly consists of.
inline void importance_of(const BlockVectors& x, BlockVectors& importance) {
  const float mean = dot(x, x) * (2.0f / BLOCK_GROUP);
  for (int v = 0; v < 2; v++) importance[v] = splat(mean) + x[v] * x[v];
}

constexpr int TRIED_SCALES = 8;  // on both sides of the one that maps the largest weight to the end of the codebook

inline void encode_iq4_nl(const float* weights, uint8_t* block) {
  const BlockVectors x = {load(weights), load(weights + LANES)};
  BlockVectors importance, entries, best = {};
  importance_of(x, importance);
  float extreme = 0, most = 0, scale = 0;
  for (int i = 0; i < BLOCK_GROUP; i++)
    if (std::fabs(weights[i]) > std::fabs(extreme)) extreme = weights[i];
  for (int tried = -TRIED_SCALES; extreme != 0 && tried <= TRIED_SCALES; tried++)
    for (float end : {CODEBOOK[0] + float(tried), -CODEBOOK[0] - float(tried)}) {
      for (int v = 0; v < 2; v++) entries[v] = nearest_entries(x[v] * (end / extreme));
      const BlockVectors weighted = {entries[0] * importance[0], entries[1] * importance[1]};
      const float with_x = dot(weighted, x), with_itself = dot(weighted, entries);
      if (with_itself <= 0 || with_x * with_x <= most * with_itself) continue;
      most = with_x * with_x / with_itself;
      scale = with_x / with_itself;
      for (int v = 0; v < 2; v++) best[v] = entries[v];
    }
  const uint16_t half = float_to_half(scale);
  std::memcpy(block, &half, 2);
  uint8_t codes[BLOCK_GROUP];
  for (int i = 0; i < BLOCK_GROUP; i++) codes[i] = scale != 0 ? place_in_codebook(best[i / LANES][i % LANES]) : 0;
  write_nibbles(codes, block + 2);
}

// Formats whose codes from 0 to MOST are scaled, and then a minimum is added.
template <int MOST>
void fit_with_minimum(const float* weights, float& scale, float& minimum, uint8_t* codes) {
  const BlockVectors x = {load(weights), load(weights + LANES)};
  BlockVectors importance, q, best = {};
  importance_of(x, importance);
  const float low = std::min(-max(max(splat(0) - x[0], splat(0) - x[1])), 0.0f);
  const float span = std::max(max(max(x[0], x[1])), 0.0f) - low;
  const float all = sum(importance[0] + importance[1]), all_x = dot(importance, x);
  float least = -1;
  scale = minimum = 0;
  for (int tried = -1; span > 0 && tried < 2 * TRIED_SCALES; tried++) {
    const float steps = tried < 0 ? float(MOST) : float(MOST) - 1 + 2.0f * float(tried) / (2 * TRIED_SCALES);
    for (int v = 0; v < 2; v++) q[v] = min(max(rounded((x[v] - low) * (steps / span)), splat(0)), splat(float(MOST)));
    const BlockVectors weighted = {q[0] * importance[0], q[1] * importance[1]};
    const float all_q = sum(weighted[0] + weighted[1]), with_x = dot(weighted, x), with_itself = dot(weighted, q);
    const float determinant = all * with_itself - all_q * all_q;
    if (determinant <= 0) continue;
    const float s = as_half((all * with_x - all_x * all_q) / determinant);
    const float m = as_half((with_itself * all_x - all_q * with_x) / determinant);
    BlockVectors error;
    for (int v = 0; v < 2; v++) error[v] = q[v] * s + m - x[v];
    const BlockVectors weighted_error = {error[0] * importance[0], error[1] * importance[1]};
    const float total = dot(weighted_error, error);
    if (least >= 0 && total >= least) continue;
    least = total;
    scale = s;
    minimum = m;
    for (int v = 0; v < 2; v++) best[v] = q[v];
  }
  for (int i = 0; i < BLOCK_GROUP; i++) codes[i] = uint8_t(best[i / LANES][i % LANES]);
}

