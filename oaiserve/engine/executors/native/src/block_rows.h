// Rows of x as integers, for products with weights in quantized blocks.
//
// Where 32 neighbouring weights share a scale, 32 neighbouring numbers of x share one, too. They are a *group*.
//
// In some formats, 256 neighbouring weights share a float, and the scale of each run of them is an integer times this float.
// There, 256 numbers of x share a scale. They are a *super*. Each 32 of them may be finer by a power of two, because some
// models have a few very large numbers, which would leave no bits for the others. The sum of the 256 products, each times
// the integer scale of its run and shifted, is an exact integer.
//
// Where 128 neighbouring weights share a scale, 256 numbers of x share one, too, but have eleven bits. They are a *long*.
// Checkpoints with such weights are made for products with floats, and with eight bits, answers would be worse.
#pragma once

#include <bit>
#include <type_traits>

#include "block_formats.h"
#include "simd.h"

#if (defined(__AVX2__) && !defined(__AVX512F__)) || (defined(__AVX512BW__) && !defined(__AVX512VNNI__))
#define WITH_SHORT_SUMS  // see short_tiles.h
#endif
#if defined(WITH_AMX) && defined(__AMX_INT8__) && defined(__AVX512VNNI__)
#define WITH_INTEGER_TILES  // see block_tiles.h
#endif

namespace oaiserve {

// The forms of x that a matrix reads. A matrix whose panels have several formats may read several.
struct RowForms {
  bool groups = false, supers = false, longs = false;
  bool rests = false;  // Supers have rests where rows need them: see quantize_rests.
};

// 64 bytes of a row. A row of k numbers begins with supers and longs, if k is a multiple of 256. Groups follow. Forms that
// are not read have no values.
struct alignas(64) RowLine {
  char bytes[64];
};

// 32 numbers: value[i] * scale.
struct alignas(64) QuantizedGroup {
  float scale;
  int32_t sum;  // the sum of the values
  float scaled_sum;
  int32_t unused[5];
  int8_t values[BLOCK_GROUP];
};
static_assert(sizeof(QuantizedGroup) == sizeof(RowLine));

constexpr int MOST_SHIFT = 3;  // Sums of QuantizedSuper have no room for larger shifts.
constexpr int LEAST_FINER = 4;  // Shifting pays from this sum of shifts in 256 numbers on. AMX tiles can't shift.

// 256 numbers: value[i] * 2^shifts[i / 32] * scale.
struct alignas(64) QuantizedSuper {
  int8_t values[SUPER];
  int32_t shifts[SUPER / BLOCK_GROUP];
  int16_t sums[SUPER / 32], half_sums[SUPER / 16];  // sums of the shifted values, by runs of 32 and of 16
  float scale;
  bool is_shifted, has_rests;  // The first super of a row says whether any has rests.
#if defined(WITH_SHORT_SUMS)
  // For runs of 16, the negated sums of the values whose products are summed in one lane of sixteen bits.
  int16_t minus_pairs[SUPER / 16][2];
#elif defined(WITH_INTEGER_TILES)
  // Tiles multiply the sums of runs of 16 with minimums. Each is stored as two bfloat16, which together are exact. They fill
  // a cache line, because loading a tile whose rows cross lines takes twice as long.
  alignas(64) bf16 parts[SUPER / 16][2];
#endif
};

constexpr int HIGH_LEVEL = 8;  // the factor of a number of the high level

// 256 numbers in two levels: (high[i] * 8 + low[i]) * scale.
struct alignas(64) QuantizedLong {
  int8_t high[SUPER], low[SUPER];
  float scale;
  int32_t sums[SUPER / 128];  // sums of high * 8 + low, by runs of 128
  int32_t unused[13];
};
static_assert(sizeof(QuantizedLong) == 9 * sizeof(RowLine));

constexpr long SUPER_LINES = sizeof(QuantizedSuper) / sizeof(RowLine);
constexpr long LONG_LINES = sizeof(QuantizedLong) / sizeof(RowLine);
inline long lines_of_supers(long k) { return k % SUPER == 0 ? k / SUPER * SUPER_LINES : 0; }
inline long lines_of_longs(long k) { return k % SUPER == 0 ? k / SUPER * LONG_LINES : 0; }
// The rests of supers are supers, too. They take the place of longs, because no matrix reads both.
inline const RowLine* rests_in(const RowLine* row, long k) { return row + lines_of_supers(k); }
inline RowLine* rests_in(RowLine* row, long k) { return row + lines_of_supers(k); }
static_assert(SUPER_LINES <= LONG_LINES);
// The number of lines for a row of k numbers or fewer.
inline long most_lines(long k) { return (k + SUPER - 1) / SUPER * (SUPER_LINES + LONG_LINES) + k / BLOCK_GROUP; }

template <class Line>  // RowLine, or const RowLine
auto* supers_in(Line* row) {
  using Super = std::conditional_t<std::is_const_v<Line>, const QuantizedSuper, QuantizedSuper>;
  return reinterpret_cast<Super*>(row);
}
template <class Line>
auto* longs_in(Line* row, long k) {
  using Long = std::conditional_t<std::is_const_v<Line>, const QuantizedLong, QuantizedLong>;
  return reinterpret_cast<Long*>(row + lines_of_supers(k));
}
template <class Line>
auto* groups_in(Line* row, long k) {
  using Group = std::conditional_t<std::is_const_v<Line>, const QuantizedGroup, QuantizedGroup>;
  return reinterpret_cast<Group*>(row + lines_of_supers(k) + lines_of_longs(k));
}

// Rounds to the nearest integers.
inline f32x16 rounded(f32x16 x) { return (x + MAGIC) - MAGIC; }

// Writes 16 numbers times `per_value` as integers, and returns these. Their sum is exact, or NaN unless all are finite.
template <class T>
[[gnu::always_inline]] inline f32x16 quantize_lanes(const T* x, float per_value, int8_t* out) {
  const f32x16 with_magic = load(x) * per_value + MAGIC;
  store_last_bytes(with_magic, out);
  return with_magic - MAGIC;
}

// The largest magnitude, or NaN if there is one.
template <class T>
[[gnu::always_inline]] inline float largest(const T* x, long count) {
  u32x16 most{};  // Without their signs, floats are in the order of their bits.
  for (long i = 0; i < count; i += LANES) most = max(most, (u32x16)load(x + i) & 0x7fffffffu);
  return std::bit_cast<float>(max(most));
}

template <class T>
void quantize_group(const T* x, QuantizedGroup& out) {
  const float most = largest(x, BLOCK_GROUP), per_value = most > 0 ? 127 / most : 0;
  f32x16 totals = splat(0);
  for (long i = 0; i < BLOCK_GROUP; i += LANES) totals += quantize_lanes(x + i, per_value, out.values + i);
  const float total = sum(totals);
  // Numbers that are not finite make the total NaN, and with it the scale and all results.
  out.scale = most / 127 + total * 0.0f;
  out.sum = total == total ? int32_t(total) : 0;
  out.scaled_sum = total * out.scale;
}

#if defined(WITH_INTEGER_TILES)
// The rows of a matrix of 4 by 4 lanes, as its columns.
inline __m512i turned(__m512i lanes) {
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), lanes);
}

