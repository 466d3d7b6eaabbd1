// Products of tiles, as a library of its own. Its intrinsics are the CPU's, or those of amx_emulator.h.

#include <vector>

#include "block_product.h"
#include "few_rows.h"

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

// scores [rows, 16 panels] = rows of queries [rows, key_dim] times panels of keys, by tiles or by the code for few rows.
extern "C" void score(bool in_tiles, const bf16* queries, const bf16* keys, long rows, long panels, long key_dim,
                      float* scores) {
  const Tiles<bf16> tiles;
  const FlushedNumbers<true> flushed;
  std::vector<const bf16*> found;
  for (long p = 0; p < panels; p++) found.push_back(keys + p * PANEL_KEYS * key_dim);
  (in_tiles ? score_in_tiles : score_few)({queries, key_dim, rows}, {found.data(), found.data(), panels, false}, key_dim,
                                          scores, panels * PANEL_KEYS);
}

// sums [rows, value_dim] = rows of weights [rows, 16 panels] times panels of values
extern "C" void weigh_values(bool in_tiles, const bf16* weights, const bf16* values, long rows, long panels, long value_dim,
                             float* sums) {
  const Tiles<bf16> tiles;
  const FlushedNumbers<true> flushed;
  std::vector<const bf16*> found;
  for (long p = 0; p < panels; p++) found.push_back(values + p * PANEL_KEYS * value_dim);
  const TiledRows of_weights{weights, panels * PANEL_KEYS, rows};
  const TiledPanels of_values{found.data(), found.data(), panels, false};
  const auto add = [&](long row, long column, Vector of_row) {
    memcpy(sums + row * value_dim + column, &of_row, sizeof(of_row));
  };
  if (in_tiles)
    add_in_tiles(of_weights, of_values, value_dim, add);
  else
    add_few(of_weights, of_values, value_dim, add);
}

#pragma GCC visibility pop
