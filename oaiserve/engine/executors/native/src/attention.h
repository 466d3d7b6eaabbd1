// Attention that reads the paged KV cache in place.
//
// Keys and values are panels of a packed matrix (paged_cache.h). So decode and prefill run the same code: it multiplies a
// few rows (queries times the heads that share a key-value head) with a few panels, and has the sums in registers. With
// AMX, bfloat16 is multiplied in tiles, or as tiles would do it: see attention_tiles.h and few_rows.h.
//
// Where the cache has eight bits, rows are rounded to sixteen bits, a query as a whole, multiplied by the sizes of keys'
// numbers, and the weights of a run together.
// Products of integers are summed without error, and then multiplied by the scales of both. The scale of a value is
// multiplied with its weight before that is rounded. No row depends on another one.
//
// The keys of a sequence are cut into runs, which begin at multiples of RUN_KEYS. The softmax of a row is computed for
// each run alone, and then the runs are added in their order. Keys that a row does not see add exact zeros. So the
// result of a row is bitwise the same in whatever unit, and however the work is divided among threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

#include "few_rows.h"
#include "paged_cache.h"
#include "step.h"

namespace oaiserve {

// The rows and panels that are multiplied at once, so that their sums fill the registers.
#if defined(__AVX512F__)
constexpr int REGISTER_ROWS = 6, REGISTER_PANELS = 4;
#else
constexpr int REGISTER_ROWS = 4, REGISTER_PANELS = 1;
#endif
constexpr int PANEL_VECTORS = LANES / WIDTH;
constexpr long UNIT_ROWS = 96;  // the most rows of a unit, which read the keys together
constexpr long UNIT_STEP = IS_TILED<bf16> ? 16 : REGISTER_ROWS;  // Units have a multiple of these, except for the last.
constexpr long RUN_KEYS = 256;  // with their values, they stay in L2
constexpr long RUN_PANELS = RUN_KEYS / PANEL_KEYS;
// The strides of scores and queries are no powers of two, because such rows would compete for the same cache lines.
constexpr long SCORE_STRIDE = (RUN_PANELS + 2) * PANEL_KEYS, QUERY_STRIDE = MAX_KEY_DIM + 32;
constexpr float NEVER = -1e30f;  // the score of a key that a row does not see

struct AttentionOptions {
  long heads;
  float scaling;
  long window;    // how many tokens a query sees, including its own; 0: all tokens up to its own
  float softcap;  // scores are softcap * tanh(scores * scaling / softcap); 0: scores * scaling
  const float* sinks;   // [heads], the score of a key more, whose value is 0; null: there is none
  bool looks_ahead;     // up to StepInput::last_visible, if there is one; else each token sees those before it
};

// A unit of work: some rows of one sequence and key-value head, over a range of keys. Row r is the query of token
// r / group, and head r % group of the group.
struct AttentionUnit {
  int32_t sequence, kv_head;
  int32_t first_row, rows;
  int32_t first_key, end_key;  // first_key is a multiple of 16
  int32_t split;               // an index into AttentionPlan::splits; -1: the unit has all keys of its rows
};

// Rows whose runs of keys are divided among several units. Each unit writes the results of its runs to `partials`, and
// the unit that ends last adds all runs.
struct AttentionSplit {
  int32_t first_run, runs, units, unfinished;
  size_t offset;  // index into `partials`, where the split has [runs][run_size(rows)]
};

// An item of the pool: the units first_unit .. end_unit - 1.
struct AttentionItem {
  int32_t first_unit, end_unit;
};

// The division of a step's attention into items. It is computed once per step for all layers of the same sizes, and
// keeps its memory from step to step.
struct AttentionPlan {
  StepInput step;
  const int32_t* last_visible;  // the step's last visible tokens, or null
  long group;                   // heads per key-value head
  long value_dim;
  std::vector<AttentionUnit> tiles;  // the units of key-value head 0, before they are split
  std::vector<AttentionUnit> units;
  std::vector<AttentionItem> items;
  std::vector<AttentionSplit> splits;
  std::vector<float> partials;

