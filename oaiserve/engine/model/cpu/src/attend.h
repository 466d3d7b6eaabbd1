// The operations of attention in a step: one prepares queries, keys and values, and one attends.
#pragma once

#include "attention.h"
#include "operations.h"

namespace oaiserve {

// A rotary position embedding rotates pairs of numbers in queries and keys by an angle that grows with the position.
struct Rotary {
  const float *cosines, *sines;  // [positions][pairs]; null: nothing is rotated
  long offset, pairs;            // of the numbers of each head that are rotated; the others stay as they are
  long apart;                    // number i forms a pair with number i + apart, unless they are
  bool interleaved;              // pairs of neighbours
  bool before_norms;             // of queries and keys; otherwise these come first
  const float* query_factors;    // [positions], by which queries are multiplied; null: they are not

  void operator()(float* head, long position) const {
    if (!cosines) return;
    head += offset;
    const float *cos = cosines + position * pairs, *sin = sines + position * pairs;
    long i = 0;
    for (; !interleaved && i + LANES <= pairs; i += LANES) {
      f32x16 a = load(head + i), b = load(head + i + apart), c = load(cos + i), s = load(sin + i);
      store(head + i, a * c - b * s);
      store(head + i + apart, b * c + a * s);
    }
    for (; i < pairs; i++) {
      float& a = head[interleaved ? 2 * i : i];
      float& b = head[interleaved ? 2 * i + 1 : i + apart];
      float turned = a * cos[i] - b * sin[i];
      b = b * cos[i] + a * sin[i];
      a = turned;
    }
  }
};

// Applies norms and rotary embedding to `qkv`, whose rows have queries, keys and values side by side. Writes the
// queries to `queries`, and keys and values into the cache. With two parts, rows have no values: a value is its key before
// norm and rotation. With one, they have queries alone, and the cache is that of another layer, which has written it.
template <class T, class S>
class Prepare : public Operation {
 public:
  Prepare(Buffer<float>& qkv, Buffer<T>& queries, PagedCache<S>& cache, long heads, Rotary rotary, Normalize query_norm,
          Normalize key_norm, Normalize value_norm, long parts)
      : qkv_(qkv), queries_(queries), cache_(cache), heads_(heads), rotary_(rotary), query_norm_(query_norm),
        key_norm_(key_norm), value_norm_(value_norm), parts_(parts) {}
  long items(const StepInput& step, int) const noexcept override { return row_items(step.num_tokens, qkv_.stride()); }
  void run(const StepInput& step, int, long item) noexcept override {
    RowRange rows(item, step.num_tokens, qkv_.stride());
    for (long row = rows.first; row < rows.last; row++) {
      float *query = qkv_.row(row), *key = query + heads_ * cache_.key_dim;
      const auto norm_and_rotate = [&](float* x, long heads, const Normalize& normalize) {
        if (!rotary_.before_norms) norm(x, heads, normalize);
        for (long head = 0; head < heads; head++) rotary_(x + head * cache_.key_dim, step.positions[row]);
        if (rotary_.before_norms) norm(x, heads, normalize);
      };
      norm_and_rotate(query, heads_, query_norm_);
      const float factor = rotary_.query_factors ? rotary_.query_factors[step.positions[row]] : 1.0f;
      for (long i = 0; i < heads_ * cache_.key_dim; i += LANES) store(queries_.row(row) + i, load(query + i) * factor);
      if (parts_ == 1) continue;
      const float* value = parts_ == 2 ? key : key + cache_.kv_heads * cache_.key_dim;
      for (long head = 0; head < cache_.kv_heads; head++, value += cache_.value_dim) {
        alignas(64) float normed[MAX_VALUE_DIM];
        if (value_norm_.weight) value_norm_(value, normed);
        write_value(cache_, step.slots[row], head, value_norm_.weight ? normed : value);
      }
      norm_and_rotate(key, cache_.kv_heads, key_norm_);
      for (long head = 0; head < cache_.kv_heads; head++, key += cache_.key_dim)
        write_key(cache_, step.slots[row], head, key);
    }
  }

 private:
  // Normalizes each head, or all heads together, depending on the width of the norm.
  void norm(float* x, long heads, const Normalize& normalize) const {
    if (!normalize.weight) return;
    for (long i = 0; i < heads * cache_.key_dim; i += normalize.width) normalize(x + i, x + i);
  }

  Buffer<float>& qkv_;
  Buffer<T>& queries_;
  PagedCache<S>& cache_;
  long heads_;
  Rotary rotary_;
  Normalize query_norm_, key_norm_, value_norm_;
  long parts_;
};

// The division of a step's attention into items, which all layers of the same heads and window share.
class SharedPlan {
 public:
  SharedPlan(long heads, long kv_heads, long value_dim, long window)
      : heads_(heads), kv_heads_(kv_heads), value_dim_(value_dim), window_(window) {}
  bool serves(long heads, long kv_heads, long value_dim, long window) const {
    return heads == heads_ && kv_heads == kv_heads_ && value_dim == value_dim_ && window == window_;
  }
  // Throws std::bad_alloc; then the plan cannot be used until it is made again.
  void make(const StepInput& step, int threads) {
    make_plan(plan, step, heads_, kv_heads_, value_dim_, window_, threads);
  }

  AttentionPlan plan;

 private:
  long heads_, kv_heads_, value_dim_, window_;
};

// out = attention of the queries over the cache
template <class T, class S>
class Attend : public Operation {
 public:
  Attend(Buffer<T>& queries, Buffer<T>& out, PagedCache<S>& cache, SharedPlan& shared, AttentionOptions options)
      : queries_(queries), out_(out), cache_(cache), shared_(shared), options_(options) {}
  long items(const StepInput&, int) const noexcept override { return long(shared_.plan.items.size()); }
  void run(const StepInput&, int, long item) noexcept override {
    attend_item(shared_.plan, item, options_, cache_, queries_.row(0), queries_.stride(), out_.row(0), out_.stride());
  }

 private:
  Buffer<T>&queries_, &out_;
  PagedCache<S>& cache_;
  SharedPlan& shared_;
  AttentionOptions options_;
};

}  // namespace oaiserve
