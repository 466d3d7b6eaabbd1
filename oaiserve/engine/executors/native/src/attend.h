// The operations of attention in a step: one prepares queries, keys and values, and one attends.
#pragma once

#include "attention.h"
#include "operations.h"

namespace oaiserve {

// A rotary position embedding rotates pairs of numbers in queries and keys by an angle that grows with the position.
struct Rotary {
  const float *cosines, *sines;  // [positions][pairs]; null: nothing is rotated
  long offset, pairs;            // range of each head's rotated numbers; the others don't change
  long apart;                    // number i forms a pair with number i + apart, unless they are
  bool interleaved;              // pairs of neighbours
  bool before_norms;             // whether queries and keys are rotated before their norms
  const float* query_factors;    // [positions], by which queries are multiplied; null: they are not
  const int32_t* axes;           // [pairs], which of a token's three positions rotates a pair; null: there is one

  // The cosines and sines of one token, and room for those that come from several rows of the tables.
  struct Angles {
    const float *cos, *sin;
    float room[MAX_KEY_DIM];
  };
  void find(const StepInput& step, long row, Angles& angles) const {
    if (!cosines) return;
    angles.cos = cosines + step.positions[row] * pairs, angles.sin = sines + step.positions[row] * pairs;
    if (!axes || !step.axes) return;
    for (long i = 0; i < pairs; i++) {
      const long at = step.axes[axes[i] * step.num_tokens + row] * pairs + i;
      angles.room[i] = cosines[at], angles.room[pairs + i] = sines[at];
    }
    angles.cos = angles.room, angles.sin = angles.room + pairs;
  }

  void operator()(float* head, const Angles& angles) const {
    if (!cosines) return;
    head += offset;
    const float *cos = angles.cos, *sin = angles.sin;
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
struct Prepare {
  Buffer<float>& qkv;
  Buffer<T>& queries;
  PagedCache<S>& cache;
  long heads;
  Rotary rotary;
  Normalize query_norm, key_norm, value_norm;
  long parts;

  long work() const { return qkv.stride(); }
  void row(const StepInput& step, long row) const {
    float *query = qkv.row(row), *key = query + heads * cache.key_dim;
    Rotary::Angles angles;
    rotary.find(step, row, angles);
    const auto norm_and_rotate = [&](float* x, long count, const Normalize& normalize) {
      if (!rotary.before_norms) norm(x, count, normalize);
      for (long head = 0; head < count; head++) rotary(x + head * cache.key_dim, angles);
      if (rotary.before_norms) norm(x, count, normalize);
    };
    norm_and_rotate(query, heads, query_norm);
    const float factor = rotary.query_factors ? rotary.query_factors[step.positions[row]] : 1.0f;
    for (long i = 0; i < heads * cache.key_dim; i += LANES) store(queries.row(row) + i, load(query + i) * factor);
    if (parts == 1) return;
    const float* value = parts == 2 ? key : key + cache.kv_heads * cache.key_dim;
    for (long head = 0; head < cache.kv_heads; head++, value += cache.value_dim) {
      alignas(64) float normed[MAX_VALUE_DIM];
      if (value_norm.weight) value_norm(value, normed);
      write_value(cache, step.slots[row], head, value_norm.weight ? normed : value);
    }
    norm_and_rotate(key, cache.kv_heads, key_norm);
    for (long head = 0; head < cache.kv_heads; head++, key += cache.key_dim)
      write_key(cache, step.slots[row], head, key);
  }

  // Normalizes each head, or all heads together, depending on the width of the norm.
  void norm(float* x, long count, const Normalize& normalize) const {
    if (!normalize.weight) return;
    for (long i = 0; i < count * cache.key_dim; i += normalize.width) normalize(x + i, x + i);
  }
};

// The division of a step's attention into items, which all layers of the same heads and visible keys share.
class SharedPlan {
 public:
  SharedPlan(long heads, long kv_heads, long value_dim, long window, bool looks_ahead)
      : heads_(heads), kv_heads_(kv_heads), value_dim_(value_dim), window_(window), looks_ahead_(looks_ahead) {}
  bool serves(long heads, long kv_heads, long value_dim, long window, bool looks_ahead) const {
    return heads == heads_ && kv_heads == kv_heads_ && value_dim == value_dim_ && window == window_ &&
           looks_ahead == looks_ahead_;
  }
  // Throws std::bad_alloc; then the plan cannot be used until it is made again.
  void make(const StepInput& step, int threads) {
    make_plan(plan, step, heads_, kv_heads_, value_dim_, window_, looks_ahead_, threads);
  }

  AttentionPlan plan;

 private:
  long heads_, kv_heads_, value_dim_, window_;
  bool looks_ahead_;
};

// out = attention of the queries over the cache
template <class T, class S>
struct Attend {
  Buffer<T>&queries, &out;
  PagedCache<S>& cache;
  SharedPlan& shared;
  AttentionOptions options;

  long items(const StepInput&, int) const { return long(shared.plan.items.size()); }
  void run(const StepInput&, int, long item) const {
    attend_item(shared.plan, item, options, cache, queries.row(0), queries.stride(), out.row(0), out.stride());
  }
};

}  // namespace oaiserve
