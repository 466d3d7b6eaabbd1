// A pool of threads that work through the phases of a step together.
//
// A phase is a number of items, which the threads take one by one. The next phase starts when all items of the phase
// are done. It does not wait for a thread that has no item: if the system suspends a thread between two items, the
// other threads do its share. So a step stays fast on cores that other programs use too.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>
#if defined(__linux__)
#include <sched.h>
#endif

namespace oaiserve {

// What the threads of a pool compute. All functions are called on these threads, where an exception would end the
// process. So they must not allocate: whatever a step needs is allocated before Pool::run.
class Work {
 public:
  virtual ~Work() = default;
  virtual long phases() const noexcept = 0;
  virtual long items(long phase) const noexcept = 0;  // may be 0; less than 2^24
  virtual void run(long phase, long item) noexcept = 0;
  virtual void ended(long phase) noexcept = 0;  // called once for each phase, before any item of the next phase
};

// Work of one phase: body(item) for each item.
template <class Body>
class Items : public Work {
 public:
  Items(long count, Body body) : count_(count), body_(body) {}
  long phases() const noexcept override { return 1; }
  long items(long) const noexcept override { return count_; }
  void run(long, long item) noexcept override { body_(item); }
  void ended(long) noexcept override {}

 private:
  long count_;
  Body body_;
};

class Pool {
 public:
  // Throws std::system_error if the system refuses a thread, and std::bad_alloc.
  explicit Pool(int threads) : threads_(threads) {
    try {
      for (int thread = 1; thread < threads; thread++) workers_.emplace_back([this] { serve(); });
    } catch (...) {
      stop();
      throw;
    }
  }

  ~Pool() { stop(); }

  int threads() const { return threads_; }

  // Runs all phases of `work`, and returns when they are done. The calling thread is one of the threads. Only one
  // thread may call it at a time.
  void run(Work& work) noexcept {
    work_ = &work;
    uint64_t generation = (state_.load(std::memory_order_relaxed) >> GENERATION) + 1;
    state_.store(generation << GENERATION | IDLE, std::memory_order_relaxed);
    start_next(generation, -1);
    if (is_over(state_.load(std::memory_order_acquire))) return;
    wake();
    take_part();
  }

 private:
  // The state is one word, so that no thread can take an item of a phase that is over. From the highest bits to the
  // lowest, it has the number of the run, the phase, and how many items are left to take.
  static constexpr int GENERATION = 40, PHASE = 24;
  static constexpr uint64_t LEFT = (1ull << PHASE) - 1;
  static constexpr uint64_t IDLE = ((1ull << (GENERATION - PHASE)) - 1) << PHASE;  // the phase of a run that is over

  void stop() {
    stopping_ = true;
    wake();
    for (std::thread& worker : workers_) worker.join();
  }

  static bool is_over(uint64_t state) { return (state & IDLE) == IDLE; }

  void wake() {
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
  }

  // The life of a thread of the pool's own.
  void serve() noexcept {
    for (;;) {
      uint32_t seen = epoch_.load(std::memory_order_acquire);
      if (stopping_) return;
      take_part();
      epoch_.wait(seen, std::memory_order_acquire);
    }
  }

  // Takes and runs items until the run is over.
  void take_part() noexcept {
    int spins = 0;
    uint64_t state = state_.load(std::memory_order_acquire);
    while (!is_over(state)) {
      if ((state & LEFT) == 0) {  // other threads work on the last items of the phase
        pause(++spins);
        state = state_.load(std::memory_order_acquire);
      } else if (state_.compare_exchange_weak(state, state - 1, std::memory_order_acq_rel)) {
        spins = 0;
        long phase = long((state >> PHASE) & (IDLE >> PHASE));
        long items = items_.load(std::memory_order_relaxed);
        work_->run(phase, items - long(state & LEFT));
        if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == items) start_next(state >> GENERATION, phase);
        state = state_.load(std::memory_order_acquire);
      }
    }
  }

  // Ends `phase` (-1: none) and starts the next phase that has several items. It is called by the thread that finished
  // the last item. That thread runs the phases of one item itself, because waking other threads would cost more.
  void start_next(uint64_t generation, long phase) {
    long phases = work_->phases(), items = 0;
    if (phase >= 0) work_->ended(phase);
    for (phase++; phase < phases; phase++) {
      items = work_->items(phase);
      if (items > 1) break;
      if (items == 1) work_->run(phase, 0);
      work_->ended(phase);
    }
    done_.store(0, std::memory_order_relaxed);
    items_.store(items, std::memory_order_relaxed);
    uint64_t next = phase < phases ? uint64_t(phase) << PHASE | uint64_t(items) : IDLE;
    state_.store(generation << GENERATION | next, std::memory_order_release);
  }

  static void pause(int spins) {
#if defined(__linux__)
    if (spins % 1024 == 0) {  // after about ten microseconds: the thread that has the last item may need this core
      sched_yield();
      return;
    }
#endif
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  alignas(64) std::atomic<uint64_t> state_{IDLE};
  alignas(64) std::atomic<long> done_{0};   // items of the phase that are done
  alignas(64) std::atomic<long> items_{0};  // items of the phase
  Work* work_ = nullptr;
  int threads_;
  std::atomic<uint32_t> epoch_{0};  // grows when the pool's own threads have to wake up
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> workers_;
};

}  // namespace oaiserve
