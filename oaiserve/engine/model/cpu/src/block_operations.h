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

// out = x in eight bits, for products that read it in these forms. A token has `rows_each` rows, if it is not of the
// logits' rows. With an `order`, which the caller keeps alive, number i of a row is x[order[i]].
template <class T>
class QuantizeRows : public Operation {
 public:
  QuantizeRows(Buffer<T>& x, Buffer<RowLine>& out, long width, RowForms forms, bool of_logits_rows,
               const int32_t* order, long rows_each = 1)
      : x_(x),
        out_(out),
        width_(width),
        forms_(forms),
        of_logits_rows_(of_logits_rows),
        order_(order),
        rows_each_(rows_each) {}
  long items(const StepInput& step, int) const noexcept override { return row_items(rows(step), width_); }
  void run(const StepInput& step, int, long item) noexcept override {
    RowRange range(item, rows(step), width_);
    for (long row = range.first; row < range.last; row++) {
      const T* x = x_.row(row);
      if (!order_) {
        quantize_part(x, 0, width_, width_, forms_, out_.row(row));
        continue;
      }
      // In pieces that both forms have a whole number of.
      const long piece = width_ % SUPER == 0 ? SUPER : BLOCK_GROUP;
      for (long first = 0; first < width_; first += piece) {
        alignas(64) T picked[SUPER];
        for (long i = 0; i < piece; i++) picked[i] = x[order_[first + i]];
        quantize_part(picked, first, piece, width_, forms_, out_.row(row));
      }
    }
  }

 private:
  long rows(const StepInput& step) const { return of_logits_rows_ ? step.num_logits : step.num_tokens * rows_each_; }
  Buffer<T>& x_;
  Buffer<RowLine>& out_;
  long width_;
  RowForms forms_;
  bool of_logits_rows_;
  const int32_t* order_;
  long rows_each_;
};

// Does what GatherRows of experts.h does, for rows of k numbers in eight bits.
class GatherQuantized : public Operation {
 public:
  GatherQuantized(Buffer<RowLine>& x, Buffer<RowLine>& out, long k, RowForms forms, const Assignment& assignment,
                  bool weighs)
      : x_(x), out_(out), k_(k), forms_(forms), assignment_(assignment), weighs_(weighs) {}
  long items(const StepInput& step, int) const noexcept override { return row_items(rows(step), k_); }
  void run(const StepInput& step, int, long item) noexcept override {
    RowRange range(item, rows(step), k_);
    for (long row = range.first; row < range.last; row++) {
      const long place = assignment_.places[size_t(row)];
      const float factor = weighs_ ? assignment_.weights[size_t(place)] : 1.0f;
      copy_times(x_.row(place / assignment_.top_k), k_, forms_, factor, out_.row(row));
    }
  }

 private:
  long rows(const StepInput& step) const { return step.num_tokens * assignment_.top_k; }
  Buffer<RowLine>&x_, &out_;
  long k_;
  RowForms forms_;
  const Assignment& assignment_;
  bool weighs_;
};

}  // namespace oaiserve
