// Products with weights in the formats of GGUF files: y = x W^T + bias.
//
// x is quantized, see block_rows.h. The products of 32 numbers, or of 128 or 256, are summed as integers, without
// error; then they are scaled and added in the order of k. A column is computed alike for any number of rows, so its
// sums are bitwise the same.
#pragma once

#include "block_tiles.h"
#include "long_tiles.h"
#include "matrix_tiles.h"
#include "short_tiles.h"
#include "strip_tiles.h"
#include "super_tiles.h"

namespace oaiserve {

// The number of rows that a tile has at most. If aarch64 has some sums of eight rows in memory, it still loads and unpacks
// less, but not where codes have high bits.
constexpr int most_tile_rows(const Layout& layout) {
#if defined(__AVX512F__) && defined(WITH_SHORT_SUMS)
  return layout.is_super ? LEAST_SHORT_ROWS - 1 : layout.is_whole() ? 5 : 4;
#elif defined(__AVX512F__)
  return layout.is_super ? 6 : 8;
#elif defined(WITH_MATRIX_TILES)
  return int(LEAST_MATRIX_ROWS) - 1;
#elif defined(WITH_LANE_DOTS)
  return layout.is_super && layout.high_bits == 0 ? 8 : 6;
#elif defined(__aarch64__)
  return 6;
#elif defined(__AVX2__)
  return 4;
#else
  return 2;
#endif
}

// How many vectors of columns a tile of few rows has on each side, so that enough sums do not wait for each other, and
// what is loaded of x is used more often.
constexpr int slices_of([[maybe_unused]] int rows) {
#if defined(WITH_LANE_DOTS)
  if (rows <= 2) return rows == 1 ? LANES / WIDTH : LANES / WIDTH / 2;
#elif defined(WITH_AVX_VNNI)
  if (rows == 1) return LANES / WIDTH;
#endif
  return 1;
}

// sums [ROWS, PANEL] = bias + x [ROWS, k] times a panel. Returns what is left to prefetch.
template <Format FORMAT, int ROWS>
Ahead block_tile(const uint8_t* panel, const RowLine* x, long x_stride, long k, const float* bias, float* sums,
                Ahead ahead) {
  using P = Places<FORMAT>;
  constexpr Layout L = P::L;
  constexpr int SLICES = slices_of(ROWS), VECTORS = 2 * SLICES;
  for (TileColumns<L, SLICES> columns{0}; columns.first < LANES; columns.first += SLICES * WIDTH) {
    Vector sum[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) sum[r][v] = load_vector<Vector>(bias + columns.at(v));
    const uint8_t* chunk = panel;
    const QuantizedGroup* groups = groups_in(x, k);
    for (long c = 0; c < k / BLOCK_GROUP; c++, chunk += P::CHUNK, groups++) {
      Integers dots[ROWS][VECTORS];
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) dots[r][v] = -summed_offset(L) * groups[r * x_stride].sum - Integers{};
#if defined(WITH_SHORT_SUMS) && !defined(WITH_AVX_VNNI)
      add_short_dots<L, 127>(dots, 1, chunk + P::codes(0) + columns.first * 4, P::LOW,
                             [&](int r) { return groups[r * x_stride].values; },
                             [&](int steps) { if (columns.first == 0) ahead.prefetch(steps); });
#elif defined(WITH_LANE_DOTS)
      if (columns.first == 0) ahead.prefetch_chunk<P::CHUNK>(STEPS);
      add_lane_dots<L, STEPS>(dots, columns, chunk + P::codes(0), P::LOW, 0,
                              [&](int r) { return groups[r * x_stride].values; });
#else
#if defined(WITH_AVX_VNNI)
      constexpr int STEPS_AT_ONCE = STEPS;
#else
      constexpr int STEPS_AT_ONCE = 1;
#endif
      for_steps<L, STEPS, ROWS == 1 && STEPS_AT_ONCE == STEPS>([&](int step) __attribute__((always_inline)) {
        if (columns.first == 0 && step % STEPS_AT_ONCE == 0) ahead.prefetch(STEPS_AT_ONCE);
        VectorBits codes[VECTORS];
        columns.load(chunk + P::codes(0), P::LOW, step, codes);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
          const Integers quad = splat_quad(groups[r * x_stride].values + 4 * step);
          for (int v = 0; v < VECTORS; v++) dots[r][v] = dot_quads(dots[r][v], codes[v], quad);
        }
      });
#endif
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) {
        const Scaling scaling = load_scaling<FORMAT>(chunk, columns.at(v));
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
          sum[r][v] = add_group<L.has_min>(sum[r][v], dots[r][v], groups[r * x_stride], scaling);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) store_lanes(sums + r * PANEL + columns.at(v), sum[r][v]);
  }
  return ahead;
}

