// The C interface of the library: build a decoder operation by operation, then run steps on it; or attention alone, layer
// by layer. library.py is its twin.
//
// Compiled for one element type, bf16 or float: that of activations between operations, of keys and values, and of
// weights unless these have eight bits. Sums and the hidden state are float32. Nothing throws across the interface: what
// can fail returns null or a negative number.

#include <chrono>
#include <deque>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "paged_attention.h"
#include "quantized.h"

namespace oaiserve {

using Element = ELEMENT;
#if defined(INT8_WEIGHTS)
using Weights = Int8Linear<Element>;
#else
using Weights = Linear<Element>;
#endif

class Decoder : public Work {
 public:
  std::deque<Buffer<float>> floats;
  std::deque<Buffer<Element>> elements;
  std::deque<Weights> weights;
  std::deque<PagedCache<Element>> caches;
  std::deque<SharedPlan> plans;
  std::vector<std::unique_ptr<Operation>> operations;
  std::vector<int64_t> durations_ns;  // of each operation, over all steps so far

  // Memory for weights, which lives as long as the decoder: side by side in large pieces, so that it can have huge pages.
  template <class E>
  E* allocate(size_t count) {
    size_t bytes = (count * sizeof(E) + 63) / 64 * 64;
    if (bytes > left_) {
      left_ = (std::max(bytes, PIECE_BYTES) + HUGE_PAGE_BYTES - 1) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
      next_ = static_cast<char*>(std::aligned_alloc(HUGE_PAGE_BYTES, left_));
      if (!next_) throw std::bad_alloc();
      owned_.emplace_back(next_, std::free);
#if defined(__linux__)
      madvise(next_, left_, MADV_HUGEPAGE);  // where the system has none, small ones do
#endif
    }
    E* data = reinterpret_cast<E*>(next_);
    next_ += bytes;
    left_ -= bytes;
    return data;
  }

  template <class Op, class... Arguments>
  void add(Arguments&&... arguments) {
    operations.push_back(std::make_unique<Op>(std::forward<Arguments>(arguments)...));
  }

  SharedPlan& plan(long heads, long kv_heads, long value_dim, long window) {
    for (SharedPlan& plan : plans)
      if (plan.serves(heads, kv_heads, value_dim, window)) return plan;
    return plans.emplace_back(heads, kv_heads, value_dim, window);
  }

  void run(Pool& pool, const StepInput& step) {
    for (auto& buffer : floats) buffer.reserve(step.num_tokens);
    for (auto& buffer : elements) buffer.reserve(step.num_tokens);
    for (SharedPlan& plan : plans) plan.make(step, pool.threads());
    step_ = &step;
    threads_ = pool.threads();
    items_.clear();
    for (auto& operation : operations) items_.push_back(operation->items(step, threads_));
    durations_ns.resize(items_.size());
    last_end_ns_ = now_ns();
    pool.run(*this);
  }

  long phases() const override { return long(items_.size()); }
  long items(long phase) const override { return items_[size_t(phase)]; }
  void run(long phase, long item, int) override {
    operations[size_t(phase)]->run(*step_, threads_, item);
  }
  void ended(long phase) override {
    int64_t now = now_ns();
    durations_ns[size_t(phase)] += now - last_end_ns_;
    last_end_ns_ = now;
  }

 private:
  static int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

