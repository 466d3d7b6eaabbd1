// AMX in plain C++, for a CPU without it: what Intel's manual (volume 2, the pages of these instructions) says they do.
//
// Put before a source with -include, it replaces the intrinsics. What a CPU would refuse with #UD ends the process.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace emulated {

struct Config {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(Config) == 64);

struct Unit {
  Config config;
  uint8_t tiles[8][16][64];  // beyond the configured rows and bytes, all are zero
};

inline Unit& unit() {
  static thread_local Unit of_this_thread{};
  return of_this_thread;
}

inline void refuse_if(bool wrong, const char* reason) {
  if (!wrong) return;
  std::fprintf(stderr, "emulated AMX: %s\n", reason);
  std::abort();
}

inline void load_config(const void* memory) {
  Config config;
  std::memcpy(&config, memory, sizeof(config));
  refuse_if(config.palette != 1, "not palette 1");
  refuse_if(config.start_row != 0, "a row to start with is only for what was interrupted");
  for (uint8_t byte : config.reserved) refuse_if(byte != 0, "a reserved byte is not zero");
  for (int t = 0; t < 16; t++) {
    refuse_if(config.row_bytes[t] > 64 || config.rows[t] > 16, "a tile is too large");
    refuse_if((config.row_bytes[t] == 0) != (config.rows[t] == 0), "a tile has rows or bytes, but not both");
    refuse_if(t >= 8 && config.rows[t] != 0, "there are only eight tiles");
  }
  unit() = {config, {}};
}

inline void release() { unit() = {}; }

inline void check_tile(int t) { refuse_if(unit().config.rows[t] == 0, "a tile is used that is not configured"); }

inline void zero(int t) {
  check_tile(t);
  std::memset(unit().tiles[t], 0, sizeof(unit().tiles[t]));
}

inline void load(int t, const void* memory, long stride) {
  zero(t);
  for (int r = 0; r < unit().config.rows[t]; r++)
    std::memcpy(unit().tiles[t][r], static_cast<const char*>(memory) + r * stride, unit().config.row_bytes[t]);
}

inline void store(int t, void* memory, long stride) {
  check_tile(t);
  for (int r = 0; r < unit().config.rows[t]; r++)
    std::memcpy(static_cast<char*>(memory) + r * stride, unit().tiles[t][r], unit().config.row_bytes[t]);
}

inline void check_operands(int sums, int a, int b) {
  const Config& config = unit().config;
  for (int t : {sums, a, b}) check_tile(t);
  refuse_if(sums == a || sums == b || a == b, "a tile is two operands");
  refuse_if(config.row_bytes[sums] % 4 || config.row_bytes[a] % 4 || config.row_bytes[b] % 4, "a part of four bytes");
  refuse_if(config.rows[sums] != config.rows[a], "other rows than those of the first operand");
  refuse_if(config.row_bytes[sums] != config.row_bytes[b], "other columns than those of the second operand");
  refuse_if(config.row_bytes[a] / 4 != config.rows[b], "the operands do not fit together");
}

// Numbers that are not normal count as zero, before and after each operation.
inline float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
inline float number(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return flush(x);
}

// sums[m][n] += the products of the pairs of a[m] and of column n of b. The elements with even and odd indices are
// summed apart, from zero on, each product rounded once with its addition, to nearest even.
inline void add_products_of_bf16(int sums, int a, int b) {
  Unit& u = unit();
  const Config& config = u.config;
  check_operands(sums, a, b);
  for (int m = 0; m < config.rows[sums]; m++) {
    float even[16] = {}, odd[16] = {};
    for (int k = 0; k < config.row_bytes[a] / 4; k++) {
      uint32_t row[16], pair;
      std::memcpy(&pair, u.tiles[a][m] + 4 * k, 4);
      std::memcpy(row, u.tiles[b][k], 64);
      const float first = number(pair << 16), second = number(pair & 0xffff0000u);
      for (int n = 0; n < 16; n++) even[n] = flush(std::fma(first, number(row[n] << 16), even[n]));
      for (int n = 0; n < 16; n++) odd[n] = flush(std::fma(second, number(row[n] & 0xffff0000u), odd[n]));
    }
    uint32_t before[16];
    std::memcpy(before, u.tiles[sums][m], 64);
    float after[16];
    for (int n = 0; n < 16; n++) after[n] = flush(number(before[n]) + flush(even[n] + odd[n]));
    std::memcpy(u.tiles[sums][m], after, config.row_bytes[sums]);
  }
}

// sums[m][n] += the products of the fours of a[m], which are signed, and of column n of b, without saturation.
template <class OfB>
void add_products_of_int8(int sums, int a, int b) {
  Unit& u = unit();
  check_operands(sums, a, b);
  for (int m = 0; m < u.config.rows[sums]; m++)
    for (int k = 0; k < u.config.row_bytes[a] / 4; k++) {
      uint32_t total[16];
      std::memcpy(total, u.tiles[sums][m], 64);
      for (int n = 0; n < 16; n++)
        for (int i = 4 * k; i < 4 * k + 4; i++)
          total[n] += uint32_t(int8_t(u.tiles[a][m][i]) * OfB(u.tiles[b][k][4 * n + i % 4]));
      std::memcpy(u.tiles[sums][m], total, u.config.row_bytes[sums]);
    }
}

}  // namespace emulated

#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbsud
#define _tile_loadconfig emulated::load_config
#define _tile_release emulated::release
#define _tile_zero emulated::zero
#define _tile_loadd emulated::load
#define _tile_stream_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_dpbf16ps emulated::add_products_of_bf16
#define _tile_dpbssd emulated::add_products_of_int8<int8_t>
#define _tile_dpbsud emulated::add_products_of_int8<uint8_t>
#if !defined(__AMX_BF16__)
#define __AMX_BF16__ 1
#endif
#if !defined(__AMX_INT8__)
#define __AMX_INT8__ 1
#endif