  // The size of a run's results: for each of the rows, the sums of weighted values [rows][value_dim], the sums of
  // weights [rows][16], and the maxima [rows], for which there is room for whole vectors.
  long run_size(long rows) const { return rows * (value_dim + LANES) + divide_up(rows, LANES) * LANES; }
};

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
                      long window, bool looks_ahead, int threads) {
  plan.step = step;
  plan.last_visible = looks_ahead ? step.last_visible : nullptr;
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
    long tile = divide_up(divide_up(rows, divide_up(rows, most_rows)), UNIT_STEP) * UNIT_STEP;
    for (long row = 0; row < rows; row += tile) {
      long count = std::min(tile, rows - row), position = step.seq_lens[b] - queries + row / plan.group;
      long from = first_visible_key(position, window) / PANEL_KEYS * PANEL_KEYS;
      const long last = (row + count - 1) / plan.group;  // a token sees no less than those before it
      long end = (plan.last_visible ? plan.last_visible[step.query_start[b] + last] : step.seq_lens[b] - queries + last) + 1;
      plan.tiles.push_back({int32_t(b), 0, int32_t(row), int32_t(count), int32_t(from), int32_t(end), -1});
      remaining += unit_cost(plan.tiles.back()) * kv_heads;
    }
  }
  std::sort(plan.tiles.begin(), plan.tiles.end(), [](const AttentionUnit& a, const AttentionUnit& b) {
    long cost_a = unit_cost(a), cost_b = unit_cost(b);
    if (cost_a != cost_b) return cost_a > cost_b;
    return a.sequence != b.sequence ? a.sequence < b.sequence : a.first_row < b.first_row;
  });

  // Each item is a share of the remaining work, so that items get shorter towards the end. An item of less than about
  // 5 us is not worth its cost. If a unit would make an item much longer than its share, the unit is split between two
  // runs.
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
    const long first_key = unit.first_key, first_run = first_key / RUN_KEYS;
    const long runs = divide_up(unit.end_key, RUN_KEYS) - first_run;
    for (long head = 0; head < kv_heads; head++) {
      unit.kv_head = int32_t(head);
      unit.first_key = int32_t(first_key);
      unit.split = -1;
      while (cost + unit_cost(unit) > wanted + wanted / 4) {
        long fitting = (wanted - cost) / panel_cost(unit) - 1;
        long cut = (unit.first_key + fitting * PANEL_KEYS) / RUN_KEYS * RUN_KEYS;
        if (cut <= unit.first_key && cost > 0) {
          end_item();
          continue;
        }
        cut = std::max(cut, (unit.first_key / RUN_KEYS + 1) * RUN_KEYS);
        if (cut >= unit.end_key) break;
        if (unit.split < 0) {
          unit.split = int32_t(plan.splits.size());
          plan.splits.push_back({int32_t(first_run), int32_t(runs), 1, 1, partials});
          partials += size_t(runs * plan.run_size(unit.rows));
        }
        plan.units.push_back(unit);
        plan.units.back().end_key = unit.first_key = int32_t(cut);
        cost += unit_cost(plan.units.back());
        end_item();
        plan.splits.back().units++;
        plan.splits.back().unfinished++;
      }
      plan.units.push_back(unit);
      cost += unit_cost(unit);
      if (cost >= wanted) end_item();
    }
  }
  if (cost > 0) end_item();
  if (plan.partials.size() < partials) plan.partials.resize(partials);
}

// Returns 2^x for x <= 0, and 0 where that would be less than about 1e-38. The relative error is 1e-7 for float, and
// 8e-5 for results that are rounded to bfloat16. NaN stays NaN.
template <class T>
[[gnu::always_inline]] inline f32x16 exp2_of_negative(f32x16 x) {
#if defined(__AVX512DQ__)
  f32x16 rest = (f32x16)_mm512_reduce_ps((__m512)x, 0);  // x minus the nearest integer
  f32x16 whole = x - rest;
#else
  u32x16 vanishes = (u32x16)(x < -125.0f);
  x = select(vanishes, splat(-125.0f), x);
  f32x16 shifted = x + MAGIC;
  f32x16 rest = x - (shifted - MAGIC);
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
  return (f32x16)(((u32x16)p + ((u32x16)shifted << 23)) & ~vanishes);
#endif
}

// By what the sums of up to 16 rows are multiplied when a run is added: those before it, and those of the run. Weights
// are relative to a maximum, which may have changed.
struct RunFactors {
  alignas(64) float before[LANES], now[LANES];
};

