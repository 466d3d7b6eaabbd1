// The operations before and after attention over latent vectors (multi-head latent attention), which Attend computes.
//
// All heads make their keys and values from one vector of a token. Nothing is made here: a head's query is multiplied by
// the matrix that would make its keys, and what attention gives, a sum of vectors, by the one that would make its values.
// So all heads read one key, which is the vector and a few numbers that all their keys would share, and the vector is the
// value, too. Prompts and decodes are computed alike: otherwise a token's numbers would depend on how its prompt was cut.
#pragma once

#include "attend.h"

namespace oaiserve {

// Rotates the shared numbers of queries and of the key, and writes the key into the cache. `query` has `own_dim` own numbers
// and then the shared ones of each head; `latent` has the shared ones of the key behind the vector, and `normed` the vector
// after its norm. Own numbers of queries go to `own`, and shared ones to `queries`, behind what ProjectHeads makes of the
// own ones.
template <class T>
struct PrepareLatent {
  Buffer<float>&rows_of_query, &latent;
  Buffer<T>&normed, &own, &queries;
  PagedCache<T>& cache;
  long heads, own_dim;
  Rotary rotary;  // rotation of the shared numbers

  long work() const { return rows_of_query.stride(); }
  void row(const StepInput& step, long row) const {
    const long rank = cache.value_dim, shared = cache.key_dim - rank;
    float* query = rows_of_query.row(row);
    Rotary::Angles angles;
    rotary.find(step, row, angles);
    for (long head = 0; head < heads; head++, query += own_dim + shared) {
      copy(query, own_dim, own.row(row) + head * own_dim);
      rotary(query + own_dim, angles);
      copy(query + own_dim, shared, queries.row(row) + head * cache.key_dim + rank);
    }
    alignas(64) float key[MAX_KEY_DIM];
    copy(normed.row(row), rank, key);
    copy(latent.row(row) + rank, shared, key + rank);
    rotary(key + rank, angles);
    write_key(cache, step.slots[row], 0, key);
  }

  template <class From, class To>
  static void copy(const From* from, long n, To* to) {
    for (long i = 0; i < n; i += LANES) store(to + i, load(from + i));
  }
};

// out = x W^T for each head, with rows of the weights that are its own. The numbers of a head are x_each apart in a row of
// x, and out_each in a row of `out`, where each head gets `dim` of them. The rows of a head begin with a panel.
// To its site, the columns of a head follow those of the head before.
template <class T, class Weights>
struct ProjectHeads {
  Buffer<T>&x, &out;
  const Weights& weights;
  const Site<T>* site;
  long heads, dim, x_each, out_each;

  long items(const StepInput& step, int) const { return heads * divide_up(step.num_tokens, BLOCK_ROWS); }
  void run(const StepInput& step, int threads, long item) const {
    const long head = item % heads, first = item / heads * BLOCK_ROWS, panels = panels_of(dim);
    const long rows = std::min(BLOCK_ROWS, step.num_tokens - first);
    const Next<Weights> next{&weights, (head + threads) % heads * panels};  // the item that this thread will probably take
    multiply_panels(weights, x.row(first) + head * x_each, x.stride(), rows, head * panels, (head + 1) * panels, next,
                    [&](long row, long column, f32x16 left, f32x16 right) {
                      const long own = column - head * panels * PANEL;
                      T* to = out.row(first + row) + head * out_each + own;
                      const auto adapted = [&](f32x16 values, long at) {
                        return site ? site->add(first + row, head * dim + at, values) : values;
                      };
                      store(to, adapted(left, own));
                      if (own + LANES < dim) store(to + LANES, adapted(right, own + LANES));
                    });
  }
};

}  // namespace oaiserve
