// Products of several rows with weights in the formats of GGUF files, with the matrix instruction of aarch64 (i8mm).
//
// It multiplies two rows with two columns, eight numbers each, and adds the four sums, which share a vector: both columns
// of the first row, then both of the second. So weights are unpacked in another order, once for all rows: eight
// neighbours along k of two columns share a vector, and these eight are an *octet*. So are those of two rows of x.
//
// All sums are exact, and they are scaled and added as in block_product.h, so a row gets the same numbers from both.
#pragma once

#include "strip_tiles.h"

#if defined(__ARM_FEATURE_MATMUL_INT8)
#define WITH_MATRIX_TILES

namespace oaiserve {

constexpr long LEAST_MATRIX_ROWS = 2;
constexpr int MATRIX_PAIRS = 2;  // pairs of rows of a tile
constexpr int OCTETS = int(BLOCK_GROUP) / 8;  // of a group
constexpr int QUARTER_PAIRS = 4;  // pairs of columns of a tile: four columns on the left, then four on the right
constexpr int PANEL_QUARTERS = PANEL / (2 * QUARTER_PAIRS);
constexpr long MATRIX_GROUPS = SUPER / BLOCK_GROUP;  // groups that are unpacked at once

using Octets = int8x16_t;  // of two columns, or of two rows
inline Integers multiply_octets(Integers sums, Octets rows, Octets columns) {
  return (Integers)vmmlaq_s32((int32x4_t)sums, rows, columns);
}

// A number of each of two rows, where the sums of their products are.
template <class V, class E>
V of_rows(E first, E second) {
  return V{first, first, second, second};
}

// Numbers of four columns on the left and four on the right, where the sums of their products are.
template <class V>
struct OfColumns {
  V pairs[QUARTER_PAIRS];

  void set(V left, V right) {
    interleave_halves(left, left, pairs[0], pairs[1]);
    interleave_halves(right, right, pairs[2], pairs[3]);
  }
};

// Unpacked weights of 256 numbers along k. What a format does not have is not set.
template <Format FORMAT>
struct alignas(64) MatrixChunk {
  using P = Places<FORMAT>;
  static constexpr Layout L = P::L;
  static constexpr int RUNS = L.is_super ? L.runs() : 1;
  static constexpr bool IS_GROUPS = !L.is_super && !L.is_long();
  static constexpr int SCALES = L.is_long() ? int(L.scales()) : int(MATRIX_GROUPS);
  static constexpr int MIN_OCTETS = L.is_super && L.has_min ? RUNS : 0;

  Octets codes[PANEL_QUARTERS][MATRIX_GROUPS][OCTETS][QUARTER_PAIRS];
  OfColumns<Integers> integers[PANEL_QUARTERS][SCALES][RUNS];  // scales of runs, or zeros
  OfColumns<Vector> scales[PANEL_QUARTERS][IS_GROUPS ? MATRIX_GROUPS : 1], mins[PANEL_QUARTERS][IS_GROUPS ? MATRIX_GROUPS : 1];
  Octets small_mins[PANEL_QUARTERS][MIN_OCTETS + 1][QUARTER_PAIRS];  // minimums of eight runs

  // Unpacks group i of a chunk, which becomes group `to`.
  void unpack(const uint8_t* chunk, long i, long to) {
    for (int quarter = 0; quarter < PANEL_QUARTERS; quarter++) {
      const long column = quarter * WIDTH;
      const uint8_t* const from = chunk + P::codes(i) + column * 4;
#pragma GCC unroll 4
      for (int octet = 0; octet < OCTETS; octet++) {
        VectorBits first[2], second[2];
        load_codes<L>(from, P::LOW, 2 * octet, first[0], first[1]);
        load_codes<L>(from, P::LOW, 2 * octet + 1, second[0], second[1]);
        for (int half = 0; half < 2; half++) {
          Octets* const pairs = codes[quarter][to][octet] + 2 * half;
          pairs[0] = (Octets)vzip1q_u32((uint32x4_t)first[half], (uint32x4_t)second[half]) - int8_t(summed_offset(L));
          pairs[1] = (Octets)vzip2q_u32((uint32x4_t)first[half], (uint32x4_t)second[half]) - int8_t(summed_offset(L));
        }
      }
      if constexpr (L.is_super)
        for (int run = 0; run < RUNS; run++)
          integers[quarter][to][run].set(load_small_scales<FORMAT>(chunk, i, run, column),
                                         load_small_scales<FORMAT>(chunk, i, run, LANES + column));
      if constexpr (IS_GROUPS) {
        const Scaling left = load_scaling<FORMAT>(chunk, column), right = load_scaling<FORMAT>(chunk, LANES + column);
        scales[quarter][to].set(left.scale, right.scale);
        if constexpr (L.has_min) mins[quarter][to].set(left.min, right.min);
      }
    }
  }