  static constexpr size_t HUGE_PAGE_BYTES = 2 << 20, PIECE_BYTES = 32 << 20;
  std::vector<std::unique_ptr<void, void (*)(void*)>> owned_;
  char* next_ = nullptr;
  size_t left_ = 0;
  std::vector<long> items_;
  const StepInput* step_ = nullptr;
  int64_t last_end_ns_ = 0;
  int threads_ = 1;
};

template <class Columns>
long add_weights(Decoder& decoder, const Columns& columns, long n, long k, const float* bias) {
  try {
    float* own_bias = bias ? decoder.allocate<float>(size_t(n)) : nullptr;
    if (bias) std::copy(bias, bias + n, own_bias);
#if defined(INT8_WEIGHTS)
    int8_t* panels = decoder.allocate<int8_t>(size_t(panels_of(n) * int8_panel_size<Element>(k)));
    quantize_columns<Element>(columns, n, k, panels);
#else
    Element* panels = decoder.allocate<Element>(size_t(panels_of(n) * panel_size<Element>(k)));
    pack_columns(columns, n, k, panels);
#endif
    decoder.weights.push_back({n, k, panels, own_bias});
    return long(decoder.weights.size()) - 1;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

}  // namespace oaiserve

using namespace oaiserve;

// All else is hidden: the linker would share what several libraries of one process define, though each is compiled for
// its own numbers and instructions.
#pragma GCC visibility push(default)
extern "C" {

Pool* oaiserve_pool(int threads) {
  try {
    return new Pool(threads);
  } catch (...) {
    return nullptr;  // the system gave no threads
  }
}

void oaiserve_free_pool(Pool* pool) { delete pool; }

Decoder* oaiserve_decoder() { return new (std::nothrow) Decoder; }

void oaiserve_free_decoder(Decoder* decoder) { delete decoder; }

long oaiserve_add_floats(Decoder* decoder, long width) {
  decoder->floats.emplace_back(width);
  return long(decoder->floats.size()) - 1;
}

long oaiserve_add_elements(Decoder* decoder, long width) {
  decoder->elements.emplace_back(width);
  return long(decoder->elements.size()) - 1;
}

// Copies `weight` [n, k] into panels; `bias` [n] or null is copied, too. -1: no memory.
long oaiserve_add_weights(Decoder* decoder, const Element* weight, long n, long k, const float* bias) {
  return add_weights(*decoder, columns_of(weight, n, k), n, k, bias);
}

// `gate` and `up`, both [n, k]. -1: no memory.
long oaiserve_add_gated_weights(Decoder* decoder, const Element* gate, const Element* up, long n, long k) {
  return add_weights(*decoder, columns_of_gated(gate, up, n, k), gated_columns(n), k, nullptr);
}

long oaiserve_add_cache(Decoder* decoder, Element* keys, Element* values, long kv_heads, long key_dim, long value_dim,
                        long block_size) {
  decoder->caches.push_back({keys, values, kv_heads, key_dim, value_dim, block_size});
  return long(decoder->caches.size()) - 1;
}

void oaiserve_embed(Decoder* decoder, long out, const Element* table, const Element* position_table, long width,
                    float scale) {
  decoder->add<Embed<Element>>(decoder->floats[out], table, position_table, width, scale);
}

void oaiserve_norm(Decoder* decoder, long x, long out, Normalize normalize, bool of_logits_rows) {
  decoder->add<Norm<Element>>(decoder->floats[x], decoder->elements[out], normalize, of_logits_rows);
}

void oaiserve_add_norm(Decoder* decoder, long x, long hidden, Normalize normalize, float scale) {
  decoder->add<AddNorm>(decoder->floats[x], decoder->floats[hidden], normalize, scale);
}

void oaiserve_project(Decoder* decoder, long x, long out, long weights, bool adds, float scale) {
  decoder->add<Project<Element, Weights>>(decoder->elements[x], decoder->floats[out], decoder->weights[weights],
                                                  adds, scale);
}

void oaiserve_activate(Decoder* decoder, long x, long out, long weights, Activation activation) {
  decoder->add<Activate<Element, Weights>>(decoder->elements[x], decoder->elements[out],
                                                   decoder->weights[weights], activation);
}

void oaiserve_gate(Decoder* decoder, long x, long out, long weights, Activation activation) {
  decoder->add<Gate<Element, Weights>>(decoder->elements[x], decoder->elements[out], decoder->weights[weights],
                                               activation);
}

void oaiserve_prepare(Decoder* decoder, long qkv, long queries, long cache, long heads, Rotary rotary,
                      Normalize query_norm, Normalize key_norm) {
  decoder->add<Prepare<Element>>(decoder->floats[qkv], decoder->elements[queries], decoder->caches[cache], heads, rotary,
                                 query_norm, key_norm);
}

void oaiserve_attend(Decoder* decoder, long queries, long out, long cache, long heads, float scaling, long window,
                     float softcap) {
  PagedCache<Element>& paged = decoder->caches[cache];
  SharedPlan& plan = decoder->plan(heads, paged.kv_heads, paged.value_dim, window);
  AttentionOptions options{heads, scaling, window, softcap};
  decoder->add<Attend<Element>>(decoder->elements[queries], decoder->elements[out], paged, plan, options);
}

void oaiserve_logits(Decoder* decoder, long x, long weights, float scale, float softcap) {
  decoder->add<Logits<Element, Weights>>(decoder->elements[x], decoder->weights[weights], scale, softcap);
}

// 0, or -1: no memory for a step of so many tokens.
int oaiserve_step(Decoder* decoder, Pool* pool, const StepInput* step) {
  try {
    decoder->run(*pool, *step);
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

// Copies the nanoseconds that each operation took, over all steps so far, in the order in which they were added.
void oaiserve_durations(const Decoder* decoder, int64_t* durations_ns) {
  std::copy(decoder->durations_ns.begin(), decoder->durations_ns.end(), durations_ns);
}

// On the threads of `team`; null: on its own.
PagedAttention<Element>* oaiserve_attention(int threads, Team team) {
  try {
    return new PagedAttention<Element>(threads, team);
  } catch (...) {
    return nullptr;  // the system gave no threads
  }
}

void oaiserve_free_attention(PagedAttention<Element>* attention) { delete attention; }

// Only the slots, sequences and block tables of the step are read. 0, or -1: no memory for it.
int oaiserve_attention_step(PagedAttention<Element>* attention, const StepInput* step) {
  try {
    attention->begin(*step);
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

// 0, or -1: no memory.
int oaiserve_attention_layer(PagedAttention<Element>* attention, PagedCache<Element> cache, AttentionOptions options,
                             const Element* query, const Element* key, const Element* value, Element* out) {
  try {
    attention->run(cache, options, query, key, value, out);
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

}  // extern "C"
#pragma GCC visibility pop
