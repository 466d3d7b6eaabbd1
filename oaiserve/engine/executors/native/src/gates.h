// Gates on what attention or a recurrence gives, which a projection of the hidden state decides.
#pragma once

#include "operations.h"

namespace oaiserve {

// x *= sigmoid(gates), with the gates from column `first` of their rows on.
template <class T>
struct GateRows {
  Buffer<T>& rows_of_x;
  Buffer<float>& rows_of_gates;
  long first, width;

  long work() const { return width; }
  void row(const StepInput&, long row) const {
    T* x = rows_of_x.row(row);
    const float* gates = rows_of_gates.row(row) + first;
    for (long i = 0; i < width; i += LANES) store(x + i, load(x + i) * sigmoid(load(gates + i)));
  }
};

// How a row of `groups` vectors, each with a norm of its own, is gated. GatedNorm in library.py has the same layout.
struct GatedNorm {
  long x, gates;  // the first number of both in their rows
  long groups;
  Activation activation;
  bool gates_first;  // out = norm(x * activation(gates)); else out = norm(x) * activation(gates)
  bool own_weights;  // the weights of the norm are [groups][width]; else all groups have the same
};

template <class T>
struct GateAndNorm {
  Buffer<float>&rows_of_x, &rows_of_gates;
  Buffer<T>& rows_of_out;
  GatedNorm by;
  Normalize normalize;

  long work() const { return by.groups * normalize.width; }
  void row(const StepInput&, long row) const {
    float *x = rows_of_x.row(row) + by.x, *gates = rows_of_gates.row(row) + by.gates;
    T* out = rows_of_out.row(row);
    const auto gated = [&](long i) { return load(x + i) * activate(by.activation, load(gates + i)); };
    if (by.gates_first)
      for (long i = 0; i < work(); i += LANES) store(x + i, gated(i));
    Normalize own = normalize;
    for (long group = 0; group < by.groups; group++) {
      float* of_group = x + group * own.width;
      own(of_group, of_group);
      if (by.own_weights && own.weight) own.weight += own.width;
    }
    for (long i = 0; i < work(); i += LANES) store(out + i, by.gates_first ? load(x + i) : gated(i));
  }
};

// What each layer gets of a token beside the hidden state (per-layer embeddings, as Gemma 4 has them in its small sizes):
// inputs = (norm(inputs) + embeddings) * scale, for each layer by itself. The layers lie side by side in a row of both.
//
// The embeddings are rows of a table, and the inputs a projection of the token's embedding. Behind its MLP, a layer
// multiplies its numbers by a gate of the hidden state (`Activate`), and adds a projection of the product to it.
struct LayerInputs {
  Buffer<float>&rows_of_inputs, &rows_of_embeddings;
  float scale;
  Normalize normalize;
  long layers;

  long work() const { return layers * normalize.width; }
  void row(const StepInput&, long row) const {
    float *inputs = rows_of_inputs.row(row), *embeddings = rows_of_embeddings.row(row);
    for (long layer = 0; layer < layers; layer++) {
      float* own = inputs + layer * normalize.width;
      normalize(own, own);
    }
    for (long i = 0; i < work(); i += LANES) store(inputs + i, (load(inputs + i) + load(embeddings + i)) * scale);
  }
};

}  // namespace oaiserve