// out = out * before + sums * now, rounded in the same way wherever it is done.
inline void add_run(Vector sums, float before, float now, float* out) {
  const Vector added = multiply_add(sums, now - Vector{}, load_vector<Vector>(out) * before);
  memcpy(out, &added, sizeof(Vector));
}

// The rows that are multiplied with panels of S: queries or weights, in integers if S is int8_t.
template <class S>
struct Rows {
  using Number = std::conditional_t<std::is_same_v<S, int8_t>, int16_t, S>;
  const Number* numbers;
  const float* scales;  // scale of each row of integers

  static Vector scaled(Vector sum, int) { return sum; }
  Vector scaled(Integers sum, int row) const { return __builtin_convertvector(sum, Vector) * scales[row]; }
};

// scores[r][16 c ..] = the dot products of row r with the keys of panel c. Prefetches the panels `later`.
template <int R, int C, class T>
void score_panels(Rows<T> queries, const T* const* panels, const T* const* later, long key_dim, float* scores) {
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
      Packs<T> query = Packs<T>::splat(queries.numbers + r * QUERY_STRIDE + d);
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) sums[r][v] = dot(sums[r][v], query, keys[v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) memcpy(scores + r * SCORE_STRIDE + v * WIDTH, &sums[r][v], sizeof(Vector));
}

// The same with keys in eight bits. The sums of each group are multiplied by its scales, and then added in their order.
template <int R, int C>
void score_panels(Rows<int8_t> queries, const int8_t* const* panels, const int8_t* const* later, long key_dim,
                  float* scores) {
  constexpr int VECTORS = C * PANEL_VECTORS;
  constexpr long P = PACK<int8_t>, LINE = 2 * P;  // numbers of each key in a line of the cache
  const int8_t *panel[C], *ahead[C];
#pragma GCC unroll 8
  for (int c = 0; c < C; c++) panel[c] = panels[c], ahead[c] = later[c];
  const long scale_bytes = key_scale_bytes(key_dim);
  for (long first = 0; first < key_dim; first += KEY_GROUP) {
    Integers sums[R][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) sums[r][v] = Integers{};
    const long scales = first / KEY_GROUP * PANEL_KEYS;
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) __builtin_prefetch(scales_of(ahead[c], scale_bytes) + scales);
    const long end = std::min(first + KEY_GROUP, key_dim);
#pragma GCC unroll 1
    for (long line = first; line < end; line += LINE) {
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) __builtin_prefetch(ahead[c] + line * PANEL_KEYS);
#pragma GCC unroll 2
      for (long d = line; d < line + LINE; d += P) {
        Packs<int8_t> keys[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++)
          keys[v] = Packs<int8_t>::load(panel[v / PANEL_VECTORS] + d * PANEL_KEYS + v % PANEL_VECTORS * WIDTH * P);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          Packs<int8_t> query = Packs<int8_t>::splat(queries.numbers + r * QUERY_STRIDE + d);
#pragma GCC unroll 8
          for (int v = 0; v < VECTORS; v++) sums[r][v] = dot(sums[r][v], query, keys[v]);
        }
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) {
      const float* group = scales_of(panel[v / PANEL_VECTORS], scale_bytes) + scales;
      const Vector scale = load_vector<Vector>(group + v % PANEL_VECTORS * WIDTH);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        float* score = scores + r * SCORE_STRIDE + v * WIDTH;
        const Vector before = first == 0 ? Vector{} : load_vector<Vector>(score);
        const Vector added = multiply_add(queries.scaled(sums[r][v], r), scale, before);
        memcpy(score, &added, sizeof(Vector));
      }
    }
  }
}

// Adds to out[r] the sum of the values of `count` panels, weighted with row r of the weights, multiplied by the factors
// of row r. It does so for the 16 C columns from `column` on. Prefetches the panels `later`.
template <int R, int C, class S>
void add_columns(Rows<S> weights, const RunFactors& factors, const S* const* panels, const S* const* later, long count,
                 long value_dim, long column, float* out) {
  constexpr long P = PACK<S>;
  constexpr int VECTORS = C * PANEL_VECTORS;
  constexpr int LINE = 64 / (LANES * P * sizeof(S));  // panels of 16 columns in a line of the cache
  typename Packs<S>::Sum sums[R][VECTORS];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) sums[r][v] = typename Packs<S>::Sum{};
  for (long p = 0; p < count; p++) {
    const S *panel = panels[p] + column * P, *ahead = later[p] + column * P;
#pragma GCC unroll 1
    for (long k = 0; k < PANEL_KEYS; k += P) {
      Packs<S> values[VECTORS];
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) values[v] = Packs<S>::load(panel + k * value_dim + v * WIDTH * P);
#pragma GCC unroll 8
      for (int c = 0; c < C; c += LINE) __builtin_prefetch(ahead + k * value_dim + c * LANES * P);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        Packs<S> weight = Packs<S>::splat(weights.numbers + r * SCORE_STRIDE + p * PANEL_KEYS + k);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) sums[r][v] = dot(sums[r][v], weight, values[v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++)
      add_run(weights.scaled(sums[r][v], r), factors.before[r], factors.now[r],
              out + r * value_dim + column + v * WIDTH);
}