// Two integers of sixteen bits in each lane: those of two runs. On aarch64, each run has a half of the vector.
inline Integers in_pairs(Integers first, Integers second) {
#if defined(__aarch64__)
  return (Integers)vcombine_s16(vmovn_s32((int32x4_t)first), vmovn_s32((int32x4_t)second));
#else
  return (first & 0xffff) | second << 16;
#endif
}

// The mins [WIDTH columns] of a chunk times the sums of x over their runs: `pairs` has them by twos.
template <int PAIRS>
Integers multiply_mins(const Integers (&pairs)[PAIRS], const int16_t* sums_of_x) {
  Integers total{};
#if defined(__aarch64__)
  const auto add = [&]<int... I>(std::integer_sequence<int, I...>) {
    ((total = (Integers)vmlal_laneq_s16((int32x4_t)total, vget_low_s16((int16x8_t)pairs[I]),
                                        load_vector<int16x8_t>(sums_of_x + I / 4 * 8), I % 4 * 2),
      total = (Integers)vmlal_laneq_s16((int32x4_t)total, vget_high_s16((int16x8_t)pairs[I]),
                                        load_vector<int16x8_t>(sums_of_x + I / 4 * 8), I % 4 * 2 + 1)), ...);
  };
  add(std::make_integer_sequence<int, PAIRS>());
  return total;
#endif
#pragma GCC unroll 8
  for (int i = 0; i < PAIRS; i++) total = dot(total, Packs<int8_t>::splat(sums_of_x + 2 * i), Packs<int8_t>{pairs[i]});
  return total;
}

// Does what block_tile does with weights whose scales are integers times a float of 256 neighbours.
template <Format FORMAT, int ROWS>
Ahead super_tile(const uint8_t* panel, const RowLine* x, long x_stride, long k, const float* bias, float* sums,
                Ahead ahead) {
  using P = Places<FORMAT>;
  constexpr Layout L = P::L;
  constexpr int RUNS = L.runs(), PAIRS = int(P::GROUPS) * RUNS / 2, SLICES = slices_of(ROWS), VECTORS = 2 * SLICES;
  const QuantizedSuper* rows[ROWS];
  for (int r = 0; r < ROWS; r++) rows[r] = supers_in(x + r * x_stride);
  start_sums(sums, ROWS, bias);
  const auto sums_of = [](const QuantizedSuper& x) { return RUNS == 1 ? x.sums : x.half_sums; };
  for (TileColumns<L, SLICES> columns{0}; columns.first < LANES; columns.first += SLICES * WIDTH) {
    const uint8_t* chunk = panel;
    for (long c = 0; c < k / SUPER; c++, chunk += P::CHUNK) {
      bool is_shifted = false;
      for (int r = 0; r < ROWS; r++) is_shifted |= rows[r][c].is_shifted;
      Integers totals[ROWS][VECTORS] = {};
      for (long i = 0; i < P::GROUPS; i++) {
        const uint8_t* const codes = chunk + P::codes(i);
#if defined(WITH_LANE_DOTS)
        if (columns.first == 0) ahead.prefetch_chunk<P::CHUNK / P::GROUPS>(STEPS);
#endif
#pragma GCC unroll 2
        for (int run = 0; run < RUNS; run++) {
          Integers dots[ROWS][VECTORS] = {};
#if defined(WITH_LANE_DOTS)
          add_lane_dots<L, STEPS / RUNS>(dots, columns, codes, P::LOW, run * (STEPS / RUNS),
                                         [&](int r) { return rows[r][c].values + i * BLOCK_GROUP; });
#else
          for_steps<L, STEPS / RUNS>([&](int in_run) {
            const int step = run * (STEPS / RUNS) + in_run;
            if (columns.first == 0) ahead.prefetch();
            VectorBits of_step[VECTORS];
            columns.load(codes, P::LOW, step, of_step);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
              const Integers quad = splat_quad(rows[r][c].values + i * BLOCK_GROUP + 4 * step);
              for (int v = 0; v < VECTORS; v++) dots[r][v] = dot_quads(dots[r][v], of_step[v], quad);
            }
          });
#endif
          if (is_shifted) [[unlikely]]
            for (int r = 0; r < ROWS; r++)
              for (int v = 0; v < VECTORS; v++) dots[r][v] <<= rows[r][c].shifts[i];
#pragma GCC unroll 8
          for (int v = 0; v < VECTORS; v++) {
            const Integers scales = load_small_scales<FORMAT>(chunk, i, run, columns.at(v));
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) totals[r][v] += dots[r][v] * scales;
          }
        }
      }
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) {
        const long at = columns.at(v);
        const Scaling scaling = load_scaling<FORMAT>(chunk, at);
#if defined(WITH_LANE_DOTS)
        if constexpr (!L.has_min) {  // Codes have no offset here, so there is nothing that the sums of x would correct.
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; r++) {
            float* sum = sums + r * PANEL + at;
            const Vector found =
                add_super<false>(load_vector<Vector>(sum), totals[r][v], Vector{}, rows[r][c].scale, scaling);
            std::memcpy(sum, &found, sizeof(found));
          }
          continue;
        }
