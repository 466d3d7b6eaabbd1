// What each layer gets of a token beside the hidden state (per-layer embeddings, as Gemma 4 has them in its small sizes).
//
// A table has a row for each token, with some numbers for each layer. A projection of the token's embedding is normed and
// added to them. Behind its MLP, a layer multiplies its numbers by a gate of the hidden state (`Activate`), and adds a projection
// of the product to it.
#pragma once

#include "operations.h"

namespace oaiserve {

// inputs = (norm(inputs) + embeddings) * scale, for each layer by itself. The layers lie side by side in a row of both.
class LayerInputs : public Operation {
 public:
  LayerInputs(Buffer<float>& inputs, Buffer<float>& embeddings, float scale, Normalize normalize, long layers)
      : inputs_(inputs), embeddings_(embeddings), scale_(scale), normalize_(normalize), layers_(layers) {}
  long items(const StepInput& step, int) const noexcept override { return row_items(step.num_tokens, width()); }
  void run(const StepInput& step, int, long item) noexcept override {
    RowRange rows(item, step.num_tokens, width());
    for (long row = rows.first; row < rows.last; row++) {
      float *inputs = inputs_.row(row), *embeddings = embeddings_.row(row);
      for (long layer = 0; layer < layers_; layer++) {
        float* own = inputs + layer * normalize_.width;
        normalize_(own, own);
      }
      for (long i = 0; i < width(); i += LANES)
        store(inputs + i, (load(inputs + i) + load(embeddings + i)) * scale_);
    }
  }

 private:
  long width() const { return layers_ * normalize_.width; }
  Buffer<float>&inputs_, &embeddings_;
  float scale_;
  Normalize normalize_;
  long layers_;
};

}  // namespace oaiserve
