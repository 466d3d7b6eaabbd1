// Products of many rows with weights in the formats of GGUF files, in the tiles of AMX. There are none without WITH_AMX,
// or if the compiler's target has no AMX for integers.
//
// A block of a panel is unpacked to integers of eight bits, once for all rows. Then one instruction sums the products of a
// group, for 16 rows and 16 columns. These sums have no error, and are scaled and added as block_tile of block_product.h
// does it, so a row gets the same numbers from both. Few rows are left to that function.
//
// A group has to be scaled before the next one is added, so a tile is half as deep as it could be. That is what it costs
// to have scales: the products of a group take 16 cycles, storing them 15, and scaling 48, because a core whose tiles
// multiply has one unit for floats left. Formats whose scales are integers have tiles of their own: super_tiles.h.
#pragma once

#include "block_operands.h"

#if defined(WITH_AMX) && defined(__AMX_INT8__) && defined(__AVX512VNNI__)
#define WITH_INTEGER_TILES

namespace oaiserve {

constexpr long LEAST_TILED_ROWS = 12;
constexpr long OF_GROUPS = 1000;     // and the last rows: what tiles are configured for, see tile_rows of amx.h
constexpr long UNPACKED_GROUPS = 8;  // of a block, which stays in L1 with what 16 rows of x have for it
constexpr long IN_FLIGHT = 4;        // groups whose products are summed, or wait to be scaled

// The tiles of a thread, as Tiles<bf16>. 0 has sums, 1 rows of x, 2 and 3 are the same for the last rows of x, and 4 has
// weights.
template <>
class Tiles<RowLine> {
 public:
  Tiles() { tile_rows = 0; }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;

