// The course of products in tiles whose scales are for more numbers than a tile is deep: 128 or 256. super_tiles.h and
// long_tiles.h say how a chunk of a panel, 256 by 32 weights, is expanded, multiplied, and added.
#pragma once

#include "block_tiles.h"

#if defined(WITH_INTEGER_TILES)

namespace oaiserve {

constexpr int QUARTERS = 4;  // of the products of a chunk, behind each of which the core does other work

// Rows of x whose products with a chunk tiles have summed, where these sums are, and where they belong.
template <class X, class Sums>
struct TiledPart {
  const Sums* found = nullptr;  // [2], of the left and the right columns
  const uint8_t* chunk;
  const X* x;
  float* sums;
  long first, end;  // the rows that are not added yet
};

// sums [rows, PANEL] = bias + x [rows, k] times a panel, while a `Tiles` lives on this thread. `Of` has the functions for
// the panel's format.
template <class Of>
void multiply_chunks_in_tiles(const uint8_t* panel, const RowLine* x, long x_stride, long rows, long k,
                              const float* bias, float* sums, const uint8_t* next) {
  using P = typename Of::P;
  using Part = typename Of::Part;
  const long chunks = k / SUPER, panel_bytes = chunks * P::CHUNK, x_bytes = x_stride * long(sizeof(RowLine));
  const long height = std::min(rows, TILE_HEIGHT), times = (rows + height - 1) / height;
  typename Of::Expanded expanded;
  // A panel is read ahead group by group, shortly before it is expanded, if that is most of the work. Else the next one
  // is, with each quarter of the products.
  const bool is_near = times == 1;
  const long steps = is_near ? chunks * P::GROUPS : chunks * times * QUARTERS;
  Ahead ahead = Ahead::of(panel, next, panel_bytes, steps, is_near);
  const auto expand = [&](const uint8_t* chunk, long group) {
    if (is_near) ahead.prefetch();
    Of::expand(chunk, group, expanded);
  };
  typename Of::Sums found[2][2];
  Of::configure(height);
  start_sums(sums, rows, bias);
  for (long group = 0; group < P::GROUPS; group++) expand(panel, group);

  // While tiles multiply, the part before is scaled and added, and the next chunk is expanded: each quarter of it, when
  // the last rows are multiplied and tiles have what was in its place. Tiles always have the same height, because setting
  // it takes long; so the last rows may begin with some that the part before has, too.
  Part last;
  for (long c = 0, number = 0; c < chunks; c++)
    for (long t = 0; t < times; t++, number ^= 1) {
      const uint8_t* const chunk = panel + c * P::CHUNK;
      const long row = std::min(t * height, rows - height);
      const Part part{found[number],      chunk,           &Of::row(x + row * x_stride, k)[c],
                      sums + row * PANEL, t * height - row, height};
      const bool expands = t + 1 == times && c + 1 < chunks;
      Of::multiply(*part.x, x_bytes, expanded, found[number], [&, last](int quarter) {
        if (!is_near) ahead.prefetch();
        if (last.found) Of::add(last, quarter, x_bytes);
        for (long i = 0; expands && i < P::GROUPS / QUARTERS; i++)
          expand(chunk + P::CHUNK, quarter * (P::GROUPS / QUARTERS) + i);
      });
      last = part;
    }
  for (int quarter = 0; last.found && quarter < QUARTERS; quarter++) Of::add(last, quarter, x_bytes);
}

}  // namespace oaiserve

#endif