#endif
        // What the sums of x are multiplied with: minimums, or what the codes of runs are too large by.
        const auto factors = [&](int run) {
          const auto load = L.has_min ? load_small_mins<FORMAT> : load_small_scales<FORMAT>;
          return load(chunk, run / RUNS, run % RUNS, at) * (L.has_min ? 1 : -summed_offset(L));
        };
        Integers pairs[PAIRS];
        for (int i = 0; i < PAIRS; i++) pairs[i] = in_pairs(factors(2 * i), factors(2 * i + 1));
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
          float* sum = sums + r * PANEL + at;
          const QuantizedSuper& super = rows[r][c];
          const Integers of_sums = multiply_mins(pairs, sums_of(super));
          const Integers total = L.has_min ? totals[r][v] : totals[r][v] + of_sums;
          const Vector mins = __builtin_convertvector(of_sums, Vector);
          const Vector found = add_super<L.has_min>(load_vector<Vector>(sum), total, mins, super.scale, scaling);
          std::memcpy(sum, &found, sizeof(found));
        }
      }
    }
  }
  return ahead;
}

// Does what block_tile does with weights whose scales are floats that 128 neighbours share.
template <Format FORMAT, int ROWS>
Ahead long_tile(const uint8_t* panel, const RowLine* x, long x_stride, long k, const float* bias, float* sums,
               Ahead ahead) {
  using P = Places<FORMAT>;
  constexpr Layout L = P::L;
  constexpr long SCALES = 2, GROUPS_EACH = P::GROUPS / SCALES;
  static_assert(L.scales() == SCALES && L.is_small());
  const QuantizedLong* rows[ROWS];
  for (int r = 0; r < ROWS; r++) {
    rows[r] = longs_in(x + r * x_stride, k);
    std::memcpy(sums + r * PANEL, bias, PANEL * sizeof(float));
  }
  constexpr int SLICES = slices_of(ROWS), VECTORS = 2 * SLICES;
  for (TileColumns<L, SLICES> columns{0}; columns.first < LANES; columns.first += SLICES * WIDTH) {
    const uint8_t* chunk = panel;
    for (long c = 0; c < k / SUPER; c++, chunk += P::CHUNK) {
      Integers dots[SCALES][ROWS][VECTORS];
#pragma GCC unroll 2
      for (long scale = 0; scale < SCALES; scale++) {
        const auto dot = dots[scale];
        for (int v = 0; v < VECTORS; v++) {
          const Integers zeros = load_zeros<FORMAT>(chunk, scale, columns.at(v));
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; r++) dot[r][v] = -rows[r][c].sums[scale] * zeros;
        }
        for (long i = scale * GROUPS_EACH; i < (scale + 1) * GROUPS_EACH; i++) {
          const uint8_t* const codes = chunk + P::codes(i);
#if defined(WITH_SHORT_SUMS) && !defined(WITH_AVX_VNNI)
          add_short_dots<L, 127>(dots[scale], HIGH_LEVEL, codes + columns.first * 4, P::LOW,
                                 [&](int r) { return rows[r][c].high + i * BLOCK_GROUP; },
                                 [&](int steps) { if (columns.first == 0) ahead.prefetch(steps); });
          add_short_dots<L, HIGH_LEVEL / 2>(dots[scale], 1, codes + columns.first * 4, P::LOW,
                                            [&](int r) { return rows[r][c].low + i * BLOCK_GROUP; }, [](int) {});
#elif defined(WITH_LANE_DOTS)
          if (columns.first == 0) ahead.prefetch_chunk<P::CHUNK / P::GROUPS>(STEPS);
          add_lane_dots<L, STEPS>(dots[scale], columns, codes, P::LOW, 0,
                                  [&](int r) { return rows[r][c].low + i * BLOCK_GROUP; });
          add_lane_dots<L, STEPS, HIGH_LEVEL>(dots[scale], columns, codes, P::LOW, 0,
                                              [&](int r) { return rows[r][c].high + i * BLOCK_GROUP; });
#else
          for_steps<L, STEPS>([&](int step) {
            if (columns.first == 0) ahead.prefetch();
            VectorBits of_step[VECTORS];
            columns.load(codes, P::LOW, step, of_step);
            const long place = i * BLOCK_GROUP + 4 * step;
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
              const Integers of_high = splat_quad(rows[r][c].high + place), of_low = splat_quad(rows[r][c].low + place);
              for (int v = 0; v < VECTORS; v++) {
                dot[r][v] = dot_quads(dot[r][v], of_step[v], of_low);
                dot[r][v] = dot_quads(dot[r][v], of_step[v] * HIGH_LEVEL, of_high);
              }
            }
          });
#endif
        }
      }
      for (int v = 0; v < VECTORS; v++) {
        const long at = columns.at(v);
        const LongScaling scaling(chunk, at);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
          float* const sum = sums + r * PANEL + at;
          const Vector found =
              scaling.add(load_vector<Vector>(sum), dots[0][r][v], dots[1][r][v], rows[r][c].scale);
          std::memcpy(sum, &found, sizeof(found));
        }
      }
    }
  }
  return ahead;
}

