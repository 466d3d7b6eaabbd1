// Products of few rows with weights whose scales are floats that 128 neighbours share.
#pragma once

#include "block_operands.h"

namespace oaiserve {

// sums [ROWS, PANEL] = bias + x [ROWS, k] times a panel.
template <Format FORMAT, int ROWS>
void long_tile(const uint8_t* panel, const RowLine* x, long x_stride, long k, const float* bias, float* sums,
               Ahead ahead) {
  using P = Places<FORMAT>;
  constexpr Layout L = P::L;
  constexpr long SCALES = L.scales(), GROUPS_EACH = P::GROUPS / SCALES;
  const QuantizedSuper* rows[ROWS];
  for (int r = 0; r < ROWS; r++) {
    rows[r] = supers_in(x + r * x_stride);
    std::memcpy(sums + r * PANEL, bias, PANEL * sizeof(float));
  }
  for (long column = 0; column < LANES; column += WIDTH) {  // of the left ones, and so of the right ones
    const uint8_t* chunk = panel;
    for (long c = 0; c < k / SUPER; c++, chunk += P::CHUNK) {
      Integers dots[SCALES][ROWS][2];
#pragma GCC unroll 2
      for (long scale = 0; scale < SCALES; scale++) {
        const auto dot = dots[scale];
        for (int v = 0; v < 2; v++) {
          const Integers zeros = load_zeros<FORMAT>(chunk, scale, v * LANES + column);
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; r++) dot[r][v] = -rows[r][c].long_sums[scale] * zeros;
        }
        for (long i = scale * GROUPS_EACH; i < (scale + 1) * GROUPS_EACH; i++) {
          if (column == 0) ahead.prefetch();
          for_steps<L, STEPS>([&](int step) {
            VectorBits left, right;
            load_codes<L>(chunk + P::codes(i) + column * 4, P::LOW, step, left, right);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
              const QuadOfX quad = splat_quad(rows[r][c].values + i * BLOCK_GROUP + 4 * step);
              dot[r][0] = dot_quads<L.is_small()>(dot[r][0], left, quad);
              dot[r][1] = dot_quads<L.is_small()>(dot[r][1], right, quad);
            }
          });
        }
      }
      for (int v = 0; v < 2; v++)
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
          const long at = v * LANES + column;
          float* const sum = sums + r * PANEL + at;
          const Vector found =
              add_long<FORMAT>(load_vector<Vector>(sum), dots[0][r][v], dots[1][r][v], rows[r][c].scale, chunk, at);
          std::memcpy(sum, &found, sizeof(found));
        }
    }
  }
}

}  // namespace oaiserve
