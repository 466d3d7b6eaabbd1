// Attention that reads the paged KV cache in place.
//
// Sixteen keys are stored side by side, so that one `dot` adds to sixteen scores. Values are stored so that one `dot`
// adds PACK weighted values to sixteen outputs. Both are panels of a packed matrix. So decode and prefill run the same
// code: it multiplies a few rows (queries times the heads that share a key-value head) with a few panels, and has the
// sums in registers. A unit of work goes through its keys chunk by chunk, and keeps the maximum and the sum of each
// row, as an online softmax does.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "packs.h"
#include "step.h"

namespace oaiserve {

constexpr long PANEL_KEYS = LANES;  // keys that are stored side by side
constexpr long MAX_HEAD_DIM = 256;
// The rows and panels that are multiplied at once, so that their sums fill the registers.
#if defined(__AVX512F__)
constexpr int REGISTER_ROWS = 6, REGISTER_PANELS = 4;
#else
constexpr int REGISTER_ROWS = 4, REGISTER_PANELS = 1;
#endif
constexpr int PANEL_VECTORS = LANES / WIDTH;
constexpr long UNIT_ROWS = 96;              // the most rows of a unit, which read the keys together
constexpr long CHUNK_PANELS = 64;           // the most panels of keys in a chunk
constexpr long CHUNK_NUMBERS = 128 * 1024;  // the most numbers in a chunk's keys and values, so that they stay in L2
// The strides of scores and queries are no powers of two, because such rows would compete for the same cache lines.
constexpr long SCORE_STRIDE = (CHUNK_PANELS + 2) * PANEL_KEYS, QUERY_STRIDE = MAX_HEAD_DIM + 32;
constexpr float NEVER = -1e30f;  // the score of a key that a row does not see

// The KV cache of one layer. The caller owns `keys` and `values`. With P = PACK<T>, keys are
// T[num_blocks][kv_heads][block_size/16][key_dim/P][16][P], and values are
// T[num_blocks][kv_heads][block_size/P][value_dim][P]. block_size and both dims are multiples of 16, and no dim is over
// 256. Slots without a token may hold anything, even NaN.
template <class T>
struct PagedCache {
  T* keys;
  T* values;
  long kv_heads, key_dim, value_dim, block_size;
};

// Writes the key of a token into its slot, which is block * block_size + offset. Different threads may write different
// slots at the same time. write_value writes the value.
template <class T>
void write_key(const PagedCache<T>& cache, long slot, long kv_head, const T* key) {
  constexpr long P = PACK<T>;
  long block = slot / cache.block_size, offset = slot % cache.block_size, lane = offset % PANEL_KEYS;
  T* panel = cache.keys + ((block * cache.kv_heads + kv_head) * cache.block_size + offset - lane) * cache.key_dim;
  for (long d = 0; d < cache.key_dim; d += P) memcpy(panel + d * PANEL_KEYS + lane * P, key + d, sizeof(T) * P);
}
template <class T>
void write_value(const PagedCache<T>& cache, long slot, long kv_head, const T* value) {
  constexpr long P = PACK<T>;
  long block = slot / cache.block_size, offset = slot % cache.block_size, lane = offset % P;
  T* pack = cache.values + ((block * cache.kv_heads + kv_head) * cache.block_size + offset - lane) * cache.value_dim;
  for (long d = 0; d < cache.value_dim; d++) pack[d * P + lane] = value[d];
}

struct AttentionOptions {
  long heads;
  float scaling;
  long window;    // how many tokens a query sees, including its own; 0: all tokens up to its own
  float softcap;  // scores are softcap * tanh(scores * scaling / softcap); 0: scores * scaling
};

// A unit of work: some rows of one sequence and key-value head, over a range of keys. Row r is the query of token
// r / group, and head r % group of the group.
struct AttentionUnit {
  int32_t sequence, kv_head;
  int32_t first_row, rows;
  int32_t first_key, end_key;  // first_key is a multiple of 16
  int32_t split, part;         // split is an index into AttentionPlan::splits; -1: the unit has all keys of its rows
};

// Rows whose keys are divided among several units. Each unit writes its part of the result to `partials`, and the unit
// that ends last merges the parts.
struct AttentionSplit {
  int32_t parts, unfinished;
  size_t offset;  // index into `partials`, where the split has [parts][part_size(rows)]
};

// An item of the pool: the units first_unit .. end_unit - 1.
struct AttentionItem {
  int32_t first_unit, end_unit;
};

// The division of a step's attention into items. It is computed once per step for all layers of the same sizes, and
// keeps its memory from step to step.
struct AttentionPlan {
  StepInput step;
  long group;  // heads per key-value head
  long value_dim;
  std::vector<AttentionUnit> tiles;  // the units of key-value head 0, before they are split
  std::vector<AttentionUnit> units;
  std::vector<AttentionItem> items;
  std::vector<AttentionSplit> splits;
  std::vector<float> partials;

