// Products with weights in the formats of GGUF files: y = x W^T + bias.
//
// x is quantized to eight bits, in groups of 32 numbers that share a scale. The products of a run of 16 or 32 weights
// with x are summed as integers, without error; then they are scaled and added in the order of k. A column is computed
// alike for any number of rows, so its sums are bitwise the same.
#pragma once

#include "block_tiles.h"

namespace oaiserve {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int BLOCK_TILE_ROWS = 6;
#else
constexpr int BLOCK_TILE_ROWS = 2;
#endif

// sums [ROWS, PANEL] = bias + x [ROWS, k] times a panel.
template <Format FORMAT, int ROWS>
void block_tile(const uint8_t* panel, const QuantizedGroup* x, long x_stride, long k, const float* bias, float* sums,
                Ahead ahead) {
  using P = Places<FORMAT>;
  constexpr Layout L = P::L;
  constexpr bool IS_SMALL = L.code_bits() < 8 && (!L.is_codebook || L.is_e2m1);
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
        if (column == 0) ahead.prefetch();
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
            for (int r = 0; r < ROWS; r++)
              sum[r][v] = add_run<L.runs(), L.has_min>(sum[r][v], dots[r][v], groups[r * x_stride], run, scaling);
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
                           float* sums, long next) {
  const PanelBias bias(w.bias, w.n, panel);
  const BlockPanel& weights = w.panels[panel];
  const long tiles = (rows + BLOCK_TILE_ROWS - 1) / BLOCK_TILE_ROWS;
  for_format(weights.format, [&]<Format FORMAT>() {
    const long groups = w.k / BLOCK_GROUP, panel_bytes = block_panel_bytes(FORMAT, w.k);
#if defined(WITH_INTEGER_TILES)
    if (rows >= LEAST_TILED_ROWS) {
      const long step = panel_bytes / groups / ((rows + TILE_HEIGHT - 1) / TILE_HEIGHT);
      return multiply_in_tiles<FORMAT>(weights.data, x, x_stride, rows, w.k, bias.values, sums,
                                       {weights.data, w.panels[next].data, panel_bytes, panel_bytes, step});
    }
#endif
    // The first of several tiles reads the whole panel, so together they prefetch the next one, while they compute.
    const long ahead = tiles > 1 ? panel_bytes : std::min(panel_bytes, BLOCK_AHEAD), step = panel_bytes / groups / tiles;
    for (long t = 0, row = 0; t < tiles; t++) {
      const long height = rows / tiles + (t < rows % tiles);
      const auto tile = block_tile_for<FORMAT>(int(height), std::make_integer_sequence<int, BLOCK_TILE_ROWS>());
      tile(weights.data, x + row * x_stride, x_stride, w.k, bias.values, sums + row * PANEL,
           {weights.data, w.panels[next].data, panel_bytes, ahead + t * groups * step, step});
      row += height;
    }
  });
}

}  // namespace oaiserve