  // Unpacks what all groups of a chunk have together.
  void unpack_rest(const uint8_t* chunk) {
    if constexpr (L.is_long())
      for (int quarter = 0; quarter < PANEL_QUARTERS; quarter++)
        for (int scale = 0; scale < SCALES; scale++) {
          const auto load = [&](long column) {
            return load_integers(chunk + P::MINS + scale * PANEL + quarter * WIDTH + column);
          };
          integers[quarter][scale][0].set(load(0), load(LANES));
        }
    for (int part = 0; part < MIN_OCTETS; part++)
      for (int half = 0; half < 2; half++) {
        uint8x16_t runs[8], turned[8];  // 16 columns of each run; in the end, eight runs of two columns
        for (int i = 0; i < 8; i++) {
          const int run = part * 8 + i;
          const long at = run / RUNS * P::INTEGERS + run % RUNS * PANEL + half * LANES;
          if constexpr (L.has_nibbles())
            runs[i] = load_vector<uint8x16_t>(chunk + P::SMALL_SCALES + at) >> 4;
          else
            runs[i] = load_vector<uint8x16_t>(chunk + P::SMALL_MINS + at);
        }
        for (int step = 0; step < 3; step++) {  // Each moves a bit of the run's number into the place in a vector.
          for (int i = 0; i < 4; i++) {
            turned[2 * i] = vzip1q_u8(runs[i], runs[i + 4]);
            turned[2 * i + 1] = vzip2q_u8(runs[i], runs[i + 4]);
          }
          std::memcpy(runs, turned, sizeof(runs));
        }
        for (int pair = 0; pair < 8; pair++)
          small_mins[pair / 2][part][half * 2 + pair % 2] = (Octets)runs[pair];
      }
  }
};

// Up to 2 * PAIRS rows of x, over 256 numbers. A last row without a partner is its own.
template <Format FORMAT, int PAIRS>
struct MatrixRows {
  using Chunk = MatrixChunk<FORMAT>;
  static constexpr Layout L = Chunk::L;
  static constexpr int LEVELS = L.is_long() ? 2 : 1;
  using X = std::conditional_t<L.is_super, QuantizedSuper, std::conditional_t<L.is_long(), QuantizedLong, QuantizedGroup>>;

  const X* rows[2 * PAIRS];  // of this chunk
  long groups;               // groups of this chunk
  bool is_shifted;
  Octets values[LEVELS][MATRIX_GROUPS][OCTETS][PAIRS];
  Integers shifts[MATRIX_GROUPS][PAIRS];
  struct {
    Vector scale, scaled_sum;
  } scales[MATRIX_GROUPS][PAIRS];  // of groups
  Octets sums[2][Chunk::MIN_OCTETS + 1][PAIRS];  // low and high bytes of the sums of eight runs

