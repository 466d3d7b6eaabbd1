// What each layer gets of a token beside the hidden state (per-layer embeddings, as Gemma 4 has them in its small sizes).
//
// A table has a row for each token, with some numbers for each layer. A projection of the token's embedding is normed and
// added to them. Behind its MLP, a layer multiplies its numbers by a gate of the hidden state, and adds a projection of the
// product to it.
#pragma once

#include "operations.h"

namespace oaiserve {

// inputs = (norm(inputs) + table[token] * table_scale) * scale, for each layer by itself. The layers lie side by side in a
// row of `inputs`, and of the table.
template <class T>
class LayerInputs : public Operation {
 public:
  LayerInputs(Buffer<float>& inputs, const T* table, float table_scale, float scale, Normalize normalize, long layers)
      : inputs_(inputs), table_(table), table_scale_(table_scale), scale_(scale), normalize_(normalize),
        layers_(layers) {}
  long items(const StepInput& step, int) const noexcept override { return row_items(step.num_tokens, width()); }
  void run(const StepInput& step, int, long item) noexcept override {
    RowRange rows(item, step.num_tokens, width());
    for (long row = rows.first; row < rows.last; row++) {
      float* inputs = inputs_.row(row);
      const T* of_token = table_ + step.token_ids[row] * width();
      for (long layer = 0; layer < layers_; layer++) {
        float* own = inputs + layer * normalize_.width;
        normalize_(own, own);
      }
      for (long i = 0; i < width(); i += LANES)
        store(inputs + i, (load(inputs + i) + load(of_token + i) * table_scale_) * scale_);
    }
  }

 private:
  long width() const { return layers_ * normalize_.width; }
  Buffer<float>& inputs_;
  const T* table_;
  float table_scale_, scale_;
  Normalize normalize_;
  long layers_;
};

// out = activation(x W^T + bias) * inputs, with the inputs of one layer.
template <class T, class Weights>
class GateInputs : public Operation {
 public:
  using Input = Buffer<typename Weights::Input>;
  GateInputs(Input& x, Buffer<T>& out, const Weights& weights, const Site<T>* site, Activation activation,
             Buffer<float>& inputs, long first)
      : x_(x), out_(out), weights_(weights), site_(site), activation_(activation), inputs_(inputs), first_(first) {}
  long items(const StepInput& step, int threads) const noexcept override {
    return linear_items(weights_, step.num_tokens, threads);
  }
  void run(const StepInput& step, int threads, long item) noexcept override {
    linear_item(weights_, x_.row(0), x_.stride(), step.num_tokens, threads, item,
                [this](long row, long column, f32x16 values) {
                  if (site_) values = site_->add(row, column, values);
                  const f32x16 inputs = load(inputs_.row(row) + first_ + column);
                  store(out_.row(row) + column, activate(activation_, values) * inputs);
                });
  }

 private:
  Input& x_;
  Buffer<T>& out_;
  const Weights& weights_;
  const Site<T>* site_;
  Activation activation_;
  Buffer<float>& inputs_;
  long first_;
};

}  // namespace oaiserve
