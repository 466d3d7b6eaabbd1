// Linear layers over packed weights: y = x W^T + bias, for one row or for thousands.
//
// Weights are stored in panels of 32 columns, in the order in which they are read: for each step along k, 32 packs side
// by side. So a panel is one stream of memory, and a product with few rows of x is as fast as memory can be read.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "amx.h"

namespace oaiserve {

constexpr int PANEL = 2 * LANES;  // columns

// The sums of a tile fill the registers.
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 12, TILE_COLUMNS = 2 * WIDTH;
#elif defined(__aarch64__)
constexpr int TILE_ROWS = 6, TILE_COLUMNS = 4 * WIDTH;
#else
constexpr int TILE_ROWS = 6, TILE_COLUMNS = 2 * WIDTH;
#endif
constexpr int TILE_SUMS = TILE_ROWS * TILE_COLUMNS;
// The most rows of an item, see most_rows. With more rows, the tiles of AMX wait for the weights less.
constexpr long BLOCK_ROWS = IS_TILED<bf16> ? 256 : 128;

// The size of a block, in bytes. A panel is multiplied in blocks along k. While all rows are multiplied with one block,
// the next one is prefetched, so the size of a block is how far ahead memory is read. A single tile reads a block once.
// Several tiles read it again and again, so it has to stay in L2. Such a block should not be small, because each tile
// loads and stores its sums once per block. Storing those of AMX's tiles takes as long as many products, and loading what
// these multiply takes longest. So a block for several tiles fits into L1, where rows of x pass it by, and a block for a
// single one is a whole panel, except for a very long one, and is read AHEAD_BYTES ahead.
constexpr long BLOCK_BYTES = 16 << 10, SHARED_BLOCK_BYTES = 64 << 10;
constexpr long ROWS_AT_ONCE = 8;  // whose sums are passed on together, since several rows of memory are waited for at once
constexpr long TILED_BYTES = 256 << 10, SHARED_TILED_BYTES = 36 << 10;
constexpr long AHEAD_BYTES = 16 << 10;
constexpr unsigned ROWS_BYTES = 1280 << 10;  // rows of an item with AMX, which fit into L2 next to two panels

// The weights W [n, k] of a linear layer, which the decoder owns. `panels` is
// T[ceil(n / 32)][ceil(k / PACK)][32][PACK], zero beyond n and k, and aligned to 64 bytes. `bias` is [n] or null.
template <class T>
struct Linear {
  using Input = T;
  long n, k;
  const T* panels;
  const float* bias;
};

inline long panels_of(long n) { return (n + PANEL - 1) / PANEL; }
template <class T>
long steps_of(long k) {
  return (k + PACK<T> - 1) / PACK<T>;
}
// The number of elements in one panel.
template <class T>
long panel_size(long k) {
  return steps_of<T>(k) * PANEL * PACK<T>;
}

// Returns a function from a column of a layer to where its weights begin in a matrix [n, k], whose rows are
// `row_stride` elements apart. That function returns null from column n on.
template <class T>
auto columns_of(const T* weight, long n, long row_stride) {
  return [=](long column) { return column < n ? weight + column * row_stride : nullptr; };
}

// Returns the same kind of function for the two matrices of gated_item, `gate` and `up`, both [n, k]. Each panel has 16
// columns of `gate` and the same 16 columns of `up`. Together they are a layer of gated_columns(n) columns.
template <class T>
auto columns_of_gated(const T* gate, const T* up, long n, long row_stride) {
  return [=](long column) {
    const long row = column / PANEL * LANES + column % LANES;
    return row < n ? (column % PANEL < LANES ? gate : up) + row * row_stride : nullptr;
  };
}
inline long gated_columns(long n) { return (n + LANES - 1) / LANES * PANEL; }

// Copies n columns of length k into panels, in the layout of Linear.
template <class T, class Columns>
void pack_columns(const Columns& columns, long n, long k, T* panels) {
  const long whole = k / PACK<T>;  // packs without padding
  for (long first = 0; first < n; first += PANEL, panels += panel_size<T>(k)) {
    const T* weights[PANEL];
    bool all = true;
    for (long c = 0; c < PANEL; c++) all &= (weights[c] = columns(first + c)) != nullptr;
    // Written in the order of memory and a pack at a time, which is five times as fast as column by column.
    T* pack = panels;
    for (long i = 0; i < steps_of<T>(k); i++)
      for (long c = 0; c < PANEL; c++, pack += PACK<T>)
        if (all && i < whole)
          std::memcpy(pack, weights[c] + i * PACK<T>, PACK<T> * sizeof(T));
        else
          for (long j = 0, at = i * PACK<T>; j < PACK<T>; j++, at++)
            pack[j] = weights[c] && at < k ? weights[c][at] : T{};
  }
}

// Reads the weights of a tile from a panel.
template <class T>
struct PanelReader {
  using Element = T;
  const T* weights;

