// Low-rank adapters (LoRA): what single rows add to the products of linear layers, scale * (x A^T) B^T.
//
// Each row of a step names its adapter, or none. An operation before a linear layer computes x A^T for all such rows,
// those of the same adapter in tiles, so that A is read once for several of them. The linear layer adds the product
// with B to its sums before these leave the registers. So rows without an adapter are computed as if there were none.
// A row's sums have one order, whatever other rows there are.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "packs.h"
#include "step.h"

namespace oaiserve {

// The rows of a tile, whose sums fill the registers together with the CHAINS below.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int ADAPTER_ROWS = 8;
#else
constexpr int ADAPTER_ROWS = 4;
#endif
constexpr int CHAINS = 2;  // sums of a row and a column run side by side, because a dot product has a long latency
constexpr int RANKS = 4;   // the ranks of a linear layer are padded to a multiple of this: two packs of bfloat16

// What an adapter has for one site. A site is a linear layer, or several that read the same x and that the decoder
// computes as one. Rank 0: the adapter has nothing for it.
template <class T>
struct SiteWeights {
  // 16 columns of the layer, to which the ranks `first` .. `first + count - 1` add something. Both are multiples of
  // RANKS. The weights are T[count / PACK][16][PACK], from `offset` of `b` on.
  struct Group {
    int32_t first, count;
    int64_t offset;
  };
  long k = 0, rank = 0;
  AlignedArray<T, 64> a;  // T[padded_rank / WIDTH][k / PACK][WIDTH][PACK], zero beyond `rank`
  std::vector<float> scales;  // [padded_rank]
  std::vector<Group> groups;
  AlignedArray<T, 64> b;

  long padded_rank() const { return (rank + LANES - 1) / LANES * LANES; }
};

// An adapter, which is made once and only read afterwards, by the steps of its decoder.
template <class T>
class Adapter {
 public:
  explicit Adapter(long sites) : sites_(size_t(sites)) {}

  const SiteWeights<T>& site(long index) const { return sites_[size_t(index)]; }
  long widest() const { return widest_; }  // the most numbers that a row of x becomes at any site

  // Copies `a` [rank, k], with a scale for each rank, and `b`: for each group, [counts[g] / PACK][16][PACK]. k is a
  // multiple of 16. Throws std::bad_alloc.
  void set(long index, long k, long rank, const T* a, const float* scales, long num_groups, const int32_t* firsts,
           const int32_t* counts, const T* b) {
    SiteWeights<T> site;
    site.k = k;
    site.rank = rank;
    const long padded = site.padded_rank();
    site.scales.assign(size_t(padded), 0);
    std::copy(scales, scales + rank, site.scales.begin());
    site.a = make_aligned<T, 64>(size_t(padded * k));
    T* packed = site.a.get();
    for (long first = 0; first < padded; first += WIDTH)
      for (long i = 0; i < k; i += PACK<T>)
        for (long c = first; c < first + WIDTH; c++)
          for (long j = 0; j < PACK<T>; j++) *packed++ = c < rank ? a[c * k + i + j] : T{};
    int64_t offset = 0;
    for (long g = 0; g < num_groups; g++) {
      site.groups.push_back({firsts[g], counts[g], offset});
      offset += int64_t(counts[g]) * LANES;
    }
    site.b = make_aligned<T, 64>(size_t(offset));
    std::copy(b, b + offset, site.b.get());
    widest_ = std::max(widest_, padded);
    sites_[size_t(index)] = std::move(site);
  }

 private:
  std::vector<SiteWeights<T>> sites_;
  long widest_ = 0;
};

// The rows of a step that have adapters, and what becomes of them at the site that is being computed.
template <class T>
class AdapterRows {
 public:
  // Up to ADAPTER_ROWS rows with the same adapter, by their place in `rows`.
  struct Tile {
    const Adapter<T>* adapter;
    long first, count;
  };
  // What a row's adapter has for the site that is being computed. Without groups, it has nothing.
  struct Addend {
    const typename SiteWeights<T>::Group* groups;
    const T *b, *products;  // the latter are scale * (x A^T)
  };
  std::vector<Tile> tiles;
  std::vector<int32_t> rows;    // those of an adapter side by side
  std::vector<Addend> addends;  // one for each row of the step; empty if none has an adapter

