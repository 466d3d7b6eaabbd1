// The C interface of the library, which library.py declares for Python. A caller builds a decoder operation by operation
// and runs steps on it.
//
// The library is compiled for one element type, bf16 or float. Activations between operations have this type. So have
// keys and values, unless their cache has eight bits, and weights, unless they are in the blocks of GGUF files. Sums and
// the hidden state are float32.
//
// No exception leaves these functions. A function that can fail returns null or a negative number, and may be called
// again.

#include <chrono>
#include <deque>
#include <string_view>
#include <tuple>
#include <variant>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "delta.h"
#include "experts.h"
#include "gates.h"
#include "latent.h"
#include "mamba.h"
#include "block_operations.h"
#include "encode_blocks.h"
#include "attend.h"

namespace oaiserve {

using Element = ELEMENT;
using Weights = std::variant<Linear<Element>, BlockLinear>;

// Weights in blocks whose rows have not been packed yet.
struct UnpackedBlocks {
  BlockLinear weights;
  std::vector<const uint8_t*> rows, scales;  // [panels * PANEL]. There are no scales if the rows have them.
  std::vector<std::pair<uint8_t*, size_t>> files;  // the pages of mapped files that have the rows

  void pack(Pool& pool) const {
    Items packing(panels_of(weights.n), [this](long panel) {
      const BlockPanel& out = weights.panels[panel];
      const uint8_t* const* own_scales = scales.empty() ? nullptr : &scales[size_t(panel * PANEL)];
      pack_panel(out.format, &rows[size_t(panel * PANEL)], own_scales, weights.k, const_cast<uint8_t*>(out.data));
    });
    pool.run(packing);
#if defined(__linux__)
    for (const auto& [begin, bytes] : files) madvise(begin, bytes, MADV_DONTNEED);
#endif
  }
};

// A decoder owns its operations, the weights of its linear layers, and the buffers between operations. Embeddings,
// weights of norms, rotary tables and the KV cache are the caller's, who keeps them alive as long as the decoder.
class Decoder : public Work {
 public:
  // Deques, because operations refer to these parts, which therefore must not move when another one is added.
  std::deque<Buffer<float>> floats;
  std::deque<Buffer<Element>> elements;
  std::deque<Buffer<RowLine>> groups;
  std::deque<Weights> weights;
  std::vector<UnpackedBlocks> unpacked;  // of these weights
  std::deque<Linear<Element>> routers;
  std::deque<Assignment> assignments;
  std::deque<AnyCache<Element>> caches;
  std::deque<SharedPlan> plans;
  std::deque<Site<Element>> sites;
  AdapterRows<Element> adapter_rows;
  std::vector<std::unique_ptr<Operation>> operations;
  std::vector<int64_t> durations_ns;  // time of each operation, summed over all steps so far

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

  // Returns the index of the plan that attention of these sizes shares, which each step makes again.
  long plan(long heads, long kv_heads, long value_dim, long window, bool looks_ahead) {
    for (size_t i = 0; i < plans.size(); i++)
      if (plans[i].serves(heads, kv_heads, value_dim, window, looks_ahead)) return long(i);
    plans.emplace_back(heads, kv_heads, value_dim, window, looks_ahead);
    return long(plans.size()) - 1;
  }

