// Products with weights whose scales are floats that 128 neighbours share, in the tiles of AMX.
//
// A chunk of a panel, 256 by 32 weights, is expanded once for all rows: to codes less their zeros, in eight bits with a
// sign. Tiles sum the products of 128 numbers, without error; then these are scaled and added, as long_tile of block_product.h does it,
// so a row gets the same numbers from both.
//
// Weights have four bits, and are expanded a second time, times what the high level of x counts: they still fit into
// eight bits, and one tile sums the products of both levels.
//
// With 16 rows and 32 columns, a chunk takes sixteen instructions of 16 cycles, and 32 times five vectors to scale and add
// what they sum.
#pragma once

#include "chunk_tiles.h"

#if defined(WITH_INTEGER_TILES)

namespace oaiserve {

constexpr long LEAST_TILED_LONG_ROWS = 5;
constexpr long OF_LONGS = 3000;  // and how many rows: what tiles are configured for, see tile_rows of amx.h
constexpr int LONG_RUNS = 2;     // runs of 128 in a chunk
constexpr int RUN_DEPTH = 2;     // tiles along k of a run
static_assert(LONG_RUNS * RUN_DEPTH == QUARTERS);

// Configures the tiles for up to 16 rows: 0 to 3 have sums, 4 a level of rows of x, and 6 and 7 weights.
inline void configure_for_longs(long rows) {
  if (tile_rows == OF_LONGS + rows) return;
  alignas(64) TileConfig config;
  for (const int tile : {0, 1, 2, 3, 4}) config.set(tile, rows);
  for (const int tile : {6, 7}) config.set(tile, TILE_HEIGHT);
  load_config(config);
  tile_rows = OF_LONGS + rows;
}

// A chunk of a panel, as tiles take it, for the high and the low level of x. A half has the left or right 16 columns.
struct alignas(64) LongChunk {
  int8_t weights[2][2][SUPER / 4][PLANE];
};

// Writes a group's codes minus its zero points, once plain, once times HIGH_LEVEL.
template <Format FORMAT>
void subtract_zeros(const uint8_t* chunk, long group, LongChunk& out) {
  using P = Places<FORMAT>;
  typedef uint8_t Bytes __attribute__((vector_size(PLANE)));
  Bytes zeros[2];
  for (int half = 0; half < 2; half++)
    zeros[half] = (Bytes)((VectorBits)load_zeros<FORMAT>(chunk, P::L.scale_of(group), half * LANES) * in_each_byte(1));
#pragma GCC unroll 8
  for (int step = 0; step < STEPS; step++) {
    VectorBits codes[2];
    load_codes<P::L>(chunk + P::codes(group), P::LOW, step, codes[0], codes[1]);
    for (int half = 0; half < 2; half++) {
      const Bytes weights = (Bytes)codes[half] - zeros[half];
      const VectorBits times = ((VectorBits)weights & in_each_byte(0xff / HIGH_LEVEL)) * HIGH_LEVEL;
      std::memcpy(out.weights[0][half][group * STEPS + step], &times, sizeof(times));
      std::memcpy(out.weights[1][half][group * STEPS + step], &weights, sizeof(weights));
    }
  }
}

// What tiles of rows and 16 columns sum, by run of 128.
struct alignas(64) LongSums {
  int32_t products[LONG_RUNS][TILE_HEIGHT][LANES];
};

// out [2] = up to 16 rows of x, which are `x_bytes` apart, times both halves of a chunk. Calls between(quarter) after
// each quarter of the products, with work for the rest of the core.
template <class Between>
void multiply_chunk(const QuantizedLong& x, long x_bytes, const LongChunk& chunk, LongSums* out, Between&& between) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
#pragma GCC unroll 4
  for (int i = 0; i < QUARTERS; i++) {
    // The runs take turns, because an instruction waits for the last one that added to the same sums.
    const int run = i % LONG_RUNS, depth = run * RUN_DEPTH + i / LONG_RUNS;
#pragma GCC unroll 2
    for (int level = 0; level < 2; level++) {
      LOAD_TILE(4, (level ? x.low : x.high) + depth * TILE_BYTES, x_bytes);
      LOAD_TILE(6, chunk.weights[level][0][depth * TILE_HEIGHT], PLANE);
      LOAD_TILE(7, chunk.weights[level][1][depth * TILE_HEIGHT], PLANE);
      if (run == 0) {
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(2, 4, 7);
      } else {
        _tile_dpbssd(1, 4, 6);
        _tile_dpbssd(3, 4, 7);
      }
    }
    between(depth);
  }
  _tile_stored(0, out[0].products[0], TILE_BYTES);
  _tile_stored(1, out[0].products[1], TILE_BYTES);
  _tile_stored(2, out[1].products[0], TILE_BYTES);
  _tile_stored(3, out[1].products[1], TILE_BYTES);
}

// What multiply_chunks_in_tiles calls.
template <Format FORMAT>
struct LongTiles {
  using P = Places<FORMAT>;
  static_assert(P::L.scales() == LONG_RUNS);
  using Expanded = LongChunk;
  using Sums = LongSums;
  using Part = TiledPart<QuantizedLong, LongSums>;

  static const QuantizedLong* row(const RowLine* x, long k) { return longs_in(x, k); }
  static void configure(long rows) { configure_for_longs(rows); }
  static void expand(const uint8_t* chunk, long group, Expanded& out) { subtract_zeros<FORMAT>(chunk, group, out); }
  template <class Between>
  static void multiply(const QuantizedLong& x, long x_bytes, const Expanded& chunk, Sums* out, Between&& between) {
    multiply_chunk(x, x_bytes, chunk, out, between);
  }
  // Adds a quarter of the rows to their sums.
  static void add(const Part& part, int quarter, long x_bytes) {
    const long each = (part.end - part.first + QUARTERS - 1) / QUARTERS;
    const long begin = std::min(part.first + quarter * each, part.end);
    for (int half = 0; half < 2; half++) {
      const LongScaling scaling(part.chunk, half * LANES);
      const auto total = [&](int run, long r) { return load_vector<Integers>(part.found[half].products[run][r]); };
#pragma GCC unroll 4
      for (long r = begin; r < std::min(begin + each, part.end); r++) {
        float x_scale, *const to = part.sums + r * PANEL + half * LANES;
        std::memcpy(&x_scale, reinterpret_cast<const char*>(&part.x->scale) + r * x_bytes, sizeof(x_scale));
        const Vector sum = scaling.add(load_vector<Vector>(to), total(0, r), total(1, r), x_scale);
        std::memcpy(to, &sum, sizeof(sum));
      }
    }
  }
};

}  // namespace oaiserve

#endif
