// Threads that work through the phases of a step together.
//
// A phase is a number of items, handed out one by one; it is over when all its items are done, and only then the next one
// starts. No thread is waited for because it has not come: one that the system has put aside between two items holds up
// nobody, and the others do its share. That is what keeps a step fast on cores that are also used by somebody else.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>
#if defined(__linux__)
#include <sched.h>
#endif

namespace oaiserve {

class Work {
 public:
  virtual ~Work() = default;
  virtual long phases() const = 0;
  virtual long items(long phase) const = 0;  // may be 0; less than 2^24
  virtual void run(long phase, long item, int thread) = 0;
  virtual void ended(long phase) = 0;  // once, before any item of the next phase
};

// Calls function(data) on so many threads at once, the caller among them, as GOMP_parallel does (flags: 0).
using Team = void (*)(void (*function)(void*), void* data, unsigned threads, unsigned flags);

class Pool {
 public:
  // Without a team, the pool has threads of its own. Throws std::system_error where the system gives no more.
  explicit Pool(int threads, Team team = nullptr) : threads_(threads), team_(team) {
    if (team) return;
    try {
      for (int thread = 1; thread < threads; thread++) workers_.emplace_back([this, thread] { serve(thread); });
    } catch (...) {
      stop();
      throw;
    }
  }

  ~Pool() { stop(); }

  int threads() const { return threads_; }

  // Returns when all phases are done. The caller is one of the threads. For one caller at a time.
  void run(Work& work) {
    work_ = &work;
    uint64_t generation = (state_.load(std::memory_order_relaxed) >> GENERATION) + 1;
    state_.store(generation << GENERATION | IDLE, std::memory_order_relaxed);
    start_next(generation, -1, 0);
    if (is_over(state_.load(std::memory_order_acquire))) return;
    if (team_) {
      joined_ = 0;
      team_([](void* self) { static_cast<Pool*>(self)->join(); }, this, unsigned(threads_), 0);
    } else {
      wake();
      take_part(0);
    }
  }

 private:
  // One word says it all, so that no thread can take an item of a phase that is over: the step, its phase, the items left.
  static constexpr int GENERATION = 40, PHASE = 24;
  static constexpr uint64_t LEFT = (1ull << PHASE) - 1;
  static constexpr uint64_t IDLE = ((1ull << (GENERATION - PHASE)) - 1) << PHASE;  // as a phase: there is nothing to do

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

  void serve(int thread) {
    for (;;) {
      uint32_t seen = epoch_.load(std::memory_order_acquire);
      if (stopping_) return;
      take_part(thread);
      epoch_.wait(seen, std::memory_order_acquire);
    }
  }

  void join() { take_part(joined_++); }

  void take_part(int thread) {
    int spins = 0;
    uint64_t state = state_.load(std::memory_order_acquire);
    while (!is_over(state)) {
      if ((state & LEFT) == 0) {  // the last items of the phase are being worked on
        pause(++spins);
        state = state_.load(std::memory_order_acquire);
      } else if (state_.compare_exchange_weak(state, state - 1, std::memory_order_acq_rel)) {
        spins = 0;
        long phase = long((state >> PHASE) & (IDLE >> PHASE));
        long items = items_.load(std::memory_order_relaxed);
        work_->run(phase, items - long(state & LEFT), thread);
        if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == items) start_next(state >> GENERATION, phase, thread);
        state = state_.load(std::memory_order_acquire);
      }
    }
  }

  // By the thread that finished the last item. Phases of one item it does at once: waking the others costs more.
  void start_next(uint64_t generation, long phase, int thread) {
    long phases = work_->phases(), items = 0;
    if (phase >= 0) work_->ended(phase);
    for (phase++; phase < phases; phase++) {
      items = work_->items(phase);
      if (items > 1) break;
      if (items == 1) work_->run(phase, 0, thread);
      work_->ended(phase);
    }
    done_.store(0, std::memory_order_relaxed);
    items_.store(items, std::memory_order_relaxed);
    uint64_t next = phase < phases ? uint64_t(phase) << PHASE | uint64_t(items) : IDLE;
    state_.store(generation << GENERATION | next, std::memory_order_release);
  }

  static void pause(int spins) {
#if defined(__linux__)
    if (spins % 1024 == 0) {  // some ten microseconds: somebody else may need this core to get done
      sched_yield();
      return;
    }
#endif
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  alignas(64) std::atomic<uint64_t> state_{IDLE};
  alignas(64) std::atomic<long> done_{0};
  alignas(64) std::atomic<long> items_{0};
  Work* work_ = nullptr;
  int threads_;
  Team team_;
  std::atomic<int> joined_{0};  // of the team
  std::atomic<uint32_t> epoch_{0};
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> workers_;
};

}  // namespace oaiserve
