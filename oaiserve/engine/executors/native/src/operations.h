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

// The operation of a structure, whose fields are what it reads and writes. It has `items` and `run` itself, or computes
// each row alone, by `row`: then it has `work`, how long a row takes, in values, and `rows`, if these are not the tokens.
template <class Op>
class OperationOf : public Operation {
 public:
  template <class... Fields>
  explicit OperationOf(Fields&&... fields) : op_{std::forward<Fields>(fields)...} {}
  long items(const StepInput& step, int threads) const noexcept override {
    if constexpr (IS_BY_ROW)
      return row_items(rows(step), op_.work());
    else
      return op_.items(step, threads);
  }
  void run(const StepInput& step, int threads, long item) noexcept override {
    if constexpr (IS_BY_ROW) {
      const RowRange range(item, rows(step), op_.work());
      for (long row = range.first; row < range.last; row++) op_.row(step, row);
    } else {
      op_.run(step, threads, item);
    }
  }

 private:
  static constexpr bool IS_BY_ROW = requires(Op op, const StepInput& step) { op.row(step, 0L); };
  long rows(const StepInput& step) const {
    if constexpr (requires(const Op& op) { op.rows(step); })
      return op_.rows(step);
    else
      return step.num_tokens;
  }
  Op op_;
};

// hidden = table[token] * scale (+ position_table[position]). A token behind the last row of the table has the first one.
template <class T>
struct Embed {
  Buffer<float>& hidden;
  const T* table;
  long table_rows;
  const T* position_table;  // or null
  long width;
  float scale;

  long work() const { return width; }
  void row(const StepInput& step, long row) const {
    const long token = step.token_ids[row];
    const T* from = table + (token < table_rows ? token : 0) * width;
    float* out = hidden.row(row);
    for (long i = 0; i < width; i += LANES) store(out + i, load(from + i) * scale);
    if (!position_table) return;
    const T* position = position_table + step.positions[row] * width;
    for (long i = 0; i < width; i += LANES) store(out + i, load(out + i) + load(position + i));
  }
};

// hidden = vector * scale for the tokens in whose places vectors are, or hidden += vector, with a further set of vectors.
struct PlaceVectors {
  Buffer<float>& hidden;
  long set, width;
  float scale;

  long work() const { return width; }
  long rows(const StepInput& step) const { return set < step.num_sets ? step.num_vectors : 0; }
  void row(const StepInput& step, long row) const {
    const float* from = step.vectors + (set * step.num_vectors + row) * width;
    float* out = hidden.row(step.vector_rows[row]);
    for (long i = 0; i < width; i += LANES) store(out + i, set ? load(out + i) + load(from + i) : load(from + i) * scale);
  }
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
struct Norm {
  Buffer<float>& x;
  Buffer<T>& out;
  Normalize normalize;
  bool of_logits_rows;

  long work() const { return normalize.width; }
  long rows(const StepInput& step) const { return of_logits_rows ? step.num_logits : step.num_tokens; }
  void row(const StepInput& step, long row) const {
    normalize(x.row(of_logits_rows ? step.logits_rows[row] : row), out.row(row));
  }
};

// hidden = (hidden + norm(x) * scale) * factor. Some families do this with the outputs of attention and MLP. x is
// overwritten.
struct AddNorm {
  Buffer<float>&rows_of_x, &rows_of_hidden;
  Normalize normalize;
  float scale, factor;

  long work() const { return normalize.width; }
  void row(const StepInput&, long row) const {
    float *x = rows_of_x.row(row), *hidden = rows_of_hidden.row(row);
    normalize(x, x);
    for (long i = 0; i < normalize.width; i += LANES)
      store(hidden + i, (load(hidden + i) + load(x + i) * scale) * factor);
  }
};

// The product with A of the adapters of a site, for all rows that have adapters. The linear layer at that site comes
// before the next site. If it computes each head by itself, so are these products: the ranks of a head, which are as many
// for all heads, multiply the numbers of x that are its own, and those of two heads are `each` apart.
template <class T>
struct Adapt {
  Buffer<T>& x;
  const Site<T>& site;
  long heads, each;

