// Several hidden states of a token, as Gemma 3n has them (alternating updates, AltUp).
//
// A layer computes with one of them, which is the *active* one. Before that, all become linear combinations of
// themselves, which predict what the layer will make of them; behind it, they are corrected by what the layer has made of
// the active one. The token decides the numbers of both: a few *modalities*, which follow from the active state.
#pragma once

#include <deque>

#include "operations.h"

namespace oaiserve {

constexpr long MOST_HIDDEN_STATES = 8;

// AltUp in library.py has the same layout.
struct AltUp {
  long width, states, active;
  float epsilon;
  const float* router;       // [states][width], of modalities, times the weight of the norm before
  const float* predictions;  // [states][states][states]: of a state, of what is added to it of each state, by modality
  const float* corrections;  // [states][states]: of a state, by modality
  const float* scale;        // [width] or null: of the active state, for what comes behind the layer

  // Writes tanh(router norm(x)).
  void modalities(const float* x, float* out) const {
    f32x16 squares = splat(0);
    for (long i = 0; i < width; i += LANES) squares += load(x + i) * load(x + i);
    const float factor = 1.0f / std::sqrt(sum(squares) / float(width) + epsilon);
    for (long m = 0; m < states; m++) {
      f32x16 products = splat(0);
      for (long i = 0; i < width; i += LANES) products += load(x + i) * load(router + m * width + i);
      out[m] = std::tanh(sum(products) * factor);
    }
  }

  // Returns the product of a row of `predictions` or `corrections` with the modalities.
  float product(const float* row, const float* modalities) const {
    float total = 0;
    for (long m = 0; m < states; m++) total += row[m] * modalities[m];
    return total;
  }
};

// The hidden states of all tokens: as many buffers, one after the other.
class HiddenStates {
 public:
  HiddenStates(std::deque<Buffer<float>>& floats, long first, long count) {
    for (long i = 0; i < count; i++) states_[i] = &floats[size_t(first + i)];
  }
  float* row(long state, long i) const { return states_[state]->row(i); }

 private:
  Buffer<float>* states_[MOST_HIDDEN_STATES];
};

// Each state becomes itself and some of all; `hidden` gets the active one.
class Predict : public Operation {
 public:
  Predict(HiddenStates states, Buffer<float>& hidden, AltUp altup) : states_(states), hidden_(hidden), altup_(altup) {}
  long items(const StepInput& step, int) const noexcept override { return row_items(step.num_tokens, work()); }
  void run(const StepInput& step, int, long item) noexcept override {
    const long count = altup_.states;
    const RowRange rows(item, step.num_tokens, work());
    for (long row = rows.first; row < rows.last; row++) {
      float modalities[MOST_HIDDEN_STATES], factors[MOST_HIDDEN_STATES][MOST_HIDDEN_STATES];
      altup_.modalities(states_.row(altup_.active, row), modalities);
      for (long to = 0; to < count; to++)
        for (long from = 0; from < count; from++)
          factors[to][from] = altup_.product(altup_.predictions + (to * count + from) * count, modalities);
      for (long i = 0; i < altup_.width; i += LANES) {
        f32x16 before[MOST_HIDDEN_STATES];
        for (long from = 0; from < count; from++) before[from] = load(states_.row(from, row) + i);
        for (long to = 0; to < count; to++) {
          f32x16 added = splat(0);
          for (long from = 0; from < count; from++) added += before[from] * factors[to][from];
          store(states_.row(to, row) + i, before[to] + added);
        }
      }
      memcpy(hidden_.row(row), states_.row(altup_.active, row), size_t(altup_.width) * sizeof(float));
    }
  }

 private:
  long work() const { return altup_.width * altup_.states * altup_.states; }
  HiddenStates states_;
  Buffer<float>& hidden_;
  AltUp altup_;
};

// Each state gets some of what the layer has changed: the difference between `hidden` and the active one, which `hidden`
// then gets, scaled.
class Correct : public Operation {
 public:
  Correct(HiddenStates states, Buffer<float>& hidden, AltUp altup) : states_(states), hidden_(hidden), altup_(altup) {}
  long items(const StepInput& step, int) const noexcept override { return row_items(step.num_tokens, work()); }
  void run(const StepInput& step, int, long item) noexcept override {
    const RowRange rows(item, step.num_tokens, work());
    for (long row = rows.first; row < rows.last; row++) {
      float modalities[MOST_HIDDEN_STATES], factors[MOST_HIDDEN_STATES], *hidden = hidden_.row(row);
      altup_.modalities(hidden, modalities);
      for (long to = 0; to < altup_.states; to++)
        factors[to] = altup_.product(altup_.corrections + to * altup_.states, modalities) + 1;
      for (long i = 0; i < altup_.width; i += LANES) {
        const f32x16 change = load(hidden + i) - load(states_.row(altup_.active, row) + i);
        for (long to = 0; to < altup_.states; to++) {
          float* state = states_.row(to, row) + i;
          store(state, load(state) + change * factors[to]);
        }
        const f32x16 active = load(states_.row(altup_.active, row) + i);
        store(hidden + i, altup_.scale ? active * load(altup_.scale + i) : active);
      }
    }
  }

