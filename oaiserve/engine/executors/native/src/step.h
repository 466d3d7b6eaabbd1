// The input of a step, and the buffers between its operations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace oaiserve {

// The input of a step, and where its logits go. The caller owns all arrays. StepInput in library.py has the same
// layout. The tokens of a sequence lie side by side; they are its last ones, and the others are in the cache already.
struct StepInput {
  int64_t num_tokens, num_sequences, table_width, num_logits;
  const int32_t* token_ids;     // [num_tokens]
  const int32_t* positions;     // [num_tokens], by which tokens are rotated
  const int32_t* slots;         // [num_tokens], where the cache stores a token: block * block_size + offset
  const int32_t* query_start;   // [num_sequences + 1], the first token of each sequence, and num_tokens
  const int32_t* seq_lens;      // [num_sequences], tokens in the cache, those of this step included
  const int32_t* block_tables;  // [num_sequences][table_width]
  const int32_t* logits_rows;   // [num_logits], the tokens for which logits are computed
  float* logits;                // [num_logits][vocab]
  int64_t num_adapters;
  const void* const* adapters;    // [num_adapters], those that the step's tokens have
  const int32_t* token_adapters;  // [num_tokens], the index in `adapters` or -1; unused if there are none
  // Of models with layers that keep a state.
  const int32_t* state_places;  // [num_sequences], where each sequence has its own in the pool of states
  void* const* states;          // [layers that keep one][2], the memory of both parts of a layer's states; see states.h
  // Images and sounds: vectors in place of some tokens' embeddings, and the vectors added to the outputs of layers.
  int64_t num_vectors, num_sets;  // 0 without any
  const float* vectors;           // [num_sets][num_vectors][width], first those in place of embeddings
  const int32_t* vector_rows;     // [num_vectors], their tokens
  const int32_t* axes;            // [3][num_tokens], positions by time, height and width; null: all are `positions`
  const int32_t* last_visible;    // [num_tokens], the last token of its sequence that each sees; null: itself
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

// A matrix [tokens * rows_each][width] that grows with the longest step so far. Each row begins at a cache line.
template <class E>
class Buffer {
 public:
  explicit Buffer(long width, long rows_each = 1) : width_((width + 31) / 32 * 32), rows_each_(rows_each) {
    // Rows that are whole pages apart, or a large part of one, compete for the same lines of the cache. If they are an odd
    // number of lines apart, they do not.
    constexpr long LINE = 64 / sizeof(E);
    if constexpr (LINE == 1) width_ = width;
    if (width_ / LINE % 2 == 0) width_ += LINE;
  }
  void reserve(long tokens) {
    if (tokens <= tokens_) return;
    data_ = make_aligned<E, 64>(size_t(tokens * rows_each_ * width_));
    tokens_ = tokens;
  }
  E* row(long i) { return data_.get() + i * width_; }
  long stride() const { return width_; }

 private:
  long width_, rows_each_, tokens_ = 0;
  AlignedArray<E, 64> data_;
};

}  // namespace oaiserve