  // Runs all operations on a step. Throws std::bad_alloc before the first of them; the next step may then be another.
  void run(Pool& pool, const StepInput& step) {
    for (auto& buffer : floats) buffer.reserve(step.num_tokens);
    for (auto& buffer : elements) buffer.reserve(step.num_tokens);
    for (Assignment& assignment : assignments) assignment.reserve(step.num_tokens);
    for (auto& buffer : groups) buffer.reserve(step.num_tokens);
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
  std::vector<long> items_;  // items of each operation in the current step
  const StepInput* step_ = nullptr;
  int64_t last_end_ns_ = 0;
  int threads_ = 1;
};

// Returns what `body` returns, or `failure` if it throws.
template <class Result, class Body>
Result guarded(Result failure, Body&& body) noexcept {
  try {
    return body();
  } catch (...) {
    return failure;
  }
}

// Returns 0, or -1 if `body` throws.
template <class Body>
int succeeds(Body&& body) noexcept {
  return guarded(-1, [&] {
    body();
    return 0;
  });
}

// Adds `part` at the end and returns its index, or -1 if there is no memory.
template <class Parts>
long add_part(Parts& parts, typename Parts::value_type part) noexcept {
  return guarded(-1L, [&] {
    parts.push_back(std::move(part));
    return long(parts.size()) - 1;
  });
}

// Returns a copy of a bias [n], which may be null. Throws std::bad_alloc.
const float* own_bias(Decoder& decoder, const float* bias, long n) {
  if (!bias) return nullptr;
  float* own = decoder.allocate<float>(size_t(n));
  std::copy(bias, bias + n, own);
  return own;
}

// Packs weights in the type of activations, and adds them to `parts` of the decoder.
template <class Columns>
long add_weights(Decoder& decoder, auto& parts, const Columns& columns, long n, long k, const float* bias) noexcept {
  return guarded(-1L, [&] {
    Element* panels = decoder.allocate<Element>(size_t(panels_of(n) * panel_size<Element>(k)));
    pack_columns(columns, n, k, panels);
    return add_part(parts, Linear<Element>{n, k, panels, own_bias(decoder, bias, n)});
  });
}

// Arguments of operations that are parts of the decoder, by their index among those of their kind.
template <auto PARTS>
struct Index {
  long at;
};
using Floats = Index<&Decoder::floats>;
using Elements = Index<&Decoder::elements>;
using RouterWeights = Index<&Decoder::routers>;
using Assigned = Index<&Decoder::assignments>;
using Plan = Index<&Decoder::plans>;
using Cache = Index<&Decoder::caches>;
using AnyWeights = Index<&Decoder::weights>;
using AdaptedSite = Index<&Decoder::sites>;
using Groups = Index<&Decoder::groups>;

// The buffer that a product with weights reads: of their own kind.
struct Input {
  long at;
};
// A site, or a buffer, or -1 for none.
struct MaybeSite {
  long at;
};
struct MaybeFloats {
  long at;
};
// Weights that follow each other: those of experts, by which the rows of an assignment are multiplied. ExpertWeights in
// library.py has the same layout.
struct ExpertWeights {
  long first, assignment;
};
// Weights that follow each other and read the same rows. WeightRange in library.py has the same layout.
struct WeightRange {
  long first, count;
};

// Finds what an operation gets for an argument: a part of the decoder, or the number or structure that it is. The
// operation's weights have the type W, and its cache has numbers S.
template <class W, class S>
struct Parts {
  Decoder& decoder;

