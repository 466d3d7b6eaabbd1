// Quantizes weights to formats of GGUF files, which --quantize int4 does when it loads a model.
//
// To round to the nearest of sixteen steps between a block's extremes loses too much. Here several scales are tried for
// each block; for each, the weights get their nearest codes, and then scale and minimum are fitted to these codes by
// least squares. The scale that leaves the smallest error is taken. No data is needed for that.
#pragma once

#include "blocks.h"
#include "pool.h"

namespace oaiserve {

using BlockVectors = f32x16[2];  // the 32 weights of a block

constexpr int TRIED_SCALES = 8;  // on both sides of the one that maps the extremes to the first and the last code

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

inline void write_half(float value, uint8_t* out) {
  const uint16_t half = float_to_half(value);
  std::memcpy(out, &half, 2);
}

inline float dot(const BlockVectors& a, const BlockVectors& b) { return sum(a[0] * b[0] + a[1] * b[1]); }

// How much the error of each weight counts: that of a large one more, which a product mostly consists of.
inline void importance_of(const BlockVectors& x, BlockVectors& importance) {
  const float mean = dot(x, x) * (2.0f / BLOCK_GROUP);
  for (int v = 0; v < 2; v++) importance[v] = splat(mean) + x[v] * x[v];
}

// The entries of the codebook that are nearest to x, and their places.
inline void nearest_entries(const BlockVectors& x, BlockVectors& entries, BlockVectors& places) {
  for (int v = 0; v < 2; v++) {
    entries[v] = splat(CODEBOOK[0]);
    places[v] = splat(0);
    for (int i = 0; i < 15; i++) {
      const f32x16 step = splat(float(CODEBOOK[i + 1] - CODEBOOK[i]));
      const f32x16 middle = splat(0.5f * float(CODEBOOK[i] + CODEBOOK[i + 1]));
      entries[v] += select(x[v] > middle, step, splat(0));
      places[v] += select(x[v] > middle, splat(1), splat(0));
    }
  }
}

// IQ4_NL, whose codes are places in the codebook: chooses scale and codes.
inline float fit_codebook(const BlockVectors& x, BlockVectors& codes) {
  BlockVectors importance, scaled, entries, places;
  importance_of(x, importance);
  const float high = max(max(x[0], x[1])), low = -max(max(splat(0) - x[0], splat(0) - x[1]));
  const float extreme = high > -low ? high : low;
  codes[0] = codes[1] = splat(0);
  float scale = 0, most = 0;
  for (int tried = -TRIED_SCALES; extreme != 0 && tried <= TRIED_SCALES; tried++)
    for (int end : {CODEBOOK[0] + tried, -CODEBOOK[0] - tried}) {
      for (int v = 0; v < 2; v++) scaled[v] = x[v] * (float(end) / extreme);
      nearest_entries(scaled, entries, places);
      const BlockVectors weighted = {entries[0] * importance[0], entries[1] * importance[1]};
      // With the best scale for these entries, they leave the smaller an error, the larger this is.
      const float with_x = dot(weighted, x), with_itself = dot(weighted, entries);
      if (with_x * with_x <= most * with_itself) continue;
      most = with_x * with_x / with_itself;
      scale = with_x / with_itself;
      codes[0] = places[0];
      codes[1] = places[1];
    }
  return scale;
}

// Formats whose codes from 0 to `last` are scaled, and a minimum added: chooses these two and the codes.
inline void fit_steps(const BlockVectors& x, float last, float& scale, float& minimum, BlockVectors& codes) {
  BlockVectors importance, q;
  importance_of(x, importance);
  const float low = std::min(-max(max(splat(0) - x[0], splat(0) - x[1])), 0.0f);
  const float span = std::max(max(max(x[0], x[1])), 0.0f) - low;
  const float all = sum(importance[0] + importance[1]), all_x = dot(importance, x);
  codes[0] = codes[1] = splat(0);
  scale = minimum = 0;
  float least = -1;
  for (int tried = -TRIED_SCALES; span > 0 && tried <= TRIED_SCALES; tried++) {
    const float steps = last + float(tried) / TRIED_SCALES;
    for (int v = 0; v < 2; v++) q[v] = min(max(rounded((x[v] - low) * (steps / span)), splat(0)), splat(last));
    const BlockVectors weighted = {q[0] * importance[0], q[1] * importance[1]};
    const float all_q = sum(weighted[0] + weighted[1]), with_x = dot(weighted, x), with_itself = dot(weighted, q);
    const float determinant = all * with_itself - all_q * all_q;
    float s = span / steps, m = low;
    if (determinant > 0) {
      s = (all * with_x - all_x * all_q) / determinant;
      m = (with_itself * all_x - all_q * with_x) / determinant;
    }
    s = half_to_float(float_to_half(s));
    m = half_to_float(float_to_half(m));
    float error = 0;
    for (int v = 0; v < 2; v++) {
      const f32x16 missed = q[v] * s + m - x[v];
      error += sum(missed * missed * importance[v]);
    }
    if (least >= 0 && error >= least) continue;
    least = error;
    scale = s;
    minimum = m;
    codes[0] = q[0];
    codes[1] = q[1];
  }
}

template <Format FORMAT>
void encode_block(const float* weights, uint8_t* block) {
  const BlockVectors x = {load(weights), load(weights + LANES)};
  BlockVectors codes;
  uint8_t bytes[BLOCK_GROUP];
  float scale = 0, minimum = 0;
  if constexpr (FORMAT == Format::IQ4_NL) {
    scale = fit_codebook(x, codes);
  } else if constexpr (FORMAT == Format::Q8_0) {
    scale = max(max(max(x[0], splat(0) - x[0]), max(x[1], splat(0) - x[1]))) / 127;
    for (int v = 0; v < 2; v++) codes[v] = rounded(x[v] * (scale > 0 ? 1 / scale : 0));
  } else {
    fit_steps(x, float((1 << layout_of(FORMAT).code_bits()) - 1), scale, minimum, codes);
  }
  for (int i = 0; i < BLOCK_GROUP; i++) bytes[i] = uint8_t(int(codes[i / LANES][i % LANES]));
  write_half(scale, block);
  if constexpr (layout_of(FORMAT).has_min) write_half(minimum, block + 2);
  uint8_t* out = block + layout_of(FORMAT).bytes - (FORMAT == Format::Q8_0 ? 32 : 16);
  if constexpr (FORMAT == Format::Q8_0) {
    std::memcpy(out, bytes, sizeof(bytes));
    return;
  }
  for (int i = 0; i < 16; i++) out[i] = uint8_t((bytes[i] & 15) | bytes[16 + i] << 4);
  if constexpr (FORMAT == Format::Q5_1) {
    uint32_t fifth = 0;
    for (int i = 0; i < BLOCK_GROUP; i++) fifth |= uint32_t(bytes[i] >> 4) << i;
    std::memcpy(block + 4, &fifth, 4);
  }
}

// Quantizes n rows of k weights on the threads of a pool.
inline void encode_rows(Pool& pool, const float* weights, long n, long k, Format format, uint8_t* out) {
  constexpr long ROWS_EACH = 8;
  const long blocks_each = k / BLOCK_GROUP;
  Items encoding((n + ROWS_EACH - 1) / ROWS_EACH, [=](long item) {
    const long first = item * ROWS_EACH * blocks_each, last = std::min((item + 1) * ROWS_EACH, n) * blocks_each;
    const auto encode = [&]<Format FORMAT>() {
      for (long block = first; block < last; block++)
        encode_block<FORMAT>(weights + block * BLOCK_GROUP, out + block * layout_of(FORMAT).bytes);
    };
    switch (format) {
      case Format::IQ4_NL: return encode.template operator()<Format::IQ4_NL>();
      case Format::Q5_1: return encode.template operator()<Format::Q5_1>();
      default: return encode.template operator()<Format::Q8_0>();
    }
  });
  pool.run(encoding);
}

}  // namespace oaiserve