template <Format FORMAT, int... ROW>
auto tile_of_blocks(int rows, std::integer_sequence<int, ROW...>) {
  if constexpr (layout_of(FORMAT).is_super) {
    static constexpr decltype(&super_tile<FORMAT, 1>) TILES[] = {super_tile<FORMAT, ROW + 1>...};
    return TILES[rows - 1];
  } else if constexpr (layout_of(FORMAT).is_long()) {
    static constexpr decltype(&long_tile<FORMAT, 1>) TILES[] = {long_tile<FORMAT, ROW + 1>...};
    return TILES[rows - 1];
  } else {
    static constexpr decltype(&block_tile<FORMAT, 1>) TILES[] = {block_tile<FORMAT, ROW + 1>...};
    return TILES[rows - 1];
  }
}

// sums [rows, PANEL] = bias + x [rows, k] times a panel, in tiles of nearly the same height, whose sums are in registers.
template <Format FORMAT>
void multiply_in_registers(const uint8_t* panel, const RowLine* x, long x_stride, long rows, long k, const float* bias,
                           float* sums, const uint8_t* next) {
  // The first of several tiles reads the whole panel, so together they prefetch the next one, while they compute.
  constexpr int TILE_ROWS = most_tile_rows(layout_of(FORMAT));
  const long tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
  const long steps = k / BLOCK_GROUP * STEPS * tiles;
  Ahead ahead = Ahead::of(panel, next, block_panel_bytes(FORMAT, k), steps, tiles == 1);
  for (long t = 0, row = 0; t < tiles; t++) {
    const long height = rows / tiles + (t < rows % tiles);
    const auto tile = tile_of_blocks<FORMAT>(int(height), std::make_integer_sequence<int, TILE_ROWS>());
    ahead = tile(panel, x + row * x_stride, x_stride, k, bias, sums + row * PANEL, ahead);
    row += height;
  }
}

