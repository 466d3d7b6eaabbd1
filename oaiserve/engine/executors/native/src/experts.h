// Mixtures of experts: a layer has many MLPs, and a router chooses a few of them for each token.
//
// A token has one row for each of its experts. All rows of a step are sorted by expert, so that those of an expert lie
// side by side and its weights are read once. A row's numbers do not depend on the others: products are those of
// gemm.h, and a token adds up its experts from the best one on.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "operations.h"

namespace oaiserve {

constexpr long MOST_EXPERTS = 1024;

// How experts are chosen. Routing in library.py has the same layout.
struct Routing {
  long experts, top_k;
  long groups, top_groups;  // only the experts of the best groups are chosen from; a group is a run of experts
  const float* bias;        // [experts] or null: added to the scores for the choice, but not to the weights
  const float* factors;     // [experts] or null: of the weight of an expert, wherever it is chosen
  float scale;              // a factor of all weights
  bool is_sigmoid;          // a score is the sigmoid of its logit; else the scores are the softmax of all logits
  bool adds_best_two;       // a group is as good as its two best experts together; else as the best one
  bool renormalizes;        // the weights of a token are divided by their sum
};

// What an expert does with its gate and its up projection. Gating in library.py has the same layout.
struct Gating {
  Activation activation;
  float alpha, limit;  // limit 0: activation(gate) * up; else (up + 1) * gate * sigmoid(alpha * gate), both clamped

  f32x16 operator()(f32x16 gate, f32x16 up) const {
    if (limit <= 0) return activate(activation, gate) * up;
    gate = min(splat(limit), gate);  // NaN stays NaN
    up = max(splat(-limit), min(splat(limit), up));
    return (up + 1.0f) * gate * sigmoid(gate * alpha);
  }
};

// Which experts compute the tokens of a step. Each layer writes it again.
class Assignment {
 public:
  // Rows of one expert, at most BLOCK_ROWS. An expert with more rows has several groups.
  struct Group {
    long expert, first, rows;
  };

  Assignment(long experts, long top_k) : experts(experts), top_k(top_k) {}

  const long experts, top_k;
  std::vector<int32_t> chosen;  // [tokens][top_k], the experts of a token, best first
  std::vector<float> weights;   // [tokens][top_k]
  std::vector<int32_t> rows;    // [tokens][top_k], where the rows of a token are among the sorted ones
  std::vector<int32_t> places;  // [tokens * top_k], where a sorted row is in `chosen` and in `weights`
  std::vector<Group> groups;    // in the order of their rows; the first num_groups count
  long num_groups = 0;

  // The most groups that a number of tokens can have.
  long most_groups(long num_tokens) const {
    return std::min(experts, num_tokens * top_k) + num_tokens * top_k / BLOCK_ROWS;
  }

  // Makes room for a number of tokens. Throws std::bad_alloc.
  void reserve(long num_tokens) {
    if (num_tokens <= tokens_) return;
    const size_t count = size_t(num_tokens * top_k);
    chosen.resize(count), weights.resize(count), rows.resize(count), places.resize(count);
    groups.resize(size_t(most_groups(num_tokens)));
    next_.resize(size_t(experts));
    tokens_ = num_tokens;
  }

  // Sorts the rows by expert, as `chosen` says.
  void sort(long num_tokens) {
    const long count = num_tokens * top_k;
    std::fill(next_.begin(), next_.end(), 0);
    for (long i = 0; i < count; i++) next_[size_t(chosen[size_t(i)])]++;
    num_groups = 0;
    long first = 0;
    for (long expert = 0; expert < experts; expert++) {
      const long of_expert = next_[size_t(expert)], blocks = (of_expert + BLOCK_ROWS - 1) / BLOCK_ROWS;
      next_[size_t(expert)] = int32_t(first);
      for (long b = 0; b < blocks; b++) {
        const long begin = of_expert * b / blocks, end = of_expert * (b + 1) / blocks;
        groups[size_t(num_groups++)] = {expert, first + begin, end - begin};
      }
      first += of_expert;
    }
    for (long i = 0; i < count; i++) {
      const int32_t row = next_[size_t(chosen[size_t(i)])]++;
      rows[size_t(i)] = row;
      places[size_t(row)] = int32_t(i);
    }
  }

