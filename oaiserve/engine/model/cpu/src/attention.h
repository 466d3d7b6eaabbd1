// Attention over the paged key and value cache, in place.
//
// Sixteen keys lie side by side (a panel), so that one `dot` adds to sixteen scores; values lie so that one `dot` adds
// `PACK` weighted values to sixteen outputs. Both are panels of a packed matrix, so a decode step and a prompt go the
// same way: a few rows (queries times heads of one key-value head) times a few panels, sums in registers. A unit of work
// walks its keys chunk by chunk, with the softmax's maximum and sum kept per row.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "simd.h"

namespace oaiserve {

constexpr long PANEL = LANES;         // keys side by side
constexpr long MAX_HEAD_DIM = 256;
constexpr long CHUNK_PANELS = 16;     // a chunk's keys and values stay in L2 while all rows of a unit pass over them
constexpr long CHUNK = CHUNK_PANELS * PANEL;
constexpr long UNIT_ROWS = 96;
#if defined(__AVX512F__)
constexpr int ROWS = 6, PANELS = 4;   // 24 of the 32 registers hold sums
#else
constexpr int ROWS = 2, PANELS = 2;   // 8 of 16, two for a vector
#endif
constexpr long QUERY_STRIDE = MAX_HEAD_DIM + 32;
constexpr float NEVER = -1e30f;       // the score of a key that a row does not see

// One layer's cache. Keys T[num_blocks][kv_heads][block_size/16][key_dim/P][16][P], values
// T[num_blocks][kv_heads][block_size/P][value_dim][P], P = PACK<T>. block_size, key_dim and value_dim are multiples of 16,
// dims at most 256.
template <class T>
struct PagedCache {
  T* keys;
  T* values;
  long kv_heads, key_dim, value_dim, block_size;

