// The C interface of the library, which library.py declares for Python. A caller either builds a decoder operation by
// operation and runs steps on it, or computes attention alone, layer by layer.
//
// The library is compiled for one element type, bf16 or float. Activations between operations have this type. So have
// keys and values, unless their cache has eight bits, and weights, unless they are quantized to eight bits, or kept as a
// GGUF file has them. Sums and the hidden state are float32.
//
// No exception leaves these functions. A function that can fail returns null or a negative number, and may be called
// again.

#include <chrono>
#include <deque>
#include <variant>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "convolution.h"
#include "delta.h"
#include "experts.h"
#include "gates.h"
#include "latent.h"
#include "layer_inputs.h"
#include "mamba.h"
#if defined(BLOCK_WEIGHTS)
#include "block_operations.h"
#include "encode_blocks.h"
#endif
#include "paged_attention.h"
#include "quantized.h"
#include "selective_scan.h"

namespace oaiserve {

using Element = ELEMENT;
#if defined(INT8_WEIGHTS)
using Weights = std::variant<Int8Linear<Element>>;
#elif defined(BLOCK_WEIGHTS)
using Weights = std::variant<Linear<Element>, BlockLinear>;
#else
using Weights = std::variant<Linear<Element>>;
#endif

// A decoder owns its operations, the weights of its linear layers, and the buffers between operations. Embeddings,
// weights of norms, rotary tables and the KV cache are the caller's, who keeps them alive as long as the decoder.
class Decoder : public Work {
 public:
  // Deques, because operations refer to these parts, which therefore must not move when another one is added.
  std::deque<Buffer<float>> floats;
  std::deque<Buffer<Element>> elements;
#if defined(BLOCK_WEIGHTS)
  std::deque<Buffer<RowLine>> groups;
#endif
  std::deque<Weights> weights;
  std::deque<Linear<Element>> routers;
  std::deque<Assignment> assignments;
  std::deque<AnyCache<Element>> caches;
  std::deque<SharedPlan> plans;
  std::deque<Site<Element>> sites;
  AdapterRows<Element> adapter_rows;
  std::vector<std::unique_ptr<Operation>> operations;
  std::vector<int64_t> durations_ns;  // of each operation, summed over all steps so far

  // Returns memory for weights, which lives as long as the decoder. Throws std::bad_alloc. The arrays lie side by side
  // in large pieces, so that the system can back them with huge pages.
  template <class E>
  E* allocate(size_t count) {
    size_t bytes = (count * sizeof(E) + 63) / 64 * 64;
    if (bytes > left_) {
      is_lent_ = false;
      size_t size = (std::max(bytes, PIECE_BYTES) + HUGE_PAGE_BYTES - 1) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
      owned_.push_back(make_aligned<char, HUGE_PAGE_BYTES>(size));
      next_ = owned_.back().get();
      left_ = size;
#if defined(__linux__)
      madvise(next_, left_, MADV_HUGEPAGE);  // its result does not matter: without huge pages, reading is only slower
#endif
    }
    E* data = reinterpret_cast<E*>(next_);
    next_ += bytes;
    left_ -= bytes;
    if (is_lent_) lent_bytes_ += bytes;
    return data;
  }

  // Takes memory for weights from `memory` [bytes] first. The caller keeps it as long as the decoder.
  void lend(char* memory, size_t bytes) {
    next_ = memory;
    left_ = bytes;
    is_lent_ = true;
  }

  // Returns how much of that memory weights have, from its begin on.
  size_t lent_bytes() const { return lent_bytes_; }

  // Returns the plan that attention of these sizes shares, which is made anew in each step.
  SharedPlan& plan(long heads, long kv_heads, long value_dim, long window) {
    for (SharedPlan& plan : plans)
      if (plan.serves(heads, kv_heads, value_dim, window)) return plan;
    return plans.emplace_back(heads, kv_heads, value_dim, window);
  }

