// Products with weights in the formats of GGUF files: y = x W^T + bias.
//
// x is quantized to eight bits, in groups of 32 numbers that share a scale. The products of a run of 16 or 32 weights
// with x are summed as integers, without error; then they are scaled and added in the order of k. A column is computed
// alike for any number of rows, so its sums are bitwise the same.
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
  const f32x16 halves[2] = {load(x), load(x + LANES)};
  const f32x16 zero = splat(0);
  const float most = max(max(max(halves[0], zero - halves[0]), max(halves[1], zero - halves[1])));
  // Numbers that are not finite make the scale NaN, and so all that is computed with it.
  out.scale = most / 127 + sum((halves[0] + halves[1]) * 0.0f);
  const float per_value = most > 0 ? 127 / most : 0;
  for (int half = 0; half < 2; half++) {
    const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding and subtracting it rounds to an integer
    const i32x16 values = __builtin_convertvector((halves[half] * per_value + magic) - magic, i32x16);
    int32_t total = 0;
    for (int i = 0; i < LANES; i++) {
      out.values[half * LANES + i] = int8_t(values[i]);
      total += values[i];
    }
    out.half_sums[half] = total;
    out.scaled_half_sums[half] = float(total) * out.scale;
  }
  out.sum = out.half_sums[0] + out.half_sums[1];
  out.scaled_sum = float(out.sum) * out.scale;
}

typedef int32_t Integers __attribute__((vector_size(WIDTH * 4)));

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

// The codebook, plus 128, at the places that the bytes say.
inline VectorBits look_up(VectorBits places) {
  alignas(64) static constexpr auto TABLE = [] {
    struct {
      uint8_t bytes[64];
    } table{};
    for (int i = 0; i < 64; i++) table.bytes[i] = uint8_t(CODEBOOK[i % 16] + 128);
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
    left = look_up(left);
    right = look_up(right);
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

// The scales and minimums of WIDTH columns, for one run of a group.
struct Scaling {
  Vector scale, min;
};
template <Format FORMAT>
Scaling load_scaling(const uint8_t* chunk, long group, int run, long column) {
  using P = Places<FORMAT>;
  constexpr Layout L = P::L;
  Scaling out{load_halves(chunk + column * 2), {}};
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

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int BLOCK_TILE_ROWS = 6;
#else
constexpr int BLOCK_TILE_ROWS = 2;
#endif
constexpr long BLOCK_AHEAD = 8 << 10;  // how far ahead memory is read, in bytes

// sums [ROWS, PANEL] = bias + x [ROWS, k] times a panel. What follows the panel in memory is prefetched.
template <Format FORMAT, int ROWS>
void block_tile(const uint8_t* panel, const QuantizedGroup* x, long x_stride, long k, const float* bias, float* sums,
                bool prefetches) {
  using P = Places<FORMAT>;
  constexpr Layout L = P::L;
  constexpr bool IS_SMALL = L.code_bits() < 8 && !L.is_codebook;
  for (long column = 0; column < LANES; column += WIDTH) {  // of the left ones, and so of the right ones
    Vector sum[ROWS][2];
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < 2; v++) sum[r][v] = load_vector<Vector>(bias + v * LANES + column);
    const uint8_t* chunk = panel;
    const QuantizedGroup* groups = x;
    for (long c = 0; c < k / L.chunk(); c++, chunk += P::CHUNK)
      for (long i = 0; i < P::GROUPS; i++, groups++) {
        const uint8_t* codes = chunk + P::codes(i) + column * 4;
        if (prefetches) {
          constexpr long SHARE = P::CHUNK / P::GROUPS;  // so that the groups of a chunk prefetch a chunk
          for (long at = 0; at < SHARE; at += 64) __builtin_prefetch(chunk + BLOCK_AHEAD + i * SHARE + at);
        }
        for (int run = 0; run < L.runs(); run++) {
          Integers dots[ROWS][2];
#pragma GCC unroll 6
          for (int r = 0; r < ROWS; r++) {
            const QuantizedGroup& group = groups[r * x_stride];
            const int32_t total = L.runs() == 1 ? group.sum : group.half_sums[run];
            dots[r][0] = dots[r][1] = -L.offset * total - Integers{};
          }
          for (int s = 0; s < STEPS / L.runs(); s++) {
            const int step = run * (STEPS / L.runs()) + s;
            VectorBits left, right;
            load_codes<L>(codes, P::LOW, step, left, right);
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; r++) {
              const QuadOfX quad = splat_quad(groups[r * x_stride].values + 4 * step);
              dots[r][0] = dot_quads<IS_SMALL>(dots[r][0], left, quad);
              dots[r][1] = dot_quads<IS_SMALL>(dots[r][1], right, quad);
            }
          }
          for (int v = 0; v < 2; v++) {
            const Scaling scaling = load_scaling<FORMAT>(chunk, i, run, v * LANES + column);
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; r++) {
              const QuantizedGroup& group = groups[r * x_stride];
              const Vector scaled = __builtin_convertvector(dots[r][v], Vector) * group.scale;
              sum[r][v] = multiply_add(scaled, scaling.scale, sum[r][v]);
              if constexpr (L.has_min) {
                const float total = L.runs() == 1 ? group.scaled_sum : group.scaled_half_sums[run];
                sum[r][v] = multiply_add(total - Vector{}, scaling.min, sum[r][v]);
              }
            }
          }
        }
      }
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < 2; v++) std::memcpy(sums + r * PANEL + v * LANES + column, &sum[r][v], sizeof(Vector));
  }
}

template <Format FORMAT, int... ROW>
auto block_tile_for(int rows, std::integer_sequence<int, ROW...>) {
  static constexpr decltype(&block_tile<FORMAT, 1>) TILES[] = {block_tile<FORMAT, ROW + 1>...};
  return TILES[rows - 1];
}

// Multiplies as multiply_panel of gemm.h does, in tiles of nearly the same height.
inline void multiply_panel(const BlockLinear& w, const QuantizedGroup* x, long x_stride, long rows, long panel,
                           float* sums, long) {
  const PanelBias bias(w.bias, w.n, panel);
  const BlockPanel& weights = w.panels[panel];
  const long tiles = (rows + BLOCK_TILE_ROWS - 1) / BLOCK_TILE_ROWS;
  for_format(weights.format, [&]<Format FORMAT>() {
    for (long t = 0, row = 0; t < tiles; t++) {
      const long height = rows / tiles + (t < rows % tiles);
      const auto tile = block_tile_for<FORMAT>(int(height), std::make_integer_sequence<int, BLOCK_TILE_ROWS>());
      tile(weights.data, x + row * x_stride, x_stride, w.k, bias.values, sums + row * PANEL, t == 0);
      row += height;
    }
  });
}

}  // namespace oaiserve
