// The products of attention for few rows, such as those of a decode, as the tiles of AMX would sum them. Where keys and
// values are read from memory, tiles take a tenth longer.
//
// An instruction of AMX sums products with even and odd indices apart, from zero on, each rounded once with its addition,
// and then adds both to the sum before. It counts numbers that are not normal as zero, and so does this code while a
// `FlushedNumbers` lives. So a row's numbers do not depend on how many others there are.
#pragma once

#include "attention_tiles.h"

namespace oaiserve {

constexpr long MOST_FEW_ROWS = 3;
// Panels of keys, or times 16 columns of values, that are multiplied at once. Sums of the most rows fill the registers.
constexpr int AT_ONCE = 4;

// While this lives, numbers of its thread that are not normal count as zero, if it is on.
template <bool IS_ON>
class FlushedNumbers {};

#if defined(WITH_AMX) && defined(__AMX_BF16__) && defined(__AVX512BF16__)

template <>
class FlushedNumbers<true> {
 public:
  FlushedNumbers() : before_(_mm_getcsr()) { _mm_setcsr(before_ | FLUSH_RESULTS | FLUSH_OPERANDS); }
  ~FlushedNumbers() { _mm_setcsr(before_); }
  FlushedNumbers(const FlushedNumbers&) = delete;

 private:
  static constexpr unsigned FLUSH_RESULTS = 0x8000, FLUSH_OPERANDS = 0x0040;
  unsigned before_;
};

// Rows of queries or weights as floats, `STRIDE` apart.
struct FewRows {
  static constexpr long STRIDE = MAX_KEY_DIM;
  alignas(64) float numbers[MOST_FEW_ROWS * STRIDE];

  void set(const TiledRows& rows, long count) {
    for (long r = 0; r < rows.count; r++)
      for (long i = 0; i < count; i += LANES) store(numbers + r * STRIDE + i, load(rows.numbers + r * rows.stride + i));
  }
};
static_assert(FewRows::STRIDE >= 256);

// The sums of an instruction for R rows and C times 16 columns.
template <int R, int C>
struct PairSums {
  Vector even[R][C], odd[R][C];

  // Adds the products of a pair of each row with pairs of the columns, or begins with these.
  [[gnu::always_inline]] void add(const float* rows, const bf16* const* columns, bool is_first) {
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      const VectorBits pairs = load_vector<VectorBits>(columns[c]);
      const Vector of_even = (Vector)(pairs << 16), of_odd = (Vector)(pairs & 0xffff0000u);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const Vector first = rows[r * FewRows::STRIDE] - Vector{}, second = rows[r * FewRows::STRIDE + 1] - Vector{};
        even[r][c] = is_first ? first * of_even : multiply_add(first, of_even, even[r][c]);
        odd[r][c] = is_first ? second * of_odd : multiply_add(second, of_odd, odd[r][c]);
      }
    }
  }
};

// scores[r][16 c ..] = the dot products of row r with the keys of panel c. An instruction has `depth` of their numbers.
template <int R, int C>
void score_few_panels(const FewRows& queries, const bf16* const* panels, const bf16* const* later, long key_dim, long depth,
                      float* scores, long score_stride) {
  for (long first = 0; first < key_dim; first += depth) {
    PairSums<R, C> sums;
#pragma GCC unroll 1
    for (long d = first; d < first + depth; d += PACK<bf16>) {
      const bf16* columns[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) columns[c] = panels[c] + d * PANEL_KEYS;
      if (d == first)
        sums.add(queries.numbers + d, columns, true);
      else
        sums.add(queries.numbers + d, columns, false);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) __builtin_prefetch(later[c] + d * PANEL_KEYS);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) {
        float* score = scores + r * score_stride + c * LANES;
        const Vector both = sums.even[r][c] + sums.odd[r][c];
        const Vector sum = first == 0 ? both : load_vector<Vector>(score) + both;
        memcpy(score, &sum, sizeof(sum));
      }
  }
}

