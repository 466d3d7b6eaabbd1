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
constexpr int ADAPTER_ROWS = 4;
#else
constexpr int ADAPTER_ROWS = 2;
#endif
constexpr int CHAINS = 4;  // sums of a row and a column run side by side, because a dot product has a long latency

// What an adapter has for one site. A site is a linear layer, or several that read the same x and that the decoder
// computes as one. Rank 0: the adapter has nothing for it.
template <class T>
struct SiteWeights {
  // 16 columns of the layer, to which the ranks `first` .. `first + count - 1` add something. Their weights are
  // T[count][16], from `offset` of `b` on.
  struct Group {
    int32_t first, count;
    int64_t offset;
  };
  long k = 0, rank = 0;
  AlignedArray<T, 64> a;  // T[ceil(rank / WIDTH)][k / PACK][WIDTH][PACK], zero beyond `rank`
  std::vector<float> scales;  // of each rank, padded to whole registers
  std::vector<Group> groups;
  AlignedArray<T, 64> b;

  long panels() const { return (rank + WIDTH - 1) / WIDTH; }
};

// An adapter, which is made once and only read afterwards, by the steps of its decoder.
template <class T>
class Adapter {
 public:
  explicit Adapter(long sites) : sites_(size_t(sites)) {}

  const SiteWeights<T>& site(long index) const { return sites_[size_t(index)]; }
  long widest() const { return widest_; }  // the most numbers that a row of x becomes at any site

  // Copies `a` [rank, k], with a scale for each rank, and `b`: for each group, [counts[g], 16]. k is a multiple of 16.
  // Throws std::bad_alloc.
  void set(long index, long k, long rank, const T* a, const float* scales, long num_groups, const int32_t* firsts,
           const int32_t* counts, const T* b) {
    SiteWeights<T> site;
    site.k = k;
    site.rank = rank;
    const long padded = site.panels() * WIDTH;
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
  std::vector<Tile> tiles;
  std::vector<int32_t> rows;  // those of an adapter side by side

  // Throws std::bad_alloc.
  void make(const StepInput& step) {
    tiles.clear();
    rows.clear();
    step_ = nullptr;
    if (step.num_adapters == 0) return;
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
      products_ = make_aligned<float, 64>(size);
      size_ = size;
    }
    step_ = &step;
  }

  // The adapter of a row, or null.
  const Adapter<T>* of(long row) const {
    if (!step_) return nullptr;
    const int32_t index = step_->token_adapters[row];
    return index < 0 ? nullptr : static_cast<const Adapter<T>*>(step_->adapters[index]);
  }
  float* products(long row) { return products_.get() + row * stride_; }  // scale * (x A^T) at the current site
  const float* products(long row) const { return products_.get() + row * stride_; }

 private:
  const StepInput* step_ = nullptr;  // if it has adapters
  AlignedArray<float, 64> products_;
  size_t size_ = 0;
  long stride_ = 0;
};

// products [ROWS][WIDTH] = x A^T * scales, for a panel of A.
template <class T, int ROWS>
void adapter_tile(const T* const* x, const T* panel, long k, const float* scales, float* const* products) {
  Vector sums[ROWS][CHAINS] = {};
  const long steps = k / PACK<T>;  // a multiple of CHAINS
  for (long step = 0; step < steps; step += CHAINS)
#pragma GCC unroll 4
    for (int chain = 0; chain < CHAINS; chain++) {
      const Packs<T> weights = Packs<T>::load(panel + (step + chain) * WIDTH * PACK<T>);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++)
        sums[r][chain] = dot(sums[r][chain], Packs<T>::splat(x[r] + (step + chain) * PACK<T>), weights);
    }
  const Vector scale = load_vector<Vector>(scales);
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; r++) {
    const Vector sum = ((sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3])) * scale;
    memcpy(products[r], &sum, sizeof(sum));
  }
}

// A site, at which a linear layer adds what adapters have for it.
template <class T>
struct Site {
  const AdapterRows<T>* rows;
  long index;

  // Returns the columns `column` .. `column + 15` of a row, to which its adapter has been added.
  f32x16 add(long row, long column, f32x16 values) const {
    const Adapter<T>* adapter = rows->of(row);
    if (!adapter) return values;
    const SiteWeights<T>& site = adapter->site(index);
    if (site.rank == 0) return values;
    const auto& group = site.groups[size_t(column / LANES)];
    const float* products = rows->products(row) + group.first;
    const T* b = site.b.get() + group.offset;
    for (long j = 0; j < group.count; j++) values += load(b + j * LANES) * products[j];
    return values;
  }
};

// Computes scale * (x A^T) at a site, for the rows of a tile.
template <class T, class RowOf, int... ROW>
void adapt(const SiteWeights<T>& site, AdapterRows<T>& rows, const typename AdapterRows<T>::Tile& tile, RowOf&& row_of,
           std::integer_sequence<int, ROW...>) {
  static constexpr decltype(&adapter_tile<T, 1>) TILES[] = {adapter_tile<T, ROW + 1>...};
  const T* x[ADAPTER_ROWS];
  float* products[ADAPTER_ROWS];
  for (long r = 0; r < tile.count; r++) {
    const long row = rows.rows[size_t(tile.first + r)];
    x[r] = row_of(row);
    products[r] = rows.products(row);
  }
  for (long panel = 0; panel < site.panels(); panel++) {
    TILES[tile.count - 1](x, site.a.get() + panel * WIDTH * site.k, site.k, site.scales.data() + panel * WIDTH,
                          products);
    for (long r = 0; r < tile.count; r++) products[r] += WIDTH;
  }
}

}  // namespace oaiserve
