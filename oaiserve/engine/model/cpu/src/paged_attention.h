// Attention alone, layer by layer, for a model whose other operations run in other code.
#pragma once

#include <deque>
#include <utility>

#include "attend.h"
#include "pool.h"

namespace oaiserve {

template <class T>
class PagedAttention : public Work {
 public:
  // Throws as Pool does.
  PagedAttention(int threads, Team team) : pool_(threads, team) {}

  // Begins a step, whose layers `run` computes afterwards. The arrays that `step` points to must stay until the last of
  // them. Throws std::bad_alloc; then no layer may run before a step has begun.
  void begin(const StepInput& step) {
    step_ = step;
    for (SharedPlan& plan : plans_) plan.make(step_, pool_.threads());
  }

  // Writes the keys and values of the step into the cache of one layer, then computes its attention. Throws
  // std::bad_alloc before it has written anything.
  //
  // query T[tokens][heads][key_dim], key T[tokens][kv_heads][key_dim], value T[tokens][kv_heads][value_dim],
  // out T[tokens][heads][value_dim].
  void run(const AnyCache<T>& cache, const AttentionOptions& options, const T* query, const T* key, const T* value,
           T* out) {
    cache_ = cache, options_ = options, query_ = query, key_ = key, value_ = value, out_ = out;
    std::visit([&](const auto& paged) { shared_ = &plan(paged.kv_heads, paged.value_dim); }, cache_);
    pool_.run(*this);
  }

  long phases() const noexcept override { return 2; }
  long items(long phase) const noexcept override {
    if (phase != WRITE) return long(shared_->plan.items.size());
    return std::visit([&](const auto& cache) { return row_items(step_.num_tokens, written_width(cache)); }, cache_);
  }
  void run(long phase, long item) noexcept override {
    std::visit(
        [&](const auto& cache) {
          if (phase == WRITE) return write(cache, RowRange(item, step_.num_tokens, written_width(cache)));
          attend_item(shared_->plan, item, options_, cache, query_, options_.heads * cache.key_dim, out_,
                      options_.heads * cache.value_dim);
        },
        cache_);
  }
  void ended(long) noexcept override {}

 private:
  static constexpr long WRITE = 0;

  static long written_width(const auto& cache) { return cache.kv_heads * (cache.key_dim + cache.value_dim); }

  void write(const auto& cache, RowRange rows) const {
    for (long row = rows.first; row < rows.last; row++)
      for (long head = 0; head < cache.kv_heads; head++) {
        long index = row * cache.kv_heads + head;
        write_key(cache, step_.slots[row], head, key_ + index * cache.key_dim);
        write_value(cache, step_.slots[row], head, value_ + index * cache.value_dim);
      }
  }

  SharedPlan& plan(long kv_heads, long value_dim) {
    for (SharedPlan& plan : plans_)
      if (plan.serves(options_.heads, kv_heads, value_dim, options_.window, options_.looks_ahead)) return plan;
    SharedPlan made(options_.heads, kv_heads, value_dim, options_.window, options_.looks_ahead);
    made.make(step_, pool_.threads());  // before it is kept: if this throws, no layer finds a plan that is half made
    return plans_.emplace_back(std::move(made));
  }

  Pool pool_;
  StepInput step_{};
  std::deque<SharedPlan> plans_;  // for all layers that have run so far

  // The layer that runs.
  AnyCache<T> cache_;
  AttentionOptions options_{};
  SharedPlan* shared_ = nullptr;
  const T *query_ = nullptr, *key_ = nullptr, *value_ = nullptr;
  T* out_ = nullptr;
};

}  // namespace oaiserve