 private:
  std::vector<int32_t> next_;  // [experts], where an expert's next row goes
  long tokens_ = 0;            // tokens for which all arrays have room
};

// Chooses the experts of one token: writes their indices and weights [top_k], best first. The first of equal
// ones is chosen. `scores` are the logits [experts], and are overwritten.
inline void choose_experts(const Routing& routing, float* scores, int32_t* chosen, float* weights) {
  constexpr float NEVER = -std::numeric_limits<float>::infinity();
  const long experts = routing.experts, size = experts / routing.groups;
  if (routing.is_sigmoid) {
    for (long i = 0; i < experts; i++) scores[i] = 1 / (1 + std::exp(-scores[i]));
  } else {
    const float most = *std::max_element(scores, scores + experts);
    float total = 0;
    for (long i = 0; i < experts; i++) total += scores[i] = std::exp(scores[i] - most);
    for (long i = 0; i < experts; i++) scores[i] /= total;
  }
  float worth[MOST_EXPERTS];
  for (long i = 0; i < experts; i++) worth[i] = routing.bias ? scores[i] + routing.bias[i] : scores[i];
  // Returns the index of the best value, and excludes it from later calls.
  const auto take_best = [](float* values, bool* is_taken, long count) {
    long best = -1;
    for (long i = 0; i < count; i++)
      if (!is_taken[i] && (best < 0 || values[i] > values[best])) best = i;
    is_taken[best] = true;
    return best;
  };
  bool is_taken[MOST_EXPERTS] = {};
  if (routing.top_groups < routing.groups) {
    float of_groups[MOST_EXPERTS];
    for (long g = 0; g < routing.groups; g++) {
      float best = NEVER, second = NEVER;
      for (long i = g * size; i < (g + 1) * size; i++) {
        second = std::max(second, std::min(best, worth[i]));
        best = std::max(best, worth[i]);
      }
      of_groups[g] = routing.adds_best_two ? best + second : best;
    }
    bool is_group_taken[MOST_EXPERTS] = {};
    for (long n = 0; n < routing.top_groups; n++) take_best(of_groups, is_group_taken, routing.groups);
    for (long i = 0; i < experts; i++) is_taken[i] = !is_group_taken[i / size];
  }
  float total = 0;
  for (long n = 0; n < routing.top_k; n++) {
    const long expert = take_best(worth, is_taken, experts);
    chosen[n] = int32_t(expert);
    total += weights[n] = scores[expert];
  }
  const float factor = routing.renormalizes ? routing.scale / total : routing.scale;
  for (long n = 0; n < routing.top_k; n++) weights[n] *= routing.factors ? factor * routing.factors[chosen[n]] : factor;
}

// Computes the router's logits from x W^T + bias, and chooses the experts of each token. The router's weights are never
// quantized: they are few, and decide about much.
template <class T>
struct Route {
  Buffer<T>& x;
  Buffer<float>& logits;
  const Linear<T>& weights;
  const Site<T>* site;
  Routing routing;
  Assignment& assignment;

  long items(const StepInput& step, int threads) const {
    return std::min(step.num_tokens, std::max<long>(2 * threads, (step.num_tokens + BLOCK_ROWS - 1) / BLOCK_ROWS));
  }
  void run(const StepInput& step, int threads, long item) const {
    const long count = items(step, threads);
    const long first = step.num_tokens * item / count, end = step.num_tokens * (item + 1) / count;
    multiply_panels(weights, x.row(first), x.stride(), end - first, 0, panels_of(weights.n), {&weights, 0},
                    [&](long row, long column, f32x16 left, f32x16 right) {
                      if (site) left = site->add(first + row, column, left);
                      if (site && column + LANES < weights.n) right = site->add(first + row, column + LANES, right);
                      store(logits.row(first + row) + column, left);  // a row has room for whole panels
                      store(logits.row(first + row) + column + LANES, right);
                    });
    const long k = routing.top_k;
    for (long row = first; row < end; row++)
      choose_experts(routing, logits.row(row), &assignment.chosen[size_t(row * k)],
                     &assignment.weights[size_t(row * k)]);
  }
};

// Sorts the rows of the step by expert.
struct SortRows {
  Assignment& assignment;

  long items(const StepInput&, int) const { return 1; }
  void run(const StepInput& step, int, long) const { assignment.sort(step.num_tokens); }
};

// Writes `count` numbers of a row times `factor`.
// out[row] = x[token of the row], for the sorted rows.
template <class T>
struct GatherRows {
  Buffer<T>&x, &out;
  long width;
  const Assignment& assignment;

  long work() const { return width * long(sizeof(T)) / 2; }  // work of a row, as if it had bfloat16
  long rows(const StepInput& step) const { return step.num_tokens * assignment.top_k; }
  void row(const StepInput&, long row) const {
    const long place = assignment.places[size_t(row)];
    memcpy(out.row(row), x.row(place / assignment.top_k), size_t(width) * sizeof(T));
  }
};

// The products of sorted rows with the weights of their experts, all of which have the same sizes. The panels of all
// groups follow each other, and items are cut from this sequence: long ones first, which begin to read memory seldom, and
// short ones last, so that all threads end together. An item may begin within a group and end in another.
template <class Weights>
class ExpertProducts {
 public:
  ExpertProducts(std::vector<const Weights*> weights, const Assignment& assignment)
      : weights_(std::move(weights)), assignment_(assignment), panels_(panels_of(weights_[0]->n)) {}

  long items(int threads) const noexcept { return ROUNDS * threads; }  // the last ones may be empty

