// Matrix products of bfloat16 in the tiles of AMX, which are registers of 16 rows of 64 bytes. There are none without
// WITH_AMX, or if the compiler's target has no AMX.
//
// Every row goes through tiles, even a single one, because TDPBF16PS adds in an order of its own: it sums 32 elements
// along k from zero on, those with even and odd indices apart, and adds both to the sum before. So the numbers of a row
// do not depend on how many others there are.
//
// Panels of gemm.h are as tiles need them: 16 steps of a panel are 16 rows of 128 bytes. One tile takes the left
// halves, and another the right ones.
//
// Tests run it in an emulator, too, and look for the instructions in what the compiler makes of it.
#pragma once

#include <algorithm>
#include <array>

#include "packs.h"

namespace oaiserve {

// Whether products of this type are computed in tiles.
template <class T>
constexpr bool IS_TILED = false;
constexpr long TILE_STEPS = 16;      // steps along k that are multiplied at once
constexpr long MOST_TILE_ROWS = 32;  // rows of x that are multiplied at once: two tiles

// What a thread will read soon: the lines from `at` to before `end`, and then those from `then` on.
struct ReadAhead {
  const char *at = nullptr, *end = nullptr, *then = nullptr;

  static ReadAhead from(const void* at) { return {(const char*)at, (const char*)UINTPTR_MAX, nullptr}; }
  // What is behind the first `done` of these bytes, and then what is at `then`.
  static ReadAhead of(const void* data, long bytes, long done, const void* then) {
    return {(const char*)data + done, (const char*)data + bytes, (const char*)then};
  }
  // Prefetches the next lines, into L2. On the way into L1, they would keep the buffers for what tiles load from L2.
  void prefetch(long lines) {
    if (at >= end) *this = from(then + (at - end));
    for (long line = 0; line < lines; line++, at += 64) __builtin_prefetch(at, 0, 2);
  }
};

// The tiles of a thread, which can be used as long as this object lives.
template <class T>
class Tiles {
 public:
  Tiles() {}
};

#if defined(WITH_AMX) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define WITH_BF16_TILES

template <>
constexpr bool IS_TILED<bf16> = true;
constexpr long TILE_HEIGHT = 16, TILE_BYTES = 64;  // the rows of a tile, and the length of one
constexpr long TILE_FLOATS = TILE_BYTES / sizeof(float), TILE_ELEMENTS = TILE_BYTES / sizeof(bf16);
constexpr long SUMS_STRIDE = 2 * TILE_FLOATS;           // stride of sums, whose columns are those of a panel
constexpr long STEP_ELEMENTS = 2 * WIDTH * PACK<bf16>;  // numbers of a panel in one step

// The tiles for a number of rows of x: 0, 1 and 4 have the first 16 of them, and 2, 3 and 5 the others. So no row is loaded
// that is not there, and a product takes as long as it has rows.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  constexpr void set(int tile, long height, long elements = TILE_ELEMENTS) {
    row_bytes[tile] = height > 0 ? uint16_t(elements * long(sizeof(bf16))) : 0;
    rows[tile] = uint8_t(height);
  }
};
constexpr auto TILE_CONFIGS = [] {
  std::array<TileConfig, MOST_TILE_ROWS + 1> found;
  for (long rows = 0; rows <= MOST_TILE_ROWS; rows++) {
    for (const int tile : {0, 1, 4}) found[size_t(rows)].set(tile, std::min(rows, TILE_HEIGHT));
    for (const int tile : {2, 3, 5}) found[size_t(rows)].set(tile, std::max(rows - TILE_HEIGHT, 0L));
    for (const int tile : {6, 7}) found[size_t(rows)].set(tile, TILE_HEIGHT);
  }
  return found;
}();

inline void load_config(const TileConfig& config) {
  // GCC's intrinsic says in some versions, such as 12.2, that it reads eight bytes, so stores to others may be left out.
  asm volatile("" : : "m"(config));
  _tile_loadconfig(&config);
}

inline thread_local constinit long tile_rows = 0;  // for which the tiles of this thread are configured; 0: not

template <>
class Tiles<bf16> {
 public:
  Tiles() { tile_rows = 0; }
  // torch configures tiles in its own way, and what is in use is saved with the thread
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;

  // Configures the tiles for a number of rows, from 1 to MOST_TILE_ROWS.
  static void set_rows(long rows) {
    if (rows == tile_rows) return;
    load_config(TILE_CONFIGS[size_t(rows)]);
    tile_rows = rows;
  }
};

// Rows of x for a tile: where they are, or a copy with zeros in place of the elements that are missing.
class TileRows {
 public:
  const bf16* data = nullptr;
  long stride_bytes = 0;

  void set(const bf16* x, long x_stride, long rows, long elements) {
    data = x, stride_bytes = x_stride * long(sizeof(bf16));
    if (elements == TILE_ELEMENTS) return;
    memset((void*)copy_, 0, sizeof(copy_));
    for (long r = 0; r < std::min(rows, TILE_HEIGHT); r++)
      memcpy(copy_ + r * TILE_ELEMENTS, x + r * x_stride, size_t(elements) * sizeof(bf16));
    data = copy_, stride_bytes = TILE_BYTES;
  }

