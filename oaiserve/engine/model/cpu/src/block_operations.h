// The operations of a decoder's step that belong to weights in the formats of GGUF files.
#pragma once

#include "block_product.h"
#include "experts.h"
#include "pool.h"

namespace oaiserve {

// Packs the rows of a file into panels, each of which is an item. `scales` are null, or as pack_panel takes them.
class PackPanels : public Work {
 public:
  PackPanels(const uint8_t* const* rows, const uint8_t* const* scales, const BlockPanel* panels, long num_panels, long k)
      : rows_(rows), scales_(scales), panels_(panels), num_panels_(num_panels), k_(k) {}
  long phases() const noexcept override { return 1; }
  long items(long) const noexcept override { return num_panels_; }
  void run(long, long item) noexcept override {
    const BlockPanel& panel = panels_[item];
    for_format(panel.format, [&]<Format FORMAT>() {
      const uint8_t* const* scales = scales_ ? scales_ + item * PANEL : nullptr;
      pack_panel<FORMAT>(rows_ + item * PANEL, scales, k_, const_cast<uint8_t*>(panel.data));
    });
  }
  void ended(long) noexcept override {}

 private:
  const uint8_t *const *rows_, *const *scales_;
  const BlockPanel* panels_;
  long num_panels_, k_;
};

// hidden = the row of a token * scale. A token behind the last row of the table has the first one.
class EmbedBlocks : public Operation {
 public:
  EmbedBlocks(Buffer<float>& out, const BlockLinear& table, float scale) : out_(out), table_(table), scale_(scale) {}
  long items(const StepInput& step, int) const noexcept override { return step.num_tokens; }
  void run(const StepInput& step, int, long row) noexcept override {
    float* out = out_.row(row);
    const long token = step.token_ids[row];
    expand_row(table_, token < table_.n ? token : 0, out);
    for (long i = 0; i < table_.k; i += LANES) store(out + i, load(out + i) * scale_);
  }

 private:
  Buffer<float>& out_;
  const BlockLinear& table_;
  float scale_;
};

// out = x in eight bits, for the product that follows. A token has `rows_each` rows, if it is not of the logits' rows.
// With an `order`, which the caller keeps alive, number i of a row is x[order[i]].
template <class T>
class QuantizeRows : public Operation {
 public:
  QuantizeRows(Buffer<T>& x, Buffer<QuantizedGroup>& out, long width, bool of_logits_rows, const int32_t* order,
               long rows_each = 1)
      : x_(x), out_(out), width_(width), of_logits_rows_(of_logits_rows), order_(order), rows_each_(rows_each) {}
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
  long rows(const StepInput& step) const { return of_logits_rows_ ? step.num_logits : step.num_tokens * rows_each_; }
  Buffer<T>& x_;
  Buffer<QuantizedGroup>& out_;
  long width_;
  bool of_logits_rows_;
  const int32_t* order_;
  long rows_each_;
};

// Writes `count` groups times `factor`, which only their scales have to know.
inline void copy_times(const QuantizedGroup* x, long count, float factor, QuantizedGroup* out) {
  for (long i = 0; i < count; i++) {
    QuantizedGroup group = x[i];
    group.scale *= factor, group.scaled_sum *= factor;
    for (float& sum : group.scaled_half_sums) sum *= factor;
    out[i] = group;
  }
}

}  // namespace oaiserve
