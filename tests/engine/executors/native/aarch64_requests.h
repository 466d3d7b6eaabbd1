// Requests of the program in aarch64_products.cpp, and what its operations have in common.
#pragma once

#include <cstdio>
#include <vector>

#include "operations.h"
#include "paged_cache.h"

using namespace oaiserve;

extern FILE *input, *output;

template <class T>
struct Array {
  AlignedArray<T, 64> data;
  long count = 0;

  Array() = default;
  explicit Array(long count) : data(make_aligned<T, 64>(size_t(count) + 64)), count(count) {
    std::memset((void*)data.get(), 0, (size_t(count) + 64) * sizeof(T));
  }
  T& operator[](long i) const { return data.get()[i]; }
  operator T*() const { return data.get(); }
};

inline void read_bytes(void* to, size_t count) {
  if (std::fread(to, 1, count, input) != count) std::exit(2);
}
template <class T>
Array<T> read() {
  int64_t bytes;
  read_bytes(&bytes, sizeof(bytes));
  Array<T> found(bytes / long(sizeof(T)));
  read_bytes(found.data.get(), size_t(bytes));
  return found;
}
// Replies are arrays, each after its length in bytes. END comes after the last one.
constexpr int64_t END = -1;

inline void write_length(int64_t bytes) { std::fwrite(&bytes, sizeof(bytes), 1, output); }
inline void write(const Array<float>& numbers) {
  write_length(numbers.count * int64_t(sizeof(float)));
  std::fwrite(numbers.data.get(), sizeof(float), size_t(numbers.count), output);
}

template <class T>
Array<T> converted(const Array<float>& numbers) {
  Array<T> out(divide_up(numbers.count, LANES) * LANES);
  for (long i = 0; i < numbers.count; i += LANES) store(&out[i], load(&numbers[i]));
  return out;
}

// Computes all items, or all rows, of an operation on this thread.
template <class Operation>
void compute(const Operation& operation, const StepInput& step) {
  if constexpr (requires { operation.items(step, 1); })
    for (long item = 0, count = operation.items(step, 1); item < count; item++) operation.run(step, 1, item);
  else
    for (long row = 0; row < step.num_tokens; row++) operation.row(step, row);
}

template <class T>
void fill(Buffer<T>& rows, const T* numbers, long count, long width) {
  rows.reserve(count);
  for (long row = 0; row < count; row++) std::memcpy((void*)rows.row(row), numbers + row * width, size_t(width) * sizeof(T));
}
template <class T>
void write_rows(Buffer<T>& rows, long count, long width) {
  Array<float> out(count * width);
  for (long row = 0; row < count; row++)
    for (long i = 0; i < width; i++) out[row * width + i] = to_float(rows.row(row)[i]);
  write(out);
}

// Requests for layers, in aarch64_layers.cpp.
void delta(const Array<int64_t>& numbers);
void scan(const Array<int64_t>& numbers);
template <class T>
void experts(const Array<int64_t>& numbers);
template <class T>
void adapters(const Array<int64_t>& numbers);
