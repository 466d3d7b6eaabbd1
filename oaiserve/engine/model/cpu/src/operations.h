// The operations of a decoder's step. Each operation is a phase of the pool, whose items the threads share.
//
// Operations refer to buffers and weights, which the decoder owns. A buffer has room for a row of each token.
#pragma once

#include <vector>

#include "activation.h"
#include "adapters.h"
#include "gemm.h"
#include "step.h"

namespace oaiserve {

// The size of an item of an operation on rows, in values: some microseconds of work.
constexpr long ITEM_VALUES = 16384;

inline long rows_per_item(long width) { return width >= ITEM_VALUES ? 1 : ITEM_VALUES / width; }
inline long row_items(long rows, long width) { return (rows + rows_per_item(width) - 1) / rows_per_item(width); }

// The rows of one item: from `first` to before `last`.
struct RowRange {
  long first, last;
  RowRange(long item, long rows, long width)
      : first(item * rows_per_item(width)), last(std::min(first + rows_per_item(width), rows)) {}
};

// `items` returns into how many items the operation is cut in a step, given the number of threads. `run` computes one
// of them, on any thread of the pool.
class Operation {
 public:
  virtual ~Operation() = default;
  virtual long items(const StepInput& step, int threads) const noexcept = 0;
  virtual void run(const StepInput& step, int threads, long item) noexcept = 0;
};

// hidden = table[token] * scale (+ position_table[position]). A token behind the last row of the table has the first one.
template <class T>
class Embed : public Operation {
 public:
  Embed(Buffer<float>& out, const T* table, long table_rows, const T* position_table, long width, float scale)
      : out_(out), table_(table), table_rows_(table_rows), position_table_(position_table), width_(width),
        scale_(scale) {}
  long items(const StepInput& step, int) const noexcept override { return row_items(step.num_tokens, width_); }
  void run(const StepInput& step, int, long item) noexcept override {
    RowRange rows(item, step.num_tokens, width_);
    for (long row = rows.first; row < rows.last; row++) {
      const long token = step.token_ids[row];
      const T* from = table_ + (token < table_rows_ ? token : 0) * width_;
      float* out = out_.row(row);
      for (long i = 0; i < width_; i += LANES) store(out + i, load(from + i) * scale_);
      if (position_table_) {
        const T* position = position_table_ + step.positions[row] * width_;
        for (long i = 0; i < width_; i += LANES) store(out + i, load(out + i) + load(position + i));
      }
    }
  }

 private:
  Buffer<float>& out_;
  const T* table_;
  long table_rows_;
  const T* position_table_;
  long width_;
  float scale_;
};

// x = x * factors, number by number, in the first `width` numbers of each row.
class ScaleColumns : public Operation {
 public:
  ScaleColumns(Buffer<float>& x, const float* factors, long width) : x_(x), factors_(factors), width_(width) {}
  long items(const StepInput& step, int) const noexcept override { return row_items(step.num_tokens, width_); }
  void run(const StepInput& step, int, long item) noexcept override {
    const RowRange rows(item, step.num_tokens, width_);
    for (long row = rows.first; row < rows.last; row++) {
      float* x = x_.row(row);
      for (long i = 0; i < width_; i += LANES) store(x + i, load(x + i) * load(factors_ + i));
    }
  }

 private:
  Buffer<float>& x_;
  const float* factors_;  // [width]
  long width_;
};

// A norm of a vector: x / sqrt(mean(x^2) + epsilon) * weight. LayerNorm subtracts the mean from x first, and adds a
// bias. Without weights, x is copied.
struct Normalize {
  const float *weight, *bias;  // [width] or null
  long width;
  float epsilon;
  bool subtracts_mean;

