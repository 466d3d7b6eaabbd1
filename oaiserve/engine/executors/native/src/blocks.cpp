// The functions of blocks.h. They don't depend on the element type: libraries of both types share what is compiled of this
// file, which takes as long as the rest, and is compiled at the same time.

#include "block_product.h"

namespace oaiserve {

void pack_panel(Format format, const uint8_t* const* rows, const uint8_t* const* scales, long k, uint8_t* panel) {
  for_format(format, [&]<Format FORMAT>() { pack_panel<FORMAT>(rows, scales, k, panel); });
}

void expand_row(const BlockLinear& w, long row, float* out) {
  const BlockPanel& panel = w.panels[row / PANEL];
  for_format(panel.format, [&]<Format FORMAT>() { expand_column<FORMAT>(panel.data, row % PANEL, w.k, out); });
}

// sums [PANEL] += the rests of a row times a panel, if the row and the panel's format have such.
static void add_rests(const BlockLinear& w, const RowLine* row, long panel, float* sums) {
  if (!layout_of(w.panels[panel].format).is_super || !supers_in(row)->has_rests) return;
  for_format(w.panels[panel].format, [&]<Format FORMAT>() {
    const uint8_t* const weights = w.panels[panel].data;
    if constexpr (layout_of(FORMAT).is_super)
      multiply_panel<FORMAT>(weights, rests_in(row, w.k), 0, 1, w.k, nullptr, sums, weights);
  });
}

void multiply_panel(const BlockLinear& w, const RowLine* x, long x_stride, long rows, long panel, float* sums,
                    long next) {
  const PanelBias bias(w.bias, w.n, panel);
  for_format(w.panels[panel].format, [&]<Format FORMAT>() {
    multiply_panel<FORMAT>(w.panels[panel].data, x, x_stride, rows, w.k, bias.values, sums, w.panels[next].data);
  });
  for (long r = 0; r < rows; r++) add_rests(w, x + r * x_stride, panel, sums + r * PANEL);
}

}  // namespace oaiserve