  // Runs all operations on a step. Throws std::bad_alloc before the first of them; the next step may then be another.
  void run(Pool& pool, const StepInput& step) {
    for (auto& buffer : floats) buffer.reserve(step.num_tokens);
    for (auto& buffer : elements) buffer.reserve(step.num_tokens);
    for (Assignment& assignment : assignments) assignment.reserve(step.num_tokens);
#if defined(BLOCK_WEIGHTS)
    for (auto& buffer : groups) buffer.reserve(step.num_tokens);
#endif
    for (SharedPlan& plan : plans) plan.make(step, pool.threads());
    adapter_rows.make(step);
    step_ = &step;
    threads_ = pool.threads();
    items_.clear();
    for (auto& operation : operations) items_.push_back(operation->items(step, threads_));
    durations_ns.resize(items_.size());
    last_end_ns_ = now_ns();
    pool.run(*this);
  }

  long phases() const noexcept override { return long(items_.size()); }
  long items(long phase) const noexcept override { return items_[size_t(phase)]; }
  void run(long phase, long item) noexcept override { operations[size_t(phase)]->run(*step_, threads_, item); }
  void ended(long phase) noexcept override {
    int64_t now = now_ns();
    durations_ns[size_t(phase)] += now - last_end_ns_;
    last_end_ns_ = now;
  }

 private:
  static int64_t now_ns() {
    using namespace std::chrono;
    return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
  }

  static constexpr size_t HUGE_PAGE_BYTES = 2 << 20, PIECE_BYTES = 32 << 20;
  std::vector<AlignedArray<char, HUGE_PAGE_BYTES>> owned_;
  char* next_ = nullptr;  // the unused rest of the last piece, and its size in bytes
  size_t left_ = 0;
  bool is_lent_ = false;  // the last piece
  size_t lent_bytes_ = 0;
  std::vector<long> items_;  // of each operation, in the step that runs
  const StepInput* step_ = nullptr;
  int64_t last_end_ns_ = 0;
  int threads_ = 1;
};

// Returns a site, or null for -1.
const Site<Element>* site_of(const Decoder& decoder, long site) {
  return site < 0 ? nullptr : &decoder.sites[size_t(site)];
}

// Returns what `body` returns, or `failure` if it throws.
template <class Result, class Body>
Result guarded(Result failure, Body&& body) noexcept {
  try {
    return body();
  } catch (...) {
    return failure;
  }
}

// Adds `part` at the end and returns its index, or -1 if there is no memory.
template <class Parts>
long add_part(Parts& parts, typename Parts::value_type part) noexcept {
  return guarded(-1L, [&] {
    parts.push_back(std::move(part));
    return long(parts.size()) - 1;
  });
}

template <class Op, class... Arguments>
long add_operation(Decoder& decoder, Arguments&&... arguments) noexcept {
  return guarded(-1L, [&] {
    return add_part(decoder.operations, std::make_unique<Op>(std::forward<Arguments>(arguments)...));
  });
}

// Returns a copy of a bias [n], which may be null. Throws std::bad_alloc.
const float* own_bias(Decoder& decoder, const float* bias, long n) {
  if (!bias) return nullptr;
  float* own = decoder.allocate<float>(size_t(n));
  std::copy(bias, bias + n, own);
  return own;
}

// Returns weights that have the type of activations also where others are quantized. Throws std::bad_alloc.
Linear<Element> plain_weights(Decoder& decoder, const Element* weight, long n, long k, const float* bias) {
  Element* panels = decoder.allocate<Element>(size_t(panels_of(n) * panel_size<Element>(k)));
  pack_columns(columns_of(weight, n, k), n, k, panels);
  return {n, k, panels, own_bias(decoder, bias, n)};
}

// Returns the products with so many experts, whose weights, all of one kind, follow each other from index `first` on.
template <class W>
ExpertProducts<W> products_of(const Decoder& decoder, long first, const Assignment& assignment) {
  std::vector<const W*> weights;
  for (long expert = 0; expert < assignment.experts; expert++)
    weights.push_back(&std::get<W>(decoder.weights[first + expert]));
  return {std::move(weights), assignment};
}

// The buffer that a product with such weights reads, by its index among those of its kind.
template <class W>
auto& input_of(Decoder& decoder, const W&, long index) {
#if defined(BLOCK_WEIGHTS)
  if constexpr (std::is_same_v<W, BlockLinear>)
    return (decoder.groups[index]);
  else
#endif
    return (decoder.elements[index]);
}

template <class Columns>
long add_weights(Decoder& decoder, const Columns& columns, long n, long k, const float* bias) noexcept {
  return guarded(-1L, [&] {
    const float* own = own_bias(decoder, bias, n);
#if defined(INT8_WEIGHTS)
    int8_t* panels = decoder.allocate<int8_t>(size_t(panels_of(n) * int8_panel_size<Element>(k)));
    quantize_columns<Element>(columns, n, k, panels);
    return add_part(decoder.weights, Int8Linear<Element>{n, k, panels, own});
#else
    Element* panels = decoder.allocate<Element>(size_t(panels_of(n) * panel_size<Element>(k)));
    pack_columns(columns, n, k, panels);
    return add_part(decoder.weights, Linear<Element>{n, k, panels, own});
#endif
  });
}

#if defined(BLOCK_WEIGHTS)
// Packs rows as oaiserve_add_blocks does. `scales` are null, or as pack_panel takes them.
long add_blocks(Decoder& decoder, Pool& pool, const uint8_t* const* rows, const uint8_t* const* scales,
                const Format* formats, long n, long k, const float* bias) noexcept {
  return guarded(-1L, [&] {
    const float* own = own_bias(decoder, bias, n);
    BlockPanel* panels = decoder.allocate<BlockPanel>(size_t(panels_of(n)));
    // As many panels lie side by side as have the same format, so that memory is read in order.
    for (long panel = 0, end = 0; panel < panels_of(n); panel = end) {
      const long bytes = block_panel_bytes(formats[panel], k);
      while (end < panels_of(n) && formats[end] == formats[panel]) end++;
      uint8_t* data = decoder.allocate<uint8_t>(size_t(bytes * (end - panel)));
      for (long i = panel; i < end; i++) panels[i] = {data + (i - panel) * bytes, formats[i]};
    }
    PackPanels packing(rows, scales, panels, panels_of(n), k);
    pool.run(packing);
    return add_part(decoder.weights, BlockLinear{n, k, panels, own});
  });
}

// What `count` weights in blocks read of a row, from index `first` on.
RowForms forms_of(const Decoder& decoder, long first, long count) {
  RowForms found;
  for (long i = first; i < first + count; i++) {
    const BlockLinear* weights = std::get_if<BlockLinear>(&decoder.weights[i]);
    const RowForms forms = weights ? weights->forms() : RowForms{};
    found.groups |= forms.groups;
    found.supers |= forms.supers;
    found.longs |= forms.longs;
  }
  return found;
}
#endif

}  // namespace oaiserve

