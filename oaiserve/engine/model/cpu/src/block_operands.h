// What products with weights in the formats of GGUF files consist of: rows of x in eight bits, codes and scales of weights,
// and how the products of a run are added to a sum.
#pragma once

#include "blocks.h"
#include "quantized.h"

namespace oaiserve {

// 32 numbers of a row of x: value[i] * scale. The sums are those of all values and of their halves; `scaled` are the
// same sums times the scale.
struct alignas(64) QuantizedGroup {
  float scale;
  int32_t sum, half_sums[2];
  float scaled_sum, scaled_half_sums[2];
  int32_t unused;
  int8_t values[BLOCK_GROUP];
};
static_assert(sizeof(QuantizedGroup) == 64);

template <class T>
void quantize_group(const T* x, QuantizedGroup& out) {
  typedef int8_t i8x16 __attribute__((vector_size(16)));
  const f32x16 halves[2] = {load(x), load(x + LANES)};
  const f32x16 zero = splat(0), magic = splat(12582912.0f);  // 1.5 * 2^23: adding and subtracting it rounds to an integer
  const float most = max(max(max(halves[0], zero - halves[0]), max(halves[1], zero - halves[1])));
  const float per_value = most > 0 ? 127 / most : 0;
  float totals[2];  // sums of integers, without error
  for (int half = 0; half < 2; half++) {
    const f32x16 values = (halves[half] * per_value + magic) - magic;
    const i8x16 bytes = __builtin_convertvector(__builtin_convertvector(values, i32x16), i8x16);
    std::memcpy(out.values + half * LANES, &bytes, sizeof(bytes));
    totals[half] = sum(values);
  }
  // Numbers that are not finite make the totals NaN, and so the scale and all that is computed with it.
  const float whole = totals[0] + totals[1];
  const bool is_finite = whole == whole;
  out.scale = most / 127 + whole * 0.0f;
  for (int half = 0; half < 2; half++) {
    out.half_sums[half] = is_finite ? int32_t(totals[half]) : 0;
    out.scaled_half_sums[half] = totals[half] * out.scale;
  }
  out.sum = out.half_sums[0] + out.half_sums[1];
  out.scaled_sum = whole * out.scale;
}

// Four bytes of x in all lanes, as `dot_quads` takes them.
struct QuadOfX {
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
  Integers bytes, even, odd;
#else
  Integers bytes;
#endif
};
inline QuadOfX splat_quad(const int8_t* p) {
  int32_t quad;
  std::memcpy(&quad, p, 4);
  QuadOfX x;
  x.bytes = quad - Integers{};
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
  typedef int16_t Shorts __attribute__((vector_size(WIDTH * 4)));
  x.even = (Integers)((Shorts)x.bytes << 8 >> 8);
  x.odd = (Integers)((Shorts)x.bytes >> 8);
#endif
  return x;
}

// Adds to each lane the dot product of four unsigned codes and four signed values. IS_SMALL: codes are below 128.
template <bool IS_SMALL>
Integers dot_quads(Integers sum, VectorBits codes, const QuadOfX& x) {
#if defined(__AVX512VNNI__)
  return (Integers)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x.bytes);
#elif defined(__AVX512BW__)
  if constexpr (IS_SMALL) {
    const __m512i pairs = _mm512_maddubs_epi16((__m512i)codes, (__m512i)x.bytes);
    return sum + (Integers)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
  }
  const VectorBits odd = (VectorBits)_mm512_srli_epi16((__m512i)codes, 8);
  return sum + (Integers)_mm512_madd_epi16((__m512i)(codes & 0x00ff00ffu), (__m512i)x.even) +
         (Integers)_mm512_madd_epi16((__m512i)odd, (__m512i)x.odd);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (IS_SMALL) {
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)codes, (__m256i)x.bytes);
    return sum + (Integers)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
  const VectorBits odd = (VectorBits)_mm256_srli_epi16((__m256i)codes, 8);
  return sum + (Integers)_mm256_madd_epi16((__m256i)(codes & 0x00ff00ffu), (__m256i)x.even) +
         (Integers)_mm256_madd_epi16((__m256i)odd, (__m256i)x.odd);
#else
#if defined(__ARM_FEATURE_DOTPROD)
  if constexpr (IS_SMALL) return (Integers)vdotq_s32((int32x4_t)sum, (int8x16_t)codes, (int8x16_t)x.bytes);
#endif
  for (int byte = 0; byte < 4; byte++)
    sum += (Integers)(codes >> 8 * byte & 0xff) * (x.bytes << (24 - 8 * byte) >> 24);
  return sum;
#endif
}

// The entries of the format's table, plus its offset, at the places that the bytes say.
template <Layout L>
VectorBits look_up(VectorBits places) {
  alignas(64) static constexpr auto TABLE = [] {
    struct {
      uint8_t bytes[64];
    } table{};
    for (int i = 0; i < 64; i++) table.bytes[i] = uint8_t(L.at_place(i % 16));
    return table;
  }();
#if defined(__AVX512BW__)
  return (VectorBits)_mm512_shuffle_epi8(load_vector<__m512i>(TABLE.bytes), (__m512i)places);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return (VectorBits)_mm256_shuffle_epi8(load_vector<__m256i>(TABLE.bytes), (__m256i)places);
#elif defined(__aarch64__)
  return (VectorBits)vqtbl1q_u8(load_vector<uint8x16_t>(TABLE.bytes), (uint8x16_t)places);
#else
  typedef uint8_t Bytes __attribute__((vector_size(WIDTH * 4)));
  Bytes found = (Bytes)places;
  for (int i = 0; i < WIDTH * 4; i++) found[i] = TABLE.bytes[found[i]];
  return (VectorBits)found;
#endif
}

