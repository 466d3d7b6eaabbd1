// The products of attention in the tiles of AMX: scores, and sums of weighted values. There are none without WITH_AMX, or
// if the compiler's target has no AMX.
//
// Panels of the cache are as tiles need them. Of sixteen keys, 32 numbers are the 16 rows of a tile. Of sixteen values, 16
// columns are its first 8 rows, so values are multiplied sixteen keys at a time, wherever the next panel lies. Every row
// goes through tiles, even the only one of a decode: see amx.h.
#pragma once

#include "amx.h"
#include "paged_cache.h"

namespace oaiserve {

// Whether attention computes rows of T over a cache of S in tiles.
template <class T, class S>
constexpr bool IS_ATTENDED_IN_TILES = IS_TILED<T> && std::is_same_v<T, S>;

// Rows of queries or of weights, `stride` numbers apart.
struct TiledRows {
  const bf16* numbers;
  long stride, count;  // There are at most MOST_TILE_ROWS.
};

// Panels of keys or of values, and those that are read soon.
struct TiledPanels {
  const bf16* const* panels;
  const bf16* const* later;
  long count;
  bool are_read;  // Other rows have read these panels, and prefetched what is read soon.
};

#if defined(WITH_AMX) && defined(__AMX_BF16__) && defined(__AVX512BF16__)

constexpr long OF_ATTENTION = 4000;  // and more: what tiles are configured for, see tile_rows of amx.h

// The tiles for a number of rows and a depth. More than 16 rows have the sums of twice 16 columns: 0 and 1 those of the
// first 16 rows, and 2 and 3 the others. These rows are in 4 and 5, and 6 and 7 are of the cache. Fewer rows have the sums
// of four times 16 columns, 0 to 3, and all that both depths need, because to configure tiles would make them wait for
// memory: with a depth of 32, 4 has rows and 5 what is of the cache, and with a depth of 16, 6 and 7 have these.
constexpr auto ATTENTION_CONFIGS = [] {
  std::array<std::array<TileConfig, 2>, MOST_TILE_ROWS + 1> found;
  for (long rows = 1; rows <= MOST_TILE_ROWS; rows++)
    for (const long is_deep : {0, 1}) {
      TileConfig& config = found[size_t(rows)][size_t(is_deep)];
      const long depth = PANEL_KEYS << is_deep, lower = rows - TILE_HEIGHT;
      if (lower > 0) {
        for (const int tile : {0, 1}) config.set(tile, TILE_HEIGHT);
        for (const int tile : {2, 3}) config.set(tile, lower);
        config.set(4, TILE_HEIGHT, depth);
        config.set(5, lower, depth);
        for (const int tile : {6, 7}) config.set(tile, depth / PACK<bf16>);
      } else {
        for (const int tile : {0, 1, 2, 3, 4}) config.set(tile, rows);
        config.set(5, TILE_HEIGHT);
        config.set(6, rows, PANEL_KEYS);
        config.set(7, PANEL_KEYS / PACK<bf16>);
      }
    }
  return found;
}();

inline void configure_for_attention(long rows, bool is_deep) {
  const long shape = OF_ATTENTION + 2 * rows + (is_deep && rows > TILE_HEIGHT);
  if (tile_rows == shape) return;
  load_config(ATTENTION_CONFIGS[size_t(rows)][size_t(is_deep)]);
  tile_rows = shape;
}

// Prefetches what a tile of this height will load.
inline void prefetch_tile(const bf16* from, long stride, long height) {
  asm volatile("");  // GCC would leave out a call of a function that does nothing else.
#pragma GCC unroll 8
  for (long r = 0; r < height; r++) __builtin_prefetch(from + r * stride);
}

// sums = rows times COLUMNS times 16 columns of the cache. find(step, column) returns where the tile of some columns begins
// that is multiplied in a step; its rows are `stride` numbers apart. prefetch(step, column) is called after each.
template <bool IS_TALL, bool IS_DEEP, int COLUMNS, class Find, class Prefetch>
inline void multiply_tiles(const TiledRows& rows, long steps, long stride, const Find& find, const Prefetch& prefetch,
                           float* sums, long sums_stride) {
  static_assert(COLUMNS <= (IS_TALL ? 2 : 4));
  constexpr long DEPTH = IS_DEEP ? 2 * PANEL_KEYS : PANEL_KEYS;
  const long row_bytes = rows.stride * long(sizeof(bf16)), bytes = stride * long(sizeof(bf16));
  const long sums_bytes = sums_stride * long(sizeof(float));
  _tile_zero(0);
  if constexpr (COLUMNS > 1) _tile_zero(1);
  if constexpr (COLUMNS > 2 || IS_TALL) _tile_zero(2);
  if constexpr (COLUMNS > 2 || (IS_TALL && COLUMNS > 1)) _tile_zero(3);
  const bf16* numbers = rows.numbers;
  for (long step = 0; step < steps; step++, numbers += DEPTH) {
    if constexpr (IS_TALL) {
      LOAD_TILE(4, numbers, row_bytes);
      LOAD_TILE(5, numbers + TILE_HEIGHT * rows.stride, row_bytes);
      LOAD_TILE(6, find(step, 0), bytes);
      prefetch(step, 0);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (COLUMNS > 1) {
        LOAD_TILE(7, find(step, 1), bytes);
        prefetch(step, 1);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
    } else {
#define MULTIPLY_COLUMN(of_rows, of_cache, column)  \
  do {                                              \
    LOAD_TILE(of_cache, find(step, column), bytes); \
    prefetch(step, column);                         \
    _tile_dpbf16ps(column, of_rows, of_cache);      \
  } while (false)
#define MULTIPLY_COLUMNS(of_rows, of_cache)                             \
  do {                                                                  \
    LOAD_TILE(of_rows, numbers, row_bytes);                             \
    MULTIPLY_COLUMN(of_rows, of_cache, 0);                              \
    if constexpr (COLUMNS > 1) MULTIPLY_COLUMN(of_rows, of_cache, 1);   \
    if constexpr (COLUMNS > 2) MULTIPLY_COLUMN(of_rows, of_cache, 2);   \
    if constexpr (COLUMNS > 2) MULTIPLY_COLUMN(of_rows, of_cache, 3);   \
  } while (false)
      if constexpr (IS_DEEP)
        MULTIPLY_COLUMNS(4, 5);
      else
        MULTIPLY_COLUMNS(6, 7);
#undef MULTIPLY_COLUMN
#undef MULTIPLY_COLUMNS
    }
  }
  _tile_stored(0, sums, sums_bytes);
  if constexpr (COLUMNS > 1) _tile_stored(1, sums + TILE_FLOATS, sums_bytes);
  if constexpr (IS_TALL) {
    _tile_stored(2, sums + TILE_HEIGHT * sums_stride, sums_bytes);
    if constexpr (COLUMNS > 1) _tile_stored(3, sums + TILE_HEIGHT * sums_stride + TILE_FLOATS, sums_bytes);
  } else if constexpr (COLUMNS > 2) {
    _tile_stored(2, sums + 2 * TILE_FLOATS, sums_bytes);
    _tile_stored(3, sums + 3 * TILE_FLOATS, sums_bytes);
  }
}

// Calls body(first, columns) for `count` times 16 columns, as many at once as there are tiles for their sums. `columns` is a
// constant.
template <bool IS_TALL, class Body>
inline void for_columns(long count, const Body& body) {
  constexpr int AT_ONCE = IS_TALL ? 2 : 4;
  long first = 0;
  for (; first + AT_ONCE <= count; first += AT_ONCE) body(first, std::integral_constant<int, AT_ONCE>());
  for (; first < count; first++) body(first, std::integral_constant<int, 1>());
}

// scores[r][16 c ..] = the dot products of row r of queries with the keys of panel c
template <bool IS_TALL, bool IS_DEEP>
void score_panels(const TiledRows& queries, const TiledPanels& keys, long key_dim, float* scores, long score_stride) {
  constexpr long DEPTH = IS_DEEP ? 2 * PANEL_KEYS : PANEL_KEYS;
  for_columns<IS_TALL>(keys.count, [&](long first, auto columns) {
    const auto find = [&](long step, long c) { return keys.panels[first + c] + step * DEPTH * PANEL_KEYS; };
    const auto prefetch = [&](long step, long c) {
      if (!keys.are_read) prefetch_tile(keys.later[first + c] + step * DEPTH * PANEL_KEYS, TILE_ELEMENTS, DEPTH / PACK<bf16>);
    };
    multiply_tiles<IS_TALL, IS_DEEP, columns>(queries, key_dim / DEPTH, TILE_ELEMENTS, find, prefetch,
                                              scores + first * PANEL_KEYS, score_stride);
  });
}

inline void score_in_tiles(const TiledRows& queries, const TiledPanels& keys, long key_dim, float* scores,
                           long score_stride) {
  const bool is_deep = key_dim % (2 * PANEL_KEYS) == 0, is_tall = queries.count > TILE_HEIGHT;
  configure_for_attention(queries.count, is_deep);
  const auto score = is_tall ? (is_deep ? score_panels<true, true> : score_panels<true, false>)
                             : (is_deep ? score_panels<false, true> : score_panels<false, false>);
  score(queries, keys, key_dim, scores, score_stride);
}

// Calls add(row, column, sums) with the sums of the values of some panels, weighted with each row of the weights: 16 columns
// at a time.
template <bool IS_TALL, class Add>
void add_panels(const TiledRows& weights, const TiledPanels& values, long value_dim, const Add& add) {
  alignas(64) float sums[(IS_TALL ? 2 : 1) * TILE_HEIGHT * 4 * TILE_FLOATS];
  for_columns<IS_TALL>(value_dim / LANES, [&](long first, auto columns) {
    constexpr long STRIDE = columns * LANES;
    const auto find = [&](long step, long c) { return values.panels[step] + (first + c) * TILE_ELEMENTS; };
    const auto prefetch = [&](long step, long c) {
      if (!values.are_read)
        prefetch_tile(values.later[step] + (first + c) * TILE_ELEMENTS, value_dim * PACK<bf16>, PANEL_KEYS / PACK<bf16>);
    };
    multiply_tiles<IS_TALL, false, columns>(weights, values.count, value_dim * PACK<bf16>, find, prefetch, sums, STRIDE);
    for (long r = 0; r < weights.count; r++)
      for (long c = 0; c < columns; c++)
        add(r, (first + c) * LANES, load_vector<Vector>(sums + r * STRIDE + c * LANES));
  });
}

template <class Add>
void add_in_tiles(const TiledRows& weights, const TiledPanels& values, long value_dim, const Add& add) {
  configure_for_attention(weights.count, false);
  if (weights.count > TILE_HEIGHT)
    add_panels<true>(weights, values, value_dim, add);
  else
    add_panels<false>(weights, values, value_dim, add);
}

#endif

}  // namespace oaiserve