  long items(const StepInput&, int) const { return long(site.rows->tiles.size()); }
  void run(const StepInput&, int, long item) const {
    const auto& tile = site.rows->tiles[size_t(item)];
    const SiteWeights<T>& weights = tile.adapter->site(site.index);
    const long of_head = std::max(weights.padded_rank() / heads, 1L);
    adapt(weights, *site.rows, tile, [&](long row, long rank) { return x.row(row) + rank / of_head * each; },
          std::make_integer_sequence<int, ADAPTER_ROWS>());
  }
};

// The linear layers of the following operations add what the rows' adapters have for their site, if there is one: to
// x W^T + bias, before anything else is done with it.

// out = x W^T + bias, or out += (x W^T + bias) * scale
template <class T, class Weights>
struct Project {
  Buffer<typename Weights::Input>& x;
  Buffer<float>& out;
  const Weights& weights;
  const Site<T>* site;
  bool adds;
  float scale;

  long items(const StepInput& step, int threads) const { return linear_items(weights, step.num_tokens, threads); }
  void run(const StepInput& step, int threads, long item) const {
    linear_item(weights, x.row(0), x.stride(), step.num_tokens, threads, item,
                [this](long row, long column, f32x16 values) {
                  if (site) values = site->add(row, column, values);
                  float* to = out.row(row) + column;
                  store(to, adds ? load(to) + values * scale : values);
                });
  }
};

// out = activation(x W^T + bias), times the numbers of `factors` from column `first` on, where there are any.
template <class T, class Weights>
struct Activate {
  Buffer<typename Weights::Input>& x;
  Buffer<T>& out;
  const Weights& weights;
  const Site<T>* site;
  Activation activation;
  Buffer<float>* factors;  // or null
  long first;

  long items(const StepInput& step, int threads) const { return linear_items(weights, step.num_tokens, threads); }
  void run(const StepInput& step, int threads, long item) const {
    linear_item(weights, x.row(0), x.stride(), step.num_tokens, threads, item,
                [this](long row, long column, f32x16 values) {
                  if (site) values = site->add(row, column, values);
                  values = activate(activation, values);
                  if (factors) values *= load(factors->row(row) + first + column);
                  store(out.row(row) + column, values);
                });
  }
};

// out = activation(x G^T) * (x U^T), where the weights hold both matrices (columns_of_gated). To its site, the columns of U
// follow those of G.
template <class T, class Weights>
struct Gate {
  Buffer<typename Weights::Input>& x;
  Buffer<T>& out;
  const Weights& weights;
  const Site<T>* site;
  Activation activation;

  long items(const StepInput& step, int threads) const { return linear_items(weights, step.num_tokens, threads); }
  void run(const StepInput& step, int threads, long item) const {
    gated_item(weights, x.row(0), x.stride(), step.num_tokens, threads, item,
               [this](long row, long column, f32x16 gate, f32x16 up) {
                 if (site) {
                   gate = site->add(row, column, gate);
                   up = site->add(row, weights.n / 2 + column, up);
                 }
                 store(out.row(row) + column, activate(activation, gate) * up);
               });
  }
};

// logits = (x W^T + bias) * scale, and then softcap * tanh(logits / softcap) unless softcap is 0.
template <class T, class Weights>
struct Logits {
  Buffer<typename Weights::Input>& x;
  const Weights& weights;
  float scale, softcap;

  long items(const StepInput& step, int threads) const { return linear_items(weights, step.num_logits, threads); }
  void run(const StepInput& step, int threads, long item) const {
    const long vocab = weights.n;
    linear_item(weights, x.row(0), x.stride(), step.num_logits, threads, item,
                [&](long row, long column, f32x16 values) {
                  values *= scale;
                  if (softcap > 0) values = tanh(values / softcap) * softcap;
                  float* out = step.logits + row * vocab + column;
                  __builtin_prefetch(out + PANEL, 1);  // rows are far apart, so writing each of them waits for memory
                  if (column + LANES <= vocab)
                    store(out, values);
                  else
                    memcpy(out, &values, size_t(vocab - column) * sizeof(float));
                });
  }
};

}  // namespace oaiserve
