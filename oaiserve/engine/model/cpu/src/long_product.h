// Products of few rows with weights whose scales are floats that 128 neighbours share.
#pragma once

#include "block_operands.h"

namespace oaiserve {

// sums [ROWS, PANEL] = bias + x [ROWS, k] times a panel. Returns what is left to prefetch.
template <Format FORMAT, int ROWS>
Ahead long_tile(const uint8_t* panel, const RowLine* x, long x_stride, long k, const float* bias, float* sums,
               Ahead ahead) {
  using P = Places<FORMAT>;
  constexpr Layout L = P::L;
  constexpr long SCALES = 2, GROUPS_EACH = P::GROUPS / SCALES;
  static_assert(L.scales() == SCALES);
  const QuantizedLong* rows[ROWS];
  for (int r = 0; r < ROWS; r++) {
    rows[r] = longs_in(x + r * x_stride, k);
    std::memcpy(sums + r * PANEL, bias, PANEL * sizeof(float));
  }
  for (long column = 0; column < LANES; column += WIDTH) {  // of the left ones, and so of the right ones
    const uint8_t* chunk = panel;
    for (long c = 0; c < k / SUPER; c++, chunk += P::CHUNK) {
      Integers dots[SCALES][ROWS][2];
#pragma GCC unroll 2
      for (long scale = 0; scale < SCALES; scale++) {
        const auto dot = dots[scale];
        // Small codes are multiplied with both levels for one sum. Others have a sum for the high level.
        constexpr bool IS_SMALL = L.is_small();
        Integers high[ROWS][2] = {};
        for (int v = 0; v < 2; v++) {
          const Integers zeros = load_zeros<FORMAT>(chunk, scale, v * LANES + column);
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; r++) dot[r][v] = -rows[r][c].sums[scale] * zeros;
        }
        for (long i = scale * GROUPS_EACH; i < (scale + 1) * GROUPS_EACH; i++) {
          for_steps<L, STEPS>([&](int step) {
            if (column == 0) ahead.prefetch();
            VectorBits codes[2];
            load_codes<L>(chunk + P::codes(i) + column * 4, P::LOW, step, codes[0], codes[1]);
            const long place = i * BLOCK_GROUP + 4 * step;
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
              const QuadOfX of_high = splat_quad(rows[r][c].high + place), of_low = splat_quad(rows[r][c].low + place);
              for (int v = 0; v < 2; v++) {
                dot[r][v] = dot_quads<IS_SMALL>(dot[r][v], codes[v], of_low);
                if constexpr (IS_SMALL)
                  dot[r][v] = dot_quads<IS_SMALL>(dot[r][v], codes[v] * HIGH_LEVEL, of_high);
                else
                  high[r][v] = dot_quads<IS_SMALL>(high[r][v], codes[v], of_high);
              }
            }
          });
        }
        if constexpr (!IS_SMALL)
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < 2; v++) dot[r][v] += high[r][v] * HIGH_LEVEL;
      }
      for (int v = 0; v < 2; v++) {
        const long at = v * LANES + column;
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

}  // namespace oaiserve