// Sums of neighbouring lanes: in each quarter two of `a`, and two of `b`.
inline __m512i sums_of_pairs(__m512i a, __m512i b) {
  return _mm512_madd_epi16(_mm512_packs_epi32(a, b), _mm512_set1_epi16(1));
}

template <class T>
void quantize_super(const T* x, QuantizedSuper& out) {
  const float most = largest(x, SUPER), per_value = most > 0 ? 127 / most : 0;
  __m512i of_four[4];
  for (int i = 0; i < 4; i++, x += 4 * LANES) {
    const auto values = [&](int j) {
      return _mm512_sub_epi32((__m512i)(load(x + j * LANES) * per_value + MAGIC), (__m512i)splat(MAGIC));
    };
    const __m512i first = _mm512_packs_epi32(values(0), values(1)), second = _mm512_packs_epi32(values(2), values(3));
    const __m512i bytes = turned(_mm512_packs_epi16(first, second));
    _mm512_storeu_si512(out.values + i * 4 * LANES, bytes);
    of_four[i] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), bytes);
  }
  const Integers sums =
      (Integers)turned(sums_of_pairs(sums_of_pairs(of_four[0], of_four[1]), sums_of_pairs(of_four[2], of_four[3])));
  const __m256i halves = _mm512_cvtepi32_epi16((__m512i)sums);
  std::memcpy(out.half_sums, &halves, sizeof(halves));
  const __m128i of_runs = _mm256_cvtepi32_epi16(_mm256_madd_epi16(halves, _mm256_set1_epi16(1)));
  std::memcpy(out.sums, &of_runs, sizeof(of_runs));
  // A sum is a multiple of 64, of which there are at most 32, and a rest of less than this.
  const Integers first = (sums + (sums >> 31 & 63)) & -64;
  const auto bits = [](Integers v) { return (VectorBits)convert<Vector>(v); };
  const VectorBits parts = bits(first) >> 16 | (bits(sums - first) & 0xffff0000u);
  std::memcpy((void*)out.parts, &parts, sizeof(parts));
  std::memset(out.shifts, 0, sizeof(out.shifts));
  out.is_shifted = false;
  out.scale = most / 127 + (most - most);  // NaN unless all numbers are finite, and with it all results
}
#else
template <class T>
void quantize_super(const T* x, QuantizedSuper& out) {
  constexpr long GROUPS = SUPER / BLOCK_GROUP;
  float most[GROUPS], most_of_all = 0;
  for (long i = 0; i < GROUPS; i++) most_of_all = std::max(most_of_all, most[i] = largest(x + i * BLOCK_GROUP, BLOCK_GROUP));
  int finer[GROUPS] = {}, finest = 0, total_finer = 0;
  for (long i = 0; i < GROUPS; i++) {
    for (int power = 1; power <= MOST_SHIFT; power++) finer[i] += most[i] * float(1 << power) <= most_of_all;
    finest = std::max(finest, finer[i]);
    total_finer += finer[i];
  }
  out.is_shifted = total_finer >= LEAST_FINER;
  if (!out.is_shifted) finest = 0;
  float whole = 0;
  for (long i = 0; i < SUPER / LANES; i++) {
    const long group = i / (BLOCK_GROUP / LANES);
    const int power = out.is_shifted ? finer[group] : 0, shift = out.shifts[group] = finest - power;
    const float per_value = most_of_all > 0 ? float(127 << power) / most_of_all : 0;
    float total = sum(quantize_lanes(x + i * LANES, per_value, out.values + i * LANES));
    whole += total;
    if (total != total) total = 0;
    out.half_sums[i] = int16_t(int(total) << shift);
#if defined(WITH_SHORT_SUMS)
    int pairs[2] = {};
    for (long j = 0; j < LANES; j++) pairs[j / 2 % 2] -= out.values[i * LANES + j];
    for (int pair = 0; pair < 2; pair++) out.minus_pairs[i][pair] = int16_t(pairs[pair]);
#endif
  }
  for (long i = 0; i < SUPER / 32; i++) out.sums[i] = int16_t(out.half_sums[2 * i] + out.half_sums[2 * i + 1]);
  out.scale = most_of_all / float(127 << finest) + whole * 0.0f;
}
#endif

