// The operations of a decoder's step that belong to weights in the formats of GGUF files.
#pragma once

#include "block_product.h"
#include "operations.h"
#include "pool.h"

namespace oaiserve {

// Packs the rows of a file into panels, each of which is an item.
class PackPanels : public Work {
 public:
  PackPanels(const uint8_t* const* rows, const BlockPanel* panels, long num_panels, long k)
      : rows_(rows), panels_(panels), num_panels_(num_panels), k_(k) {}
  long phases() const noexcept override { return 1; }
  long items(long) const noexcept override { return num_panels_; }
  void run(long, long item) noexcept override {
    const BlockPanel& panel = panels_[item];
    for_format(panel.format, [&]<Format FORMAT>() {
      pack_panel<FORMAT>(rows_ + item * PANEL, k_, const_cast<uint8_t*>(panel.data));
    });
  }
  void ended(long) noexcept override {}

 private:
  const uint8_t* const* rows_;
  const BlockPanel* panels_;
  long num_panels_, k_;
};

// hidden = the row of a token * scale
class EmbedBlocks : public Operation {
 public:
  EmbedBlocks(Buffer<float>& out, const BlockLinear& table, float scale) : out_(out), table_(table), scale_(scale) {}
  long items(const StepInput& step, int) const noexcept override { return step.num_tokens; }
  void run(const StepInput& step, int, long row) noexcept override {
    float* out = out_.row(row);
    expand_row(table_, step.token_ids[row], out);
    for (long i = 0; i < table_.k; i += LANES) store(out + i, load(out + i) * scale_);
  }

 private:
  Buffer<float>& out_;
  const BlockLinear& table_;
  float scale_;
};

// out = x in eight bits, for the product that follows. With an `order`, which the caller keeps alive, number i of a row
// is x[order[i]].
template <class T>
class QuantizeRows : public Operation {
 public:
  QuantizeRows(Buffer<T>& x, Buffer<QuantizedGroup>& out, long width, bool of_logits_rows, const int32_t* order)
      : x_(x), out_(out), width_(width), of_logits_rows_(of_logits_rows), order_(order) {}
  long items(const StepInput& step, int) const noexcept override { return row_items(rows(step), width_); }
  void run(const StepInput& step, int, long item) noexcept override {
    RowRange range(item, rows(step), width_);
    for (long row = range.first; row < range.last; row++)
      for (long group = 0; group < width_ / BLOCK_GROUP; group++) {
        const T* x = x_.row(row) + group * BLOCK_GROUP;
        alignas(64) T picked[BLOCK_GROUP];
        if (order_) {
          for (long i = 0; i < BLOCK_GROUP; i++) picked[i] = x_.row(row)[order_[group * BLOCK_GROUP + i]];
          x = picked;
        }
        quantize_group(x, out_.row(row)[group]);
      }
  }

 private:
  long rows(const StepInput& step) const { return of_logits_rows_ ? step.num_logits : step.num_tokens; }
  Buffer<T>& x_;
  Buffer<QuantizedGroup>& out_;
  long width_;
  bool of_logits_rows_;
  const int32_t* order_;
};

}  // namespace oaiserve