  PanelReader from(long step, long column) const { return {weights + (step * PANEL + column) * PACK<T>}; }
  Packs<T> load(long step, int v) const { return Packs<T>::load(weights + (step * PANEL + v * WIDTH) * PACK<T>); }
};

// Whether x is widened to floats: where no instruction multiplies its type.
template <class T>
constexpr bool IS_WIDENED = false;
#if !defined(WITH_BF16_DOTS)
template <>
constexpr bool IS_WIDENED<bf16> = true;
#endif
template <class T>
using Multiplied = std::conditional_t<IS_WIDENED<T>, float, T>;

// Does what `dot` does. GCC may keep a factor's register for the sum instead, and then has too few.
template <class X>
Vector add_dot(Vector sum, Packs<X> a, Packs<X> b) {
#if defined(__FMA__) && !defined(__AVX512F__)
  if constexpr (std::is_same_v<X, float>) {
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a.v), "x"(b.v));
    return sum;
  }
#endif
  return dot(sum, a, b);
}

// sums [ROWS, PANEL] = start + x [ROWS, k] times `steps` steps of VECTORS * WIDTH columns of a panel. Each step prefetches
// the cache lines at `ahead`, which advances by `ahead_step` bytes.
template <class Reader, int ROWS, int VECTORS>
void tile(const Multiplied<typename Reader::Element>* x, long x_stride, Reader reader, long steps, const float* start,
          long start_stride, float* sums, const char* ahead, long ahead_step) {
  using T = typename Reader::Element;
  using X = Multiplied<T>;
  constexpr int TIMES = PACK<T> / PACK<X>;  // how many packs of x a pack of weights makes
  Vector sum[ROWS][VECTORS];
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++)
      sum[r][v] = load_vector<Vector>(start + r * start_stride + v * WIDTH);
  for (long step = 0; step < steps; step++) {
    __builtin_prefetch(ahead);
    __builtin_prefetch(ahead + 64);
    ahead += ahead_step;
#pragma GCC unroll 2
    for (int time = 0; time < TIMES; time++) {
      const auto splat = [&](int r) { return Packs<X>::splat(x + r * x_stride + step * PACK<T> + time); };
      const auto load = [&](int v) -> Packs<X> {
        if constexpr (!IS_WIDENED<T>)
          return reader.load(step, v);
        else
          return {time == 0 ? reader.load(step, v).first : reader.load(step, v).second};
      };
      if constexpr (ROWS < VECTORS) {  // what is used most stays in registers
        Packs<X> packs[ROWS];
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) packs[r] = splat(r);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
          const Packs<X> w = load(v);
#pragma GCC unroll 12
          for (int r = 0; r < ROWS; r++) sum[r][v] = add_dot(sum[r][v], packs[r], w);
        }
      } else {
        Packs<X> w[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) w[v] = load(v);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
          const Packs<X> pack = splat(r);
#pragma GCC unroll 8
          for (int v = 0; v < VECTORS; v++) sum[r][v] = add_dot(sum[r][v], pack, w[v]);
        }
      }
      // The second half of a pack is loaded again, as there are no registers to keep it in.
      if constexpr (IS_WIDENED<T>) asm volatile("" ::: "memory");
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) store_lanes(sums + r * PANEL + v * WIDTH, sum[r][v]);
}