  void load(const X* first, long x_bytes, long count, long groups_of_chunk) {
    for (long r = 0; r < 2 * PAIRS; r++)
      rows[r] = reinterpret_cast<const X*>(reinterpret_cast<const char*>(first) + std::min(r, count - 1) * x_bytes);
    groups = groups_of_chunk;
    is_shifted = false;
    for (int pair = 0; pair < PAIRS; pair++) {
      const X &a = *rows[2 * pair], &b = *rows[2 * pair + 1];
      if constexpr (L.is_super) {
        interleave(a.values, b.values, MATRIX_GROUPS, values[0], pair);
        is_shifted |= a.is_shifted | b.is_shifted;
        if (a.is_shifted | b.is_shifted)
          for (long i = 0; i < groups; i++) shifts[i][pair] = of_rows<Integers>(a.shifts[i], b.shifts[i]);
        else
          for (long i = 0; i < groups; i++) shifts[i][pair] = Integers{};
        for (int part = 0; part < Chunk::MIN_OCTETS; part++) {
          const int16x8_t of_a = load_vector<int16x8_t>((Chunk::RUNS == 1 ? a.sums : a.half_sums) + part * 8);
          const int16x8_t of_b = load_vector<int16x8_t>((Chunk::RUNS == 1 ? b.sums : b.half_sums) + part * 8);
          sums[0][part][pair] = vcombine_s8(vmovn_s16(of_a), vmovn_s16(of_b));
          sums[1][part][pair] = vcombine_s8(vrshrn_n_s16(of_a, 8), vrshrn_n_s16(of_b, 8));
        }
      } else if constexpr (L.is_long()) {
        interleave(a.high, b.high, MATRIX_GROUPS, values[0], pair);
        interleave(a.low, b.low, MATRIX_GROUPS, values[1], pair);
      } else {
        for (long i = 0; i < groups; i++) {
          interleave((&a)[i].values, (&b)[i].values, 1, values[0] + i, pair);
          scales[i][pair].scale = of_rows<Vector>((&a)[i].scale, (&b)[i].scale);
          if constexpr (L.has_min) scales[i][pair].scaled_sum = of_rows<Vector>((&a)[i].scaled_sum, (&b)[i].scaled_sum);
        }
      }
    }
  }

 private:
  static void interleave(const int8_t* a, const int8_t* b, long count, Octets (*out)[OCTETS][PAIRS], int pair) {
    for (long i = 0; i < count; i++)
      for (int octet = 0; octet < OCTETS; octet += 2) {
        const long at = i * BLOCK_GROUP + octet * 8;
        interleave_halves(load_vector<Octets>(a + at), load_vector<Octets>(b + at), out[i][octet][pair],
                          out[i][octet + 1][pair]);
      }
  }
};

// sums [PAIRS, 4] += some octets of rows times as many of a quarter of the columns.
template <int COUNT, int PAIRS>
[[gnu::always_inline]] inline void add_octets(Integers (&sums)[PAIRS][QUARTER_PAIRS], const Octets (*rows)[PAIRS],
                                              const Octets (*columns)[QUARTER_PAIRS]) {
#pragma GCC unroll 4
  for (int octet = 0; octet < COUNT; octet++)
#pragma GCC unroll 2
    for (int pair = 0; pair < PAIRS; pair++)
#pragma GCC unroll 4
      for (int c = 0; c < QUARTER_PAIRS; c++)
        sums[pair][c] = multiply_octets(sums[pair][c], rows[octet][pair], columns[octet][c]);
}

// Calls body(row, at, sums...) for each row of a tile and four columns from `at` on, with their sums in order.
template <int PAIRS, class Body, class... V>
[[gnu::always_inline]] inline void for_rows(long rows, long column, Body&& body, const V (&... sums)[PAIRS][QUARTER_PAIRS]) {
#pragma GCC unroll 2
  for (int pair = 0; pair < PAIRS; pair++)
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      const auto of_row = [&](const auto& of, bool is_second) {
        std::remove_cvref_t<decltype(of[0][0])> first, second;
        interleave_halves(of[pair][2 * half], of[pair][2 * half + 1], first, second);
        return is_second ? second : first;
      };
      body(2 * pair, half * LANES + column, of_row(sums, false)...);
      if (2 * pair + 1 < rows) body(2 * pair + 1, half * LANES + column, of_row(sums, true)...);
    }
}