  // The size of a part, rounded up to whole cache lines. A part has, for each of its rows, the sums of weighted values
  // [rows][value_dim], the maxima [rows] and the sums of weights [rows].
  long part_size(long rows) const { return (rows * (value_dim + 2) + LANES - 1) / LANES * LANES; }
};

inline long divide_up(long a, long b) { return (a + b - 1) / b; }

inline long first_visible_key(long position, long window) {
  return window > 0 ? std::max(0L, position - window + 1) : 0L;
}

inline long unit_panels(const AttentionUnit& unit) { return divide_up(unit.end_key - unit.first_key, PANEL_KEYS); }

// The cost of a panel of keys and values. The unit is the time for one row, which is 13 ns with 64 numbers in a head.
// Reading the panel from memory takes about as long as 8 rows.
inline long panel_cost(const AttentionUnit& unit) { return 8 + unit.rows; }
inline long unit_cost(const AttentionUnit& unit) { return (unit_panels(unit) + 1) * panel_cost(unit); }

// Divides the attention of a step into items, long ones first and short ones last, so that all threads end at the same
// time. It is called before the threads of the pool begin, because it allocates. Throws std::bad_alloc.
inline void make_plan(AttentionPlan& plan, const StepInput& step, long heads, long kv_heads, long value_dim,
                      long window, int threads) {
  plan.step = step;
  plan.group = heads / kv_heads;
  plan.value_dim = value_dim;
  plan.tiles.clear();
  plan.units.clear();
  plan.items.clear();
  plan.splits.clear();

  // Units with more rows read the keys fewer times. But if each thread has only few units, the work cannot be shared
  // evenly.
  long all_rows = step.query_start[step.num_sequences] * heads;
  long most_rows = std::min(std::max(all_rows / (8 * threads), 4L * REGISTER_ROWS), UNIT_ROWS);
  long remaining = 0;
  for (long b = 0; b < step.num_sequences; b++) {
    long queries = step.query_start[b + 1] - step.query_start[b];
    long rows = queries * plan.group;
    if (rows == 0) continue;
    long tile = divide_up(divide_up(rows, divide_up(rows, most_rows)), REGISTER_ROWS) * REGISTER_ROWS;
    for (long row = 0; row < rows; row += tile) {
      long count = std::min(tile, rows - row), position = step.seq_lens[b] - queries + row / plan.group;
      long from = first_visible_key(position, window) / PANEL_KEYS * PANEL_KEYS;
      long end = step.seq_lens[b] - queries + (row + count - 1) / plan.group + 1;
      plan.tiles.push_back({int32_t(b), 0, int32_t(row), int32_t(count), int32_t(from), int32_t(end), -1, 0});
      remaining += unit_cost(plan.tiles.back()) * kv_heads;
    }
  }
  std::sort(plan.tiles.begin(), plan.tiles.end(), [](const AttentionUnit& a, const AttentionUnit& b) {
    long cost_a = unit_cost(a), cost_b = unit_cost(b);
    if (cost_a != cost_b) return cost_a > cost_b;
    return a.sequence != b.sequence ? a.sequence < b.sequence : a.first_row < b.first_row;
  });

  // Each item is a share of the remaining work, so that items get shorter towards the end. An item of less than about
  // 5 us is not worth its cost. If a unit would make an item much longer than its share, the unit is split.
  constexpr long MIN_PART_PANELS = 4;
  long least = std::min(24 * 1024 / value_dim, divide_up(remaining, threads));
  long wanted = threads == 1 ? remaining : std::max(least, remaining / (2 * threads));
  long cost = 0;
  size_t partials = 0;
  auto end_item = [&] {
    int32_t first_unit = plan.items.empty() ? 0 : plan.items.back().end_unit;
    plan.items.push_back({first_unit, int32_t(plan.units.size())});
    remaining -= cost;
    wanted = std::max(least, remaining / (2 * threads));
    cost = 0;
  };
  for (AttentionUnit unit : plan.tiles) {
    long from = unit.first_key;
    for (long head = 0; head < kv_heads; head++) {
      unit.kv_head = int32_t(head);
      unit.first_key = int32_t(from);
      unit.split = -1;
      unit.part = 0;
      while (cost + unit_cost(unit) > wanted + wanted / 4) {
        long fitting = std::min((wanted - cost) / panel_cost(unit) - 1, unit_panels(unit) - MIN_PART_PANELS);
        if (fitting < MIN_PART_PANELS) {
          if (cost == 0) break;
          end_item();
          continue;
        }
        if (unit.split < 0) {
          unit.split = int32_t(plan.splits.size());
          plan.splits.push_back({1, 1, partials});
          partials += plan.part_size(unit.rows);
        }
        plan.units.push_back(unit);
        unit.first_key += int32_t(fitting * PANEL_KEYS);
        plan.units.back().end_key = unit.first_key;
        cost += unit_cost(plan.units.back());
        end_item();
        unit.part++;
        plan.splits.back().parts++;
        plan.splits.back().unfinished++;
        partials += plan.part_size(unit.rows);
      }
      plan.units.push_back(unit);
      cost += unit_cost(unit);
      if (cost >= wanted) end_item();
    }
  }
  if (cost > 0) end_item();
  if (plan.partials.size() < partials) plan.partials.resize(partials);
}

// Returns 2^x for x <= 0. The relative error is 1e-7 for float, and 8e-5 for results that are rounded to bfloat16. NaN
// stays NaN.
template <class T>
f32x16 exp2_of_negative(f32x16 x) {
#if defined(__AVX512DQ__)
  f32x16 rest = (f32x16)_mm512_reduce_ps((__m512)x, 0);  // x minus the nearest integer
  f32x16 whole = x - rest;
#else
  x = x < -125.0f ? splat(-125.0f) : x;
  f32x16 shifted = x + 12582912.0f;  // 1.5 * 2^23: the integer nearest to x is in the last bits
  f32x16 rest = x - (shifted - 12582912.0f);
#endif
  f32x16 p;
  if constexpr (PACK<T> == 1) {
    p = rest * 1.327647129e-3f + 9.675541893e-3f;
    p = p * rest + 5.550713092e-2f;
    p = p * rest + 2.402212024e-1f;
    p = p * rest + 6.931469440e-1f;
    p = p * rest + 1.0f;
  } else {
    p = rest * 5.517166853e-2f + 2.426111400e-1f;
    p = p * rest + 6.932609677e-1f;
    p = p * rest + 9.999280572e-1f;
  }
#if defined(__AVX512DQ__)
  return (f32x16)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
  return (f32x16)((u32x16)p + ((u32x16)shifted << 23));
#endif
}

// scores[r][16 c ..] = the dot products of queries[r] with the keys of panel c. Prefetches the panels `later`.
template <class T, int R, int C>
void score_panels(const T* queries, const T* const* panels, const T* const* later, long key_dim, float* scores) {
  constexpr int VECTORS = C * PANEL_VECTORS;
  Vector sums[R][VECTORS];
  const T *panel[C], *ahead[C];
#pragma GCC unroll 8
  for (int c = 0; c < C; c++) panel[c] = panels[c], ahead[c] = later[c];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) sums[r][v] = Vector{};
#pragma GCC unroll 1
  for (long d = 0; d < key_dim; d += PACK<T>) {
    Packs<T> keys[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++)
      keys[v] = Packs<T>::load(panel[v / PANEL_VECTORS] + d * PANEL_KEYS + v % PANEL_VECTORS * WIDTH * PACK<T>);
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) __builtin_prefetch(ahead[c] + d * PANEL_KEYS);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      Packs<T> query = Packs<T>::splat(queries + r * QUERY_STRIDE + d);
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) sums[r][v] = dot(sums[r][v], query, keys[v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) memcpy(scores + r * SCORE_STRIDE + v * WIDTH, &sums[r][v], sizeof(Vector));
}

