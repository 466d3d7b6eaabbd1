// What the tests call directly, compiled as a library of its own.

#include <random>

#include "operations.h"
#include "pool.h"

using namespace oaiserve;

namespace {

// Checks that each phase is over before the next one begins, and that each item is done once. In a phase with as many
// items as there are threads, each item waits until all have begun: so all threads take part.
class Checked : public Work {
 public:
  Checked(int threads, const std::vector<long>& items) : threads_(threads) {
    for (long count : items) begun_.emplace_back(size_t(count));
  }
  long phases() const noexcept override { return long(begun_.size()); }
  long items(long phase) const noexcept override { return long(begun_[size_t(phase)].size()); }
  void run(long phase, long item) noexcept override {
    if (phase != current_) return complain("an item of another phase runs");
    if (item < 0 || item >= items(phase)) return complain("there is no such item");
    auto& begun = begun_[size_t(phase)];
    if (begun[size_t(item)]++) complain("an item runs twice");
    if (items(phase) == threads_)
      for (auto& other : begun)
        while (other == 0) std::this_thread::yield();
    done_++;
  }
  void ended(long phase) noexcept override {
    if (phase != current_) return complain("another phase ends");
    if (done_ != items(phase)) complain("a phase ends before all its items are done");
    done_ = 0;
    current_++;
  }
  const char* complaint() {
    if (current_ != phases()) complain("the run ends before its last phase");
    return complaint_;
  }

 private:
  void complain(const char* text) { complaint_ = text; }

  int threads_;
  std::vector<std::vector<std::atomic<int>>> begun_;
  std::atomic<long> current_{0}, done_{0};
  std::atomic<const char*> complaint_{nullptr};
};

// A team.
void fresh_threads(void (*function)(void*), void* data, unsigned threads, unsigned) {
  std::vector<std::thread> others;
  for (unsigned i = 1; i < threads; i++) others.emplace_back(function, data);
  function(data);
  for (std::thread& other : others) other.join();
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Runs of the same pool with all kinds of phases, on its own threads or on others. Null, or what was wrong.
const char* check_pool(int threads, int runs, bool has_team) {
  const long sizes[] = {0, 1, 1, 2, 3, threads, 40, 200};
  Pool pool(threads, has_team ? fresh_threads : nullptr);
  std::minstd_rand random(1);
  for (int run = 0; run < runs; run++) {
    std::vector<long> items(random() % 16);
    for (long& count : items) count = sizes[random() % std::size(sizes)];
    Checked work(threads, items);
    pool.run(work);
    if (const char* complaint = work.complaint()) return complaint;
  }
  return nullptr;
}

void run_activate(Activation activation, const float* x, float* out, long n) {
  for (long i = 0; i < n; i += LANES) store(out + i, activate(activation, load(x + i)));
}

void run_tanh(const float* x, float* out, long n) {
  for (long i = 0; i < n; i += LANES) store(out + i, tanh(load(x + i)));
}

void run_normalize(const Normalize* normalize, const float* x, float* out) { (*normalize)(x, out); }

void run_normalize_to_bf16(const Normalize* normalize, const float* x, bf16* out) { (*normalize)(x, out); }

}  // extern "C"
#pragma GCC visibility pop
