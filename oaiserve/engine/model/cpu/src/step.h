// A step: what it computes on, and the buffers between its operations.
#pragma once

#include <cstddef>
#include <cstdint>
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

template <size_t ALIGNMENT>
struct AlignedDelete {
  void operator()(void* memory) const { ::operator delete(memory, std::align_val_t(ALIGNMENT)); }
};
template <class E, size_t ALIGNMENT>
using AlignedArray = std::unique_ptr<E, AlignedDelete<ALIGNMENT>>;

// Returns uninitialized memory for `count` elements. Throws std::bad_alloc.
template <class E, size_t ALIGNMENT>
AlignedArray<E, ALIGNMENT> make_aligned(size_t count) {
  return AlignedArray<E, ALIGNMENT>(static_cast<E*>(::operator new(count * sizeof(E), std::align_val_t(ALIGNMENT))));
}

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
    data_ = make_aligned<E, 64>(size_t(rows * width_));
    rows_ = rows;
  }
  E* row(long i) { return data_.get() + i * width_; }
  long stride() const { return width_; }

 private:
  long width_, rows_ = 0;
  AlignedArray<E, 64> data_;
};

}  // namespace oaiserve