// out[r] = out[r] * factors[r] + the sum of the values of `count` panels, weighted with weights[r]. It does so for the
// 16 C columns from `column` on. Prefetches the panels `later`.
template <class T, int R, int C>
void add_columns(const T* weights, const float* factors, const T* const* panels, const T* const* later, long count,
                 long value_dim, long column, float* out) {
  constexpr long P = PACK<T>;
  constexpr int VECTORS = C * PANEL_VECTORS;
  Vector sums[R][VECTORS];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++)
      sums[r][v] = load_vector<Vector>(out + r * value_dim + column + v * WIDTH) * factors[r];
  for (long p = 0; p < count; p++) {
    const T *panel = panels[p] + column * P, *ahead = later[p] + column * P;
#pragma GCC unroll 1
    for (long k = 0; k < PANEL_KEYS; k += P) {
      Packs<T> values[VECTORS];
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) values[v] = Packs<T>::load(panel + k * value_dim + v * WIDTH * P);
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) __builtin_prefetch(ahead + k * value_dim + c * LANES * P);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        Packs<T> weight = Packs<T>::splat(weights + r * SCORE_STRIDE + p * PANEL_KEYS + k);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) sums[r][v] = dot(sums[r][v], weight, values[v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++)
      memcpy(out + r * value_dim + column + v * WIDTH, &sums[r][v], sizeof(Vector));
}