template <class S, int R>
void score_rows(Rows<S> queries, const S* const* panels, const S* const* later, long count, long key_dim,
                float* scores) {
  long p = 0;
  for (; p + REGISTER_PANELS <= count; p += REGISTER_PANELS)
    score_panels<R, REGISTER_PANELS>(queries, panels + p, later + p, key_dim, scores + p * PANEL_KEYS);
  for (; p < count; p++) score_panels<R, 1>(queries, panels + p, later + p, key_dim, scores + p * PANEL_KEYS);
}

template <class S, int R>
void add_rows(Rows<S> weights, const RunFactors& factors, const S* const* panels, const S* const* later, long count,
              long value_dim, float* out) {
  long column = 0;
  for (; column + REGISTER_PANELS * LANES <= value_dim; column += REGISTER_PANELS * LANES)
    add_columns<R, REGISTER_PANELS>(weights, factors, panels, later, count, value_dim, column, out);
  for (; column < value_dim; column += LANES)
    add_columns<R, 1>(weights, factors, panels, later, count, value_dim, column, out);
}

// Tables of both products, for 1 to REGISTER_ROWS rows: entry R is for R + 1 rows.
template <class S, class = std::make_integer_sequence<int, REGISTER_ROWS>>
struct Products;
template <class S, int... R>
struct Products<S, std::integer_sequence<int, R...>> {
  static constexpr decltype(&score_rows<S, 1>) SCORE[] = {score_rows<S, R + 1>...};
  static constexpr decltype(&add_rows<S, 1>) ADD[] = {add_rows<S, R + 1>...};
};

// scores = softcap * tanh(scores * scaling / softcap)
inline void cap_scores(float* scores, long count, const AttentionOptions& options) {
  for (long k = 0; k < count; k += LANES) {
    f32x16 e = exp(load(scores + k) * (2.0f * options.scaling / options.softcap));
    store(scores + k, options.softcap - 2.0f * options.softcap / (e + 1.0f));
  }
}

// The softmax of up to `ROWS` rows over some keys. A key weighs 2^(scale * score - maximum), and `sums` are the sums of
// the weights, by lane.
template <long ROWS>
struct Softmax {
  alignas(64) float sums[ROWS * LANES];
  alignas(64) float maxima[divide_up(ROWS, LANES) * LANES + LANES];
};

// Converts the scores of one row over `panels` panels of a run into weights, as precise as T, and stores their sums by
// lane. The row sees the keys from .. to - 1 of these. Returns the maximum. `weights` may be `scores`.
template <class T, class Weight>
float weigh(float* scores, Weight* weights, long panels, long from, long to, float scale, float* sums) {
  if (from >= to) {
    for (long p = 0; p < panels; p++) store(weights + p * PANEL_KEYS, f32x16{});
    store(sums, f32x16{});
    return NEVER;
  }
  std::fill(scores, scores + from, NEVER);
  std::fill(scores + to, scores + panels * PANEL_KEYS, NEVER);
  f32x16 most = load(scores), other = most;  // two maxima, so that two chains of instructions run side by side
  for (long p = 1; p + 1 < panels; p += 2) {
    most = max(most, load(scores + p * PANEL_KEYS));
    other = max(other, load(scores + (p + 1) * PANEL_KEYS));
  }
  most = max(max(most, other), load(scores + (panels - 1) * PANEL_KEYS));
  float maximum = max(most) * scale;
  f32x16 total{};
  for (long p = 0; p < panels; p++) {
    f32x16 weight = exp2_of_negative<T>(load(scores + p * PANEL_KEYS) * scale - maximum);
    total = total + weight;
    store(weights + p * PANEL_KEYS, weight);
  }
  store(sums, total);
  return maximum;
}

