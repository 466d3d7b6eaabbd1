// Replaces operator new in the library that it is compiled into, so that a test can make any one allocation fail. It is
// included in each file of the library, and counts in the one that is compiled for an element type.
#if defined(ELEMENT)

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

static std::atomic<long> allocations_until_failure{0};

// Lets the n-th allocation from now on throw std::bad_alloc, whichever thread makes it; 0: none.
extern "C" __attribute__((visibility("default"))) void fail_allocation(long n) { allocations_until_failure = n; }

static void* allocate(size_t bytes, size_t alignment) {
  if (allocations_until_failure > 0 && --allocations_until_failure == 0) throw std::bad_alloc();
  void* memory = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (!memory) throw std::bad_alloc();
  return memory;
}

void* operator new(size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new(size_t bytes, std::align_val_t alignment) { return allocate(bytes, size_t(alignment)); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }
#endif
