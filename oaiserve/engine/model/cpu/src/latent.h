// The operations before and after attention over latent vectors (multi-head latent attention), which Attend computes.
//
// All heads make their keys and values from one vector of a token. Nothing is made here: a head's query is multiplied by
// the matrix that would make its keys, and what attention gives, a sum of vectors, by the one that would make its values.
// So all heads read one key, which is the vector and a few numbers that all their keys would share, and the vector is the
// value, too. Prompts and decodes are computed alike: otherwise a token's numbers would depend on how its prompt was cut.
#pragma once

#include "attend.h"

namespace oaiserve {

// Rotates the shared numbers of queries and of the key, and writes the key into the cache. `query` has the own numbers and
// then the shared ones of each head; `latent` has the shared ones of the key behind the vector, and `normed` the vector
// after its norm. Own numbers of queries go to `own`, and shared ones to `queries`, behind what ProjectHeads makes of the
// own ones.
template <class T>
class PrepareLatent : public Operation {
 public:
  PrepareLatent(Buffer<float>& query, Buffer<float>& latent, Buffer<T>& normed, Buffer<T>& own, Buffer<T>& queries,
                PagedCache<T>& cache, long heads, Rotary rotary)
      : query_(query), latent_(latent), normed_(normed), own_(own), queries_(queries), cache_(cache), heads_(heads),
        own_dim_(rotary.offset), rotary_(rotary) {
    rotary_.offset = 0;
  }
  long items(const StepInput& step, int) const noexcept override { return row_items(step.num_tokens, query_.stride()); }
  void run(const StepInput& step, int, long item) noexcept override {
    const long rank = cache_.value_dim, shared = cache_.key_dim - rank;
    const RowRange rows(item, step.num_tokens, query_.stride());
    for (long row = rows.first; row < rows.last; row++) {
      float* query = query_.row(row);
      for (long head = 0; head < heads_; head++, query += own_dim_ + shared) {
        copy(query, own_dim_, own_.row(row) + head * own_dim_);
        rotary_(query + own_dim_, step.positions[row]);
        copy(query + own_dim_, shared, queries_.row(row) + head * cache_.key_dim + rank);
      }
      alignas(64) float key[MAX_KEY_DIM];
      copy(normed_.row(row), rank, key);
      copy(latent_.row(row) + rank, shared, key + rank);
      rotary_(key + rank, step.positions[row]);
      write_key(cache_, step.slots[row], 0, key);
    }
  }

 private:
  template <class From, class To>
  static void copy(const From* from, long n, To* to) {
    for (long i = 0; i < n; i += LANES) store(to + i, load(from + i));
  }

  Buffer<float>&query_, &latent_;
  Buffer<T>&normed_, &own_, &queries_;
  PagedCache<T>& cache_;
  long heads_, own_dim_;
  Rotary rotary_;
};

// out = x W^T for each head, with rows of the weights that are its own. The numbers of a head are x_each apart in a row of
// x, and out_each in a row of `out`, where each head gets `dim` of them. The rows of a head begin with a panel.
// To its site, the columns of a head follow those of the head before.
template <class T, class Weights>
class ProjectHeads : public Operation {
 public:
  ProjectHeads(Buffer<T>& x, Buffer<T>& out, const Weights& weights, const Site<T>* site, long heads, long dim,
               long x_each, long out_each)
      : x_(x), out_(out), weights_(weights), site_(site), heads_(heads), dim_(dim), x_each_(x_each),
        out_each_(out_each) {}
  long items(const StepInput& step, int) const noexcept override {
    return heads_ * divide_up(step.num_tokens, BLOCK_ROWS);
  }
  void run(const StepInput& step, int threads, long item) noexcept override {
    const long head = item % heads_, first = item / heads_ * BLOCK_ROWS, panels = panels_of(dim_);
    const long rows = std::min(BLOCK_ROWS, step.num_tokens - first);
    const Next<Weights> next{&weights_, (head + threads) % heads_ * panels};  // of the item this thread will likely take
    multiply_panels(weights_, x_.row(first) + head * x_each_, x_.stride(), rows, head * panels, (head + 1) * panels, next,
                    [&](long row, long column, f32x16 left, f32x16 right) {
                      const long own = column - head * panels * PANEL;
                      T* out = out_.row(first + row) + head * out_each_ + own;
                      const auto adapted = [&](f32x16 values, long at) {
                        return site_ ? site_->add(first + row, head * dim_ + at, values) : values;
                      };
                      store(out, adapted(left, own));
                      if (own + LANES < dim_) store(out + LANES, adapted(right, own + LANES));
                    });
  }

 private:
  Buffer<T>&x_, &out_;
  const Weights& weights_;
  const Site<T>* site_;
  long heads_, dim_, x_each_, out_each_;
};

}  // namespace oaiserve