template <class T, int R>
void score_rows(const T* queries, const T* const* panels, const T* const* later, long count, long key_dim,
                float* scores) {
  long p = 0;
  for (; p + REGISTER_PANELS <= count; p += REGISTER_PANELS)
    score_panels<T, R, REGISTER_PANELS>(queries, panels + p, later + p, key_dim, scores + p * PANEL_KEYS);
  for (; p < count; p++) score_panels<T, R, 1>(queries, panels + p, later + p, key_dim, scores + p * PANEL_KEYS);
}

template <class T, int R>
void add_rows(const T* weights, const float* factors, const T* const* panels, const T* const* later, long count,
              long value_dim, float* out) {
  long column = 0;
  for (; column + REGISTER_PANELS * LANES <= value_dim; column += REGISTER_PANELS * LANES)
    add_columns<T, R, REGISTER_PANELS>(weights, factors, panels, later, count, value_dim, column, out);
  for (; column < value_dim; column += LANES)
    add_columns<T, R, 1>(weights, factors, panels, later, count, value_dim, column, out);
}

// Tables of both products, for 1 to REGISTER_ROWS rows: entry R is for R + 1 rows.
template <class T, class = std::make_integer_sequence<int, REGISTER_ROWS>>
struct Products;
template <class T, int... R>
struct Products<T, std::integer_sequence<int, R...>> {
  static constexpr decltype(&score_rows<T, 1>) SCORE[] = {score_rows<T, R + 1>...};
  static constexpr decltype(&add_rows<T, 1>) ADD[] = {add_rows<T, R + 1>...};
};

// scores = softcap * tanh(scores * scaling / softcap)
inline void cap_scores(float* scores, long count, const AttentionOptions& options) {
  for (long k = 0; k < count; k += LANES) {
    f32x16 e = exp(load(scores + k) * (2.0f * options.scaling / options.softcap));
    store(scores + k, options.softcap - 2.0f * options.softcap / (e + 1.0f));
  }
}

// The state of a row between chunks. The weight of a key is 2^(scale * score - maximum), and `sum` has the sum of the
// weights in each lane.
struct SoftmaxRow {
  f32x16 sum;
  float maximum;
};