template <class Reader, int VECTORS, int... ROW>
auto tile_for(int rows, std::integer_sequence<int, ROW...>) {
  static constexpr decltype(&tile<Reader, 1, VECTORS>) TILES[] = {tile<Reader, ROW + 1, VECTORS>...};
  return TILES[rows - 1];
}

// sums [rows, PANEL] = start + x [rows, k] times a block of a panel, in tiles of nearly the same height. The rows of
// `start` are `start_stride` elements apart; 0: all sums start with the same row. Together, the tiles prefetch
// `ahead_bytes` from `ahead` on.
template <class Reader>
void multiply_block(const Multiplied<typename Reader::Element>* x, long x_stride, long rows, long k,
                    const Reader& reader, const float* start, long start_stride, float* sums, const char* ahead,
                    long ahead_bytes) {
  using T = typename Reader::Element;
  const long steps = k / PACK<T>;
  const long tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
  const long ahead_step = (ahead_bytes + steps * tiles - 1) / std::max(steps * tiles, 1L);
  for (long t = 0, row = 0; t < tiles; t++) {
    const long height = rows / tiles + (t < rows % tiles);
    const auto multiply = [&]<int COLUMNS>(std::integral_constant<int, COLUMNS>) {
      constexpr auto HEIGHTS = std::make_integer_sequence<int, TILE_SUMS / COLUMNS>();
      const auto of_height = tile_for<Reader, COLUMNS / WIDTH>(int(height), HEIGHTS);
      for (long c = 0; c < PANEL; c += COLUMNS)
        of_height(x + row * x_stride, x_stride, reader.from(0, c), steps, start + row * start_stride + c,
                  start_stride, sums + row * PANEL + c, ahead, ahead_step);
    };
    if (height * PANEL < TILE_SUMS)  // a low tile has the whole panel, so that enough sums do not wait for each other
      multiply(std::integral_constant<int, PANEL>());
    else
      multiply(std::integral_constant<int, TILE_COLUMNS>());
    row += height;
    ahead += ahead_step * steps;
  }
  if (k % PACK<T> != 0) {  // x has only a part of the last pack, and what follows in memory may be anything
    Multiplied<T> last[BLOCK_ROWS * PACK<T>] = {};
    for (long r = 0; r < rows; r++) last[r * PACK<T>] = x[r * x_stride + k - 1];
    multiply_block(last, PACK<T>, rows, PACK<T>, reader.from(steps, 0), sums, PANEL, sums, ahead, 0);
  }
}

constexpr long WIDENED_K = 256;  // columns of a block of widened rows, which fit into L2 next to the weights

// Does what multiply_block does, for x as the buffers have it. Where x is widened, k is at most WIDENED_K.
template <class T, class Reader>
void multiply_rows(const T* x, long x_stride, long rows, long k, const Reader& reader, const float* start,
                      long start_stride, float* sums, const char* ahead, long ahead_bytes) {
  if constexpr (!IS_WIDENED<T>) {
    multiply_block(x, x_stride, rows, k, reader, start, start_stride, sums, ahead, ahead_bytes);
  } else {
    constexpr long STRIDE = WIDENED_K + LANES;
    alignas(64) float wide[BLOCK_ROWS * STRIDE];
    const long whole = k / WIDTH * WIDTH;
    for (long r = 0; r < rows; r++) {
      for (long i = 0; i < whole; i += WIDTH) {
        const VectorBits bits = __builtin_convertvector(load_vector<Halves>(x + r * x_stride + i), VectorBits) << 16;
        memcpy(wide + r * STRIDE + i, &bits, sizeof(bits));
      }
      for (long i = whole; i < k; i++) wide[r * STRIDE + i] = to_float(x[r * x_stride + i]);
    }
    multiply_block(wide, STRIDE, rows, k, reader, start, start_stride, sums, ahead, ahead_bytes);
  }
}

