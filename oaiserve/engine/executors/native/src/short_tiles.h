// Products with weights whose scales are integers times a float of 256 neighbours, with AVX2, and with AVX-512 where it
// has no dot products of bytes.
//
// There, an instruction multiplies unsigned with signed bytes and adds two products, in sixteen bits. Such sums have room
// for those of a run, or of half of one. Then one more multiplies them with the run's scale, and widens them. That takes
// two instructions for 32 products, and another six or so for each run, where block_product.h takes three and ten. All
// sums are exact, so a row gets the same numbers from both.
//
// Several tiles of rows have the codes of a chunk from memory, where they are unpacked once for all of them.
#pragma once

#include <bit>

#include "block_operands.h"

#if defined(WITH_SHORT_SUMS)

namespace oaiserve {

constexpr int SHORT_TILE_ROWS = 4;

typedef int16_t ShortSums __attribute__((vector_size(WIDTH * 4)));

// Codes times the bytes of x, as sums of two neighbours in sixteen bits.
template <bool IS_SMALL>
[[gnu::always_inline]] inline ShortSums multiply_bytes(VectorBits codes, Integers x) {
#if defined(__AVX512BW__)
  if constexpr (IS_SMALL) return (ShortSums)_mm512_maddubs_epi16((__m512i)codes, (__m512i)x);
  const __mmask64 is_negative = _mm512_movepi8_mask((__m512i)codes);
  const __m512i with_sign = _mm512_mask_sub_epi8((__m512i)x, is_negative, _mm512_setzero_si512(), (__m512i)x);
  return (ShortSums)_mm512_maddubs_epi16(_mm512_abs_epi8((__m512i)codes), with_sign);
#else
  if constexpr (IS_SMALL) return (ShortSums)_mm256_maddubs_epi16((__m256i)codes, (__m256i)x);
  return (ShortSums)_mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)codes), _mm256_sign_epi8((__m256i)x, (__m256i)codes));
#endif
}

// How many steps along k a sum in sixteen bits has room for, if x is at most MOST_X. While it is summed it may overflow,
// and back. Codes of eight bits have a sign, which x gets in place of them.
template <Layout L, int MOST_X>
constexpr int short_steps() {
  constexpr int MOST_CODE = !L.is_small() ? 128 : L.is_e2m1 ? 2 * L.offset : (1 << L.code_bits()) - 1;
  static_assert(2 * MOST_X * MOST_CODE < 32768);  // what the instruction itself adds
  constexpr int MOST = L.is_super && L.is_small() ? std::max(L.offset, MOST_CODE - L.offset) : MOST_CODE;
  const int steps = std::min(32767 / (2 * MOST_X * MOST), STEPS / std::max(L.runs(), 1));
  return int(std::bit_floor(unsigned(steps)));
}

// Loads what short sums multiply.
template <Layout L>
[[gnu::always_inline]] inline void load_short(const uint8_t* p, long low_bytes, int step, VectorBits* codes) {
  load_codes<L>(p, low_bytes, step, codes[0], codes[1]);
  if constexpr (!L.is_small())
    for (int v = 0; v < 2; v++) codes[v] ^= in_each_byte(128);
}

// sums [ROWS, 2] += a number of steps of codes times x, in sixteen bits. A single step replaces them.
template <Layout L, int COUNT, int ROWS, class Load, class XOf>
[[gnu::always_inline]] inline void add_short(VectorBits (&sums)[ROWS][2], int first, Load&& load, XOf&& x_of) {
#pragma GCC unroll 8
  for (int step = first; step < first + COUNT; step++) {
    VectorBits codes[2];
    load(step, codes);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
      int32_t quad;
      std::memcpy(&quad, x_of(r) + 4 * step, 4);
      for (int v = 0; v < 2; v++) {
        const ShortSums pairs = multiply_bytes<L.is_small()>(codes[v], quad - Integers{});
        if constexpr (COUNT == 1)
          sums[r][v] = (VectorBits)pairs;
        else  // GCC would sum in another order, for which there are too few registers
          asm("vpaddw %1, %0, %0" : "+v"(sums[r][v]) : "v"(pairs));
      }
    }
  }
}