// Converts the scores of one row over `panels` panels into weights. The row sees the keys from .. to - 1 of these.
// Returns the factor by which the sums of the previous chunks have to be multiplied, because the maximum has changed.
template <class T>
float weigh(float* scores, T* weights, long panels, long from, long to, float scale, SoftmaxRow& row) {
  if (from >= to) {
    for (long p = 0; p < panels; p++) store(weights + p * PANEL_KEYS, f32x16{});
    return 1.0f;
  }
  std::fill(scores, scores + from, NEVER);
  std::fill(scores + to, scores + panels * PANEL_KEYS, NEVER);
  f32x16 most = load(scores), other = most;  // two maxima, so that two chains of instructions run side by side
  for (long p = 1; p + 1 < panels; p += 2) {
    most = max(most, load(scores + p * PANEL_KEYS));
    other = max(other, load(scores + (p + 1) * PANEL_KEYS));
  }
  most = max(max(most, other), load(scores + (panels - 1) * PANEL_KEYS));
  float maximum = std::max(row.maximum, max(most) * scale);
  float factor = exp2_of_negative<float>(splat(row.maximum - maximum))[0];
  f32x16 sum = row.sum * factor;
  for (long p = 0; p < panels; p++) {
    f32x16 weight = exp2_of_negative<T>(load(scores + p * PANEL_KEYS) * scale - maximum);
    sum = sum + weight;
    store(weights + p * PANEL_KEYS, weight);
  }
  row = {sum, maximum};
  return factor;
}

// Copies the first `count` values of a panel, and writes zeros in place of the rest. The rest may be NaN, which a
// weight of 0 does not remove from a sum.
template <class T>
void copy_values(const T* panel, long count, long value_dim, T* out) {
  constexpr long P = PACK<T>;
  long whole = count / P * P * value_dim;
  memcpy(out, panel, sizeof(T) * whole);
  memset((void*)(out + whole), 0, sizeof(T) * (PANEL_KEYS * value_dim - whole));
  if (count % P)
    for (long d = 0; d < value_dim; d++) out[whole + d * P] = panel[whole + d * P];
}

template <class T>
void write_row(const float* sums, float factor, long value_dim, T* out) {
  for (long d = 0; d < value_dim; d += LANES) store(out + d, load(sums + d) * factor);
}

// out = the sums of weighted values of a row over all parts, scaled to their common maximum. Returns the sum of the
// weights.
inline float merge_parts(const float* parts, long count, long part_size, long rows, long row, long value_dim,
                         float* out) {
  const float* maxima = parts + rows * value_dim + row;
  const float* sums = maxima + rows;
  float maximum = NEVER, sum = 0.0f;
  for (long p = 0; p < count; p++) maximum = std::max(maximum, maxima[p * part_size]);
  memset(out, 0, sizeof(float) * value_dim);
  for (long p = 0; p < count; p++) {
    float factor = exp2_of_negative<float>(splat(maxima[p * part_size] - maximum))[0];
    const float* part = parts + p * part_size + row * value_dim;
    for (long d = 0; d < value_dim; d += LANES) store(out + d, load(out + d) + load(part + d) * factor);
    sum += sums[p * part_size] * factor;
  }
  return sum;
}

// A range of a unit's keys, and where its panels of keys and values begin. Behind these, each array has the panels that
// are read next, for prefetching.
template <class T>
struct KeyChunk {
  const AttentionUnit* unit;
  long first_key, end_key, panels;
  const T* keys[CHUNK_PANELS + REGISTER_PANELS];
  const T* values[CHUNK_PANELS + REGISTER_PANELS];

  void find(const AttentionUnit* its_unit, long key, long most_keys, const StepInput& step,
            const PagedCache<T>& cache) {
    unit = its_unit, first_key = key, end_key = std::min(key + most_keys, long(unit->end_key));
    panels = divide_up(end_key - key, PANEL_KEYS);
    const int32_t* table = step.block_tables + unit->sequence * step.table_width;
    long block = key / cache.block_size, offset = key % cache.block_size;
    for (long p = 0; p < panels; p++) {
      long token = (table[block] * cache.kv_heads + unit->kv_head) * cache.block_size + offset;
      keys[p] = cache.keys + token * cache.key_dim;
      values[p] = cache.values + token * cache.value_dim;
      offset += PANEL_KEYS;
      if (offset == cache.block_size) block++, offset = 0;
    }
  }
};

