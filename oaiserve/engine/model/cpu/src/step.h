// A step: what it computes on, and the buffers between its operations.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace oaiserve {

// Same layout as StepInput in library.py.
struct StepInput {
  int64_t num_tokens, num_sequences, table_width, num_logits;
  const int32_t* token_ids;     // [num_tokens]
  const int32_t* positions;     // [num_tokens]
  const int32_t* slots;         // [num_tokens]
  const int32_t* query_start;   // [num_sequences + 1]
  const int32_t* seq_lens;      // [num_sequences]
  const int32_t* block_tables;  // [num_sequences][table_width]
  const int32_t* logits_rows;   // [num_logits]
  float* logits;                // [num_logits][vocab]
};

// [rows][width], grows with the longest step so far; rows begin at cache lines.
template <class E>
class Buffer {
 public:
  explicit Buffer(long width) : width_((width + 31) / 32 * 32) {
    // Rows that lie whole pages apart are in each other's way in the cache: 5 % of a matrix product from 64 rows on.
    if (width_ * sizeof(E) % 4096 == 0) width_ += 32;
  }
  void reserve(long rows) {
    if (rows <= rows_) return;
    rows_ = 0;
    data_.reset(static_cast<E*>(std::aligned_alloc(64, size_t(rows) * width_ * sizeof(E))));
    if (!data_) throw std::bad_alloc();
    rows_ = rows;
  }
  E* row(long i) { return data_.get() + i * width_; }
  long stride() const { return width_; }

 private:
  struct Free {
    void operator()(E* p) const { std::free(p); }
  };
  long width_, rows_ = 0;
  std::unique_ptr<E, Free> data_;
};

}  // namespace oaiserve
