// Products of many rows with weights in the formats of GGUF files, in the tiles of AMX. There are none without WITH_AMX,
// or if the compiler's target has no AMX for integers.
//
// Weights are unpacked to integers of eight bits, if they are not such, some groups at a time and once for all rows.
// Then one instruction sums the products of a group, for 16 rows and 16 columns. These sums have no error, and are
// scaled and added as block_tile of block_product.h does it, so a row gets the same numbers from both. Few rows are left
// to that function.
//
// A group has to be scaled before the next one is added, so a tile is half as deep as it could be. That is what it costs
// to have scales: the products of a group take 16 cycles, storing them 15, and scaling 48, because a core whose tiles
// multiply has one unit for floats left. Formats whose scales are integers have tiles of their own: super_tiles.h.
#pragma once

#include "block_operands.h"

#if defined(WITH_INTEGER_TILES)

namespace oaiserve {

constexpr long LEAST_TILED_ROWS = 12;
constexpr long OF_GROUPS = 1000;     // and the last rows: what tiles are configured for, see tile_rows of amx.h
constexpr long UNPACKED_GROUPS = 8;  // at once, which stay in L1 with what 16 rows of x have for them
constexpr long IN_FLIGHT = 4;        // groups whose products are summed, or wait to be scaled

// The tiles of a thread, as Tiles<bf16>. 0 has sums, 1 rows of x, 2 and 3 are the same for the last rows of x, and 4 has
// weights.
template <>
class Tiles<RowLine> {
 public:
  Tiles() { tile_rows = 0; }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;

  // Configures the tiles for groups, and for the last rows, from 1 to 16 of them.
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

// The weights of a group as tiles take them: integers of eight bits, and of each step along k first the left 16
// columns. Panels whose codes are bytes have them so.
struct UnpackedGroup {
  int8_t steps[STEPS][2][PLANE];
};

// Unpacks a number of groups of a panel.
template <Format FORMAT>
void unpack_groups(const uint8_t* chunk, long count, UnpackedGroup* out) {
  using P = Places<FORMAT>;
  typedef uint8_t Bytes __attribute__((vector_size(PLANE)));
  for (long i = 0; i < count; i++, chunk += P::CHUNK) {
    for (int step = 0; step < STEPS; step++) {
      VectorBits codes[2];
      load_codes<P::L>(chunk + P::codes(0), P::LOW, step, codes[0], codes[1]);
      for (int half = 0; half < 2; half++) {
        const Bytes weights = (Bytes)codes[half] - uint8_t(P::L.offset);
        std::memcpy(out[i].steps[step][half], &weights, sizeof(weights));
      }
    }
  }
}

// products [16, 16] = rows of x times a group of 16 columns.
template <bool IS_LAST>
void multiply_group(const int8_t* x, long x_bytes, const int8_t* weights, int32_t* products) {
  LOAD_TILE(4, weights, 2 * PLANE);
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

// Some groups of a panel: their chunks, and their weights, which are `weights_step` bytes apart.
struct TiledGroups {
  const uint8_t* chunk;
  const int8_t* weights;
  long weights_step, count;
};

// sums [16, 16] = start + up to 16 rows of x times a half of some groups. The sums of rows that are not there mean
// nothing. Each group prefetches one step of `ahead`.
template <Format FORMAT, bool IS_LAST>
void add_groups(const TiledGroups& groups, int half, const QuantizedGroup* x, long x_stride, long rows,
                const float* start, long start_stride, float* sums, Ahead& to_read) {
  using P = Places<FORMAT>;
  Ahead ahead = to_read;
  alignas(64) int32_t products[IN_FLIGHT][TILE_HEIGHT][LANES];
  if (IS_LAST) std::memset(products, 0, sizeof(products));
  const auto row_of = [&](long r) { return x + (IS_LAST && r >= rows ? 0 : r) * x_stride; };
  const auto multiply = [&](long g) {
    multiply_group<IS_LAST>(x[g].values, x_stride * long(sizeof(QuantizedGroup)),
                            groups.weights + g * groups.weights_step + half * PLANE, products[g % IN_FLIGHT][0]);
  };
  Vector sum[TILE_HEIGHT];
#pragma GCC unroll 16
  for (int r = 0; r < TILE_HEIGHT; r++) sum[r] = load_vector<Vector>(start + r * start_stride);
  // Products are ahead of their scaling, because they take long.
  for (long g = 0; g < std::min(IN_FLIGHT / 2, groups.count); g++) multiply(g);
  for (long g = 0; g < groups.count; g++) {
    if (g + IN_FLIGHT / 2 < groups.count) multiply(g + IN_FLIGHT / 2);
    ahead.prefetch();
    const Scaling scaling = load_scaling<FORMAT>(groups.chunk + g * P::CHUNK, half * LANES);
    const auto& from = products[g % IN_FLIGHT];
#pragma GCC unroll 16
    for (int r = 0; r < TILE_HEIGHT; r++)
      sum[r] = add_group<P::L.has_min>(sum[r], load_vector<Integers>(from[r]), row_of(r)[g], scaling);
  }
#pragma GCC unroll 16
  for (int r = 0; r < TILE_HEIGHT; r++) std::memcpy(sums + r * PANEL, &sum[r], sizeof(Vector));
  to_read = ahead;
}

// sums [rows, PANEL] = bias + x [rows, k] times a panel, while a `Tiles` lives on this thread. `sums` must have room for
// whole tiles.
template <Format FORMAT>
void multiply_groups_in_tiles(const uint8_t* panel, const RowLine* x, long x_stride, long rows, long k,
                              const float* bias, float* sums, const uint8_t* next) {
  using P = Places<FORMAT>;
  const long groups = k / BLOCK_GROUP, whole = (rows - 1) / TILE_HEIGHT * TILE_HEIGHT;  // rows before the last ones
  const long steps = groups * (whole / TILE_HEIGHT + 1) * 2;
  Ahead ahead = Ahead::of(panel, next, block_panel_bytes(FORMAT, k), steps, false);
  Tiles<RowLine>::set(rows - whole);
  alignas(64) UnpackedGroup unpacked[UNPACKED_GROUPS];
  const float* start = bias;
  long start_stride = 0;
  for (long first = 0; first < groups; first += UNPACKED_GROUPS) {
    const uint8_t* chunk = panel + first * P::CHUNK;
    TiledGroups some{chunk, reinterpret_cast<const int8_t*>(chunk + P::codes(0)), P::CHUNK,
                     std::min(UNPACKED_GROUPS, groups - first)};
    if constexpr (!P::L.is_whole()) {
      unpack_groups<FORMAT>(chunk, some.count, unpacked);
      some.weights = unpacked[0].steps[0][0];
      some.weights_step = sizeof(UnpackedGroup);
    }
    for (long row = 0; row < rows; row += TILE_HEIGHT) {
      const auto add = row < whole ? add_groups<FORMAT, false> : add_groups<FORMAT, true>;
      for (int half = 0; half < 2; half++)
        add(some, half, groups_in(x + row * x_stride, k) + first, x_stride, rows - row,
            start + row * start_stride + half * LANES, start_stride, sums + row * PANEL + half * LANES, ahead);
    }
    start = sums;
    start_stride = PANEL;
  }
}

}  // namespace oaiserve

#endif