// The bias of a panel's columns, with which their sums start; 0 beyond n.
struct PanelBias {
  alignas(64) float values[PANEL] = {};
  PanelBias(const float* bias, long n, long panel) {
    if (bias) memcpy(values, bias + panel * PANEL, std::min<long>(PANEL, n - panel * PANEL) * sizeof(float));
  }
};

// The panel that a thread is likely to multiply next: of these weights, or of others that have the same sizes.
template <class Weights>
struct Next {
  const Weights* weights;
  long panel;
  operator long() const { return panel; }
};
// Whether multiply_panel reads ahead in other weights, too. Else it takes only the number of a panel of its own.
template <class Weights>
constexpr bool READS_OTHERS = false;
template <class T>
constexpr bool READS_OTHERS<Linear<T>> = true;

// sums [rows, PANEL] = x [rows, k] times a panel, plus bias; 1 <= rows <= BLOCK_ROWS. `next` is what this thread will
// read afterwards.
template <class T>
void multiply_panel(const Linear<T>& w, const T* x, long x_stride, long rows, long panel, float* sums,
                    Next<Linear<T>> next) {
  const T* weights = w.panels + panel * panel_size<T>(w.k);
  const char* then = reinterpret_cast<const char*>(next.weights->panels + next.panel * panel_size<T>(w.k));
  const long panel_bytes = panel_size<T>(w.k) * long(sizeof(T));
  const long block_bytes = IS_WIDENED<T>       ? WIDENED_K * PANEL * long(sizeof(T))
                           : rows <= TILE_ROWS ? BLOCK_BYTES
                                               : SHARED_BLOCK_BYTES;
  const long steps = steps_of<T>(w.k), blocks = (panel_bytes + block_bytes - 1) / block_bytes;
  const PanelBias bias(w.bias, w.n, panel);
  const float* start = bias.values;
  long start_stride = 0;
  const auto begin = [&](long b) { return steps * b / blocks * PACK<T>; };
  for (long b = 0; b < blocks; b++) {
    const long from = begin(b), to = b + 1 < blocks ? begin(b + 1) : w.k;
    const char* ahead = b + 1 < blocks ? reinterpret_cast<const char*>(weights + to * PANEL) : then;
    multiply_rows(x + from, x_stride, rows, to - from, PanelReader<T>{weights + from * PANEL}, start, start_stride, sums,
                  ahead, panel_bytes / blocks);
    start = sums;
    start_stride = PANEL;
  }
}

#if defined(WITH_BF16_TILES)
// Rows whose sums tiles have stored.
struct SummedRows {
  const float* sums = nullptr;  // those of `row`
  long row = 0, end = 0, column = 0;

  template <class Store>
  void pass_on(long most, Store& store) {
    for (const long to = std::min(row + most, end); row < to; row++, sums += PANEL)
      store(row, column, load(sums), load(sums + LANES));
  }
};

