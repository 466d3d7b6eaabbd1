// Linear layers over packed weights: y = x W^T + bias, for one row or for thousands.
//
// Weights lie in panels of 32 columns, in the order in which they are read: for each step along k, 32 packs side by side.
// So a panel is one stream of memory, which is what one row needs to be as fast as the memory is, and reading ahead of a
// panel is reading the next one.
#pragma once

#include <algorithm>
#include <utility>

#include "simd.h"

namespace oaiserve {

constexpr int PANEL = 2 * LANES;  // columns

// The sums of a tile fill the registers: 12 x 32 with the 32 of AVX-512, else 6 x 16.
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 12, TILE_COLUMNS = PANEL;
#else
constexpr int TILE_ROWS = 6, TILE_COLUMNS = LANES;
#endif
constexpr long BLOCK_ROWS = 128;      // rows of an item at most: 16 KiB of sums
constexpr long BLOCK_BYTES = 16384;   // weights that stay in L1 while all rows of an item pass
constexpr long AHEAD_BYTES = 16384;   // how far ahead weights are asked for: a block, or they come too late

// W [n, k]. `panels` is T[ceil(n / 32)][ceil(k / PACK)][32][PACK], zero beyond n and k, and aligned to 64 bytes.
// `bias` is [n] or null.
template <class T>
struct Linear {
  long n, k;
  const T* panels;
  const float* bias;
};

inline long panels_of(long n) { return (n + PANEL - 1) / PANEL; }
template <class T>
long steps_of(long k) {
  return (k + PACK<T> - 1) / PACK<T>;
}
// Elements of T in one panel.
template <class T>
long panel_size(long k) {
  return steps_of<T>(k) * PANEL * PACK<T>;
}

// Packs n columns of W, each of k neighbours in memory; `column(i)` is where the i-th begins, null where zeros belong.
template <class T, class Column>
void pack_columns(Column&& column, long n, long k, T* panels) {
  for (long first = 0; first < n; first += PANEL, panels += panel_size<T>(k))
    for (long c = 0; c < PANEL; c++) {
      const T* from = first + c < n ? column(first + c) : nullptr;
      for (long i = 0; i < steps_of<T>(k) * PACK<T>; i++)
        panels[(i / PACK<T> * PANEL + c) * PACK<T> + i % PACK<T>] = from && i < k ? from[i] : T{};
    }
}

// W [n, k], `row_stride` elements from one row to the next. Parts that begin at a multiple of 32 rows can be packed apart.
template <class T>
void pack_panels(const T* weight, long n, long k, long row_stride, T* panels) {
  pack_columns([=](long i) { return weight + i * row_stride; }, n, k, panels);
}

// Two matrices [n, k] for gated_item: 16 columns of `gate` and the same 16 of `up` in each panel. The n of the Linear is
// gated_columns(n).
inline long gated_columns(long n) { return (n + LANES - 1) / LANES * PANEL; }
template <class T>
void pack_gated(const T* gate, const T* up, long n, long k, long row_stride, T* panels) {
  const auto column = [=](long i) -> const T* {
    const long row = i / PANEL * LANES + i % LANES;
    return row < n ? (i % PANEL < LANES ? gate : up) + row * row_stride : nullptr;
  };
  pack_columns(column, gated_columns(n), k, panels);
}

// sums [ROWS, PANEL] += x [ROWS, k] times `steps` steps of a panel, TILE_COLUMNS of each. In every step, asks for the
// cache lines at `ahead`, which moves on by `ahead_step` bytes.
template <class T, int ROWS>
void tile(const T* x, long x_stride, const T* weights, long steps, float* sums, const char* ahead, long ahead_step) {
  constexpr int VECTORS = TILE_COLUMNS / LANES;
  f32x16 sum[ROWS][VECTORS];
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++) sum[r][v] = load(sums + r * PANEL + v * LANES);
  for (long step = 0; step < steps; step++) {
    Packed<T> w[VECTORS];
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++) w[v] = Packed<T>::load(weights + (step * PANEL + v * LANES) * PACK<T>);
    __builtin_prefetch(ahead);
    __builtin_prefetch(ahead + 64);
    ahead += ahead_step;
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
      const Packed<T> pack = Packed<T>::splat(x + r * x_stride + step * PACK<T>);
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; v++) sum[r][v] = dot(sum[r][v], pack, w[v]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++) store(sums + r * PANEL + v * LANES, sum[r][v]);
}

template <class T>
using Tile = void (*)(const T*, long, const T*, long, float*, const char*, long);

template <class T, int... ROW>
Tile<T> tile_for(int rows, std::integer_sequence<int, ROW...>) {
  static constexpr Tile<T> TILES[] = {tile<T, ROW + 1>...};
  return TILES[rows - 1];
}