using namespace oaiserve;

// Only these functions are visible. If others were, the linker would use the definitions of one library in all
// libraries of the process, though each is compiled for its own element type and instructions.
#pragma GCC visibility push(default)
extern "C" {

// Starts the threads of a pool. Null: no memory, or the system gives no more threads.
Pool* oaiserve_pool(int threads) {
  return guarded<Pool*>(nullptr, [&] { return new Pool(threads); });
}

// Joins the threads. `pool` may be null.
void oaiserve_free_pool(Pool* pool) { delete pool; }

// Null: no memory.
Decoder* oaiserve_decoder() {
  return guarded<Decoder*>(nullptr, [] { return new Decoder; });
}

// `decoder` may be null.
void oaiserve_free_decoder(Decoder* decoder) { delete decoder; }

// Lends a decoder memory for its weights, see Decoder::lend. Before any weights.
void oaiserve_lend_memory(Decoder* decoder, char* memory, long bytes) { decoder->lend(memory, size_t(bytes)); }

// Returns how many bytes of lent memory have weights.
long oaiserve_lent_bytes(const Decoder* decoder) { return long(decoder->lent_bytes()); }

// Each of the following functions adds one part to a decoder. It returns the index of the part among those of its kind,
// by which the other functions refer to it, or -1 if there is no memory. Not while a step runs.

// A buffer float32[tokens * rows_each][width].
long oaiserve_add_floats(Decoder* decoder, long width, long rows_each) {
  return add_part(decoder->floats, Buffer<float>(width, rows_each));
}

// A buffer Element[tokens * rows_each][width].
long oaiserve_add_elements(Decoder* decoder, long width, long rows_each) {
  return add_part(decoder->elements, Buffer<Element>(width, rows_each));
}

// Weights of a linear layer. Copies `weight` [n, k] and `bias` [n], which may be null.
long oaiserve_add_weights(Decoder* decoder, const Element* weight, long n, long k, const float* bias) {
  return add_weights(*decoder, columns_of(weight, n, k), n, k, bias);
}

// Weights of a gated linear layer. Copies `gate` and `up`, both [n, k], and `bias` [gated_columns(n)], which may be null
// and has the order of the columns.
long oaiserve_add_gated_weights(Decoder* decoder, const Element* gate, const Element* up, long n, long k,
                                const float* bias) {
  return add_weights(*decoder, columns_of_gated(gate, up, n, k), gated_columns(n), k, bias);
}

// Weights of a router. Copies `weight` [n, k] and `bias` [n], which may be null.
long oaiserve_add_router(Decoder* decoder, const Element* weight, long n, long k, const float* bias) {
  return guarded(-1L, [&] { return add_part(decoder->routers, plain_weights(*decoder, weight, n, k, bias)); });
}

// The assignment of tokens to experts, which layers with as many experts may share.
long oaiserve_add_assignment(Decoder* decoder, long experts, long top_k) {
  return guarded(-1L, [&] {
    decoder->assignments.emplace_back(experts, top_k);
    return long(decoder->assignments.size()) - 1;
  });
}

#if defined(BLOCK_WEIGHTS)
// Whether products with weights in blocks are summed in tiles.
bool oaiserve_has_integer_tiles() {
#if defined(WITH_INTEGER_TILES)
  return true;
#else
  return false;
#endif
}

// A buffer RowLine[tokens * rows_each][most_lines(width)], for rows of up to `width` numbers.
long oaiserve_add_groups(Decoder* decoder, long width, long rows_each) {
  return add_part(decoder->groups, Buffer<RowLine>(most_lines(width), rows_each));
}

// Weights of a linear layer that stay as a GGUF file has them. Packs the n rows of k weights at `rows`, on the threads
// of `pool`. A row that is null is zeros. There are 32 for each panel, and a panel's rows have one of `formats`. Copies
// `bias` [n], which may be null.
long oaiserve_add_blocks(Decoder* decoder, Pool* pool, const uint8_t* const* rows, const Format* formats, long n, long k,
                         const float* bias) {
  return add_blocks(*decoder, *pool, rows, nullptr, formats, n, k, bias);
}

// The same for weights in MXFP4 whose scales are apart: `rows` are the codes, and `scales` the rows of their scales.
long oaiserve_add_blocks_apart(Decoder* decoder, Pool* pool, const uint8_t* const* rows, const uint8_t* const* scales,
                               long n, long k, const float* bias) {
  return guarded(-1L, [&] {
    const std::vector<Format> formats(size_t(panels_of(n)), Format::MXFP4);
    return add_blocks(*decoder, *pool, rows, scales, formats.data(), n, k, bias);
  });
}

// Quantizes `weights` [n, k] to blocks of a format of encode_blocks.h, as a GGUF file has them, on the threads of `pool`.
void oaiserve_encode_blocks(Pool* pool, const float* weights, long n, long k, Format format, uint8_t* out) {
  EncodeRows encoding(weights, n, k, format, out);
  pool->run(encoding);
}

// Writes row `row` of such weights, expanded, to `out` [k].
void oaiserve_expand_row(const Decoder* decoder, long weights, long row, float* out) {
  expand_row(std::get<BlockLinear>(decoder->weights[weights]), row, out);
}
#endif

// The KV cache of a layer, with the layout of PagedCache. The caller owns its memory.
long oaiserve_add_cache(Decoder* decoder, CacheMemory memory) {
  return add_part(decoder->caches, memory.as<Element>());
}

// The remaining parts are operations, which run in the order in which they are added. operations.h, attend.h, latent.h,
// layer_inputs.h, experts.h, convolution.h, delta.h, mamba.h, selective_scan.h and gates.h say what they compute.

long oaiserve_embed(Decoder* decoder, long out, const Element* table, long table_rows, const Element* position_table,
                    long width, float scale) {
  return add_operation<Embed<Element>>(*decoder, decoder->floats[out], table, table_rows, position_table, width, scale);
}

#if defined(BLOCK_WEIGHTS)
long oaiserve_embed_blocks(Decoder* decoder, long out, long weights, float scale) {
  return add_operation<EmbedBlocks>(*decoder, decoder->floats[out], std::get<BlockLinear>(decoder->weights[weights]),
                                    scale);
}

// Quantizes rows as `count` weights that follow each other read them, from index `weights` on. `order` [width] may be null.
long oaiserve_quantize(Decoder* decoder, long x, long out, long width, long weights, long count, bool of_logits_rows,
                       const int32_t* order) {
  return add_operation<QuantizeRows<Element>>(*decoder, decoder->elements[x], decoder->groups[out], width,
                                              forms_of(*decoder, weights, count), of_logits_rows, order);
}

// Quantizes the sorted rows of all experts, whose weights follow each other from index `weights` on.
long oaiserve_quantize_expert_rows(Decoder* decoder, long x, long out, long width, long weights, long assignment) {
  const Assignment& assigned = decoder->assignments[assignment];
  return add_operation<QuantizeRows<Element>>(*decoder, decoder->elements[x], decoder->groups[out], width,
                                              forms_of(*decoder, weights, assigned.experts), false, nullptr,
                                              assigned.top_k);
}

// Gathers rows in eight bits for such weights.
long oaiserve_gather_groups(Decoder* decoder, long x, long out, long width, long weights, long assignment, bool weighs) {
  const Assignment& assigned = decoder->assignments[assignment];
  return add_operation<GatherQuantized>(*decoder, decoder->groups[x], decoder->groups[out], width,
                                        forms_of(*decoder, weights, assigned.experts), assigned, weighs);
}
#endif

long oaiserve_norm(Decoder* decoder, long x, long out, Normalize normalize, bool of_logits_rows) {
  return add_operation<Norm<Element>>(*decoder, decoder->floats[x], decoder->elements[out], normalize, of_logits_rows);
}

// The same for all tokens, in float32.
long oaiserve_norm_floats(Decoder* decoder, long x, long out, Normalize normalize) {
  return add_operation<Norm<float>>(*decoder, decoder->floats[x], decoder->floats[out], normalize, false);
}

long oaiserve_add_norm(Decoder* decoder, long x, long hidden, Normalize normalize, float scale, float factor) {
  return add_operation<AddNorm>(*decoder, decoder->floats[x], decoder->floats[hidden], normalize, scale, factor);
}

// Adds a site, at which the next linear layer, which reads the same `x` or what `x` is quantized to, lets adapters add to
// its product. Without a site (-1), a layer has no adapters. `heads` and `each` are as Adapt takes them, 1 and 0 for a layer
// that reads whole rows.
long oaiserve_site(Decoder* decoder, long x, long heads, long each) {
  const long index = add_part(decoder->sites, {&decoder->adapter_rows, long(decoder->sites.size())});
  if (index < 0) return -1;
  const long added =
      add_operation<Adapt<Element>>(*decoder, decoder->elements[x], decoder->adapter_rows, index, heads, each);
  return added < 0 ? -1 : index;
}

long oaiserve_project(Decoder* decoder, long x, long out, long weights, long site, bool adds, float scale) {
  return std::visit(
      [&]<class W>(const W& w) {
        return add_operation<Project<Element, W>>(*decoder, input_of(*decoder, w, x), decoder->floats[out], w,
                                                  site_of(*decoder, site), adds, scale);
      },
      decoder->weights[weights]);
}

long oaiserve_activate(Decoder* decoder, long x, long out, long weights, long site, Activation activation) {
  return std::visit(
      [&]<class W>(const W& w) {
        return add_operation<Activate<Element, W>>(*decoder, input_of(*decoder, w, x), decoder->elements[out], w,
                                              site_of(*decoder, site), activation);
      },
      decoder->weights[weights]);
}

long oaiserve_gate(Decoder* decoder, long x, long out, long weights, long site, Activation activation, float factor) {
  return std::visit(
      [&]<class W>(const W& w) {
        return add_operation<Gate<Element, W>>(*decoder, input_of(*decoder, w, x), decoder->elements[out], w,
                                              site_of(*decoder, site), activation, factor);
      },
      decoder->weights[weights]);
}

long oaiserve_route(Decoder* decoder, long x, long logits, long router, long site, Routing routing, long assignment) {
  return add_operation<Route<Element>>(*decoder, decoder->elements[x], decoder->floats[logits],
                                       decoder->routers[router], site_of(*decoder, site), routing,
                                       decoder->assignments[assignment]);
}

long oaiserve_sort_rows(Decoder* decoder, long assignment) {
  return add_operation<SortRows>(*decoder, decoder->assignments[assignment]);
}

long oaiserve_gather_rows(Decoder* decoder, long x, long out, long width, long assignment, bool weighs) {
  return add_operation<GatherRows<Element>>(*decoder, decoder->elements[x], decoder->elements[out], width,
                                            decoder->assignments[assignment], weighs);
}

// The weights of the first expert are those of index `first`, and the others follow it.
long oaiserve_expert_gate(Decoder* decoder, long x, long out, long first, long assignment, Gating gating) {
  return guarded(-1L, [&] {
    return std::visit(
        [&]<class W>(const W& w) {
          return add_operation<ExpertGate<Element, W>>(
              *decoder, input_of(*decoder, w, x), decoder->elements[out],
              products_of<W>(*decoder, first, decoder->assignments[assignment]), gating);
        },
        decoder->weights[first]);
  });
}

long oaiserve_expert_activate(Decoder* decoder, long x, long out, long first, long assignment, Activation activation) {
  return guarded(-1L, [&] {
    return std::visit(
        [&]<class W>(const W& w) {
          return add_operation<ExpertActivate<Element, W>>(
              *decoder, input_of(*decoder, w, x), decoder->elements[out],
              products_of<W>(*decoder, first, decoder->assignments[assignment]), activation);
        },
        decoder->weights[first]);
  });
}

long oaiserve_expert_project(Decoder* decoder, long x, long out, long first, long assignment) {
  return guarded(-1L, [&] {
    return std::visit(
        [&]<class W>(const W& w) {
          return add_operation<ExpertProject<W>>(*decoder, input_of(*decoder, w, x), decoder->floats[out],
                                                 products_of<W>(*decoder, first, decoder->assignments[assignment]));
        },
        decoder->weights[first]);
  });
}

long oaiserve_combine(Decoder* decoder, long x, long out, long width, long assignment, bool weighs, bool adds,
                      float scale) {
  return add_operation<Combine>(*decoder, decoder->floats[x], decoder->floats[out], width,
                                decoder->assignments[assignment], weighs, adds, scale);
}

long oaiserve_scale_rows(Decoder* decoder, long x, long values, const float* weight, long site, long width,
                         long values_width) {
  return add_operation<ScaleRows<Element>>(*decoder, decoder->elements[x], decoder->elements[values], weight,
                                           site_of(*decoder, site), width, values_width);
}

long oaiserve_prepare(Decoder* decoder, long qkv, long queries, long cache, long heads, Rotary rotary,
                      Normalize query_norm, Normalize key_norm, Normalize value_norm, long parts) {
  return std::visit(
      [&]<class S>(PagedCache<S>& paged) {
        return add_operation<Prepare<Element, S>>(*decoder, decoder->floats[qkv], decoder->elements[queries], paged,
                                                  heads, rotary, query_norm, key_norm, value_norm, parts);
      },
      decoder->caches[cache]);
}

// `cache` has latent vectors.
long oaiserve_prepare_latent(Decoder* decoder, long query, long latent, long normed, long own, long queries, long cache,
                             long heads, Rotary rotary) {
  return add_operation<PrepareLatent<Element>>(
      *decoder, decoder->floats[query], decoder->floats[latent], decoder->elements[normed], decoder->elements[own],
      decoder->elements[queries], std::get<PagedCache<Element>>(decoder->caches[cache]), heads, rotary);
}

// The weights have the type of activations, or eight bits.
long oaiserve_project_heads(Decoder* decoder, long x, long out, long weights, long site, long heads, long dim,
                            long x_each, long out_each) {
  const auto& plain = std::get<0>(decoder->weights[weights]);
  return add_operation<ProjectHeads<Element, std::decay_t<decltype(plain)>>>(
      *decoder, decoder->elements[x], decoder->elements[out], plain, site_of(*decoder, site), heads, dim, x_each,
      out_each);
}

// `inputs` has the projections of the embedding, for all layers side by side, and `embeddings` rows of their table.
long oaiserve_layer_inputs(Decoder* decoder, long inputs, long embeddings, float scale, Normalize normalize,
                           long layers) {
  return add_operation<LayerInputs>(*decoder, decoder->floats[inputs], decoder->floats[embeddings], scale, normalize,
                                    layers);
}

// The layer's inputs are those from column `first` of `inputs` on.
long oaiserve_gate_inputs(Decoder* decoder, long x, long out, long weights, long site, Activation activation, long inputs,
                          long first) {
  return std::visit(
      [&]<class W>(const W& w) {
        return add_operation<Activate<Element, W>>(*decoder, input_of(*decoder, w, x), decoder->elements[out], w,
                                                   site_of(*decoder, site), activation, &decoder->floats[inputs], first);
      },
      decoder->weights[weights]);
}

// `sinks` and `slopes` are null or [heads], see AttentionOptions.
long oaiserve_attend(Decoder* decoder, long queries, long out, long cache, long heads, float scaling, long window,
                     float softcap, const float* sinks, const float* slopes) {
  const AttentionOptions options{heads, scaling, window, softcap, sinks, slopes};
  const auto add = [&]<class S>(PagedCache<S>& paged) {
    SharedPlan& plan = decoder->plan(heads, paged.kv_heads, paged.value_dim, window);
    return add_operation<Attend<Element, S>>(*decoder, decoder->elements[queries], decoder->elements[out], paged, plan,
                                             options);
  };
  return guarded(-1L, [&] { return std::visit(add, decoder->caches[cache]); });
}

// `convolution.weight` and the biases stay the caller's.
long oaiserve_convolve(Decoder* decoder, long x, Convolution convolution) {
  return add_operation<Convolve<Element>>(*decoder, decoder->floats[x], convolution);
}

// `speeds` and `biases` are [heads.decays()].
long oaiserve_prepare_delta(Decoder* decoder, long x, long rates, long decays, DeltaHeads heads, const float* speeds,
                            const float* biases) {
  return add_operation<PrepareDelta>(*decoder, decoder->floats[x], decoder->floats[rates], decoder->floats[decays], heads,
                                     speeds, biases);
}

// `layer` is the layer's place among those that keep a state.
long oaiserve_delta_rule(Decoder* decoder, long x, long rates, long decays, DeltaHeads heads, long layer) {
  const auto add = [&]<bool FADES_BY_ROW>() {
    return add_operation<DeltaRule<FADES_BY_ROW>>(*decoder, decoder->floats[x], decoder->floats[rates],
                                                  decoder->floats[decays], heads, layer);
  };
  return heads.fades_by_row ? add.operator()<true>() : add.operator()<false>();
}

// `speeds` and `biases` are [heads.heads].
long oaiserve_prepare_scan(Decoder* decoder, long x, ScanHeads heads, const float* speeds, const float* biases) {
  return add_operation<PrepareScan>(*decoder, decoder->floats[x], heads, speeds, biases);
}

// `skips` are [heads.heads].
long oaiserve_scan(Decoder* decoder, long x, ScanHeads heads, const float* skips, long layer) {
  return add_operation<Scan>(*decoder, decoder->floats[x], heads, skips, layer);
}

long oaiserve_selective_scan(Decoder* decoder, long x, long times, long vectors, long out, Selection selection,
                             long layer) {
  return add_operation<SelectiveScan<Element>>(*decoder, decoder->floats[x], decoder->floats[times],
                                               decoder->floats[vectors], decoder->elements[out], selection, layer);
}

long oaiserve_gate_and_norm(Decoder* decoder, long x, long gates, long out, GatedNorm gated, Normalize normalize) {
  return add_operation<GateAndNorm<Element>>(*decoder, decoder->floats[x], decoder->floats[gates],
                                             decoder->elements[out], gated, normalize);
}

// `factors` are [width], and stay the caller's.
long oaiserve_scale_columns(Decoder* decoder, long x, const float* factors, long width) {
  return add_operation<ScaleColumns>(*decoder, decoder->floats[x], factors, width);
}

long oaiserve_gate_rows(Decoder* decoder, long x, long gates, long first, long width) {
  return add_operation<GateRows<Element>>(*decoder, decoder->elements[x], decoder->floats[gates], first, width);
}

long oaiserve_logits(Decoder* decoder, long x, long weights, float scale, float softcap) {
  return std::visit(
      [&]<class W>(const W& w) {
        return add_operation<Logits<Element, W>>(*decoder, input_of(*decoder, w, x), w, scale, softcap);
      },
      decoder->weights[weights]);
}

// Returns an adapter of a decoder with so many sites, which has nothing for any of them yet. It belongs to the caller:
// steps that name it read it, and no step may run that names it when it is freed. Null: no memory.
Adapter<Element>* oaiserve_adapter(long sites) {
  return guarded<Adapter<Element>*>(nullptr, [&] { return new Adapter<Element>(sites); });
}

// `adapter` may be null.
void oaiserve_free_adapter(Adapter<Element>* adapter) { delete adapter; }

// Gives an adapter its weights for a site, as Adapter::set does. Returns 0, or -1 if there is no memory.
int oaiserve_set_adapter(Adapter<Element>* adapter, long site, long k, long rank, const Element* a,
                         const float* scales, long num_groups, const int32_t* firsts, const int32_t* counts,
                         const Element* b) {
  return guarded(-1, [&] {
    adapter->set(site, k, rank, a, scales, num_groups, firsts, counts, b);
    return 0;
  });
}

// Runs a step on the threads of `pool`, one of which is the caller's. Returns 0, or -1 if there is no memory for so
// many tokens; then nothing has been computed. Only one step of a decoder, and only one of a pool, may run at a time.
int oaiserve_step(Decoder* decoder, Pool* pool, const StepInput* step) {
  return guarded(-1, [&] {
    decoder->run(*pool, *step);
    return 0;
  });
}

// Copies how many nanoseconds each operation took, summed over all steps so far, in the order of the operations.
// `durations_ns` has room for all of them.
void oaiserve_durations(const Decoder* decoder, int64_t* durations_ns) {
  std::copy(decoder->durations_ns.begin(), decoder->durations_ns.end(), durations_ns);
}

// Returns attention that runs on the threads of `team`, or on threads of its own if `team` is null. Null: no memory, or
// the system gives no more threads.
PagedAttention<Element>* oaiserve_attention(int threads, Team team) {
  return guarded<PagedAttention<Element>*>(nullptr, [&] { return new PagedAttention<Element>(threads, team); });
}

// `attention` may be null.
void oaiserve_free_attention(PagedAttention<Element>* attention) { delete attention; }

// Begins a step, whose layers are computed afterwards. Only its slots, sequences and block tables are read; they
// must stay until its last layer. Returns 0, or -1 if there is no memory; then no layer may follow.
int oaiserve_attention_step(PagedAttention<Element>* attention, const StepInput* step) {
  return guarded(-1, [&] {
    attention->begin(*step);
    return 0;
  });
}

// Computes one layer, as PagedAttention::run does. Returns 0, or -1 if there is no memory; then nothing is written.
int oaiserve_attention_layer(PagedAttention<Element>* attention, CacheMemory memory, AttentionOptions options,
                             const Element* query, const Element* key, const Element* value, Element* out) {
  return guarded(-1, [&] {
    attention->run(memory.as<Element>(), options, query, key, value, out);
    return 0;
  });
}

}  // extern "C"
#pragma GCC visibility pop