// Does what multiply_panels does, in the tiles of AMX. Where rows share a block of weights, the next block is read ahead,
// and sums are passed on while tiles multiply other rows.
template <class Store>
void multiply_panels_in_tiles(const Linear<bf16>& w, const bf16* x, long x_stride, long rows, long first, long end,
                              Next<Linear<bf16>> next, Store&& store) {
  const Tiles<bf16> tiles;
  const long size = panel_size<bf16>(w.k), panel_bytes = size * long(sizeof(bf16));
  const long depth = (w.k + TILE_ELEMENTS - 1) / TILE_ELEMENTS;
  const long times = (rows + MOST_TILE_ROWS - 1) / MOST_TILE_ROWS;
  const bool is_shared = times > 1;
  const long block_bytes = is_shared ? SHARED_TILED_BYTES : TILED_BYTES;
  const long blocks = (panel_bytes + block_bytes - 1) / block_bytes;
  const long parts = depth * times, ahead_lines = (panel_bytes / 64 + 4 * parts - 1) / (4 * parts) * 4;
  const long row_lines = std::min(8L, panel_bytes / 64 / 2 / rows);  // read ahead with a row, while nothing is multiplied
  const long far = is_shared ? panel_bytes / blocks : AHEAD_BYTES;
  const auto begin = [&](long b) { return b < blocks ? depth * b / blocks * TILE_ELEMENTS : w.k; };
  alignas(64) float sums[BLOCK_ROWS * PANEL];
  SummedRows summed;
  for (long panel = first; panel < end; panel++) {
    const bf16* const weights = w.panels + panel * size;
    const bf16* const then = panel + 1 < end ? weights + size : next.weights->panels + next.panel * size;
    ReadAhead ahead = ReadAhead::of(weights, panel_bytes, far, then);
    const PanelBias bias(w.bias, w.n, panel);
    for (long b = 0; b < blocks; b++) {
      const long from = begin(b), k = begin(b + 1) - from;
      for (long t = 0, row = 0, count = 0; t < times; t++, row += count) {
        count = rows / times + (t < rows % times);
        Tiles<bf16>::set_rows(count);
        float* const own = sums + (blocks > 1 ? row : t % 2 * MOST_TILE_ROWS) * PANEL;
        load_sums(b == 0 ? bias.values : own, b == 0 ? 0 : PANEL, count);
        add_products(x + row * x_stride + from, x_stride, count, weights + from * PANEL, k, is_shared, ahead,
                     ahead_lines, [&] { summed.pass_on(ROWS_AT_ONCE, store); });
        summed.pass_on(MOST_TILE_ROWS, store);
        store_sums(own, count);
        if (b + 1 == blocks) summed = {own, row, row + count, panel * PANEL};
        for (long r = 0; !is_shared && r < summed.end; r++) {
          ahead.prefetch(row_lines);
          summed.pass_on(1, store);
        }
      }
    }
  }
  summed.pass_on(MOST_TILE_ROWS, store);
}
#endif

// How a layer is cut into items: its rows into blocks, and its panels into groups. An item is the product of one
// block and one group.
struct Cut {
  unsigned blocks, groups;
};

// Returns the most rows of an item, for rows of k numbers: with AMX, as many as stay in L2, because each panel reads
// them again, and tiles do so faster than they can be read from elsewhere.
constexpr unsigned most_rows(unsigned k) {
  if (!IS_TILED<bf16>) return BLOCK_ROWS;
  const unsigned fit = ROWS_BYTES / (std::max(k, 1u) * unsigned(sizeof(bf16)));
  return std::clamp<unsigned>(fit / MOST_TILE_ROWS * MOST_TILE_ROWS, 2 * MOST_TILE_ROWS, BLOCK_ROWS);
}

// Cuts a layer so that all threads end at about the same time. Few items cost less, because taking an item and
// beginning to read its weights takes time. Many items are shared better among threads that are not equally fast.
inline Cut cut(unsigned panels, unsigned k, unsigned rows, unsigned threads) {
  if (rows == 0) return {0, 0};
  const auto ceil_div = [](unsigned a, unsigned b) { return (a + b - 1) / b; };
  // The unit of time is the time for one row and one panel, which is about k / 8 ns. Fewer than 12 rows take as long as
  // 12, because they wait for the weights. An item costs 400 ns in addition.
  const unsigned item_time = 3200 / k;
  const auto panel_time = [&](unsigned blocks) { return std::max(ceil_div(rows, blocks), 12u); };

  const unsigned fewest = ceil_div(rows, most_rows(k));
  unsigned blocks = fewest;
  if (fewest * panels < 8 * threads) {  // too few panels for all threads: several may read the same, for other rows
    const auto time = [&](unsigned n) { return ceil_div(n * panels, threads) * (panel_time(n) + item_time); };
    for (unsigned more = fewest + 1; more <= fewest + 3 && more * 12 <= rows; more++)
      if (time(more) < time(blocks)) blocks = more;
  }

  Cut best{blocks, panels};
  unsigned best_time = ~0u;
  for (const unsigned rounds : {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64}) {
    const unsigned groups = std::min(std::max(rounds * threads / blocks, 1u), panels);
    const unsigned work = ceil_div(panels, groups) * panel_time(blocks);
    const unsigned time = ceil_div(groups * blocks, threads) * (work + item_time) + work / 8;
    if (time < best_time) best = {blocks, groups}, best_time = time;
    if (groups == panels) break;
  }
  return best;
}