// Computes one item on one thread. With the functions that it calls, it takes about 200 KiB of the thread's stack.
template <class T>
class ItemWalk {
 public:
  ItemWalk(AttentionPlan& plan, const AttentionOptions& options, const PagedCache<T>& cache, const T* query,
           long query_stride, T* out, long out_stride)
      : plan_(plan), options_(options), cache_(cache), query_(query), query_stride_(query_stride), out_(out),
        out_stride_(out_stride) {}

  void run(const AttentionItem& item) {
    long fitting = CHUNK_NUMBERS / (cache_.key_dim + cache_.value_dim) / PANEL_KEYS * PANEL_KEYS;
    long most_keys = std::min(fitting, CHUNK_PANELS * PANEL_KEYS);
    const AttentionUnit *unit = &plan_.units[item.first_unit], *end = unit + (item.end_unit - item.first_unit);
    KeyChunk<T> chunks[2], *chunk = &chunks[0], *next = &chunks[1];
    chunk->find(unit, unit->first_key, most_keys, plan_.step, cache_);
    start(*unit);
    while (unit != end) {
      bool ends_unit = chunk->end_key == unit->end_key;
      next->panels = 0;
      if (!ends_unit)
        next->find(unit, chunk->end_key, most_keys, plan_.step, cache_);
      else if (unit + 1 != end)
        next->find(unit + 1, unit[1].first_key, most_keys, plan_.step, cache_);
      attend(*chunk, *next);
      std::swap(chunk, next);
      if (!ends_unit) continue;
      finish(*unit);
      if (++unit != end) start(*unit);
    }
  }

 private:
  void start(const AttentionUnit& unit) {
    long start = plan_.step.query_start[unit.sequence], end = plan_.step.query_start[unit.sequence + 1];
    long before = plan_.step.seq_lens[unit.sequence] - (end - start);
    for (long r = 0; r < unit.rows; r++) {
      long row = unit.first_row + r, query = row / plan_.group;
      long head = unit.kv_head * plan_.group + row - query * plan_.group;
      queries_[r] = query_ + (start + query) * query_stride_ + head * cache_.key_dim;
      targets_[r] = out_ + (start + query) * out_stride_ + head * cache_.value_dim;
      position_[r] = before + query;
      softmax_[r] = {f32x16{}, NEVER};
    }
    memset(sums_, 0, sizeof(float) * unit.rows * cache_.value_dim);
  }

  void attend(KeyChunk<T>& chunk, const KeyChunk<T>& next) {
    alignas(64) T last_values[PANEL_KEYS * MAX_HEAD_DIM];
    for (long p = 0; p < REGISTER_PANELS; p++) {
      chunk.keys[chunk.panels + p] = chunk.values[std::min(p, chunk.panels - 1)];
      chunk.values[chunk.panels + p] = p < next.panels ? next.keys[p] : chunk.values[0];
    }
    if (long rest = (chunk.end_key - chunk.first_key) % PANEL_KEYS) {
      copy_values(chunk.values[chunk.panels - 1], rest, cache_.value_dim, last_values);
      chunk.values[chunk.panels - 1] = last_values;
    }
    long rows = chunk.unit->rows, blocks = divide_up(rows, REGISTER_ROWS);
    long block_rows = divide_up(rows, blocks);  // 7 rows are faster as 4 and 3 than as 6 and 1
    for (long block = 0; block * block_rows < rows; block++)
      attend_block(chunk, block * block_rows, std::min(block_rows, rows - block * block_rows));
  }