  // Calls store(row, column, left, right) as multiply_panels of gemm.h does.
  template <class T, class Store>
  void run(const StepInput& step, int threads, long item, Buffer<T>& x, Store&& store) const noexcept {
    const long rows = step.num_tokens * assignment_.top_k;
    Place at = begin(rows, threads, item);
    const Place end = begin(rows, threads, item + 1), later = begin(rows, threads, item + threads);
    for (; at.group < end.group || (at.group == end.group && at.panel < end.panel); at = {at.group + 1, 0}) {
      const Assignment::Group& group = assignment_.groups[size_t(at.group)];
      const Weights& weights = *weights_[size_t(group.expert)];
      const bool is_last = at.group == end.group;
      const long last = is_last ? end.panel : panels_;
      // What follows in this item, or what begins the item that this thread is likely to take next.
      const Place then = is_last || (at.group + 1 == end.group && end.panel == 0) ? later : Place{at.group + 1, 0};
      Next<Weights> next{&weights, last - 1};  // the last panel, which is in the cache already
      if (READS_OTHERS<Weights> && then.group < assignment_.num_groups)
        next = {weights_[size_t(assignment_.groups[size_t(then.group)].expert)], then.panel};
      multiply_panels(weights, x.row(group.first), x.stride(), group.rows, at.panel, last, next,
                      [&](long row, long column, f32x16 left, f32x16 right) {
                        store(group.first + row, column, left, right);
                      });
    }
  }

 private:
  // Each round of items, one for each thread, has half of what the rounds before have left; the last one has all.
  static constexpr long ROUNDS = 6;
  // A panel takes as long as its rows, and as this number of rows more because it is read.
  static constexpr long ROWS_OF_READING = IS_TILED<typename Weights::Input> ? 64 : 12;

  struct Place {
    long group, panel;
  };

  // Where an item begins. From the last item on, that is behind the last group.
  Place begin(long rows, int threads, long item) const noexcept {
    const long groups = assignment_.num_groups, round = item / threads;
    if (round >= ROUNDS) return {groups, 0};
    const auto cost_before = [&](long group) {  // cost of one panel of all earlier groups
      return group * ROWS_OF_READING + (group < groups ? assignment_.groups[size_t(group)].first : rows);
    };
    const long parts = threads << ROUNDS, each = 1L << (ROUNDS - 1) >> std::min(round, ROUNDS - 2);
    const long done = parts - (parts >> round) + each * (item % threads);
    const long cost = cost_before(groups) * panels_ * done / parts;
    long group = 0;
    while (group + 1 < groups && cost_before(group + 1) * panels_ <= cost) group++;
    const long of_group = cost_before(group + 1) - cost_before(group);
    return {group, (cost - cost_before(group) * panels_) / of_group};
  }

  std::vector<const Weights*> weights_;  // [experts]
  const Assignment& assignment_;
  long panels_;
};

// out = gating(x G^T + bias, x U^T + bias), with the weights of each row's expert.
template <class T, class Weights>
struct ExpertGate {
  Buffer<typename Weights::Input>& x;
  Buffer<T>& out;
  ExpertProducts<Weights> products;
  Gating gating;

  long items(const StepInput&, int threads) const { return products.items(threads); }
  void run(const StepInput& step, int threads, long item) const {
    products.run(step, threads, item, x, [this](long row, long column, f32x16 gate, f32x16 up) {
      store(out.row(row) + column / 2, gating(gate, up));
    });
  }
};

// out = x W^T + bias, with the weights of each row's expert. A row of `out` has room for whole panels.
template <class Out, class Weights>
struct ExpertProject {
  Buffer<typename Weights::Input>& x;
  Buffer<Out>& out;
  ExpertProducts<Weights> products;

  long items(const StepInput&, int threads) const { return products.items(threads); }
  void run(const StepInput& step, int threads, long item) const {
    products.run(step, threads, item, x, [this](long row, long column, f32x16 left, f32x16 right) {
      store(out.row(row) + column, left);
      store(out.row(row) + column + LANES, right);
    });
  }
};

// out += scale * (the weighted sum of a token's rows), or out = that sum.
struct Combine {
  Buffer<float>&x, &rows_of_out;
  long width;
  const Assignment& assignment;
  bool adds;
  float scale;

  long work() const { return width * assignment.top_k; }
  void row(const StepInput&, long token) const {
    const long k = assignment.top_k;
    float* out = rows_of_out.row(token);
    for (long i = 0; i < width; i += LANES) {
      f32x16 total = splat(0);
      for (long n = token * k; n < (token + 1) * k; n++)
        total += load(x.row(assignment.rows[size_t(n)]) + i) * assignment.weights[size_t(n)];
      store(out + i, adds ? load(out + i) + total * scale : total * scale);
    }
  }
};

// values *= sigmoid(x . weight), row by row: how much of its shared expert a token gets. To its site, the product is the
// first of sixteen columns.
template <class T>
struct ScaleRows {
  Buffer<T>&x, &rows_of_values;
  const float* weight;
  const Site<T>* site;
  long width, values_width;

  long work() const { return width; }
  void row(const StepInput&, long row) const {
    f32x16 products = splat(0);
    for (long i = 0; i < width; i += LANES) products += load(x.row(row) + i) * load(weight + i);
    float product = sum(products);
    if (site) product = site->add(row, 0, splat(product))[0];
    const float share = 1 / (1 + std::exp(-product));
    T* values = rows_of_values.row(row);
    for (long i = 0; i < values_width; i += LANES) store(values + i, load(values + i) * share);
  }
};

}  // namespace oaiserve