// sums [rows, PANEL] = bias + x [rows, k] times a panel. If the bias of a format whose scales are integers is null, the
// products are added to the sums.
template <Format FORMAT>
void multiply_panel(const uint8_t* panel, const RowLine* x, long x_stride, long rows, long k, const float* bias,
                    float* sums, const uint8_t* next) {
  const auto in_tiles = [&](auto* multiply) {
    multiply(panel, x, x_stride, rows, k, bias, sums, next);
  };
#if defined(WITH_SHORT_SUMS)
  constexpr Layout L = layout_of(FORMAT);
  if constexpr (L.is_super && has_short_sums(L)) {
    if (!L.is_small() || rows >= LEAST_SHORT_ROWS) return in_tiles(multiply_in_short_tiles<FORMAT>);
  }
  if constexpr (!L.is_super || !has_short_sums(L) || (L.is_small() && LEAST_SHORT_ROWS > 1))
#elif defined(WITH_INTEGER_TILES)
  if constexpr (layout_of(FORMAT).is_super) {
    if (rows >= least_tiled_rows(expansion_of(FORMAT)))
      return in_tiles(multiply_chunks_in_tiles<SuperTiles<FORMAT>>);
  } else if constexpr (layout_of(FORMAT).is_long()) {
    if (rows >= LEAST_TILED_LONG_ROWS) return in_tiles(multiply_chunks_in_tiles<LongTiles<FORMAT>>);
  } else if (rows >= LEAST_TILED_ROWS) {
    return in_tiles(multiply_groups_in_tiles<FORMAT>);
  }
#elif defined(WITH_STRIPS)
  if constexpr (has_strips(layout_of(FORMAT))) {
    if (rows >= least_strip_rows(layout_of(FORMAT))) return in_tiles(multiply_in_strips<FORMAT>);
  } else {
#if defined(WITH_MATRIX_TILES)
    if (rows >= LEAST_MATRIX_ROWS) return in_tiles(multiply_in_matrices<FORMAT>);
#endif
  }
#endif
  in_tiles(multiply_in_registers<FORMAT>);
}

#if defined(WITH_INTEGER_TILES)
// sums [PANEL] = bias + a row times a panel without points, whose codes are multiplied as they are unpacked.
template <Format FORMAT>
void multiply_row_in_planes(const uint8_t* panel, const RowLine* x, long k, const float* bias, float* sums) {
  start_sums(sums, 1, bias);
  const QuantizedSuper* super = supers_in(x);
  for (long c = 0; c < k / SUPER; c++, panel += Places<FORMAT>::CHUNK, super++) {
    prefetch_lines<false>(panel + Places<FORMAT>::CHUNK, Places<FORMAT>::CHUNK);
    int32_t sum_of_x = 0;
    for (const int16_t of_run : super->sums) sum_of_x += of_run;
    for (long column = 0; column < PANEL; column += WIDTH) {
      Integers dots[2] = {};
      for_planes<FORMAT>(panel + Places<FORMAT>::PLANES, column, [&](long step, VectorBits codes) {
        dots[step % 2] = dot_quads(dots[step % 2], codes, splat_quad(super->values + 4 * step));
      });
      const Integers total = (dots[0] + dots[1] - sum_of_x) * 8;
      const Scaling scaling = load_scaling<Format::UNPACKED>(panel, column);
      const Vector found =
          add_super<false>(load_vector<Vector>(sums + column), total, Vector{}, super->scale, scaling);
      std::memcpy(sums + column, &found, sizeof(found));
    }
  }
}
#endif

// Does the same chunk by chunk. Each is unpacked once for all rows.
template <Format FORMAT>
  requires(IS_UNPACKED<FORMAT>)
void multiply_panel(const uint8_t* panel, const RowLine* x, long x_stride, long rows, long k, const float* bias,
                    float* sums, const uint8_t*) {
#if defined(WITH_INTEGER_TILES)
  if constexpr (grid_of(FORMAT).weights == 0)
    if (rows == 1) return multiply_row_in_planes<FORMAT>(panel, x, k, bias, sums);
#endif
  UnpackedChunk chunk;
  start_sums(sums, rows, bias);
  for (long c = 0; c < k / SUPER; c++, panel += Places<FORMAT>::CHUNK, x += SUPER_LINES) {
    prefetch_lines<false>(panel + Places<FORMAT>::CHUNK, Places<FORMAT>::CHUNK);
    unpack_chunk<FORMAT>(panel, chunk.bytes);
    multiply_panel<Format::UNPACKED>(chunk.bytes, x, x_stride, rows, SUPER, nullptr, sums, chunk.bytes);
  }
}

}  // namespace oaiserve