template <class T>
void quantize_long(const T* x, QuantizedLong& out) {
  constexpr float MOST = 127 * HIGH_LEVEL + HIGH_LEVEL / 2 - 1;
  const float most = largest(x, SUPER), per_value = most > 0 ? MOST / most : 0;
  float whole = 0;
  for (long run = 0; run < SUPER / 128; run++) {
    float total = 0;  // exact: it has at most 17 bits
    for (long i = run * 128; i < (run + 1) * 128; i += LANES) {
      const f32x16 values = rounded(load(x + i) * per_value);
      const f32x16 high = rounded(values * (1.0f / HIGH_LEVEL)), low = values - high * float(HIGH_LEVEL);
      store(out.high + i, high);
      store(out.low + i, low);
      total += sum(values);
    }
    whole += total;
    out.sums[run] = total == total ? int32_t(total) : 0;
  }
  out.scale = most / MOST + whole * 0.0f;
}

// If a number exceeds the mean of its 256 numbers by this factor, too few bits are left for the others. Real models have
// such numbers in the MLP inputs of their first token.
constexpr float FAR = 64;

// Rounds the rests, which are the difference between a row and its supers, if one of the row's numbers is far from the
// others. The products of the rests are added to those of the row, which then has fifteen bits.
template <class T>
void quantize_rests(const T* x, long k, RowLine* out) {
  bool& has_rests = supers_in(out)->has_rests;
  for (long i = 0; i < k && !has_rests; i += SUPER) {
    f32x16 total = splat(0);
    for (long j = i; j < i + SUPER; j += LANES) total += max(load(x + j), splat(0) - load(x + j));
    has_rests = largest(x + i, SUPER) * SUPER > FAR * sum(total);
  }
  for (long i = 0; i < k && has_rests; i += SUPER) {
    const QuantizedSuper& super = supers_in(out)[i / SUPER];
    alignas(64) float rest[SUPER];
    for (long j = 0; j < SUPER; j++)
      rest[j] = to_float(x[i + j]) - float(super.values[j] * (1 << super.shifts[j / BLOCK_GROUP])) * super.scale;
    quantize_super(rest, supers_in(rests_in(out, k))[i / SUPER]);
  }
}

// Writes x [count] into out, a row of k numbers in the forms that are read, from number `first` on. `first` and `count` are
// multiples of the numbers that share a scale. Parts are written in order, and only whole rows have rests.
template <class T>
void quantize_part(const T* x, long first, long count, long k, RowForms forms, RowLine* out) {
  for (long i = 0; forms.supers && i < count; i += SUPER) quantize_super(x + i, supers_in(out)[(first + i) / SUPER]);
  if (forms.supers && first == 0) supers_in(out)->has_rests = false;
  if (forms.supers && forms.rests && count == k) quantize_rests(x, k, out);
  for (long i = 0; forms.longs && i < count; i += SUPER) quantize_long(x + i, longs_in(out, k)[(first + i) / SUPER]);
  for (long i = 0; forms.groups && i < count; i += BLOCK_GROUP)
    quantize_group(x + i, groups_in(out, k)[(first + i) / BLOCK_GROUP]);
}

inline void copy(const RowLine* row, long k, RowForms forms, RowLine* out) {
  for (long i = 0; forms.supers && i < k / SUPER; i++) supers_in(out)[i] = supers_in(row)[i];
  if (forms.supers && supers_in(row)->has_rests)
    std::memcpy((void*)rests_in(out, k), rests_in(row, k), size_t(lines_of_supers(k)) * sizeof(RowLine));
  for (long i = 0; forms.longs && i < k / SUPER; i++) longs_in(out, k)[i] = longs_in(row, k)[i];
  for (long i = 0; forms.groups && i < k / BLOCK_GROUP; i++) groups_in(out, k)[i] = groups_in(row, k)[i];
}

}  // namespace oaiserve