  // The first of 16 keys or values that begin at `offset` in a block.
  const T* key_panel(long block, long kv_head, long offset) const {
    return keys + ((block * kv_heads + kv_head) * block_size + offset) * key_dim;
  }
  const T* value_panel(long block, long kv_head, long offset) const {
    return values + ((block * kv_heads + kv_head) * block_size + offset) * value_dim;
  }
};

// slot = block * block_size + offset. Neighbouring slots may be written at the same time by different threads.
template <class T>
void write_key(const PagedCache<T>& cache, long slot, long kv_head, const T* key) {
  constexpr int P = PACK<T>;
  long block = slot / cache.block_size, offset = slot % cache.block_size, lane = offset % PANEL;
  T* panel = cache.keys + ((block * cache.kv_heads + kv_head) * cache.block_size + offset - lane) * cache.key_dim;
  for (long d = 0; d < cache.key_dim; d += P) memcpy(panel + d * PANEL + lane * P, key + d, sizeof(T) * P);
}

template <class T>
void write_value(const PagedCache<T>& cache, long slot, long kv_head, const T* value) {
  constexpr int P = PACK<T>;
  long block = slot / cache.block_size, offset = slot % cache.block_size, lane = offset % P;
  T* step = cache.values + ((block * cache.kv_heads + kv_head) * cache.block_size + offset - lane) * cache.value_dim;
  for (long d = 0; d < cache.value_dim; d++) step[d * P + lane] = value[d];
}

// The sequences of a step. Sequence b's queries are the last query_start[b + 1] - query_start[b] of its seq_lens[b] tokens.
struct AttentionBatch {
  long sequences;
  const int32_t* query_start;   // [sequences + 1]
  const int32_t* seq_lens;      // [sequences], tokens in the cache, this step's included
  const int32_t* block_tables;  // [sequences][table_width]
  long table_width;
};

struct AttentionOptions {
  long heads;
  float scaling;
  long window;    // a query sees this many tokens, itself included; 0: all before it
  float softcap;  // scores = softcap * tanh(scores * scaling / softcap); 0: none
};

// Rows of one sequence and key-value head (row r: query r / group, head r % group of its group) over a range of keys.
struct AttentionUnit {
  int32_t sequence, kv_head;
  int32_t first_row, rows;
  int32_t first_key, end_key;
  int32_t split, part;  // split: index into AttentionPlan::splits, -1 if the unit sees all its keys
};

// Rows whose keys are divided among several units. Each leaves its share in `partials`; the last one merges them.
struct AttentionSplit {
  int32_t parts, unfinished;
  size_t offset;  // of [parts][rows][value_dim + 2] floats: sums of weighted values, maximum and sum of the weights
};

struct AttentionItem {
  int32_t first_unit, end_unit;
  long cost;
};

// What is worked out once per step for all layers with the same options and dims.
struct AttentionPlan {
  AttentionBatch batch;
  long group;  // heads per key-value head
  std::vector<AttentionUnit> units;
  std::vector<AttentionItem> items;
  std::vector<AttentionSplit> splits;
  std::vector<float> partials;
};

// The keys that row `row` sees are first_visible() .. position inclusive.
inline long row_position(const AttentionBatch& batch, long group, long sequence, long row) {
  long queries = batch.query_start[sequence + 1] - batch.query_start[sequence];
  return batch.seq_lens[sequence] - queries + row / group;
}
inline long first_visible(long position, long window) {
  return window > 0 ? std::max(0L, position - window + 1) : 0L;
}

// A panel's cost: reading it from memory takes about as long as multiplying this many rows by it.
constexpr long READ_COST = 10;

inline long unit_cost(const AttentionUnit& unit) {
  long panels = (unit.end_key + PANEL - 1) / PANEL - unit.first_key / PANEL;
  return (panels + 1) * (READ_COST + unit.rows);
}

inline void make_plan(AttentionPlan& plan, const AttentionBatch& batch, const AttentionOptions& options, long kv_heads,
                      long value_dim, int threads) {
  plan.batch = batch;
  plan.group = options.heads / kv_heads;
  plan.units.clear();
  plan.items.clear();
  plan.splits.clear();

  long total = 0;
  for (long b = 0; b < batch.sequences; b++) {
    long rows = (batch.query_start[b + 1] - batch.query_start[b]) * plan.group;
    if (rows == 0) continue;
    long tiles = (rows + UNIT_ROWS - 1) / UNIT_ROWS;
    long tile = ((rows + tiles - 1) / tiles + ROWS - 1) / ROWS * ROWS;
    for (long first = 0; first < rows; first += tile) {
      long count = std::min(tile, rows - first);
      long from = first_visible(row_position(batch, plan.group, b, first), options.window) / PANEL * PANEL;
      long end = row_position(batch, plan.group, b, first + count - 1) + 1;
      for (long h = 0; h < kv_heads; h++) {
        plan.units.push_back({int32_t(b), int32_t(h), int32_t(first), int32_t(count), int32_t(from), int32_t(end), -1, 0});
        total += unit_cost(plan.units.back());
      }
    }
  }

  // Split units that one thread would still be busy with when the others have nothing left to do.
  constexpr long MIN_PART_PANELS = 4;
  long largest = total / (threads * 8) + 1;
  if (threads > 1) {
    size_t partials = 0;
    std::vector<AttentionUnit> whole;
    whole.swap(plan.units);
    for (const AttentionUnit& unit : whole) {
      long panels = (unit.end_key + PANEL - 1) / PANEL - unit.first_key / PANEL;
      long parts = std::min((unit_cost(unit) + largest - 1) / largest, panels / MIN_PART_PANELS);
      if (parts <= 1) {
        plan.units.push_back(unit);
        continue;
      }
      for (long p = 0; p < parts; p++) {
        AttentionUnit part = unit;
        part.split = int32_t(plan.splits.size());
        part.part = int32_t(p);
        part.first_key = int32_t(unit.first_key + panels * p / parts * PANEL);
        if (p + 1 < parts) part.end_key = int32_t(unit.first_key + panels * (p + 1) / parts * PANEL);
        plan.units.push_back(part);
      }
      plan.splits.push_back({int32_t(parts), int32_t(parts), partials});
      partials += size_t(parts * unit.rows * (value_dim + 2));
    }
    if (plan.partials.size() < partials) plan.partials.resize(partials);
  }

  // Small units go together: handing out an item costs time, and within one the next unit's keys are prefetched.
  constexpr long MAX_ITEM_COST = 1200;
  long wanted = std::min(total / (threads * 16), MAX_ITEM_COST);
  AttentionItem item = {0, 0, 0};
  for (long u = 0; u < long(plan.units.size()); u++) {
    item.end_unit = int32_t(u + 1);
    item.cost += unit_cost(plan.units[u]);
    if (item.cost >= wanted || u + 1 == long(plan.units.size())) {
      plan.items.push_back(item);
      item = {int32_t(u + 1), 0, 0};
    }
  }
  // The long ones first, so that the short ones fill the end.
  std::stable_sort(plan.items.begin(), plan.items.end(),
                   [](const AttentionItem& a, const AttentionItem& b) { return a.cost > b.cost; });
}

// 2^x for x <= 0.
inline f32x16 exp2_of_negative(f32x16 x) {
#if defined(__AVX512DQ__)
  f32x16 rest = (f32x16)_mm512_reduce_ps((__m512)x, 0);
  f32x16 whole = x - rest;
#else
  x = max(x, splat(-126.0f));
  const f32x16 magic = splat(12582912.0f);
  f32x16 whole = (x + magic) - magic;
  f32x16 rest = x - whole;
#endif
  f32x16 p = splat(1.339887440e-3f);
  p = p * rest + 9.618437357e-3f;
  p = p * rest + 5.550332549e-2f;
  p = p * rest + 2.402264791e-1f;
  p = p * rest + 6.931472028e-1f;
  p = p * rest + 1.0f;
#if defined(__AVX512DQ__)
  return (f32x16)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
  f32x16 scale = (f32x16)((__builtin_convertvector(whole, i32x16) + 127) << 23);
  return p * scale;
#endif
}

// scores[r][16 c ..] = queries[r] . keys of panel c. Prefetches what is read later, `ahead`, on the way.
template <class T, int R, int C>
void score_panels(const T* queries, const T* const* panels, const T* const* ahead, long key_dim, float* scores) {
  f32x16 sums[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) sums[r][c] = f32x16{};
  const T *panel[C], *later[C];
#pragma GCC unroll 8
  for (int c = 0; c < C; c++) panel[c] = panels[c], later[c] = ahead[c];
#pragma GCC unroll 1
  for (long d = 0; d < key_dim; d += PACK<T>) {
    Packed<T> keys[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) {
      keys[c] = Packed<T>::load(panel[c] + d * PANEL);
      __builtin_prefetch(later[c] + d * PANEL);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      Packed<T> query = Packed<T>::splat(queries + r * QUERY_STRIDE + d);
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) sums[r][c] = dot(sums[r][c], query, keys[c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) store(scores + r * CHUNK + c * PANEL, sums[r][c]);
}

// out[r][column + 16 c ..] = out[r][column + 16 c ..] * factors[r] + weights[r] . values[.., column + 16 c ..].
template <class T, int R, int C>
void add_values(const T* weights, const float* factors, const T* const* panels, const T* const* ahead, long count,
                long value_dim, long column, float* out) {
  constexpr int P = PACK<T>;
  f32x16 sums[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) sums[r][c] = load(out + r * value_dim + column + c * LANES) * factors[r];
  for (long p = 0; p < count; p++) {
    const T *values = panels[p] + column * P, *later = ahead[p] + column * P;
#pragma GCC unroll 1
    for (long k = 0; k < PANEL; k += P) {
      Packed<T> columns[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) {
        columns[c] = Packed<T>::load(values + k * value_dim + c * LANES * P);
        __builtin_prefetch(later + k * value_dim + c * LANES * P);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        Packed<T> weight = Packed<T>::splat(weights + r * CHUNK + p * PANEL + k);
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) sums[r][c] = dot(sums[r][c], weight, columns[c]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) store(out + r * value_dim + column + c * LANES, sums[r][c]);
}

// The same for `count` panels, and for all columns, with R rows in registers.
template <class T, int R>
struct RowBlock {
  static void score(const T* queries, const T* const* panels, const T* const* ahead, long count, long key_dim,
                    float* scores) {
    long p = 0;
    for (; p + PANELS <= count; p += PANELS)
      score_panels<T, R, PANELS>(queries, panels + p, ahead + p, key_dim, scores + p * PANEL);
    for (; p < count; p++) score_panels<T, R, 1>(queries, panels + p, ahead + p, key_dim, scores + p * PANEL);
  }
  static void add(const T* weights, const float* factors, const T* const* panels, const T* const* ahead, long count,
                  long value_dim, float* out) {
    long column = 0;
    for (; column + PANELS * LANES <= value_dim; column += PANELS * LANES)
      add_values<T, R, PANELS>(weights, factors, panels, ahead, count, value_dim, column, out);
    for (; column < value_dim; column += LANES)
      add_values<T, R, 1>(weights, factors, panels, ahead, count, value_dim, column, out);
  }
};

// Calls `f` with RowBlock<T, rows>.
template <class T, int R = ROWS, class F>
void with_row_block(long rows, F f) {
  if constexpr (R == 1)
    f(RowBlock<T, 1>());
  else if (rows == R)
    f(RowBlock<T, R>());
  else
    with_row_block<T, R - 1>(rows, f);
}

// What a unit remembers of its rows from chunk to chunk. Weights are 2^(score - maximum), with log2(e) in the score.
struct AttentionRows {
  alignas(64) float out[UNIT_ROWS * MAX_HEAD_DIM];  // [rows][value_dim], sums of weighted values
  f32x16 sums[UNIT_ROWS];                           // of the weights, by lane
  float maxima[UNIT_ROWS];
};

// One row's scores to weights. It sees the keys from .. to - 1 of its `count` panels. Returns the factor for what was
// summed up with the old maximum.
template <class T>
float weigh(float* scores, T* weights, long count, long from, long to, float scale, float& maximum, f32x16& sums) {
  if (from >= to) {
    for (long p = 0; p < count; p++) store(weights + p * PANEL, f32x16{});
    return 1.0f;
  }
  for (long k = 0; k < from; k++) scores[k] = NEVER;
  for (long k = to; k < count * PANEL; k++) scores[k] = NEVER;
  f32x16 most = load(scores);
  for (long p = 1; p < count; p++) most = max(most, load(scores + p * PANEL));
  float before = maximum;
  maximum = std::max(before, max(most) * scale);
  float factor = exp2_of_negative(splat(before - maximum))[0];
  f32x16 total = sums * factor;
  for (long p = 0; p < count; p++) {
    f32x16 weight = exp2_of_negative(load(scores + p * PANEL) * scale - maximum);
    total = total + weight;
    store(weights + p * PANEL, weight);
  }
  sums = total;
  return factor;
}

// scores = softcap * tanh(scores * scaling / softcap)
inline void cap(float* scores, long count, float scaling, float softcap) {
  for (long k = 0; k < count; k += LANES) {
    f32x16 e = exp(load(scores + k) * (2.0f * scaling / softcap));
    store(scores + k, softcap - 2.0f * softcap / (e + 1.0f));
  }
}

// Where the keys and values of `count` panels from `key` on lie.
template <class T>
void find_panels(const AttentionBatch& batch, const PagedCache<T>& cache, const AttentionUnit& unit, long key, long count,
                 const T** keys, const T** values) {
  const int32_t* table = batch.block_tables + unit.sequence * batch.table_width;
  long block = key / cache.block_size, offset = key % cache.block_size;
  for (long p = 0; p < count; p++) {
    long row = (table[block] * cache.kv_heads + unit.kv_head) * cache.block_size + offset;
    keys[p] = cache.keys + row * cache.key_dim;
    if (values) values[p] = cache.values + row * cache.value_dim;
    offset += PANEL;
    if (offset == cache.block_size) block++, offset = 0;
  }
}

constexpr long AHEAD = PANELS;

// The last panel's values with zeros for what lies beyond the end: there may be anything, and 0 * NaN is NaN.
template <class T>
void copy_tail(const T* values, long count, long value_dim, T* out) {
  constexpr int P = PACK<T>;
  long whole = count / P * P;
  memcpy(out, values, sizeof(T) * whole * value_dim);
  memset((void*)(out + whole * value_dim), 0, sizeof(T) * (PANEL - whole) * value_dim);
  if (whole < count)
    for (long d = 0; d < value_dim; d++) out[whole * value_dim + d * P] = values[whole * value_dim + d * P];
}

template <class T>
void attend_item(AttentionPlan& plan, long item, const AttentionOptions& options, const PagedCache<T>& cache,
                 const T* query, long query_stride, T* out, long out_stride) {
  const AttentionBatch& batch = plan.batch;
  const float log2_e = 1.44269504f;
  alignas(64) T queries[ROWS * QUERY_STRIDE];
  alignas(64) float scores[ROWS * CHUNK];
  alignas(64) T weights[ROWS * CHUNK];
  alignas(64) T tail[PANEL * MAX_HEAD_DIM];
  float factors[ROWS];
  AttentionRows rows;
  const T* stream[2 * CHUNK_PANELS + AHEAD];  // a chunk's panels in the order they are read: keys, values, the next keys

  long end_unit = plan.items[item].end_unit;
  for (long u = plan.items[item].first_unit; u < end_unit; u++) {
    const AttentionUnit& unit = plan.units[u];
    memset(rows.out, 0, sizeof(float) * unit.rows * cache.value_dim);
    for (long r = 0; r < unit.rows; r++) rows.sums[r] = f32x16{}, rows.maxima[r] = NEVER;
    long sequence_first = batch.query_start[unit.sequence];

    for (long first = unit.first_key; first < unit.end_key; first += CHUNK) {
      long keys_here = std::min(CHUNK, unit.end_key - first);
      long count = (keys_here + PANEL - 1) / PANEL;
      find_panels(batch, cache, unit, first, count, stream, stream + count);
      const AttentionUnit* next = first + CHUNK < unit.end_key ? &unit : u + 1 < end_unit ? &plan.units[u + 1] : nullptr;
      long next_first = next == &unit ? first + CHUNK : next ? next->first_key : 0;
      long next_count = next ? std::min(AHEAD, (next->end_key - next_first + PANEL - 1) / PANEL) : 0;
      if (next) find_panels<T>(batch, cache, *next, next_first, next_count, stream + 2 * count, nullptr);
      for (long p = next_count; p < AHEAD; p++) stream[2 * count + p] = stream[2 * count - 1];
      const T** values = stream + count;
      if (keys_here % PANEL) {
        copy_tail(values[count - 1], keys_here % PANEL, cache.value_dim, tail);
        values[count - 1] = tail;
      }

      for (long r0 = 0; r0 < unit.rows; r0 += ROWS) {
        long n = std::min(long(ROWS), unit.rows - r0);
        // The panels that any of these rows sees.
        long low = first_visible(row_position(batch, plan.group, unit.sequence, unit.first_row + r0), options.window);
        long high = row_position(batch, plan.group, unit.sequence, unit.first_row + r0 + n - 1) + 1;
        long begin = low > first ? (low - first) / PANEL : 0;
        long end = std::min(count, (high - first + PANEL - 1) / PANEL);
        if (high <= first || begin >= end) continue;
        for (long r = 0; r < n; r++) {
          long row = unit.first_row + r0 + r;
          long head = unit.kv_head * plan.group + row % plan.group;
          memcpy(queries + r * QUERY_STRIDE, query + (sequence_first + row / plan.group) * query_stride + head * cache.key_dim,
                 sizeof(T) * cache.key_dim);
        }
        with_row_block<T>(n, [&](auto block) {
          block.score(queries, stream + begin, stream + begin + AHEAD, end - begin, cache.key_dim, scores);
        });
        float scale = options.scaling * log2_e;
        if (options.softcap > 0) {
          for (long r = 0; r < n; r++) cap(scores + r * CHUNK, (end - begin) * PANEL, options.scaling, options.softcap);
          scale = log2_e;
        }
        for (long r = 0; r < n; r++) {
          long position = row_position(batch, plan.group, unit.sequence, unit.first_row + r0 + r);
          long base = first + begin * PANEL;
          long from = std::max(first_visible(position, options.window) - base, 0L);
          long to = std::min({position + 1 - base, (end - begin) * PANEL, unit.end_key - base});
          factors[r] = weigh(scores + r * CHUNK, weights + r * CHUNK, end - begin, from, to, scale, rows.maxima[r0 + r],
                             rows.sums[r0 + r]);
        }
        with_row_block<T>(n, [&](auto block) {
          block.add(weights, factors, values + begin, values + begin + AHEAD, end - begin, cache.value_dim,
                    rows.out + r0 * cache.value_dim);
        });
      }
    }

    if (unit.split < 0) {
      for (long r = 0; r < unit.rows; r++) {
        long row = unit.first_row + r, head = unit.kv_head * plan.group + row % plan.group;
        T* target = out + (sequence_first + row / plan.group) * out_stride + head * cache.value_dim;
        float factor = 1.0f / sum(rows.sums[r]);
        for (long d = 0; d < cache.value_dim; d += LANES) store(target + d, load(rows.out + r * cache.value_dim + d) * factor);
      }
      continue;
    }

    AttentionSplit& split = plan.splits[unit.split];
    long part_size = unit.rows * (cache.value_dim + 2);
    float* shares = plan.partials.data() + split.offset;
    float* share = shares + unit.part * part_size;
    memcpy(share, rows.out, sizeof(float) * unit.rows * cache.value_dim);
    for (long r = 0; r < unit.rows; r++) {
      share[unit.rows * cache.value_dim + r] = rows.maxima[r];
      share[unit.rows * (cache.value_dim + 1) + r] = sum(rows.sums[r]);
    }
    if (__atomic_sub_fetch(&split.unfinished, 1, __ATOMIC_ACQ_REL) > 0) continue;
    split.unfinished = split.parts;  // for the next layer
    for (long r = 0; r < unit.rows; r++) {
      long row = unit.first_row + r, head = unit.kv_head * plan.group + row % plan.group;
      T* target = out + (sequence_first + row / plan.group) * out_stride + head * cache.value_dim;
      const float* maxima = shares + unit.rows * cache.value_dim + r;
      const float* sums = maxima + unit.rows;
      float maximum = NEVER, total = 0.0f;
      for (long p = 0; p < split.parts; p++) maximum = std::max(maximum, maxima[p * part_size]);
      float* merged = rows.out;
      memset(merged, 0, sizeof(float) * cache.value_dim);
      for (long p = 0; p < split.parts; p++) {
        float factor = exp2_of_negative(splat(maxima[p * part_size] - maximum))[0];
        total += factor * sums[p * part_size];
        const float* part = shares + p * part_size + r * cache.value_dim;
        for (long d = 0; d < cache.value_dim; d += LANES) store(merged + d, load(merged + d) + load(part + d) * factor);
      }
      for (long d = 0; d < cache.value_dim; d += LANES) store(target + d, load(merged + d) * (1.0f / total));
    }
  }
}

}  // namespace oaiserve