  template <auto PARTS>
  auto& operator()(Index<PARTS> index) const {
    auto& part = (decoder.*PARTS)[size_t(index.at)];
    if constexpr (std::is_same_v<Index<PARTS>, AnyWeights>)
      return std::get<W>(part);
    else if constexpr (std::is_same_v<Index<PARTS>, Cache>)
      return std::get<PagedCache<S>>(part);
    else
      return (part);
  }
  auto& operator()(Input index) const {
    if constexpr (std::is_same_v<W, BlockLinear>)
      return (decoder.groups[size_t(index.at)]);
    else
      return (decoder.elements[size_t(index.at)]);
  }
  const Site<Element>* operator()(MaybeSite site) const {
    return site.at < 0 ? nullptr : &decoder.sites[size_t(site.at)];
  }
  Buffer<float>* operator()(MaybeFloats buffer) const {
    return buffer.at < 0 ? nullptr : &decoder.floats[size_t(buffer.at)];
  }
  ExpertProducts<W> operator()(ExpertWeights experts) const {
    const Assignment& assignment = decoder.assignments[size_t(experts.assignment)];
    std::vector<const W*> weights;
    for (long expert = 0; expert < assignment.experts; expert++)
      weights.push_back(&std::get<W>(decoder.weights[size_t(experts.first + expert)]));
    return {std::move(weights), assignment};
  }
  RowForms operator()(WeightRange weights) const {
    RowForms found;
    for (long i = weights.first; i < weights.first + weights.count; i++) {
      const BlockLinear* blocks = std::get_if<BlockLinear>(&decoder.weights[size_t(i)]);
      const RowForms forms = blocks ? blocks->forms() : RowForms{};
      found.groups |= forms.groups;
      found.supers |= forms.supers;
      found.longs |= forms.longs;
    }
    return found;
  }
  template <class Value>
  const Value& operator()(const Value& value) const {
    return value;
  }
};

// An operation by its name: the kinds of its arguments, and a function that adds it, given a pointer to each argument.
struct Entry {
  const char *name, *kinds;
  void (*add)(Decoder& decoder, const void* const* arguments);
};

// f: float; b: bool; p: a pointer; i: an integer of 64 bits, such as an index or an activation; s: a structure
template <class A>
constexpr char KIND = std::is_same_v<A, float>  ? 'f'
                      : std::is_same_v<A, bool> ? 'b'
                      : std::is_pointer_v<A>    ? 'p'
                      : sizeof(A) == 8          ? 'i'
                                                : 's';
template <class... As>
constexpr char KINDS[] = {KIND<As>..., '\0'};

using Plain = std::variant_alternative_t<0, Weights>;

template <class Op, class W, class S, class... As>
void add_operation(Decoder& decoder, const void* const* arguments) {
  const Parts<W, S> parts{decoder};
  [&]<size_t... I>(std::index_sequence<I...>) {
    decoder.operations.push_back(
        std::make_unique<OperationOf<Op>>(parts(*static_cast<const As*>(arguments[I]))...));
  }(std::index_sequence_for<As...>());
}

// An operation on weights of one type, or on none.
template <class Op, class... As>
constexpr Entry of(const char* name) {
  return {name, KINDS<As...>, add_operation<Op, Plain, Element, As...>};
}

// An operation on weights of any type, with results of T. They are the third argument, or the second.
template <template <class, class> class Op, class T, class... As>
constexpr Entry of_weights(const char* name) {
  return {name, KINDS<As...>, [](Decoder& decoder, const void* const* arguments) {
            constexpr size_t AT = std::is_same_v<std::tuple_element_t<1, std::tuple<As...>>, AnyWeights> ? 1 : 2;
            const long first = *static_cast<const long*>(arguments[AT]);
            std::visit([&]<class W>(const W&) { add_operation<Op<T, W>, W, Element, As...>(decoder, arguments); },
                       decoder.weights[size_t(first)]);
          }};
}

// An operation on a cache of any type, which is the third argument.
template <template <class, class> class Op, class... As>
constexpr Entry of_cache(const char* name) {
  return {name, KINDS<As...>, [](Decoder& decoder, const void* const* arguments) {
            const long cache = *static_cast<const long*>(arguments[2]);
            std::visit([&]<class S>(const PagedCache<S>&) {
              add_operation<Op<Element, S>, Plain, S, As...>(decoder, arguments);
            }, decoder.caches[size_t(cache)]);
          }};
}

using Numbers = const float*;

// What each operation computes stands beside its structure, and what its arguments are.
constexpr Entry OPERATIONS[] = {
    of<Embed<Element>, Floats, const Element*, long, const Element*, long, float>("embed"),
    of<PlaceVectors, Floats, long, long, float>("place_vectors"),
    of<Norm<Element>, Floats, Elements, Normalize, bool>("norm"),
    of<Norm<float>, Floats, Floats, Normalize, bool>("norm_floats"),
    of<AddNorm, Floats, Floats, Normalize, float, float>("add_norm"),
    of<Adapt<Element>, Elements, AdaptedSite, long, long>("adapt"),
    of_weights<Project, Element, Input, Floats, AnyWeights, MaybeSite, bool, float>("project"),
    of_weights<Activate, Element, Input, Elements, AnyWeights, MaybeSite, Activation, MaybeFloats, long>("activate"),
    of_weights<Gate, Element, Input, Elements, AnyWeights, MaybeSite, Activation>("gate"),
    of_weights<Logits, Element, Input, AnyWeights, float, float>("logits"),
    of_cache<Prepare, Floats, Elements, Cache, long, Rotary, Normalize, Normalize, Normalize, long>("prepare"),
    of_cache<Attend, Elements, Elements, Cache, Plan, AttentionOptions>("attend"),
    of<PrepareLatent<Element>, Floats, Floats, Elements, Elements, Elements, Cache, long, long, Rotary>(
        "prepare_latent"),
    of<ProjectHeads<Element, Plain>, Elements, Elements, AnyWeights, MaybeSite, long, long, long, long>(
        "project_heads"),
    of<Route<Element>, Elements, Floats, RouterWeights, MaybeSite, Routing, Assigned>("route"),
    of<SortRows, Assigned>("sort_rows"),
    of<GatherRows<Element>, Elements, Elements, long, Assigned>("gather_rows"),
    of_weights<ExpertGate, Element, Input, Elements, ExpertWeights, Gating>("expert_gate"),
    of_weights<ExpertProject, float, Input, Floats, ExpertWeights>("expert_project"),
    of<Combine, Floats, Floats, long, Assigned, bool, float>("combine"),
    of<ScaleRows<Element>, Elements, Elements, Numbers, MaybeSite, long, long>("scale_rows"),
    of<LayerInputs, Floats, Floats, float, Normalize, long>("layer_inputs"),
    of<Convolve<Element>, Floats, Convolution>("convolve"),
    of<PrepareDelta, Floats, Floats, Floats, DeltaHeads, Numbers, Numbers>("prepare_delta"),
    of<DeltaRule<false>, Floats, Floats, Floats, DeltaHeads, long>("delta_rule"),
    of<DeltaRule<true>, Floats, Floats, Floats, DeltaHeads, long>("delta_rule_by_row"),
    of<PrepareScan, Floats, ScanHeads, Numbers, Numbers>("prepare_scan"),
    of<Scan, Floats, ScanHeads, Numbers, long>("scan"),
    of<GateAndNorm<Element>, Floats, Floats, Elements, GatedNorm, Normalize>("gate_and_norm"),
    of<GateRows<Element>, Elements, Floats, long, long>("gate_rows"),
    {"embed_blocks", KINDS<Floats, AnyWeights, float>,
     add_operation<EmbedBlocks, BlockLinear, Element, Floats, AnyWeights, float>},
    of<QuantizeRows<Element>, Elements, Groups, long, WeightRange, bool, bool, const int32_t*, long>("quantize"),
    of<GatherQuantized, Groups, Groups, long, WeightRange, Assigned>("gather_groups"),
};

// Returns an operation by its name, or null.
const Entry* entry_of(std::string_view name) {
  const Entry* found = std::find_if(std::begin(OPERATIONS), std::end(OPERATIONS),
                                    [name](const Entry& entry) { return entry.name == name; });
  return found == std::end(OPERATIONS) ? nullptr : found;
}

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
// by which operations refer to it, or -1 if there is no memory. Not while a step runs.

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
  return add_weights(*decoder, decoder->weights, columns_of(weight, n, k), n, k, bias);
}

// Weights of a gated linear layer. Copies `gate` and `up`, both [n, k], and `bias` [gated_columns(n)], which may be null
// and has the order of the columns.
long oaiserve_add_gated_weights(Decoder* decoder, const Element* gate, const Element* up, long n, long k,
                                const float* bias) {
  return add_weights(*decoder, decoder->weights, columns_of_gated(gate, up, n, k), gated_columns(n), k, bias);
}

// Weights of a router, which are never quantized. Copies `weight` [n, k] and `bias` [n], which may be null.
long oaiserve_add_router(Decoder* decoder, const Element* weight, long n, long k, const float* bias) {
  return add_weights(*decoder, decoder->routers, columns_of(weight, n, k), n, k, bias);
}

// The assignment of tokens to experts, which layers with as many experts may share.
long oaiserve_add_assignment(Decoder* decoder, long experts, long top_k) {
  return guarded(-1L, [&] {
    decoder->assignments.emplace_back(experts, top_k);
    return long(decoder->assignments.size()) - 1;
  });
}

// The KV cache of a layer, with the layout of PagedCache. The caller owns its memory.
long oaiserve_add_cache(Decoder* decoder, CacheMemory memory) {
  return add_part(decoder->caches, memory.as<Element>());
}

// The plan of attention over a cache, which may be that of other layers, too.
long oaiserve_add_plan(Decoder* decoder, long heads, long cache, long window, bool looks_ahead) {
  const auto plan = [&](const auto& paged) {
    return decoder->plan(heads, paged.kv_heads, paged.value_dim, window, looks_ahead);
  };
  return guarded(-1L, [&] { return std::visit(plan, decoder->caches[size_t(cache)]); });
}

// A site, at which the next linear layer lets adapters add to its product.
long oaiserve_add_site(Decoder* decoder) {
  return add_part(decoder->sites, {&decoder->adapter_rows, long(decoder->sites.size())});
}

// Returns the kinds of an operation's arguments, as KIND says, or null if there is no such operation.
const char* oaiserve_arguments(const char* name) {
  const Entry* entry = entry_of(name);
  return entry ? entry->kinds : nullptr;
}

// Adds an operation that oaiserve_arguments knows, given a pointer to each argument. Operations run in the order in which
// they are added. Arrays that they refer to stay the caller's.
long oaiserve_add_operation(Decoder* decoder, const char* name, const void* const* arguments) {
  return guarded(-1L, [&] {
    entry_of(name)->add(*decoder, arguments);
    return long(decoder->operations.size()) - 1;
  });
}

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

// Weights of a linear layer that stay as a GGUF file has them: the n rows of k weights at `rows`, which oaiserve_pack reads.
// A row that is null is zeros. There are 32 for each panel, and a panel's rows have one of `formats`. If `scales` are not
// null, all are MXFP4: `rows` are the codes, and `scales` the rows of their scales. Copies `bias` [n], which may be null.
long oaiserve_add_blocks(Decoder* decoder, const uint8_t* const* rows, const uint8_t* const* scales,
                         const Format* formats, long n, long k, const float* bias) {
  return guarded(-1L, [&] {
    const float* own = own_bias(*decoder, bias, n);
    BlockPanel* panels = decoder->allocate<BlockPanel>(size_t(panels_of(n)));
    // As many panels lie side by side as have the same format, so that memory is read in order.
    for (long panel = 0, end = 0; panel < panels_of(n); panel = end) {
      const long bytes = block_panel_bytes(formats[panel], k);
      while (end < panels_of(n) && formats[end] == formats[panel]) end++;
      uint8_t* data = decoder->allocate<uint8_t>(size_t(bytes * (end - panel)));
      for (long i = panel; i < end; i++) panels[i] = {data + (i - panel) * bytes, formats[i]};
    }
    const long count = panels_of(n) * PANEL;
    UnpackedBlocks unpacked{{n, k, panels, own}, {rows, rows + count}, {}, {}};
    if (scales) unpacked.scales.assign(scales, scales + count);
    const long index = add_part(decoder->weights, unpacked.weights);
    if (index >= 0) decoder->unpacked.push_back(std::move(unpacked));
    return index;
  });
}

// Lets the system drop pages of a mapped file once the blocks that were added last are packed. Pages that are needed again
// are read again. Returns 0, or -1 if there is no memory.
int oaiserve_drop_after(Decoder* decoder, uint8_t* begin, long bytes) {
  return succeeds([&] { decoder->unpacked.back().files.push_back({begin, size_t(bytes)}); });
}

// Packs all blocks that were added since the last call, on the threads of `pool`.
void oaiserve_pack(Decoder* decoder, Pool* pool) {
  for (const UnpackedBlocks& unpacked : decoder->unpacked) unpacked.pack(*pool);
  decoder->unpacked.clear();
}

// Sets the points of a format of grids.h, which the caller keeps. Others do without.
void oaiserve_set_grid(Format format, const void* points) { set_grid(format, points); }

// Quantizes `weights` [n, k] to blocks of a format of encode_blocks.h, as a GGUF file has them, on the threads of `pool`.
void oaiserve_encode_blocks(Pool* pool, const float* weights, long n, long k, Format format, uint8_t* out) {
  encode_rows(*pool, weights, n, k, format, out);
}

// Writes row `row` of such weights, expanded, to `out` [k].
void oaiserve_expand_row(const Decoder* decoder, long weights, long row, float* out) {
  expand_row(std::get<BlockLinear>(decoder->weights[size_t(weights)]), row, out);
}

// Returns an adapter of a decoder with this number of sites, which has nothing for any of them yet. It belongs to the caller:
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
  return succeeds([&] { adapter->set(site, k, rank, a, scales, num_groups, firsts, counts, b); });
}

// Runs a step on the threads of `pool`, one of which is the caller's. Returns 0, or -1 if there is no memory for so
// many tokens; then nothing has been computed. Only one step of a decoder, and only one of a pool, may run at a time.
int oaiserve_step(Decoder* decoder, Pool* pool, const StepInput* step) {
  return succeeds([&] { decoder->run(*pool, *step); });
}

// Copies how many nanoseconds each operation took, summed over all steps so far, in the order of the operations.
// `durations_ns` has room for all of them.
void oaiserve_durations(const Decoder* decoder, int64_t* durations_ns) {
  std::copy(decoder->durations_ns.begin(), decoder->durations_ns.end(), durations_ns);
}

}  // extern "C"
#pragma GCC visibility pop