// sums [rows, PANEL] += x times a chunk.
template <Format FORMAT, int PAIRS, bool IS_SHIFTED>
void multiply_matrices(const uint8_t* chunk, const MatrixChunk<FORMAT>& weights, const MatrixRows<FORMAT, PAIRS>& x,
                       long rows, float* sums) {
  using Chunk = MatrixChunk<FORMAT>;
  using Sums = Integers[PAIRS][QUARTER_PAIRS];
  constexpr Layout L = Chunk::L;
  constexpr int RUNS = Chunk::RUNS, RUN_OCTETS = OCTETS / RUNS;
  const auto for_sums = [](auto&& body) __attribute__((always_inline)) {
#pragma GCC unroll 2
    for (int pair = 0; pair < PAIRS; pair++)
#pragma GCC unroll 4
      for (int c = 0; c < QUARTER_PAIRS; c++) body(pair, c);
  };
  for (int quarter = 0; quarter < PANEL_QUARTERS; quarter++) {
    const long column = quarter * WIDTH;
    const auto& codes = weights.codes[quarter];
    const auto sum_at = [&](int row, long at) { return sums + row * PANEL + at; };
    if constexpr (L.is_super) {
      Sums totals = {};
      for (int group = 0; group < MATRIX_GROUPS; group++)
#pragma GCC unroll 2
        for (int run = 0; run < RUNS; run++) {
          Sums dots = {};
          add_octets<RUN_OCTETS>(dots, x.values[0][group] + run * RUN_OCTETS, codes[group] + run * RUN_OCTETS);
          const auto& scales = weights.integers[quarter][group][run].pairs;
          for_sums([&](int pair, int c) __attribute__((always_inline)) {
            if constexpr (IS_SHIFTED)
              totals[pair][c] += dots[pair][c] * scales[c] << x.shifts[group][pair];
            else
              totals[pair][c] += dots[pair][c] * scales[c];
          });
        }
      Sums mins = {};
      if constexpr (L.has_min) {
        add_octets<Chunk::MIN_OCTETS>(mins, x.sums[1], weights.small_mins[quarter]);
        for_sums([&](int pair, int c) __attribute__((always_inline)) { mins[pair][c] <<= 8; });
        add_octets<Chunk::MIN_OCTETS>(mins, x.sums[0], weights.small_mins[quarter]);
      }
      const Scaling scaling[2] = {load_scaling<FORMAT>(chunk, column), load_scaling<FORMAT>(chunk, LANES + column)};
      for_rows(rows, column, [&](int row, long at, Integers total, Integers min) __attribute__((always_inline)) {
        const Vector sum = add_super<L.has_min>(load_vector<Vector>(sum_at(row, at)), total, __builtin_convertvector(min, Vector),
                                                x.rows[row]->scale, scaling[at / LANES]);
        std::memcpy(sum_at(row, at), &sum, sizeof(sum));
      }, totals, mins);
    } else if constexpr (L.is_long()) {
      constexpr int GROUPS_EACH = int(MATRIX_GROUPS) / Chunk::SCALES;
      Sums dots[Chunk::SCALES] = {};
#pragma GCC unroll 2
      for (int scale = 0; scale < Chunk::SCALES; scale++) {
        const auto add_level = [&](int level) __attribute__((always_inline)) {
          for (int group = scale * GROUPS_EACH; group < (scale + 1) * GROUPS_EACH; group++)
            add_octets<OCTETS>(dots[scale], x.values[level][group], codes[group]);
        };
        add_level(0);
        for_sums([&](int pair, int c) __attribute__((always_inline)) { dots[scale][pair][c] *= HIGH_LEVEL; });
        add_level(1);
        for_sums([&](int pair, int c) __attribute__((always_inline)) {
          const auto of_x = of_rows<Integers>(x.rows[2 * pair]->sums[scale], x.rows[2 * pair + 1]->sums[scale]);
          dots[scale][pair][c] -= of_x * weights.integers[quarter][scale][0].pairs[c];
        });
      }
      const LongScaling scaling[2] = {{chunk, column}, {chunk, LANES + column}};
      for_rows(rows, column, [&](int row, long at, Integers first, Integers second) __attribute__((always_inline)) {
        const Vector sum =
            scaling[at / LANES].add(load_vector<Vector>(sum_at(row, at)), first, second, x.rows[row]->scale);
        std::memcpy(sum_at(row, at), &sum, sizeof(sum));
      }, dots[0], dots[1]);
    } else {
      Vector scaled[PAIRS][QUARTER_PAIRS];
#pragma GCC unroll 2
      for (int pair = 0; pair < PAIRS; pair++)
        for (int half = 0; half < 2; half++) {
          const auto load = [&](int row) { return load_vector<Vector>(sum_at(row, half * LANES + column)); };
          interleave_halves(load(2 * pair), load(2 * pair + 1 < rows ? 2 * pair + 1 : 2 * pair), scaled[pair][2 * half],
                            scaled[pair][2 * half + 1]);
        }
      for (long group = 0; group < x.groups; group++) {
        Sums dots = {};
        add_octets<OCTETS>(dots, x.values[0][group], codes[group]);
        for_sums([&](int pair, int c) __attribute__((always_inline)) {
          const Scaling scaling{weights.scales[quarter][group].pairs[c], weights.mins[quarter][group].pairs[c]};
          scaled[pair][c] = add_group<L.has_min>(scaled[pair][c], dots[pair][c], x.scales[group][pair], scaling);
        });
      }
      for_rows(rows, column, [&](int row, long at, Vector sum) __attribute__((always_inline)) {
        std::memcpy(sum_at(row, at), &sum, sizeof(sum));
      }, scaled);
    }
  }
}