// Loads the same quads of the left and the right columns: `p` points to the quads of WIDTH columns.
template <Layout L>
void load_codes(const uint8_t* p, long low_bytes, int step, VectorBits& left, VectorBits& right) {
  const auto plane = [p](long at) { return load_vector<VectorBits>(p + at * PLANE); };
  if constexpr (L.low_bits == 8) {
    left = plane(2 * step);
    right = plane(2 * step + 1);
  } else if constexpr (L.low_bits == 4) {
    const VectorBits both = plane(step);
    left = both & 0x0f0f0f0fu;
    right = both >> 4 & 0x0f0f0f0fu;
  } else {
    const VectorBits both = plane(step / 2) >> step % 2 * 4;
    left = both & 0x03030303u;
    right = both >> 2 & 0x03030303u;
  }
  if constexpr (L.high_bits > 0) {
    constexpr int STEPS_EACH = 4 / L.high_bits;
    constexpr uint32_t MASK = (((1u << L.high_bits) - 1) << L.low_bits) * 0x01010101u;
    const VectorBits both = load_vector<VectorBits>(p + low_bytes + step / STEPS_EACH * PLANE);
    const auto moved = [&](int from) {  // bits from a place of a byte to above the low ones
      return (from >= L.low_bits ? both >> (from - L.low_bits) : both << (L.low_bits - from)) & MASK;
    };
    const int from = step % STEPS_EACH * 2 * L.high_bits;
    left |= moved(from);
    right |= moved(from + L.high_bits);
  }
  if constexpr (L.is_codebook) {
    left = look_up<L>(left);
    right = look_up<L>(right);
  }
}

inline Vector load_halves(const uint8_t* p) {
#if defined(__AVX512F__)
  return (Vector)_mm512_maskz_cvtph_ps(0xffff, load_vector<__m256i>(p));
#elif defined(__F16C__)
  return (Vector)_mm256_cvtph_ps(load_vector<__m128i>(p));
#else
  Vector v;
  for (int i = 0; i < WIDTH; i++) v[i] = half_to_float(half_at(p + 2 * i));
  return v;
#endif
}

inline Vector load_bfloat16s(const uint8_t* p) {
  typedef uint16_t Halves __attribute__((vector_size(WIDTH * 2)));
  return (Vector)(__builtin_convertvector(load_vector<Halves>(p), VectorBits) << 16);
}

// The scales and minimums of WIDTH columns, for one run of a group.
struct Scaling {
  Vector scale, min;
};
template <Format FORMAT>
Scaling load_scaling(const uint8_t* chunk, long group, int run, long column) {
  using P = Places<FORMAT>;
  constexpr Layout L = P::L;
  Scaling out{L.is_e2m1 ? load_bfloat16s(chunk + column * 2) : load_halves(chunk + column * 2), {}};
  if constexpr (L.has_zero)
    out.min = -out.scale * load_int8<Vector>(reinterpret_cast<const int8_t*>(chunk + P::MINS + column));
  else if constexpr (L.has_min)
    out.min = load_halves(chunk + P::MINS + column * 2);
  const uint8_t* at = chunk + P::SMALL_SCALES + group * P::INTEGERS + run * PANEL + column;
  if constexpr (L.has_nibbles()) {
    const Vector both = load_int8<Vector>(reinterpret_cast<const int8_t*>(at));
    const Integers bytes = __builtin_convertvector(both, Integers);
    out.scale *= __builtin_convertvector(bytes & 15, Vector);
    out.min *= -__builtin_convertvector(bytes >> 4 & 15, Vector);
  } else if constexpr (L.is_super) {
    out.scale *= load_int8<Vector>(reinterpret_cast<const int8_t*>(at));
    if constexpr (L.has_min)
      out.min *= -load_int8<Vector>(reinterpret_cast<const int8_t*>(at + P::SMALL_MINS - P::SMALL_SCALES));
  }
  return out;
}

// Adds to sums what a run of x and of weights makes: their products and a minimum for each number of x, both scaled.
template <int RUNS, bool HAS_MIN>
Vector add_run(Vector sum, Integers products, const QuantizedGroup& x, int run, const Scaling& scaling) {
  const Vector scaled = __builtin_convertvector(products, Vector) * x.scale;
  sum = multiply_add(scaled, scaling.scale, sum);
  if constexpr (HAS_MIN) {
    const float total = RUNS == 1 ? x.scaled_sum : x.scaled_half_sums[run];
    sum = multiply_add(total - Vector{}, scaling.min, sum);
  }
  return sum;
}

constexpr long BLOCK_AHEAD = 8 << 10;  // how far ahead one tile reads memory, in bytes

// The bytes that a tile prefetches: `step` for each of its groups, from `place` on, of a panel and then of the next one.
struct Ahead {
  const uint8_t *panel, *next;
  long panel_bytes, place, step;

  void prefetch() {
    const uint8_t* line = place < panel_bytes ? panel + place : next + (place - panel_bytes);
    for (long at = 0; at < step; at += 64) __builtin_prefetch(line + at, 0, 2);  // into L2: L1 is too small for so much
    place += step;
  }
};

}  // namespace oaiserve
