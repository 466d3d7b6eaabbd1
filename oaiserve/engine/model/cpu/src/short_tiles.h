// Products with weights whose scales are integers times a float of 256 neighbours, with AVX2.
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

// How many steps along k a sum in sixteen bits has room for. While they are summed they may overflow, and back.
template <Layout L>
constexpr int short_steps() {
  constexpr int MOST_CODE = (1 << L.code_bits()) - 1, MOST = std::max(L.offset, MOST_CODE - L.offset);
  static_assert(2 * 127 * MOST_CODE < 32768);  // what the instruction itself adds
  return std::min(32767 / (2 * 127 * MOST), STEPS / L.runs());
}

// What tiles share of WIDTH left and as many right columns of a chunk.
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
  [[gnu::always_inline]] void load(int group, int step, VectorBits& left, VectorBits& right) const {
    load_codes<L>(packed + P::codes(group), P::LOW, step, left, right);
  }
  void unpack() {
    for (int group = 0; group < P::GROUPS; group++)
#pragma GCC unroll 8
      for (int step = 0; step < STEPS; step++) {
        VectorBits* const to = codes[group * STEPS + step];
        load(group, step, to[0], to[1]);
      }
  }
};

// sums [ROWS, 2 * WIDTH] += x times the columns of a chunk; the right ones are LANES behind the left ones. Calls
// before_steps(count) before so many steps.
template <Format FORMAT, bool IS_UNPACKED, int ROWS, class BeforeSteps>
void short_tile(const SuperColumns<FORMAT>& columns, const QuantizedSuper* x, long x_bytes, float* sums,
                BeforeSteps&& before_steps) {
  using Columns = SuperColumns<FORMAT>;
  constexpr Layout L = Columns::L;
  constexpr int RUN_STEPS = STEPS / L.runs(), SUM_STEPS = short_steps<L>();
  const auto row = [&](int r) -> const QuantizedSuper& {
    return *reinterpret_cast<const QuantizedSuper*>(reinterpret_cast<const char*>(x) + r * x_bytes);
  };
  Integers totals[ROWS][2] = {};
  for (int group = 0; group < SUPER / BLOCK_GROUP; group++)
#pragma GCC unroll 4
    for (int first = 0; first < STEPS; first += SUM_STEPS) {
      const int run = group * L.runs() + first / RUN_STEPS;
      VectorBits dots[ROWS][2];
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++) {
        dots[r][0] = VectorBits{};
        if constexpr (L.offset != 0) {
          static_assert(SUM_STEPS == 4 && (L.offset & (L.offset - 1)) == 0);  // so a sum is of 16 values
          int32_t pairs;
          std::memcpy(&pairs, row(r).minus_pairs[run], 4);
          dots[r][0] = (VectorBits)_mm256_slli_epi16((__m256i)(pairs - Integers{}), std::countr_zero(unsigned(L.offset)));
        }
        dots[r][1] = dots[r][0];
      }
#pragma GCC unroll 8
      for (int step = first; step < first + SUM_STEPS; step++) {
        if (step % 2 == 0) before_steps(2);
        VectorBits codes[2];
        if constexpr (IS_UNPACKED)
          for (int v = 0; v < 2; v++) codes[v] = columns.codes[group * STEPS + step][v];
        else
          columns.load(group, step, codes[0], codes[1]);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
          int32_t quad;
          std::memcpy(&quad, row(r).values + group * BLOCK_GROUP + 4 * step, 4);
          const __m256i bytes = _mm256_set1_epi32(quad);
          for (int v = 0; v < 2; v++)  // GCC would sum in another order, for which there are too few registers
            asm("vpaddw %1, %0, %0" : "+x"(dots[r][v]) : "x"(_mm256_maddubs_epi16((__m256i)codes[v], bytes)));
        }
      }
      for (int v = 0; v < 2; v++)
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++)
          totals[r][v] = dot(totals[r][v], Packs<int8_t>{(Integers)dots[r][v]}, columns.scales[run][v]);
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
  for (long r = 0; r < rows; r++) std::memcpy(sums + r * PANEL, bias, PANEL * sizeof(float));
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