// dots [ROWS, 2] += the codes of a group times x, times `factor`. Calls before(count) before `count` steps.
template <Layout L, int MOST_X, int ROWS, class XOf, class Before>
[[gnu::always_inline]] inline void add_short_dots(Integers (&dots)[ROWS][2], int factor, const uint8_t* codes,
                                                  long low_bytes, XOf&& x_of, Before&& before) {
  constexpr int COUNT = short_steps<L, MOST_X>();
  const Packs<int8_t> factors{(factor | factor << 16) - Integers{}};
  for_steps<L, STEPS / COUNT>([&](int part) __attribute__((always_inline)) {
    VectorBits sums[ROWS][2] = {};
    before(COUNT);
    const auto load = [&](int step, VectorBits* to) __attribute__((always_inline)) {
      load_short<L>(codes, low_bytes, step, to);
    };
    add_short<L, COUNT>(sums, part * COUNT, load, x_of);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < 2; v++) dots[r][v] = dot(dots[r][v], Packs<int8_t>{(Integers)sums[r][v]}, factors);
  });
}

// What all tiles read of a pair of columns: WIDTH on the left of a chunk and as many on its right.
template <Format FORMAT>
struct SuperColumns {
  using P = Places<FORMAT>;
  static constexpr Layout L = P::L;
  static constexpr int RUNS = int(P::GROUPS) * L.runs(), ALL_STEPS = int(P::GROUPS) * STEPS;
  Packs<int8_t> scales[RUNS][2];
  Packs<int8_t> mins[RUNS / 2][2];
  Scaling scaling[2];
  const uint8_t* packed;
  VectorBits codes[ALL_STEPS][2];  // if several tiles read them

  SuperColumns(const uint8_t* chunk, long column) : packed(chunk + column * 4) {
    const auto in_pairs = [](Integers first, Integers second) {
      return Packs<int8_t>{(first & 0xffff) | second << 16};
    };
    for (int v = 0; v < 2; v++) {
      const long at = v * LANES + column;
      scaling[v] = load_scaling<FORMAT>(chunk, at);
      for (int run = 0; run < RUNS; run++) {
        const Integers scale = load_small_scales<FORMAT>(chunk, run / L.runs(), run % L.runs(), at);
        scales[run][v] = in_pairs(scale, scale);
      }
      const auto min = [&](int run) { return load_small_mins<FORMAT>(chunk, run / L.runs(), run % L.runs(), at); };
      if constexpr (L.has_min)
        for (int i = 0; i < RUNS / 2; i++) mins[i][v] = in_pairs(min(2 * i), min(2 * i + 1));
    }
  }
  [[gnu::always_inline]] void load(int group, int step, VectorBits* to) const {
    load_short<L>(packed + P::codes(group), P::LOW, step, to);
  }
  void unpack() {
    for (int group = 0; group < P::GROUPS; group++)
#pragma GCC unroll 8
      for (int step = 0; step < STEPS; step++) load(group, step, codes[group * STEPS + step]);
  }
};

