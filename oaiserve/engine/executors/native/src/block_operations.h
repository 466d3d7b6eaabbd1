// The operations of a decoder's step that belong to weights in the formats of GGUF files.
#pragma once

#include "block_tiles.h"
#include "experts.h"

namespace oaiserve {

// hidden = the row of a token * scale. A token behind the last row of the table has the first one.
struct EmbedBlocks {
  Buffer<float>& hidden;
  const BlockLinear& table;
  float scale;

  long work() const { return ITEM_VALUES; }
  void row(const StepInput& step, long row) const {
    float* out = hidden.row(row);
    const long token = step.token_ids[row];
    expand_row(table, token < table.n ? token : 0, out);
    for (long i = 0; i < table.k; i += LANES) store(out + i, load(out + i) * scale);
  }
};

// out = x in eight bits, for products that read it in these forms. A token has `rows_each` rows, if it is not of the
// logits' rows. With `with_rests`, rows whose numbers differ most have rests. With an `order`, which the caller keeps
// alive, number i of a row is x[order[i]].
template <class T>
struct QuantizeRows {
  Buffer<T>& rows_of_x;
  Buffer<RowLine>& out;
  long width;
  RowForms forms;
  bool of_logits_rows, with_rests;
  const int32_t* order;
  long rows_each;

  long work() const { return width; }
  long rows(const StepInput& step) const { return of_logits_rows ? step.num_logits : step.num_tokens * rows_each; }
  void row(const StepInput&, long row) const {
    const T* x = rows_of_x.row(row);
    RowForms of_row = forms;
    of_row.rests = with_rests;
    if (!order) return quantize_part(x, 0, width, width, of_row, out.row(row));
    // In pieces that both forms have a whole number of.
    const long piece = width % SUPER == 0 ? SUPER : BLOCK_GROUP;
    for (long first = 0; first < width; first += piece) {
      alignas(64) T picked[SUPER];
      for (long i = 0; i < piece; i++) picked[i] = x[order[first + i]];
      quantize_part(picked, first, piece, width, forms, out.row(row));
    }
  }
};

// Does what GatherRows of experts.h does, for rows of k numbers in eight bits.
struct GatherQuantized {
  Buffer<RowLine>&x, &out;
  long k;
  RowForms forms;
  const Assignment& assignment;

  long work() const { return k; }
  long rows(const StepInput& step) const { return step.num_tokens * assignment.top_k; }
  void row(const StepInput&, long row) const {
    const long place = assignment.places[size_t(row)];
    copy(x.row(place / assignment.top_k), k, forms, out.row(row));
  }
};

}  // namespace oaiserve
