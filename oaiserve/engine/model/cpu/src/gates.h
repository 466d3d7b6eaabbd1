// Gates on what attention or a recurrence gives, which a projection of the hidden state decides.
#pragma once

#include "operations.h"

namespace oaiserve {

// x *= sigmoid(gates), with the gates from column `first` of their rows on.
template <class T>
class GateRows : public Operation {
 public:
  GateRows(Buffer<T>& x, Buffer<float>& gates, long first, long width)
      : x_(x), gates_(gates), first_(first), width_(width) {}
  long items(const StepInput& step, int) const noexcept override { return row_items(step.num_tokens, width_); }
  void run(const StepInput& step, int, long item) noexcept override {
    const RowRange rows(item, step.num_tokens, width_);
    for (long row = rows.first; row < rows.last; row++) {
      T* x = x_.row(row);
      const float* gates = gates_.row(row) + first_;
      for (long i = 0; i < width_; i += LANES) store(x + i, load(x + i) * sigmoid(load(gates + i)));
    }
  }

 private:
  Buffer<T>& x_;
  Buffer<float>& gates_;
  long first_, width_;
};

// How a row of `groups` vectors, each with a norm of its own, is gated.
struct GatedNorm {
  long x, gates;  // the first number of both in their rows
  long groups;
  Activation activation;
  bool gates_first;  // out = norm(x * activation(gates)); else out = norm(x) * activation(gates)
  bool own_weights;  // the weights of the norm are [groups][width]; else all groups have the same
};

template <class T>
class GateAndNorm : public Operation {
 public:
  GateAndNorm(Buffer<float>& x, Buffer<float>& gates, Buffer<T>& out, GatedNorm gated, Normalize normalize)
      : x_(x), gates_(gates), out_(out), gated_(gated), normalize_(normalize) {}
  long items(const StepInput& step, int) const noexcept override { return row_items(step.num_tokens, width()); }
  void run(const StepInput& step, int, long item) noexcept override {
    const RowRange rows(item, step.num_tokens, width());
    for (long row = rows.first; row < rows.last; row++) {
      float *x = x_.row(row) + gated_.x, *gates = gates_.row(row) + gated_.gates;
      T* out = out_.row(row);
      const auto gated = [&](long i) { return load(x + i) * activate(gated_.activation, load(gates + i)); };
      if (gated_.gates_first)
        for (long i = 0; i < width(); i += LANES) store(x + i, gated(i));
      Normalize own = normalize_;
      for (long group = 0; group < gated_.groups; group++) {
        float* of_group = x + group * own.width;
        own(of_group, of_group);
        if (gated_.own_weights && own.weight) own.weight += own.width;
      }
      for (long i = 0; i < width(); i += LANES) store(out + i, gated_.gates_first ? load(x + i) : gated(i));
    }
  }

 private:
  long width() const { return gated_.groups * normalize_.width; }
  Buffer<float>&x_, &gates_;
  Buffer<T>& out_;
  GatedNorm gated_;
  Normalize normalize_;
};

}  // namespace oaiserve