// sums [rows, PANEL] = bias + x [rows, k] times a panel.
template <Format FORMAT>
void multiply_in_matrices(const uint8_t* panel, const RowLine* x, long x_stride, long rows, long k, const float* bias,
                          float* sums, const uint8_t* next) {
  using Chunk = MatrixChunk<FORMAT>;
  using P = Places<FORMAT>;
  const long groups = k / BLOCK_GROUP, x_bytes = x_stride * long(sizeof(RowLine));
  Ahead ahead = Ahead::of(panel, next, block_panel_bytes(FORMAT, k), groups, true);
  start_sums(sums, rows, bias);
  Chunk weights;
  for (long first = 0; first < groups; first += MATRIX_GROUPS) {
    const long count = std::min(MATRIX_GROUPS, groups - first);
    const uint8_t* const chunk = panel + first / P::GROUPS * P::CHUNK;
    for (long i = 0; i < count; i++) {
      ahead.prefetch();
      weights.unpack(chunk + i / P::GROUPS * P::CHUNK, i % P::GROUPS, i);
    }
    weights.unpack_rest(chunk);
    const auto multiply = [&]<int PAIRS>(std::integral_constant<int, PAIRS>, long row, long height) {
      using Rows = MatrixRows<FORMAT, PAIRS>;
      Rows tile;
      const auto* const from = [&] {
        if constexpr (Chunk::L.is_super)
          return supers_in(x + row * x_stride) + first / MATRIX_GROUPS;
        else if constexpr (Chunk::L.is_long())
          return longs_in(x + row * x_stride, k) + first / MATRIX_GROUPS;
        else
          return groups_in(x + row * x_stride, k) + first;
      }();
      tile.load(from, x_bytes, height, count);
      if (Chunk::L.is_super && tile.is_shifted)
        multiply_matrices<FORMAT, PAIRS, Chunk::L.is_super>(chunk, weights, tile, height, sums + row * PANEL);
      else
        multiply_matrices<FORMAT, PAIRS, false>(chunk, weights, tile, height, sums + row * PANEL);
    };
    for (long row = 0; row < rows; row += 2 * MATRIX_PAIRS) {
      const long height = std::min(rows - row, long(2 * MATRIX_PAIRS));
      if (height <= 2)
        multiply(std::integral_constant<int, 1>(), row, height);
      else
        multiply(std::integral_constant<int, MATRIX_PAIRS>(), row, height);
    }
  }
}

}  // namespace oaiserve

#endif