 private:
  long work() const { return altup_.width * altup_.states * 2; }
  HiddenStates states_;
  Buffer<float>& hidden_;
  AltUp altup_;
};

// All states but the first get norm(x) in addition. x is overwritten.
class AddToStates : public Operation {
 public:
  AddToStates(Buffer<float>& x, HiddenStates states, long count, Normalize normalize)
      : x_(x), states_(states), count_(count), normalize_(normalize) {}
  long items(const StepInput& step, int) const noexcept override { return row_items(step.num_tokens, work()); }
  void run(const StepInput& step, int, long item) noexcept override {
    const RowRange rows(item, step.num_tokens, work());
    for (long row = rows.first; row < rows.last; row++) {
      float* x = x_.row(row);
      normalize_(x, x);
      for (long to = 1; to < count_; to++) {
        float* state = states_.row(to, row);
        for (long i = 0; i < normalize_.width; i += LANES) store(state + i, load(state + i) + load(x + i));
      }
    }
  }

 private:
  long work() const { return normalize_.width * count_; }
  Buffer<float>& x_;
  HiddenStates states_;
  long count_;
  Normalize normalize_;
};

// x = x, as long as `like`: the mean of squares is the same.
class MatchLength : public Operation {
 public:
  MatchLength(Buffer<float>& x, Buffer<float>& like, long width) : x_(x), like_(like), width_(width) {}
  long items(const StepInput& step, int) const noexcept override { return row_items(step.num_tokens, width_); }
  void run(const StepInput& step, int, long item) noexcept override {
    const RowRange rows(item, step.num_tokens, width_);
    for (long row = rows.first; row < rows.last; row++) {
      float* x = x_.row(row);
      const float factor = std::sqrt(mean_square(like_.row(row)) / std::max(mean_square(x), 1e-5f));
      for (long i = 0; i < width_; i += LANES) store(x + i, load(x + i) * factor);
    }
  }

 private:
  float mean_square(const float* x) const {
    f32x16 squares = splat(0);
    for (long i = 0; i < width_; i += LANES) squares += load(x + i) * load(x + i);
    return sum(squares) / float(width_);
  }
  Buffer<float>&x_, &like_;
  long width_;
};

// gates = activation(relu(gates - cutoff)), where the cutoff is so many standard deviations above the mean of the row: so
// only the largest of its numbers remain.
class CutOff : public Operation {
 public:
  CutOff(Buffer<float>& gates, long width, float deviations, Activation activation)
      : gates_(gates), width_(width), deviations_(deviations), activation_(activation) {}
  long items(const StepInput& step, int) const noexcept override { return row_items(step.num_tokens, width_); }
  void run(const StepInput& step, int, long item) noexcept override {
    const RowRange rows(item, step.num_tokens, width_);
    for (long row = rows.first; row < rows.last; row++) {
      float* gates = gates_.row(row);
      f32x16 total = splat(0), squares = splat(0);
      for (long i = 0; i < width_; i += LANES) total += load(gates + i);
      const float mean = sum(total) / float(width_);
      for (long i = 0; i < width_; i += LANES) squares += (load(gates + i) - mean) * (load(gates + i) - mean);
      const float cutoff = mean + deviations_ * std::sqrt(sum(squares) / float(width_));
      for (long i = 0; i < width_; i += LANES)
        store(gates + i, activate(activation_, max(splat(0.0f), load(gates + i) - cutoff)));
    }
  }

 private:
  Buffer<float>& gates_;
  long width_;
  float deviations_;
  Activation activation_;
};

// hidden = hidden + x
template <class T>
class AddRows : public Operation {
 public:
  AddRows(Buffer<T>& x, Buffer<float>& hidden, long width) : x_(x), hidden_(hidden), width_(width) {}
  long items(const StepInput& step, int) const noexcept override { return row_items(step.num_tokens, width_); }
  void run(const StepInput& step, int, long item) noexcept override {
    const RowRange rows(item, step.num_tokens, width_);
    for (long row = rows.first; row < rows.last; row++) {
      float* hidden = hidden_.row(row);
      for (long i = 0; i < width_; i += LANES) store(hidden + i, load(hidden + i) + load(x_.row(row) + i));
    }
  }

 private:
  Buffer<T>& x_;
  Buffer<float>& hidden_;
  long width_;
};

}  // namespace oaiserve