// sums [ROWS, 2 * WIDTH] += x times the columns of a chunk; the right ones are LANES behind the left ones. Calls
// before_steps(count) before `count` steps.
template <Format FORMAT, bool IS_UNPACKED, int ROWS, class BeforeSteps>
void short_tile(const SuperColumns<FORMAT>& columns, const QuantizedSuper* x, long x_bytes, float* sums,
                BeforeSteps&& before_steps) {
  using Columns = SuperColumns<FORMAT>;
  constexpr Layout L = Columns::L;
  constexpr int RUN_STEPS = STEPS / L.runs(), SUM_STEPS = short_steps<L, 127>();
  const auto row = [&](int r) -> const QuantizedSuper& {
    return *reinterpret_cast<const QuantizedSuper*>(reinterpret_cast<const char*>(x) + r * x_bytes);
  };
  // Where few rows wait for memory, looking for shifts takes longer than shifting.
  bool is_shifted = ROWS < 3;
  for (int r = 0; r < ROWS; r++) is_shifted |= row(r).is_shifted;
  Integers totals[ROWS][2] = {};
  for (int group = 0; group < SUPER / BLOCK_GROUP; group++) {
    Integers of_group[ROWS][2] = {};
#pragma GCC unroll 4
    for (int first = 0; first < STEPS; first += SUM_STEPS) {
      const int run = group * L.runs() + first / RUN_STEPS;
      VectorBits dots[ROWS][2];
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++) {
        dots[r][0] = VectorBits{};
        if constexpr (summed_offset(L) != 0) {
          static_assert(SUM_STEPS == 4 && (L.offset & (L.offset - 1)) == 0);  // so a sum is of 16 values
          int32_t pairs;
          std::memcpy(&pairs, row(r).minus_pairs[run], 4);
          dots[r][0] = (VectorBits)((ShortSums)(pairs - Integers{}) << std::countr_zero(unsigned(L.offset)));
        }
        dots[r][1] = dots[r][0];
      }
      const auto load = [&](int step, VectorBits* to) __attribute__((always_inline)) {
        if (step % 2 == 0) before_steps(2);
        if constexpr (IS_UNPACKED)
          for (int v = 0; v < 2; v++) to[v] = columns.codes[group * STEPS + step][v];
        else
          columns.load(group, step, to);
      };
      add_short<L, SUM_STEPS>(dots, first, load, [&](int r) { return row(r).values + group * BLOCK_GROUP; });
      for (int v = 0; v < 2; v++)
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++)
          of_group[r][v] = dot(of_group[r][v], Packs<int8_t>{(Integers)dots[r][v]}, columns.scales[run][v]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < 2; v++)
        totals[r][v] += is_shifted ? of_group[r][v] << row(r).shifts[group] : of_group[r][v];
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < 2; v++) {
      Integers mins{};
      if constexpr (L.has_min) {
        const int16_t* const sums_of_x = L.runs() == 1 ? row(r).sums : row(r).half_sums;
        for (int i = 0; i < Columns::RUNS / 2; i++)
          mins = dot(mins, Packs<int8_t>::splat(sums_of_x + 2 * i), columns.mins[i][v]);
      }
      float* const to = sums + r * PANEL + v * LANES;
      const Vector sum = add_super<L.has_min>(load_vector<Vector>(to), totals[r][v],
                                              __builtin_convertvector(mins, Vector), row(r).scale, columns.scaling[v]);
      std::memcpy(to, &sum, sizeof(sum));
    }
}

// sums [rows, PANEL] = bias + x [rows, k] times a panel.
template <Format FORMAT>
void multiply_in_short_tiles(const uint8_t* panel, const RowLine* x, long x_stride, long rows, long k,
                             const float* bias, float* sums, const uint8_t* next) {
  using P = Places<FORMAT>;
  const long tiles = (rows + SHORT_TILE_ROWS - 1) / SHORT_TILE_ROWS, x_bytes = x_stride * long(sizeof(RowLine));
  Ahead ahead = Ahead::of(panel, next, block_panel_bytes(FORMAT, k), k / 4 * tiles, tiles == 1);
  start_sums(sums, rows, bias);
  for (long c = 0; c < k / SUPER; c++)
    for (long column = 0; column < LANES; column += WIDTH) {
      SuperColumns<FORMAT> columns(panel + c * P::CHUNK, column);
      if (tiles > 1) columns.unpack();
      const auto before_steps = [&](int steps) {
        if (column == 0) ahead.prefetch(steps);
      };
      for (long t = 0, row = 0; t < tiles; t++) {
        const long height = rows / tiles + (t < rows % tiles);
        const auto multiply = [&]<int... LESS>(std::integer_sequence<int, LESS...>) {
          const auto of_height = [&]<int ROWS>(std::integral_constant<int, ROWS>) {
            const auto tile = tiles > 1 ? short_tile<FORMAT, true, ROWS, decltype(before_steps)&>
                                        : short_tile<FORMAT, false, ROWS, decltype(before_steps)&>;
            tile(columns, supers_in(x + row * x_stride) + c, x_bytes, sums + row * PANEL + column, before_steps);
          };
          ((height == LESS + 1 && (of_height(std::integral_constant<int, LESS + 1>()), true)) || ...);
        };
        multiply(std::make_integer_sequence<int, SHORT_TILE_ROWS>());
        row += height;
      }
    }
}

}  // namespace oaiserve

#endif
