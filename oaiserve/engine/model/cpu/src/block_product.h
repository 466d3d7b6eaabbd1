// Products with weights in the formats of GGUF files: y = x W^T + bias.
//
// x is quantized, see block_rows.h. The products of 32 numbers, or of 128 or 256, are summed as integers, without
// error; then they are scaled and added in the order of k. A column is computed alike for any number of rows, so its
// sums are bitwise the same.
#pragma once

#include "block_tiles.h"
#include "long_product.h"
#include "long_tiles.h"
#include "super_product.h"
#include "super_tiles.h"

namespace oaiserve {

#if defined(__AVX512F__)
constexpr int BLOCK_TILE_ROWS = 8;
#elif defined(__aarch64__)
constexpr int BLOCK_TILE_ROWS = 6;
#else
constexpr int BLOCK_TILE_ROWS = 2;
#endif

// sums [ROWS, PANEL] = bias + x [ROWS, k] times a panel. Returns what is left to prefetch.
template <Format FORMAT, int ROWS>
Ahead block_tile(const uint8_t* panel, const RowLine* x, long x_stride, long k, const float* bias, float* sums,
                Ahead ahead) {
  using P = Places<FORMAT>;
  constexpr Layout L = P::L;
  for (long column = 0; column < LANES; column += WIDTH) {  // of the left ones, and so of the right ones
    Vector sum[ROWS][2];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < 2; v++) sum[r][v] = load_vector<Vector>(bias + v * LANES + column);
    const uint8_t* chunk = panel;
    const QuantizedGroup* groups = groups_in(x, k);
    for (long c = 0; c < k / BLOCK_GROUP; c++, chunk += P::CHUNK, groups++) {
      Integers dots[ROWS][2];
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) dots[r][0] = dots[r][1] = -L.offset * groups[r * x_stride].sum - Integers{};
      const auto multiply = [&](int step) {
        if (column == 0) ahead.prefetch();
        VectorBits left, right;
        load_codes<L>(chunk + P::codes(0) + column * 4, P::LOW, step, left, right);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
          const QuadOfX quad = splat_quad(groups[r * x_stride].values + 4 * step);
          dots[r][0] = dot_quads<L.is_small()>(dots[r][0], left, quad);
          dots[r][1] = dot_quads<L.is_small()>(dots[r][1], right, quad);
        }
      };
      for_steps<L, STEPS>(multiply);
      for (int v = 0; v < 2; v++) {
        const Scaling scaling = load_scaling<FORMAT>(chunk, v * LANES + column);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
          sum[r][v] = add_group<L.has_min>(sum[r][v], dots[r][v], groups[r * x_stride], scaling);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < 2; v++) std::memcpy(sums + r * PANEL + v * LANES + column, &sum[r][v], sizeof(Vector));
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

// Multiplies as multiply_panel of gemm.h does, in tiles of nearly the same height.
inline void multiply_panel(const BlockLinear& w, const RowLine* x, long x_stride, long rows, long panel, float* sums,
                           long next) {
  const PanelBias bias(w.bias, w.n, panel);
  const BlockPanel& weights = w.panels[panel];
  const uint8_t* const next_data = w.panels[next].data;
  for_format(weights.format, [&]<Format FORMAT>() {
#if defined(WITH_INTEGER_TILES)
    const auto in_tiles = [&](auto* multiply) {
      multiply(weights.data, x, x_stride, rows, w.k, bias.values, sums, next_data);
    };
    if constexpr (layout_of(FORMAT).is_super) {
      if (rows >= least_tiled_rows(expansion_of(FORMAT)))
        return in_tiles(multiply_chunks_in_tiles<SuperTiles<FORMAT>>);
    } else if constexpr (layout_of(FORMAT).is_long()) {
      if (rows >= LEAST_TILED_LONG_ROWS) return in_tiles(multiply_chunks_in_tiles<LongTiles<FORMAT>>);
    } else if (rows >= LEAST_TILED_ROWS) {
      return in_tiles(multiply_groups_in_tiles<FORMAT>);
    }
#endif
    // The first of several tiles reads the whole panel, so together they prefetch the next one, while they compute.
    const long tiles = (rows + BLOCK_TILE_ROWS - 1) / BLOCK_TILE_ROWS;
    const long steps = w.k / BLOCK_GROUP * STEPS * tiles;
    Ahead ahead = Ahead::of(weights.data, next_data, block_panel_bytes(FORMAT, w.k), steps, tiles == 1);
    for (long t = 0, row = 0; t < tiles; t++) {
      const long height = rows / tiles + (t < rows % tiles);
      const auto tile = tile_of_blocks<FORMAT>(int(height), std::make_integer_sequence<int, BLOCK_TILE_ROWS>());
      ahead = tile(weights.data, x + row * x_stride, x_stride, w.k, bias.values, sums + row * PANEL, ahead);
      row += height;
    }
  });
}

}  // namespace oaiserve