  // Configures the tiles for groups, and for so many last rows, from 1 to 16.
  static void set(long last_rows) {
    const long shape = OF_GROUPS + last_rows;
    if (shape == tile_rows) return;
    alignas(64) TileConfig config;
    for (const int tile : {0, 1}) config.set(tile, TILE_HEIGHT);
    for (const int tile : {2, 3}) config.set(tile, last_rows);
    for (const int tile : {1, 3}) config.row_bytes[tile] = uint16_t(BLOCK_GROUP);
    config.set(4, BLOCK_GROUP / 4);
    load_config(config);
    tile_rows = shape;
  }
};

// A block of a panel, as tiles take it. A half has the left or the right 16 columns.
struct UnpackedBlock {
  struct Group {
    int8_t halves[2][STEPS][PLANE];
    Scaling scalings[2];
  };
  alignas(64) Group groups[UNPACKED_GROUPS];
};

// Unpacks the groups of a panel from `first` on.
template <Format FORMAT>
void unpack_block(const uint8_t* panel, long first, long count, UnpackedBlock& out) {
  using P = Places<FORMAT>;
  typedef uint8_t Bytes __attribute__((vector_size(PLANE)));
  for (long i = 0; i < count; i++) {
    UnpackedBlock::Group& group = out.groups[i];
    const uint8_t* chunk = panel + (first + i) * P::CHUNK;
    for (int step = 0; step < STEPS; step++) {
      VectorBits codes[2];
      load_codes<P::L>(chunk + P::codes(0), P::LOW, step, codes[0], codes[1]);
      for (int half = 0; half < 2; half++) {
        const Bytes weights = (Bytes)codes[half] - uint8_t(P::L.offset);
        std::memcpy(group.halves[half][step], &weights, sizeof(weights));
      }
    }
    for (int half = 0; half < 2; half++) group.scalings[half] = load_scaling<FORMAT>(chunk, half * LANES);
  }
}

// products [16, 16] = rows of x times a group of 16 columns.
template <bool IS_LAST>
void multiply_group(const int8_t* x, long x_bytes, const int8_t* weights, int32_t* products) {
  LOAD_TILE(4, weights, PLANE);
  if constexpr (IS_LAST) {
    _tile_zero(2);
    LOAD_TILE(3, x, x_bytes);
    _tile_dpbssd(2, 3, 4);
    _tile_stored(2, products, LANES * sizeof(int32_t));
  } else {
    _tile_zero(0);
    LOAD_TILE(1, x, x_bytes);
    _tile_dpbssd(0, 1, 4);
    _tile_stored(0, products, LANES * sizeof(int32_t));
  }
}

// sums [16, 16] = start + up to 16 rows of x times a half of a block. The sums of rows that are not there mean nothing.
template <bool HAS_MIN, bool IS_LAST>
void add_block(const UnpackedBlock& block, long count, int half, const QuantizedGroup* x, long x_stride, long rows,
               const float* start, long start_stride, float* sums) {
  alignas(64) int32_t products[IN_FLIGHT][TILE_HEIGHT][LANES];
  if (IS_LAST) std::memset(products, 0, sizeof(products));
  const auto row_of = [&](long r) { return x + (IS_LAST && r >= rows ? 0 : r) * x_stride; };
  const auto multiply = [&](long g) {
    multiply_group<IS_LAST>(x[g].values, x_stride * long(sizeof(QuantizedGroup)), block.groups[g].halves[half][0],
                            products[g % IN_FLIGHT][0]);
  };
  Vector sum[TILE_HEIGHT];
#pragma GCC unroll 16
  for (int r = 0; r < TILE_HEIGHT; r++) sum[r] = load_vector<Vector>(start + r * start_stride);
  // Products are ahead of their scaling, because they take long.
  for (long g = 0; g < std::min(IN_FLIGHT / 2, count); g++) multiply(g);
  for (long g = 0; g < count; g++) {
    if (g + IN_FLIGHT / 2 < count) multiply(g + IN_FLIGHT / 2);
    const Scaling scaling = block.groups[g].scalings[half];
    const auto& from = products[g % IN_FLIGHT];
#pragma GCC unroll 16
    for (int r = 0; r < TILE_HEIGHT; r++)
      sum[r] = add_group<HAS_MIN>(sum[r], load_vector<Integers>(from[r]), row_of(r)[g], scaling);
  }
#pragma GCC unroll 16
  for (int r = 0; r < TILE_HEIGHT; r++) std::memcpy(sums + r * PANEL, &sum[r], sizeof(Vector));
}

// sums [rows, PANEL] = bias + x [rows, k] times a panel, while a `Tiles` lives on this thread. `sums` must have room for
// whole tiles.
template <Format FORMAT>
void multiply_groups_in_tiles(const uint8_t* panel, const RowLine* x, long x_stride, long rows, long k,
                              const float* bias, float* sums, const uint8_t* next) {
  constexpr Layout L = layout_of(FORMAT);
  const long groups = k / BLOCK_GROUP, whole = (rows - 1) / TILE_HEIGHT * TILE_HEIGHT;  // rows before the last ones
  const long panel_bytes = block_panel_bytes(FORMAT, k);
  const long steps = groups * ((rows + TILE_HEIGHT - 1) / TILE_HEIGHT);
  Ahead ahead = Ahead::of(panel, next, panel_bytes, steps, false);
  Tiles<RowLine>::set(rows - whole);
  UnpackedBlock block;
  const float* start = bias;
  long start_stride = 0;
  for (long first = 0; first < groups; first += UNPACKED_GROUPS) {
    const long count = std::min(UNPACKED_GROUPS, groups - first);
    unpack_block<FORMAT>(panel, first, count, block);
    for (long row = 0; row < rows; row += TILE_HEIGHT) {
      for (long i = 0; i < count; i++) ahead.prefetch();
      const auto add = row < whole ? add_block<L.has_min, false> : add_block<L.has_min, true>;
      for (int half = 0; half < 2; half++)
        add(block, count, half, groups_in(x + row * x_stride, k) + first, x_stride, rows - row,
            start + row * start_stride + half * LANES, start_stride, sums + row * PANEL + half * LANES);
    }
    start = sums;
    start_stride = PANEL;
  }
}

}  // namespace oaiserve

#endif