 private:
  alignas(64) bf16 copy_[TILE_HEIGHT * TILE_ELEMENTS];
};

// Steps of a panel for whole tiles: where they are, or a copy if some are missing.
class TileWeights {
 public:
  const bf16* data = nullptr;

  void set(const bf16* steps, long count) {
    data = steps;
    if (count == TILE_STEPS) return;
    memset((void*)copy_, 0, sizeof(copy_));
    memcpy(copy_, steps, size_t(count) * STEP_ELEMENTS * sizeof(bf16));
    data = copy_;
  }

 private:
  alignas(64) bf16 copy_[TILE_STEPS * STEP_ELEMENTS];
};

// Loads a tile, whose number must be a literal. GCC's intrinsic does not say that it reads memory, so the compiler
// could move stores past it.
#define LOAD_TILE_BY(load, tile, from, stride_bytes) \
  do {                                               \
    asm volatile("" ::: "memory");                   \
    load(tile, from, stride_bytes);                  \
    asm volatile("" ::: "memory");                   \
  } while (false)
#define LOAD_TILE(tile, from, stride_bytes) LOAD_TILE_BY(_tile_loadd, tile, from, stride_bytes)
// The same from L2, past L1, where weights and many rows of x would only displace each other.
#define STREAM_TILE(tile, from, stride_bytes) LOAD_TILE_BY(_tile_stream_loadd, tile, from, stride_bytes)

// Adds to tiles 0 to 3 the products of up to 32 rows of x, of k numbers each, with a panel: 0 and 1 have the left and the
// right columns of the first 16 rows, and 2 and 3 those of the others. Each 16 steps prefetch `ahead_lines` lines, a
// multiple of 4: some behind each instruction, because many at once would make the loads of tiles wait. Then they call
// between(), with work for the rest of the core. `is_near`: the panel stays in L1, for other rows.
template <class Between>
inline void add_products(const bf16* x, long x_stride, long rows, const bf16* panel, long k, bool is_near,
                         ReadAhead& ahead, long ahead_lines, Between&& between) {
  TileRows upper, lower;
  TileWeights weights;
  const long quarter = ahead_lines / 4;
  for (long first = 0; first < k; first += TILE_ELEMENTS, x += TILE_ELEMENTS, panel += TILE_STEPS * STEP_ELEMENTS) {
    const long elements = std::min(TILE_ELEMENTS, k - first);
    weights.set(panel, (elements + PACK<bf16> - 1) / PACK<bf16>);
    upper.set(x, x_stride, rows, elements);
    if (rows > TILE_HEIGHT) lower.set(x + TILE_HEIGHT * x_stride, x_stride, rows - TILE_HEIGHT, elements);
    if (rows > TILE_HEIGHT)
      STREAM_TILE(4, upper.data, upper.stride_bytes);
    else  // so few rows may stay in L1 from panel to panel
      LOAD_TILE(4, upper.data, upper.stride_bytes);
    ahead.prefetch(quarter);
    if (is_near)
      LOAD_TILE(6, weights.data, STEP_ELEMENTS * sizeof(bf16));
    else
      STREAM_TILE(6, weights.data, STEP_ELEMENTS * sizeof(bf16));
    ahead.prefetch(quarter);
    _tile_dpbf16ps(0, 4, 6);
    if (is_near)
      LOAD_TILE(7, weights.data + TILE_ELEMENTS, STEP_ELEMENTS * sizeof(bf16));
    else
      STREAM_TILE(7, weights.data + TILE_ELEMENTS, STEP_ELEMENTS * sizeof(bf16));
    ahead.prefetch(quarter);
    _tile_dpbf16ps(1, 4, 7);
    if (rows > TILE_HEIGHT) {
      STREAM_TILE(5, lower.data, lower.stride_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    ahead.prefetch(quarter);
    between();
  }
}

inline void load_sums(const float* sums, long stride, long rows) {
  const long bytes = stride * long(sizeof(float));
  LOAD_TILE(0, sums, bytes);
  LOAD_TILE(1, sums + TILE_FLOATS, bytes);
  if (rows <= TILE_HEIGHT) return;
  LOAD_TILE(2, sums + TILE_HEIGHT * stride, bytes);
  LOAD_TILE(3, sums + TILE_HEIGHT * stride + TILE_FLOATS, bytes);
}

inline void store_sums(float* sums, long rows) {
  constexpr long BYTES = SUMS_STRIDE * sizeof(float);
  _tile_stored(0, sums, BYTES);
  _tile_stored(1, sums + TILE_FLOATS, BYTES);
  if (rows <= TILE_HEIGHT) return;
  _tile_stored(2, sums + TILE_HEIGHT * SUMS_STRIDE, BYTES);
  _tile_stored(3, sums + TILE_HEIGHT * SUMS_STRIDE + TILE_FLOATS, BYTES);
}

#endif

}  // namespace oaiserve