// Calls add(row, column, sums) with the weighted sums of the 16 C columns from `column` on.
template <int R, int C, class Add>
void add_few_columns(const FewRows& weights, const TiledPanels& values, long value_dim, long column, const Add& add) {
  alignas(64) float totals[R][C * LANES] = {};  // in memory, because the sums of an instruction fill the registers
  for (long p = 0; p < values.count; p++) {
    PairSums<R, C> sums;
#pragma GCC unroll 1
    for (long k = 0; k < PANEL_KEYS; k += PACK<bf16>) {
      const long at = k * value_dim + column * PACK<bf16>;
      const bf16* columns[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) columns[c] = values.panels[p] + at + c * TILE_ELEMENTS;
      if (k == 0)
        sums.add(weights.numbers + p * PANEL_KEYS + k, columns, true);
      else
        sums.add(weights.numbers + p * PANEL_KEYS + k, columns, false);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) __builtin_prefetch(values.later[p] + at + c * TILE_ELEMENTS);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) {
        float* total = totals[r] + c * LANES;
        const Vector sum = load_vector<Vector>(total) + (sums.even[r][c] + sums.odd[r][c]);
        memcpy(total, &sum, sizeof(sum));
      }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) add(r, column + c * LANES, load_vector<Vector>(totals[r] + c * LANES));
}

// Calls body(rows) with the number of rows, from 1 to MOST_FEW_ROWS, as a constant.
template <class Body>
void with_few_rows(long rows, const Body& body) {
  switch (rows) {
    case 1: return body(std::integral_constant<int, 1>());
    case 2: return body(std::integral_constant<int, 2>());
    default: return body(std::integral_constant<int, 3>());
  }
}

// What score_in_tiles does
inline void score_few(const TiledRows& queries, const TiledPanels& keys, long key_dim, float* scores, long score_stride) {
  const long depth = key_dim % (2 * PANEL_KEYS) == 0 ? 2 * PANEL_KEYS : PANEL_KEYS;
  FewRows rows;
  rows.set(queries, key_dim);
  with_few_rows(queries.count, [&](auto count) {
    long p = 0;
    for (; p + AT_ONCE <= keys.count; p += AT_ONCE)
      score_few_panels<count, AT_ONCE>(rows, keys.panels + p, keys.later + p, key_dim, depth, scores + p * LANES,
                                       score_stride);
    for (; p < keys.count; p++)
      score_few_panels<count, 1>(rows, keys.panels + p, keys.later + p, key_dim, depth, scores + p * LANES, score_stride);
  });
}

// What add_in_tiles does
template <class Add>
void add_few(const TiledRows& weights, const TiledPanels& values, long value_dim, const Add& add) {
  FewRows rows;
  rows.set(weights, values.count * PANEL_KEYS);
  with_few_rows(weights.count, [&](auto count) {
    long column = 0;
    for (; column + AT_ONCE * LANES <= value_dim; column += AT_ONCE * LANES)
      add_few_columns<count, AT_ONCE>(rows, values, value_dim, column, add);
    for (; column < value_dim; column += LANES) add_few_columns<count, 1>(rows, values, value_dim, column, add);
  });
}

// scores[r][16 c ..] = the dot products of row r of queries with the keys of panel c
inline void score_as_amx(const TiledRows& queries, const TiledPanels& keys, long key_dim, float* scores, long score_stride) {
  const auto score = queries.count <= MOST_FEW_ROWS ? score_few : score_in_tiles;
  score(queries, keys, key_dim, scores, score_stride);
}

// Calls add(row, column, sums) with the sums of the values of some panels, weighted with each row of the weights: a vector
// of columns at a time.
template <class Add>
void add_as_amx(const TiledRows& weights, const TiledPanels& values, long value_dim, const Add& add) {
  if (weights.count <= MOST_FEW_ROWS)
    add_few(weights, values, value_dim, add);
  else
    add_in_tiles(weights, values, value_dim, add);
}

#else

void score_as_amx(const TiledRows&, const TiledPanels&, long, float*, long) = delete;
template <class Add>
void add_as_amx(const TiledRows&, const TiledPanels&, long, const Add&) = delete;

#endif

}  // namespace oaiserve
