// Products of few rows with weights whose scales are integers times a float of 256 neighbours.
#pragma once

#include "block_operands.h"

namespace oaiserve {

// Two integers of sixteen bits in each lane: those of two runs.
inline Integers in_pairs(Integers first, Integers second) { return (first & 0xffff) | second << 16; }

// The mins [WIDTH columns] of a chunk times the sums of x over their runs: `pairs` has them by twos.
template <int PAIRS>
Vector multiply_mins(const Integers (&pairs)[PAIRS], const int16_t* sums_of_x) {
  Integers total{};
#pragma GCC unroll 8
  for (int i = 0; i < PAIRS; i++) total = dot(total, Packs<int8_t>::splat(sums_of_x + 2 * i), Packs<int8_t>{pairs[i]});
  return __builtin_convertvector(total, Vector);
}

// sums [ROWS, PANEL] = bias + x [ROWS, k] times a panel. Returns what is left to prefetch.
template <Format FORMAT, int ROWS>
Ahead super_tile(const uint8_t* panel, const RowLine* x, long x_stride, long k, const float* bias, float* sums,
                Ahead ahead) {
  using P = Places<FORMAT>;
  constexpr Layout L = P::L;
  constexpr int RUNS = L.runs(), PAIRS = int(P::GROUPS) * RUNS / 2;
  const QuantizedSuper* rows[ROWS];
  for (int r = 0; r < ROWS; r++) {
    rows[r] = supers_in(x + r * x_stride);
    std::memcpy(sums + r * PANEL, bias, PANEL * sizeof(float));
  }
  const auto sums_of = [](const QuantizedSuper& x) { return RUNS == 1 ? x.sums : x.half_sums; };
  for (long column = 0; column < LANES; column += WIDTH) {  // of the left ones, and so of the right ones
    const uint8_t* chunk = panel;
    for (long c = 0; c < k / SUPER; c++, chunk += P::CHUNK) {
      Integers totals[ROWS][2] = {};
      for (long i = 0; i < P::GROUPS; i++) {
        const uint8_t* codes = chunk + P::codes(i) + column * 4;
#pragma GCC unroll 2
        for (int run = 0; run < RUNS; run++) {
          Integers dots[ROWS][2];
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; r++)
            dots[r][0] = dots[r][1] = -L.offset * sums_of(rows[r][c])[i * RUNS + run] - Integers{};
          const auto multiply = [&](int in_run) {
            const int step = run * (STEPS / RUNS) + in_run;
            if (column == 0) ahead.prefetch();
            VectorBits left, right;
            load_codes<L>(codes, P::LOW, step, left, right);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
              const QuadOfX quad = splat_quad(rows[r][c].values + i * BLOCK_GROUP + 4 * step);
              dots[r][0] = dot_quads<L.is_small()>(dots[r][0], left, quad);
              dots[r][1] = dot_quads<L.is_small()>(dots[r][1], right, quad);
            }
          };
          for_steps<L, STEPS / RUNS>(multiply);
          for (int v = 0; v < 2; v++) {
            const Integers scales = load_small_scales<FORMAT>(chunk, i, run, v * LANES + column);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) totals[r][v] += dots[r][v] * scales;
          }
        }
      }
      for (int v = 0; v < 2; v++) {
        const long at = v * LANES + column;
        const Scaling scaling = load_scaling<FORMAT>(chunk, at);
        Integers mins[PAIRS];
        if constexpr (L.has_min)
          for (int i = 0; i < PAIRS; i++) {
            const int first = 2 * i, second = 2 * i + 1;
            mins[i] = in_pairs(load_small_mins<FORMAT>(chunk, first / RUNS, first % RUNS, at),
                               load_small_mins<FORMAT>(chunk, second / RUNS, second % RUNS, at));
          }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
          float* sum = sums + r * PANEL + at;
          const QuantizedSuper& super = rows[r][c];
          Vector of_mins{};
          if constexpr (L.has_min) of_mins = multiply_mins(mins, sums_of(super));
          const Vector found =
              add_super<L.has_min>(load_vector<Vector>(sum), totals[r][v], of_mins, super.scale, scaling);
          std::memcpy(sum, &found, sizeof(found));
        }
      }
    }
  }
  return ahead;
}

}  // namespace oaiserve