  // Throws std::bad_alloc.
  void make(const StepInput& step) {
    tiles.clear();
    rows.clear();
    addends.clear();
    if (step.num_adapters == 0) return;
    addends.resize(size_t(step.num_tokens));
    long widest = 0;
    for (int64_t index = 0; index < step.num_adapters; index++) {
      const auto* adapter = static_cast<const Adapter<T>*>(step.adapters[index]);
      widest = std::max(widest, adapter->widest());
      const long first = long(rows.size());
      for (int64_t row = 0; row < step.num_tokens; row++)
        if (step.token_adapters[row] == index) rows.push_back(int32_t(row));
      for (long at = first; at < long(rows.size()); at += ADAPTER_ROWS)
        tiles.push_back({adapter, at, std::min<long>(ADAPTER_ROWS, long(rows.size()) - at)});
    }
    stride_ = widest;
    const size_t size = size_t(step.num_tokens * widest);
    if (size > size_) {
      products_ = make_aligned<T, 64>(size);
      size_ = size;
    }
  }

  T* products(long row) { return products_.get() + row * stride_; }

 private:
  AlignedArray<T, 64> products_;
  size_t size_ = 0;
  long stride_ = 0;
};

// products [ROWS][LANES] = x A^T * scales, for a panel of A.
template <class T, int ROWS>
void adapter_tile(const T* const* x, const T* panel, long k, const float* scales, float* products) {
  Vector sums[ROWS][CHAINS] = {};
  const long steps = k / PACK<T>;  // a multiple of CHAINS
  for (long step = 0; step < steps; step += CHAINS)
#pragma GCC unroll 2
    for (int chain = 0; chain < CHAINS; chain++) {
      const Packs<T> weights = Packs<T>::load(panel + (step + chain) * WIDTH * PACK<T>);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++)
        sums[r][chain] = dot(sums[r][chain], Packs<T>::splat(x[r] + (step + chain) * PACK<T>), weights);
    }
  const Vector scale = load_vector<Vector>(scales);
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) {
    const Vector sum = (sums[r][0] + sums[r][1]) * scale;
    memcpy(products + r * LANES, &sum, sizeof(sum));
  }
}

// A site, at which a linear layer adds what adapters have for it.
template <class T>
struct Site {
  AdapterRows<T>* rows;
  long index;

  // Returns the columns `column` .. `column + 15` of a row, to which its adapter has been added.
  f32x16 add(long row, long column, f32x16 values) const {
    if (rows->addends.empty()) return values;
    const auto& addend = rows->addends[size_t(row)];
    if (!addend.groups) return values;
    const auto& group = addend.groups[column / LANES];
    const T* products = addend.products + group.first;
    const T* b = addend.b + group.offset;
    // Two chains of sums, because a dot product has a long latency.
    Vector sums[LANES / WIDTH], others[LANES / WIDTH] = {};
    memcpy(sums, &values, sizeof(values));
    for (long j = 0; j < group.count; j += 2 * PACK<T>) {
      const Packs<T> first = Packs<T>::splat(products + j), second = Packs<T>::splat(products + j + PACK<T>);
      const T* weights = b + j * LANES;
#pragma GCC unroll 4
      for (int v = 0; v < LANES / WIDTH; v++) {
        sums[v] = dot(sums[v], first, Packs<T>::load(weights + v * WIDTH * PACK<T>));
        others[v] = dot(others[v], second, Packs<T>::load(weights + (LANES + v * WIDTH) * PACK<T>));
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < LANES / WIDTH; v++) sums[v] += others[v];
    memcpy(&values, sums, sizeof(values));
    return values;
  }
};

// Computes scale * (x A^T) at a site, for the rows of a tile, whose addends are those of the site then. `row_of` returns
// what sixteen ranks from one on multiply of a row.
template <class T, class RowOf, int... ROW>
void adapt(const SiteWeights<T>& site, AdapterRows<T>& rows, const typename AdapterRows<T>::Tile& tile, RowOf&& row_of,
           std::integer_sequence<int, ROW...>) {
  static constexpr decltype(&adapter_tile<T, 1>) TILES[] = {adapter_tile<T, ROW + 1>...};
  const int32_t* tile_rows = rows.rows.data() + tile.first;
  const T* x[ADAPTER_ROWS];
  for (long r = 0; r < tile.count; r++)
    rows.addends[size_t(tile_rows[r])] = {site.groups.empty() ? nullptr : site.groups.data(), site.b.get(),
                                          rows.products(tile_rows[r])};
  for (long rank = 0; rank < site.padded_rank(); rank += LANES) {
    alignas(64) float products[ADAPTER_ROWS * LANES];
    for (long r = 0; r < tile.count; r++) x[r] = row_of(tile_rows[r], rank);
    for (long c = 0; c < LANES; c += WIDTH)
      TILES[tile.count - 1](x, site.a.get() + (rank + c) * site.k, site.k, site.scales.data() + rank + c, products + c);
    for (long r = 0; r < tile.count; r++) store(rows.products(tile_rows[r]) + rank, load(products + r * LANES));
  }
}

}  // namespace oaiserve