// Multiplies the weights of one row over `count` panels by the scales of their values, and rounds them to integers.
// Returns their scale. Where the weight is 0, the scale may be anything.
inline float quantize_weights(float* weights, const int8_t* const* panels, long count, int16_t* out) {
  for (long p = 0; p < count; p++) {
    const f32x16 weight = load(weights + p * PANEL_KEYS);
    const f32x16 scaled = weight * load(scales_of(panels[p], VALUE_SCALE_BYTES));
    store(weights + p * PANEL_KEYS, (f32x16)((u32x16)scaled & (u32x16)(weight != 0.0f)));
  }
  return quantize(weights, count * PANEL_KEYS, out);
}

// Adds a run to the softmax of `rows` rows, at most 16. The arrays of maxima have room for 16.
inline RunFactors add_softmax(const float* run_sums, const float* run_maxima, long rows, float* sums, float* maxima) {
  RunFactors factors;
  const f32x16 run = load(run_maxima), old = load(maxima), most = max(old, run);
  store(factors.before, exp2_of_negative<float>(old - most));
  store(factors.now, exp2_of_negative<float>(run - most));
  store(maxima, most);
  for (long r = 0; r < rows; r++)
    for (long i = r * LANES; i < (r + 1) * LANES; i += WIDTH)
      add_run(load_vector<Vector>(run_sums + i), factors.before[r], factors.now[r], sums + i);
  return factors;
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

// The keys of a run that a unit reads, and where its panels of keys and values begin. Behind these, each array has the
// panels that are read next, for prefetching.
template <class S>
struct KeyRun {
  const AttentionUnit* unit;
  long first_key, end_key, panels;
  const S* keys[RUN_PANELS + REGISTER_PANELS];
  const S* values[RUN_PANELS + REGISTER_PANELS];

  void find(const AttentionUnit* its_unit, long key, const StepInput& step, const PagedCache<S>& cache) {
    unit = its_unit, first_key = key, end_key = std::min((key / RUN_KEYS + 1) * RUN_KEYS, long(unit->end_key));
    panels = divide_up(end_key - key, PANEL_KEYS);
    const int32_t* table = step.block_tables + unit->sequence * step.table_width;
    long block = key / cache.block_size, offset = key % cache.block_size;
    for (long p = 0; p < panels; p++) {
      const long panel = cache.panel(table[block], unit->kv_head, offset);
      keys[p] = cache.key_panel(panel);
      values[p] = cache.values ? cache.value_panel(panel) : nullptr;
      // Weights need the scales of all values of the run, before its first value is read.
      if constexpr (PagedCache<S>::IS_SCALED) __builtin_prefetch(scales_of(values[p], VALUE_SCALE_BYTES));
      offset += PANEL_KEYS;
      if (offset == cache.block_size) block++, offset = 0;
    }
  }
};

// Computes one item on one thread, with queries and results of T and a cache of S. With the functions that it calls, it
// takes about a MiB of the thread's stack. With AMX, a `Tiles` must live on this thread.
template <class T, class S>
class ItemWalk {
 public:
  ItemWalk(AttentionPlan& plan, const AttentionOptions& options, const PagedCache<S>& cache, const T* query,
           long query_stride, T* out, long out_stride)
      : plan_(plan), options_(options), cache_(cache), query_(query), query_stride_(query_stride), out_(out),
        out_stride_(out_stride) {}

  void run(const AttentionItem& item) {
    const AttentionUnit *unit = &plan_.units[item.first_unit], *end = unit + (item.end_unit - item.first_unit);
    KeyRun<S> runs[2], *run = &runs[0], *next = &runs[1];
    run->find(unit, unit->first_key, plan_.step, cache_);
    start(*unit);
    while (unit != end) {
      bool ends_unit = run->end_key == unit->end_key;
      next->panels = 0;
      if (!ends_unit)
        next->find(unit, run->end_key, plan_.step, cache_);
      else if (unit + 1 != end)
        next->find(unit + 1, unit[1].first_key, plan_.step, cache_);
      attend(*run, *next);
      std::swap(run, next);
      if (!ends_unit) continue;
      finish(*unit);
      if (++unit != end) start(*unit);
    }
  }

 private:
  using Number = typename Rows<S>::Number;
  static constexpr bool IS_SCALED = PagedCache<S>::IS_SCALED;
  static constexpr bool IN_TILES = IS_ATTENDED_IN_TILES<T, S>;
  static constexpr long BLOCK_ROWS = IN_TILES ? MOST_TILE_ROWS : REGISTER_ROWS;  // that are computed at once
  using Factors = std::array<RunFactors, divide_up(BLOCK_ROWS, LANES)>;

  // Returns the head of a row of a unit.
  long head(const AttentionUnit& unit, long row) const {
    return unit.kv_head * plan_.group + (unit.first_row + row) % plan_.group;
  }

  // Rounds a query for keys that have been divided by their sizes. Returns its scale.
  float quantize_query(const T* query, long kv_head, int16_t* out) const {
    if (!cache_.key_sizes) return quantize(query, cache_.key_dim, out);
    alignas(64) float sized[MAX_KEY_DIM];
    const float* sizes = cache_.key_sizes + kv_head * cache_.key_dim;
    for (long d = 0; d < cache_.key_dim; d += LANES) store(sized + d, load(query + d) * load(sizes + d));
    return quantize(sized, cache_.key_dim, out);
  }

  void start(const AttentionUnit& unit) {
    long start = plan_.step.query_start[unit.sequence], end = plan_.step.query_start[unit.sequence + 1];
    long before = plan_.step.seq_lens[unit.sequence] - (end - start);
    for (long r = 0; r < unit.rows; r++) {
      long row = unit.first_row + r, query = row / plan_.group;
      const T* from = query_ + (start + query) * query_stride_ + head(unit, r) * cache_.key_dim;
      if constexpr (IS_SCALED)
        query_scales_[r] = quantize_query(from, unit.kv_head, queries_ + r * QUERY_STRIDE);
      else
        memcpy(queries_ + r * QUERY_STRIDE, from, sizeof(T) * cache_.key_dim);
      targets_[r] = out_ + (start + query) * out_stride_ + head(unit, r) * cache_.value_dim;
      position_[r] = before + query;
      last_[r] = plan_.last_visible ? plan_.last_visible[start + query] : position_[r];
    }
    std::fill(softmax_.maxima, std::end(softmax_.maxima), NEVER);
    memset(softmax_.sums, 0, sizeof(float) * unit.rows * LANES);
    memset(values_, 0, sizeof(float) * unit.rows * cache_.value_dim);
  }

  void attend(KeyRun<S>& run, const KeyRun<S>& next) {
    [[maybe_unused]] alignas(64) S last_values[PANEL_KEYS * MAX_VALUE_DIM];
    if constexpr (!IS_SCALED)
      if (!cache_.values) turn(run);
    for (long p = 0; p < REGISTER_PANELS; p++) {
      run.keys[run.panels + p] = run.values[std::min(p, run.panels - 1)];
      run.values[run.panels + p] = p < next.panels ? next.keys[p] : run.values[0];
    }
    if constexpr (!IS_SCALED)  // a weight of 0 removes any integer from a sum
      if (long rest = (run.end_key - run.first_key) % PANEL_KEYS; rest && cache_.values) {
        copy_values(run.values[run.panels - 1], rest, cache_.value_dim, last_values);
        run.values[run.panels - 1] = last_values;
      }
    const long rows = run.unit->rows, blocks = divide_up(rows, BLOCK_ROWS);
    // 7 rows are faster as 4 and 3 than as 6 and 1, but not if tiles have room for 16.
    const long block_rows = IN_TILES ? BLOCK_ROWS : divide_up(rows, blocks);
    for (long block = 0; block * block_rows < rows; block++)
      attend_block(run, block * block_rows, std::min(block_rows, rows - block * block_rows));
  }

  // Makes the panels of values of a run from those of its keys.
  void turn(KeyRun<S>& run) {
    for (long p = 0; p < run.panels; p++) {
      S* values = turned_ + p * PANEL_KEYS * cache_.value_dim;
      const long count = std::min(run.end_key - run.first_key - p * PANEL_KEYS, PANEL_KEYS);
      turn_panel(run.keys[p], count, cache_.value_dim, values);
      run.values[p] = values;
    }
  }

  // Computes `count` rows from `row` on, as many as the registers hold, with those keys of the run that any of these
  // rows sees.
  void attend_block(const KeyRun<S>& run, long row, long count) {
    alignas(64) float scores[BLOCK_ROWS * SCORE_STRIDE];
    // The weights of a row in tiles take the place of its scores, so that both fit into L1 with what they are computed of.
    constexpr long WEIGHT_STRIDE = IN_TILES ? SCORE_STRIDE * long(sizeof(float) / sizeof(Number)) : SCORE_STRIDE;
    alignas(64) Number own_weights[IN_TILES ? LANES : BLOCK_ROWS * SCORE_STRIDE];
    Number* const weights = IN_TILES ? reinterpret_cast<Number*>(scores) : own_weights;
    [[maybe_unused]] float weight_scales[BLOCK_ROWS];
    Softmax<BLOCK_ROWS> softmax;
    std::fill(softmax.maxima, std::end(softmax.maxima), NEVER);
    const bool is_split = run.unit->split >= 0;
    float* results = is_split ? split_results(*run.unit, run.first_key / RUN_KEYS) : nullptr;
    long begin = std::max(0L, first_visible_key(position_[row], options_.window) - run.first_key) / PANEL_KEYS;
    long end = std::min(run.panels, divide_up(last_[row + count - 1] + 1 - run.first_key, PANEL_KEYS));
    if (begin >= end) {
      if (is_split) set_results(results, run.unit->rows, row, count, softmax);
      return;
    }
    const S *const *keys = run.keys + begin, *const *values = run.values + begin;
    const S *const *next_keys = keys + REGISTER_PANELS, *const *next_values = values + REGISTER_PANELS;
    const Rows<S> queries{queries_ + row * QUERY_STRIDE, query_scales_ + row};
    if constexpr (IN_TILES)
      score_as_amx(TiledRows{queries.numbers, QUERY_STRIDE, count}, TiledPanels{keys, next_keys, end - begin, row > 0},
                   cache_.key_dim, scores, SCORE_STRIDE);
    else
      Products<S>::SCORE[count - 1](queries, keys, next_keys, end - begin, cache_.key_dim, scores);

    const float log2_e = 1.44269504f;
    const float scale = options_.softcap > 0 ? log2_e : log2_e * options_.scaling;
    long first = run.first_key + begin * PANEL_KEYS;
    long last = std::min(run.first_key + end * PANEL_KEYS, run.end_key);
    for (long r = 0; r < count; r++) {
      float* row_scores = scores + r * SCORE_STRIDE;
      if (options_.softcap > 0) cap_scores(row_scores, (end - begin) * PANEL_KEYS, options_);
      long from = std::max(first_visible_key(position_[row + r], options_.window), first);
      long to = std::min(last_[row + r] + 1, last);
      Number* row_weights = weights + r * WEIGHT_STRIDE;
      const auto weigh_into = [&](auto* target) {
        softmax.maxima[r] =
            weigh<T>(row_scores, target, end - begin, from - first, to - first, scale, softmax.sums + r * LANES);
      };
      if constexpr (IS_SCALED) {
        weigh_into(row_scores);
        weight_scales[r] = quantize_weights(row_scores, values, end - begin, row_weights);
      } else {
        weigh_into(row_weights);
      }
    }
    const auto add = [&](const Factors& factors, float* sums) {
      if constexpr (IN_TILES) {
        const TiledPanels panels{values, next_values, end - begin, row > 0};
        add_as_amx(TiledRows{weights, WEIGHT_STRIDE, count}, panels, cache_.value_dim,
                   [&](long r, long column, Vector added) {
                     const RunFactors& by = factors[size_t(r / LANES)];
                     add_run(added, by.before[r % LANES], by.now[r % LANES], sums + r * cache_.value_dim + column);
                   });
      } else {
        Products<S>::ADD[count - 1]({weights, weight_scales}, factors[0], values, next_values, end - begin,
                                    cache_.value_dim, sums);
      }
    };
    Factors factors{};
    if (is_split) {
      set_results(results, run.unit->rows, row, count, softmax);
      float* sums = results + row * cache_.value_dim;
      memset(sums, 0, sizeof(float) * count * cache_.value_dim);
      for (RunFactors& as_they_are : factors) store(as_they_are.now, splat(1.0f));
      add(factors, sums);
    } else {
      for (long r = 0; r < count; r += LANES)
        factors[r / LANES] = add_softmax(softmax.sums + r * LANES, softmax.maxima + r, std::min<long>(LANES, count - r),
                                         softmax_.sums + (row + r) * LANES, softmax_.maxima + row + r);
      add(factors, values_ + row * cache_.value_dim);
    }
  }

  void finish(const AttentionUnit& unit) {
    long value_dim = cache_.value_dim;
    if (unit.split >= 0) {
      AttentionSplit& split = plan_.splits[unit.split];
      if (__atomic_sub_fetch(&split.unfinished, 1, __ATOMIC_ACQ_REL) > 0) return;
      split.unfinished = split.units;  // for the next layer
      for (long run = split.first_run; run < split.first_run + split.runs; run++) add_results(unit, run);
    }
    for (long r = 0; r < unit.rows; r++) {
      float weights = sum(load(softmax_.sums + r * LANES));
      if (options_.sinks) weights += std::exp2(1.44269504f * options_.sinks[head(unit, r)] - softmax_.maxima[r]);
      write_row(values_ + r * value_dim, 1.0f / weights, value_dim, targets_[r]);
    }
  }

  // Returns where a run of a unit that is split has its results, in the layout of AttentionPlan::run_size.
  float* split_results(const AttentionUnit& unit, long run) const {
    const AttentionSplit& split = plan_.splits[unit.split];
    return plan_.partials.data() + split.offset + (run - split.first_run) * plan_.run_size(unit.rows);
  }

  // Keeps the softmax of some rows for add_results. A row that sees no key of the run has no sums of values either.
  void set_results(float* results, long rows, long row, long count, const Softmax<BLOCK_ROWS>& softmax) const {
    float* sums = results + rows * cache_.value_dim;
    memcpy(sums + row * LANES, softmax.sums, sizeof(float) * count * LANES);
    memcpy(sums + rows * LANES + row, softmax.maxima, sizeof(float) * count);
  }

  // Adds the results of a run of a unit that is split, as attend_block adds a run.
  void add_results(const AttentionUnit& unit, long run) {
    const float* values = split_results(unit, run);
    const float* sums = values + unit.rows * cache_.value_dim;
    const float* maxima = sums + unit.rows * LANES;
    for (long row = 0; row < unit.rows; row += LANES) {
      const long count = std::min<long>(LANES, unit.rows - row);
      const RunFactors factors = add_softmax(sums + row * LANES, maxima + row, count, softmax_.sums + row * LANES,
                                             softmax_.maxima + row);
      for (long r = 0; r < count; r++) {
        if (maxima[row + r] == NEVER) continue;
        const long at = (row + r) * cache_.value_dim;
        for (long d = 0; d < cache_.value_dim; d += WIDTH)
          add_run(load_vector<Vector>(values + at + d), factors.before[r], factors.now[r], values_ + at + d);
      }
    }
  }

  AttentionPlan& plan_;
  const AttentionOptions& options_;
  const PagedCache<S>& cache_;
  const T* query_;
  long query_stride_;
  T* out_;
  long out_stride_;

  // The rows of the current unit.
  alignas(64) Number queries_[UNIT_ROWS * QUERY_STRIDE];
  float query_scales_[UNIT_ROWS];  // scales of queries that are integers
  T* targets_[UNIT_ROWS];
  long position_[UNIT_ROWS];  // position of a row's token in its sequence
  long last_[UNIT_ROWS];      // position of the last token that it sees
  Softmax<UNIT_ROWS> softmax_;
  alignas(64) float values_[UNIT_ROWS * MAX_VALUE_DIM];  // sums of weighted values, [rows][value_dim]
  alignas(64) S turned_[RUN_KEYS * MAX_VALUE_DIM];       // the values of a run, if the cache has keys alone
};

// Computes one item of a plan. query is T[tokens][heads * key_dim], out is T[tokens][heads * value_dim], and their rows
// are query_stride and out_stride elements apart.
template <class T, class S>
void attend_item(AttentionPlan& plan, long item, const AttentionOptions& options, const PagedCache<S>& cache,
                 const T* query, long query_stride, T* out, long out_stride) {
  [[maybe_unused]] const Tiles<std::conditional_t<IS_ATTENDED_IN_TILES<T, S>, T, float>> tiles;
  [[maybe_unused]] const FlushedNumbers<IS_ATTENDED_IN_TILES<T, S>> flushed;
  ItemWalk<T, S>(plan, options, cache, query, query_stride, out, out_stride).run(plan.items[item]);
}

}  // namespace oaiserve