// Returns the number of items of a layer, for `rows` rows of x and this number of threads.
template <class Weights>
long linear_items(const Weights& w, long rows, int threads) {
  const Cut c = cut(panels_of(w.n), w.k, rows, threads);
  return long(c.blocks) * c.groups;
}

// Multiplies rows of x with the panels from `first` to before `end`, and calls store(row, column, left, right) for each
// row and panel: `left` has the columns column .. column + 15, and `right` the next 16. There are at most BLOCK_ROWS rows,
// `x_stride` elements apart. `next` is what this thread is likely to multiply afterwards.
template <class Weights, class T, class Store>
void multiply_panels(const Weights& w, const T* x, long x_stride, long rows, long first, long end, Next<Weights> next,
                     Store&& store) {
#if defined(WITH_BF16_TILES)
  if constexpr (std::is_same_v<Weights, Linear<bf16>>)
    return multiply_panels_in_tiles(w, x, x_stride, rows, first, end, next, store);
#endif
  alignas(64) float sums[BLOCK_ROWS * PANEL];
  const Tiles<T> tiles;
  for (long panel = first; panel < end; panel++) {
    multiply_panel(w, x, x_stride, rows, panel, sums, panel + 1 < end ? Next<Weights>{&w, panel + 1} : next);
    for (long row = 0; row < rows; row++) {
      const float* from = sums + row * PANEL;
      store(row, panel * PANEL, load(from), load(from + LANES));
    }
  }
}

// Computes one item of a layer, and calls store(row, column, left, right) as multiply_panels does. x is
// [rows, k], with rows `x_stride` elements apart.
template <class Weights, class T, class Store>
void panel_item(const Weights& w, const T* x, long x_stride, long rows, int threads, long item, Store&& store) {
  const long panels = panels_of(w.n);
  const Cut c = cut(panels, w.k, rows, threads);
  const long block = item / c.groups, group = item % c.groups;
  const long row = rows * block / c.blocks, end_row = rows * (block + 1) / c.blocks;
  const long first = panels * group / c.groups, end = panels * (group + 1) / c.groups;
  // The panel with which this thread's next item is likely to begin. Behind the last one is nothing that is not in the
  // cache.
  const bool is_last = item + threads >= long(c.blocks) * c.groups;
  const long likely_next = is_last ? end - 1 : panels * ((group + threads) % c.groups) / c.groups;
  multiply_panels(w, x + row * x_stride, x_stride, end_row - row, first, end, Next<Weights>{&w, likely_next},
                  [&](long r, long column, f32x16 left, f32x16 right) { store(row + r, column, left, right); });
}

// Computes one item of y = x W^T + bias, and calls store(row, column, values) with 16 columns of one row at a time. The
// first of these is below n; values beyond n are zero.
template <class Weights, class T, class Store>
void linear_item(const Weights& w, const T* x, long x_stride, long rows, int threads, long item, Store&& store) {
  panel_item(w, x, x_stride, rows, threads, item, [&](long row, long column, f32x16 left, f32x16 right) {
    store(row, column, left);
    if (column + LANES < w.n) store(row, column + LANES, right);
  });
}

// Computes one item of a layer of columns_of_gated, and calls store(row, column, gate, up) with 16 columns of both
// matrices at a time.
template <class Weights, class T, class Store>
void gated_item(const Weights& w, const T* x, long x_stride, long rows, int threads, long item, Store&& store) {
  panel_item(w, x, x_stride, rows, threads, item,
             [&](long row, long column, f32x16 gate, f32x16 up) { store(row, column / 2, gate, up); });
}

}  // namespace oaiserve