  template <class Out>
  void operator()(const float* x, Out* out) const {
    if (!weight) {
      for (long i = 0; i < width; i += LANES) store(out + i, load(x + i));
      return;
    }
    f32x16 total = splat(0), squares = splat(0);
    float mean = 0;
    if (subtracts_mean) {
      for (long i = 0; i < width; i += LANES) total += load(x + i);
      mean = sum(total) / float(width);
    }
    for (long i = 0; i < width; i += LANES) {
      f32x16 v = load(x + i) - mean;
      squares += v * v;
    }
    float scale = 1.0f / std::sqrt(sum(squares) / float(width) + epsilon);
    for (long i = 0; i < width; i += LANES) {
      f32x16 v = (load(x + i) - mean) * scale * load(weight + i);
      if (bias) v += load(bias + i);
      store(out + i, v);
    }
  }
};

// out = norm(x): for all tokens, or only for those whose logits are computed.
template <class T>
class Norm : public Operation {
 public:
  Norm(Buffer<float>& x, Buffer<T>& out, Normalize normalize, bool of_logits_rows)
      : x_(x), out_(out), normalize_(normalize), of_logits_rows_(of_logits_rows) {}
  long items(const StepInput& step, int) const noexcept override { return row_items(rows(step), normalize_.width); }
  void run(const StepInput& step, int, long item) noexcept override {
    RowRange range(item, rows(step), normalize_.width);
    for (long row = range.first; row < range.last; row++)
      normalize_(x_.row(of_logits_rows_ ? step.logits_rows[row] : row), out_.row(row));
  }

 private:
  long rows(const StepInput& step) const { return of_logits_rows_ ? step.num_logits : step.num_tokens; }
  Buffer<float>& x_;
  Buffer<T>& out_;
  Normalize normalize_;
  bool of_logits_rows_;
};

// hidden = (hidden + norm(x) * scale) * factor. Some families do this with the outputs of attention and MLP. x is
// overwritten.
class AddNorm : public Operation {
 public:
  AddNorm(Buffer<float>& x, Buffer<float>& hidden, Normalize normalize, float scale, float factor)
      : x_(x), hidden_(hidden), normalize_(normalize), scale_(scale), factor_(factor) {}
  long items(const StepInput& step, int) const noexcept override {
    return row_items(step.num_tokens, normalize_.width);
  }
  void run(const StepInput& step, int, long item) noexcept override {
    RowRange rows(item, step.num_tokens, normalize_.width);
    for (long row = rows.first; row < rows.last; row++) {
      float *x = x_.row(row), *hidden = hidden_.row(row);
      normalize_(x, x);
      for (long i = 0; i < normalize_.width; i += LANES)
        store(hidden + i, (load(hidden + i) + load(x + i) * scale_) * factor_);
    }
  }

 private:
  Buffer<float>&x_, &hidden_;
  Normalize normalize_;
  float scale_, factor_;
};

// The product with A of the adapters of a site, for all rows that have adapters. The linear layer at that site comes
// before the next site. If it computes each head by itself, so are these products: the ranks of a head, which are as many
// for all heads, multiply the numbers of x that are its own, and those of two heads are `each` apart.
template <class T>
class Adapt : public Operation {
 public:
  Adapt(Buffer<T>& x, AdapterRows<T>& rows, long site, long heads, long each)
      : x_(x), rows_(rows), site_(site), heads_(heads), each_(each) {}
  long items(const StepInput&, int) const noexcept override { return long(rows_.tiles.size()); }
  void run(const StepInput&, int, long item) noexcept override {
    const auto& tile = rows_.tiles[size_t(item)];
    const SiteWeights<T>& site = tile.adapter->site(site_);
    const long of_head = std::max(site.padded_rank() / heads_, 1L);
    adapt(site, rows_, tile, [&](long row, long rank) { return x_.row(row) + rank / of_head * each_; },
          std::make_integer_sequence<int, ADAPTER_ROWS>());
  }

 private:
  Buffer<T>& x_;
  AdapterRows<T>& rows_;
  long site_, heads_, each_;
};

// The linear layers of the following operations add what the rows' adapters have for their site, if there is one: to
// x W^T + bias, before anything else is done with it.

// out = x W^T + bias, or out += (x W^T + bias) * scale
template <class T, class Weights>
class Project : public Operation {
 public:
  using Input = Buffer<typename Weights::Input>;
  Project(Input& x, Buffer<float>& out, const Weights& weights, const Site<T>* site, bool adds, float scale)
      : x_(x), out_(out), weights_(weights), site_(site), adds_(adds), scale_(scale) {}
  long items(const StepInput& step, int threads) const noexcept override {
    return linear_items(weights_, step.num_tokens, threads);
  }
  void run(const StepInput& step, int threads, long item) noexcept override {
    linear_item(weights_, x_.row(0), x_.stride(), step.num_tokens, threads, item,
                [this](long row, long column, f32x16 values) {
                  if (site_) values = site_->add(row, column, values);
                  float* out = out_.row(row) + column;
                  store(out, adds_ ? load(out) + values * scale_ : values);
                });
  }

