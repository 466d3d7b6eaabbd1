// Products of tiles, as a library of its own. Its intrinsics are the CPU's, or those of amx_emulator.h.

#include "block_product.h"

using namespace oaiserve;

#pragma GCC visibility push(default)

// sums [16, 16] += a [16, 32] times b [16, 16, 2], whose pairs are neighbours along k.
extern "C" void add_products_of_tiles(const bf16* a, const bf16* b, float* sums) {
  const Tiles<bf16> tiles;
  Tiles<bf16>::set_rows(MOST_TILE_ROWS);
  _tile_loadd(0, sums, TILE_BYTES);
  _tile_loadd(1, a, TILE_BYTES);
  _tile_loadd(2, b, TILE_BYTES);
  _tile_dpbf16ps(0, 1, 2);
  _tile_stored(0, sums, TILE_BYTES);
}

// sums [16, 16] += a [16, 32] times b [8, 16, 4], whose fours are neighbours along k, and have signs or not.
extern "C" void add_products_of_integer_tiles(const int8_t* a, const int8_t* b, bool is_signed, int32_t* sums) {
  const Tiles<RowLine> tiles;
  Tiles<RowLine>::set(TILE_HEIGHT);
  _tile_loadd(0, sums, TILE_BYTES);
  _tile_loadd(1, a, BLOCK_GROUP);
  _tile_loadd(4, b, TILE_BYTES);
  if (is_signed)
    _tile_dpbssd(0, 1, 4);
  else
    _tile_dpbsud(0, 1, 4);
  _tile_stored(0, sums, TILE_BYTES);
}

#pragma GCC visibility pop
