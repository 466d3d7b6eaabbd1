// Functions of the native code that tests call directly. They are compiled as a separate library.

#include <random>

#include "experts.h"
#include "paged_cache.h"
#include "pool.h"

using namespace oaiserve;

namespace {

// Checks that each phase ends before the next one begins, and that each item runs once. In a phase with as many items
// as there are threads, each item waits until all have begun, so that every thread has to run one.
class Checked : public Work {
 public:
  Checked(int threads, const std::vector<long>& items) : threads_(threads) {
    for (long count : items) begun_.emplace_back(size_t(count));
  }
  long phases() const noexcept override { return long(begun_.size()); }
  long items(long phase) const noexcept override { return long(begun_[size_t(phase)].size()); }
  void run(long phase, long item) noexcept override {
    if (phase != current_) return fail("an item of another phase runs");
    if (item < 0 || item >= items(phase)) return fail("there is no such item");
    auto& begun = begun_[size_t(phase)];
    if (begun[size_t(item)]++) fail("an item runs twice");
    if (items(phase) == threads_)
      for (auto& other : begun)
        while (other == 0) std::this_thread::yield();
    done_++;
  }
  void ended(long phase) noexcept override {
    if (phase != current_) return fail("another phase ends");
    if (done_ != items(phase)) fail("a phase ends before all its items are done");
    done_ = 0;
    current_++;
  }
  const char* error() {
    if (current_ != phases()) fail("the run ends before its last phase");
    return error_;
  }

 private:
  void fail(const char* text) { error_ = text; }

  int threads_;
  std::vector<std::vector<std::atomic<int>>> begun_;
  std::atomic<long> current_{0}, done_{0};
  std::atomic<const char*> error_{nullptr};
};

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Runs a pool many times with phases of different sizes. Returns null, or the last error.
const char* check_pool(int threads, int runs) {
  const long sizes[] = {0, 1, 1, 2, 3, threads, 40, 200};
  Pool pool(threads);
  std::minstd_rand random(1);
  for (int run = 0; run < runs; run++) {
    std::vector<long> items(random() % 16);
    for (long& count : items) count = sizes[random() % std::size(sizes)];
    Checked work(threads, items);
    pool.run(work);
    if (const char* error = work.error()) return error;
  }
  return nullptr;
}

void run_activate(Activation activation, const float* x, float* out, long n) {
  for (long i = 0; i < n; i += LANES) store(out + i, activate(activation, load(x + i)));
}

void run_gating(const Gating* gating, const float* gate, const float* up, float* out, long n) {
  for (long i = 0; i < n; i += LANES) store(out + i, (*gating)(load(gate + i), load(up + i)));
}

void run_tanh(const float* x, float* out, long n) {
  for (long i = 0; i < n; i += LANES) store(out + i, tanh(load(x + i)));
}

void run_softplus(const float* x, float* out, long n) {
  for (long i = 0; i < n; i += LANES) store(out + i, softplus(load(x + i)));
}

void run_turn_panel(const bf16* keys, long count, long value_dim, bf16* values) {
  turn_panel(keys, count, value_dim, values);
}

void run_turn_float_panel(const float* keys, long count, long value_dim, float* values) {
  turn_panel(keys, count, value_dim, values);
}

void run_normalize(const Normalize* normalize, const float* x, float* out) { (*normalize)(x, out); }

void run_normalize_to_bf16(const Normalize* normalize, const float* x, bf16* out) { (*normalize)(x, out); }

}  // extern "C"
#pragma GCC visibility pop