// sums [rows, PANEL] += x [rows, k] times `steps` steps of a panel, at most TILE_ROWS rows at a time. The tiles share the
// work of asking for what lies AHEAD_BYTES after the weights.
template <class T>
void add_block(const T* x, long x_stride, long rows, const T* weights, long steps, float* sums) {
  const long tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
  const long ahead_step = (PANEL * PACK<T> * sizeof(T) + tiles - 1) / tiles;
  const char* ahead = (const char*)weights + AHEAD_BYTES;
  for (long t = 0; t < tiles; t++) {
    const long row = rows * t / tiles, next = rows * (t + 1) / tiles;  // of one height, or nearly
    const Tile<T> add = tile_for<T>(next - row, std::make_integer_sequence<int, TILE_ROWS>());
    for (long c = 0; c < PANEL; c += TILE_COLUMNS)
      add(x + row * x_stride, x_stride, weights + c * PACK<T>, steps, sums + row * PANEL + c, ahead, ahead_step);
    ahead += ahead_step * steps;
  }
}

// sums [rows, PANEL] = x [rows, k] times a panel; rows <= BLOCK_ROWS.
template <class T>
void multiply(const Linear<T>& w, const T* x, long x_stride, long rows, long panel, float* sums) {
  for (long c = 0; c < PANEL; c++) {
    const long column = panel * PANEL + c;
    sums[c] = w.bias && column < w.n ? w.bias[column] : 0;
  }
  for (long r = 1; r < rows; r++) memcpy(sums + r * PANEL, sums, PANEL * sizeof(float));

  const T* weights = w.panels + panel * panel_size<T>(w.k);
  const long steps = w.k / PACK<T>;
  const long most = rows <= TILE_ROWS ? steps : BLOCK_BYTES / (PANEL * PACK<T> * (long)sizeof(T));
  for (long step = 0; step < steps; step += most)
    add_block(x + step * PACK<T>, x_stride, rows, weights + step * PANEL * PACK<T>, std::min(most, steps - step), sums);

  if (steps * PACK<T> < w.k) {  // the last pack is not whole: x may end, or go on with something else
    T last[BLOCK_ROWS][PACK<T>] = {};
    for (long r = 0; r < rows; r++) last[r][0] = x[r * x_stride + w.k - 1];
    add_block(last[0], PACK<T>, rows, weights + steps * PANEL * PACK<T>, 1, sums);
  }
}

// How a layer is cut into items: the rows into blocks, the panels into groups. An item is one group for one block.
struct Cut {
  long blocks, groups;
};

// Cuts so that all threads end at about the same time.
inline Cut cut(long panels, long k, long rows, int threads) {
  // What a panel costs for a block of rows, in rows: few rows wait for the weights, and some time goes by in any case.
  const auto cost = [&](long blocks) { return std::max((rows + blocks - 1) / blocks, 12L) + 2; };
  const auto time = [&](long blocks) { return (blocks * panels + threads - 1) / threads * cost(blocks); };
  const long fewest = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
  long blocks = fewest;
  for (long more = fewest + 1; more <= 4 * fewest && more * 12 <= rows; more++)
    if (time(more) < time(blocks)) blocks = more;
  // Short items go together, to about 2^17 rows times k (some 15 us), as long as each thread still gets 32 of them.
  const long together = std::min((1L << 17) / (cost(blocks) * k), blocks * panels / (32L * threads));
  const long group = std::max(together, 1L);
  return {blocks, (panels + group - 1) / group};
}

// Items of a layer for `rows` rows of x and this many threads.
template <class T>
long linear_items(const Linear<T>& w, long rows, int threads) {
  const Cut c = cut(panels_of(w.n), w.k, rows, threads);
  return c.blocks * c.groups;
}

// Calls store(row, column, left, right) for all of an item: columns column to column + 31 of a row.
template <class T, class Store>
void panel_item(const Linear<T>& w, const T* x, long x_stride, long rows, int threads, long item, Store&& store) {
  alignas(64) float sums[BLOCK_ROWS * PANEL];
  const long panels = panels_of(w.n);
  const Cut c = cut(panels, w.k, rows, threads);
  const long block = item / c.groups, group = item % c.groups;
  const long first = rows * block / c.blocks, count = rows * (block + 1) / c.blocks - first;
  for (long panel = panels * group / c.groups; panel < panels * (group + 1) / c.groups; panel++) {
    multiply(w, x + first * x_stride, x_stride, count, panel, sums);
    for (long r = 0; r < count; r++)
      store(first + r, panel * PANEL, load(sums + r * PANEL), load(sums + r * PANEL + LANES));
  }
}

// One item of y = x W^T + bias, x [rows, k]: calls store(row, column, values) with 16 columns of one row at a time. Columns
// begin below n; those of the last sixteen that are not below n are zero.
template <class T, class Store>
void linear_item(const Linear<T>& w, const T* x, long x_stride, long rows, int threads, long item, Store&& store) {
  panel_item(w, x, x_stride, rows, threads, item, [&](long row, long column, f32x16 left, f32x16 right) {
    store(row, column, left);
    if (column + LANES < w.n) store(row, column + LANES, right);
  });
}

// The same for weights of pack_gated: store(row, column, gate, up), columns as in the two matrices.
template <class T, class Store>
void gated_item(const Linear<T>& w, const T* x, long x_stride, long rows, int threads, long item, Store&& store) {
  panel_item(w, x, x_stride, rows, threads, item,
             [&](long row, long column, f32x16 gate, f32x16 up) { store(row, column / 2, gate, up); });
}

}  // namespace oaiserve