  // Computes `count` rows from `row` on, as many as the registers hold, with those keys of the chunk that any of these
  // rows sees.
  void attend_block(const KeyChunk<T>& chunk, long row, long count) {
    alignas(64) T queries[REGISTER_ROWS * QUERY_STRIDE];
    alignas(64) float scores[REGISTER_ROWS * SCORE_STRIDE];
    alignas(64) T weights[REGISTER_ROWS * SCORE_STRIDE];
    float factors[REGISTER_ROWS];
    long begin = std::max(0L, first_visible_key(position_[row], options_.window) - chunk.first_key) / PANEL_KEYS;
    long end = std::min(chunk.panels, divide_up(position_[row + count - 1] + 1 - chunk.first_key, PANEL_KEYS));
    if (begin >= end) return;
    for (long r = 0; r < count; r++) memcpy(queries + r * QUERY_STRIDE, queries_[row + r], sizeof(T) * cache_.key_dim);
    const T *const *keys = chunk.keys + begin, *const *values = chunk.values + begin;
    Products<T>::SCORE[count - 1](queries, keys, keys + REGISTER_PANELS, end - begin, cache_.key_dim, scores);

    const float log2_e = 1.44269504f;
    const float scale = options_.softcap > 0 ? log2_e : log2_e * options_.scaling;
    long first = chunk.first_key + begin * PANEL_KEYS;
    long last = std::min(chunk.first_key + end * PANEL_KEYS, chunk.end_key);
    for (long r = 0; r < count; r++) {
      float* row_scores = scores + r * SCORE_STRIDE;
      if (options_.softcap > 0) cap_scores(row_scores, (end - begin) * PANEL_KEYS, options_);
      long from = std::max(first_visible_key(position_[row + r], options_.window), first);
      long to = std::min(position_[row + r] + 1, last);
      factors[r] = weigh(row_scores, weights + r * SCORE_STRIDE, end - begin, from - first, to - first, scale,
                         softmax_[row + r]);
    }
    Products<T>::ADD[count - 1](weights, factors, values, values + REGISTER_PANELS, end - begin, cache_.value_dim,
                                sums_ + row * cache_.value_dim);
  }

  void finish(const AttentionUnit& unit) {
    long value_dim = cache_.value_dim;
    if (unit.split < 0) {
      for (long r = 0; r < unit.rows; r++)
        write_row(sums_ + r * value_dim, 1.0f / sum(softmax_[r].sum), value_dim, targets_[r]);
      return;
    }
    AttentionSplit& split = plan_.splits[unit.split];
    long part_size = plan_.part_size(unit.rows);
    float* parts = plan_.partials.data() + split.offset;
    float* part = parts + unit.part * part_size;
    memcpy(part, sums_, sizeof(float) * unit.rows * value_dim);
    part += unit.rows * value_dim;
    for (long r = 0; r < unit.rows; r++) part[r] = softmax_[r].maximum;
    for (long r = 0; r < unit.rows; r++) part[unit.rows + r] = sum(softmax_[r].sum);
    if (__atomic_sub_fetch(&split.unfinished, 1, __ATOMIC_ACQ_REL) > 0) return;
    split.unfinished = split.parts;  // for the next layer
    for (long r = 0; r < unit.rows; r++) {
      float weight_sum = merge_parts(parts, split.parts, part_size, unit.rows, r, value_dim, sums_);
      write_row(sums_, 1.0f / weight_sum, value_dim, targets_[r]);
    }
  }

  AttentionPlan& plan_;
  const AttentionOptions& options_;
  const PagedCache<T>& cache_;
  const T* query_;
  long query_stride_;
  T* out_;
  long out_stride_;

  // The rows of the current unit.
  const T* queries_[UNIT_ROWS];
  T* targets_[UNIT_ROWS];
  long position_[UNIT_ROWS];  // of a row's token in its sequence
  SoftmaxRow softmax_[UNIT_ROWS];
  alignas(64) float sums_[UNIT_ROWS * MAX_HEAD_DIM];  // sums of weighted values, [rows][value_dim]
};

// Computes one item of a plan. query is T[tokens][heads * key_dim], out is T[tokens][heads * value_dim], and their rows
// are query_stride and out_stride elements apart.
template <class T>
void attend_item(AttentionPlan& plan, long item, const AttentionOptions& options, const PagedCache<T>& cache,
                 const T* query, long query_stride, T* out, long out_stride) {
  ItemWalk<T>(plan, options, cache, query, query_stride, out, out_stride).run(plan.items[item]);
}

}  // namespace oaiserve