 private:
  Input& x_;
  Buffer<float>& out_;
  const Weights& weights_;
  const Site<T>* site_;
  bool adds_;
  float scale_;
};

// out = activation(x W^T + bias), times the numbers of `factors` from column `first` on, where there are any.
template <class T, class Weights>
class Activate : public Operation {
 public:
  using Input = Buffer<typename Weights::Input>;
  Activate(Input& x, Buffer<T>& out, const Weights& weights, const Site<T>* site, Activation activation,
           Buffer<float>* factors = nullptr, long first = 0)
      : x_(x), out_(out), weights_(weights), site_(site), activation_(activation), factors_(factors), first_(first) {}
  long items(const StepInput& step, int threads) const noexcept override {
    return linear_items(weights_, step.num_tokens, threads);
  }
  void run(const StepInput& step, int threads, long item) noexcept override {
    linear_item(weights_, x_.row(0), x_.stride(), step.num_tokens, threads, item,
                [this](long row, long column, f32x16 values) {
                  if (site_) values = site_->add(row, column, values);
                  values = activate(activation_, values);
                  if (factors_) values *= load(factors_->row(row) + first_ + column);
                  store(out_.row(row) + column, values);
                });
  }

 private:
  Input& x_;
  Buffer<T>& out_;
  const Weights& weights_;
  const Site<T>* site_;
  Activation activation_;
  Buffer<float>* factors_;
  long first_;
};

// out = activation(x G^T * factor) * (x U^T), where the weights hold both matrices (columns_of_gated). To its site, the columns
// of U follow those of G.
template <class T, class Weights>
class Gate : public Operation {
 public:
  using Input = Buffer<typename Weights::Input>;
  Gate(Input& x, Buffer<T>& out, const Weights& weights, const Site<T>* site, Activation activation, float factor)
      : x_(x), out_(out), weights_(weights), site_(site), activation_(activation), factor_(factor) {}
  long items(const StepInput& step, int threads) const noexcept override {
    return linear_items(weights_, step.num_tokens, threads);
  }
  void run(const StepInput& step, int threads, long item) noexcept override {
    gated_item(weights_, x_.row(0), x_.stride(), step.num_tokens, threads, item,
               [this](long row, long column, f32x16 gate, f32x16 up) {
                 if (site_) {
                   gate = site_->add(row, column, gate);
                   up = site_->add(row, weights_.n / 2 + column, up);
                 }
                 store(out_.row(row) + column, activate(activation_, gate * factor_) * up);
               });
  }

 private:
  Input& x_;
  Buffer<T>& out_;
  const Weights& weights_;
  const Site<T>* site_;
  Activation activation_;
  float factor_;
};

// logits = (x W^T + bias) * scale, and then softcap * tanh(logits / softcap) unless softcap is 0.
template <class T, class Weights>
class Logits : public Operation {
 public:
  using Input = Buffer<typename Weights::Input>;
  Logits(Input& x, const Weights& weights, float scale, float softcap)
      : x_(x), weights_(weights), scale_(scale), softcap_(softcap) {}
  long items(const StepInput& step, int threads) const noexcept override {
    return linear_items(weights_, step.num_logits, threads);
  }
  void run(const StepInput& step, int threads, long item) noexcept override {
    long vocab = weights_.n;
    linear_item(weights_, x_.row(0), x_.stride(), step.num_logits, threads, item,
                [&](long row, long column, f32x16 values) {
                  values *= scale_;
                  if (softcap_ > 0) values = tanh(values / softcap_) * softcap_;
                  float* out = step.logits + row * vocab + column;
                  __builtin_prefetch(out + PANEL, 1);  // rows are far apart, so writing each of them waits for memory
                  if (column + LANES <= vocab)
                    store(out, values);
                  else
                    memcpy(out, &values, size_t(vocab - column) * sizeof(float));
                });
  }

 private:
  Input& x_;
  const Weights& weights_;
  float scale_, softcap_;
};

}  // namespace oaiserve
