// Products with weights whose scales are integers times a float of 256 neighbours, in the tiles of AMX.
//
// A chunk of a panel, 256 by 32 weights, is expanded once for all rows: to codes times their integer scales, which have
// up to 14 bits, in two *levels* of eight bits. Tiles sum the products of each level over all 256 numbers, without error.
// Only then are they put together, scaled and added. Minimums and the sums of x that they are multiplied with are exact
// in bfloat16, the sums in two parts, so one more instruction has the products of all minimums of a chunk. A row gets the
// same numbers as from super_tile of block_product.h.
//
// With 16 rows and 16 columns, a chunk takes nine instructions of 16 cycles, and six vectors for each row to put together
// what they sum.
#pragma once

#include "chunk_tiles.h"

#if defined(WITH_INTEGER_TILES)

namespace oaiserve {

constexpr long OF_SUPERS = 2000;  // and how many rows: what tiles are configured for, see tile_rows of amx.h

// How codes times scales become levels.
enum class Expansion {
  ONE_LEVEL,       // they fit into eight bits, without a sign
  NEGATIVE,        // they fit in with the other sign
  SPLIT_SCALES,    // low + 8 * high: each level has three bits of the scales, and neither has a sign
  SPLIT_PRODUCTS,  // low + 256 * high: the low level has the last eight bits, and the high one the sign
};
constexpr Expansion expansion_of(Format format) {
  switch (format) {
    case Format::Q2_K: return Expansion::ONE_LEVEL;     // 3 * 15
    case Format::Q3_K: return Expansion::NEGATIVE;      // -4..3 times -32..31
    case Format::Q4_K: return Expansion::SPLIT_SCALES;  // 15 * 7
    case Format::Q5_K: return Expansion::SPLIT_SCALES;  // 31 * 7
    default: return Expansion::SPLIT_PRODUCTS;          // Q6_K: -32..31 times -128..127; IQ4_XS: -127..113 times -32..31
  }
}
constexpr int levels_of(Expansion expansion) {
  return expansion == Expansion::ONE_LEVEL || expansion == Expansion::NEGATIVE ? 1 : 2;
}
constexpr long least_tiled_rows(Expansion expansion) { return levels_of(expansion) == 1 ? 5 : 9; }

// Configures the tiles for up to 16 rows: 0 and 1 have the sums of both levels of the left 16 columns, 2 and 3 those of
// the right ones, and 4 and 5 those of minimums; 6 has rows of x, and 7 weights.
inline void configure_for_supers(long rows) {
  if (tile_rows == OF_SUPERS + rows) return;
  alignas(64) TileConfig config;
  for (const int tile : {0, 1, 2, 3, 4, 5, 6}) config.set(tile, rows);
  config.set(7, TILE_HEIGHT);
  load_config(config);
  tile_rows = OF_SUPERS + rows;
}

// A chunk of a panel, as tiles take it. A half has the left or the right 16 columns.
template <int LEVELS>
struct alignas(64) ExpandedChunk {
  uint8_t weights[2][LEVELS][SUPER / 4][PLANE];
  uint32_t mins[2][SUPER / 16][LANES];  // in bfloat16, twice
};

// The scales of 16 columns, as codes are multiplied with them.
struct QuadScales {
  __m512i scales, even, odd;  // twice in a lane; as the first byte of these shorts, and as the second
  __m512i offsets;            // times the offset of the codes

  QuadScales(Integers of_columns, int offset) {
    scales = (__m512i)((of_columns & 0xffff) | of_columns << 16);
    even = _mm512_and_si512(scales, _mm512_set1_epi16(0xff));
    odd = _mm512_slli_epi16(scales, 8);
    offsets = _mm512_mullo_epi16(scales, _mm512_set1_epi16(int16_t(offset)));
  }
};

// Expands a quad of 16 columns to its levels.
template <Expansion EXPANSION>
[[gnu::always_inline]] inline void expand_quad(VectorBits quad, const QuadScales& by, uint8_t* low, uint8_t* high) {
  const __m512i codes = (__m512i)quad, three_bits = _mm512_set1_epi16(7);
  if constexpr (EXPANSION == Expansion::ONE_LEVEL) {
    _mm512_store_si512(low, _mm512_mullo_epi16(codes, by.scales));  // no product of a byte reaches the next one
  } else if constexpr (EXPANSION == Expansion::SPLIT_SCALES) {
    _mm512_store_si512(low, _mm512_mullo_epi16(codes, _mm512_and_si512(by.scales, three_bits)));
    _mm512_store_si512(high, _mm512_mullo_epi16(codes, _mm512_srli_epi16(by.scales, 3)));
  } else {
    constexpr __mmask64 ODD = 0xaaaaaaaaaaaaaaaa;
    const __m512i even = _mm512_maddubs_epi16(codes, by.even), odd = _mm512_maddubs_epi16(codes, by.odd);
    if constexpr (EXPANSION == Expansion::NEGATIVE) {
      const __m512i left = _mm512_sub_epi16(by.offsets, even), right = _mm512_sub_epi16(by.offsets, odd);
      _mm512_store_si512(low, _mm512_mask_blend_epi8(ODD, left, _mm512_slli_epi16(right, 8)));
    } else {
      const __m512i left = _mm512_sub_epi16(even, by.offsets), right = _mm512_sub_epi16(odd, by.offsets);
      _mm512_store_si512(low, _mm512_mask_blend_epi8(ODD, left, _mm512_slli_epi16(right, 8)));
      _mm512_store_si512(high, _mm512_mask_blend_epi8(ODD, _mm512_srli_epi16(left, 8), right));
    }
  }
}

// Expands a group of a chunk.
template <Format FORMAT, int LEVELS>
void expand_group(const uint8_t* chunk, long group, ExpandedChunk<LEVELS>& out) {
  using P = Places<FORMAT>;
  constexpr Layout L = P::L;
  constexpr int RUNS = L.runs();
#pragma GCC unroll 2
  for (int run = 0; run < RUNS; run++) {
    const QuadScales scales[2] = {{load_small_scales<FORMAT>(chunk, group, run, 0), L.offset},
                                  {load_small_scales<FORMAT>(chunk, group, run, LANES), L.offset}};
    if constexpr (L.has_min)
      for (int half = 0; half < 2; half++) {
        const Vector min = __builtin_convertvector(load_small_mins<FORMAT>(chunk, group, run, half * LANES), Vector);
        const VectorBits twice = (VectorBits)min | (VectorBits)min >> 16;
        for (int at = 0; at < 2 / RUNS; at++) std::memcpy(out.mins[half][group * 2 + run + at], &twice, sizeof(twice));
      }
#pragma GCC unroll 8
    for (int s = 0; s < STEPS / RUNS; s++) {
      const int step = run * (STEPS / RUNS) + s;
      VectorBits codes[2];
      load_codes<L>(chunk + P::codes(group), P::LOW, step, codes[0], codes[1]);
      for (int half = 0; half < 2; half++) {
        auto& levels = out.weights[half];
        expand_quad<expansion_of(FORMAT)>(codes[half], scales[half], levels[0][group * STEPS + step],
                                          levels[LEVELS - 1][group * STEPS + step]);
      }
    }
  }
}

// What a tile of rows and 16 columns sums: the products of both levels, and those of minimums.
struct alignas(64) TiledSums {
  int32_t products[2][TILE_HEIGHT][LANES];
  float mins[TILE_HEIGHT][LANES];
};

#define MULTIPLY_WEIGHTS(IS_SIGNED, sums, x, weights) \
  do {                                                \
    if constexpr (IS_SIGNED)                          \
      _tile_dpbssd(sums, x, weights);                 \
    else                                              \
      _tile_dpbsud(sums, x, weights);                 \
  } while (false)

// out [2] = up to 16 rows of x, which are `x_bytes` apart, times both halves of a chunk. Calls between(quarter) after each
// quarter of the products, with work for the rest of the core.
template <Expansion EXPANSION, bool HAS_MIN, class Between>
void multiply_chunk(const QuantizedSuper& x, long x_bytes, const ExpandedChunk<levels_of(EXPANSION)>& chunk,
                    TiledSums* out, Between&& between) {
  constexpr int LEVELS = levels_of(EXPANSION);
  constexpr bool LOW_IS_SIGNED = EXPANSION == Expansion::NEGATIVE;
  constexpr bool HIGH_IS_SIGNED = EXPANSION == Expansion::SPLIT_PRODUCTS;
  _tile_zero(0);
  _tile_zero(2);
  if constexpr (LEVELS == 2) {
    _tile_zero(1);
    _tile_zero(3);
  }
  if constexpr (HAS_MIN) {
    _tile_zero(4);
    _tile_zero(5);
    LOAD_TILE(6, x.parts, x_bytes);
    LOAD_TILE(7, chunk.mins[0], PLANE);
    _tile_dpbf16ps(4, 6, 7);
    LOAD_TILE(7, chunk.mins[1], PLANE);
    _tile_dpbf16ps(5, 6, 7);
  }
#pragma GCC unroll 4
  for (int depth = 0; depth < QUARTERS; depth++) {
    STREAM_TILE(6, x.values + depth * TILE_BYTES, x_bytes);
    LOAD_TILE(7, chunk.weights[0][0][depth * TILE_HEIGHT], PLANE);
    MULTIPLY_WEIGHTS(LOW_IS_SIGNED, 0, 6, 7);
    LOAD_TILE(7, chunk.weights[1][0][depth * TILE_HEIGHT], PLANE);
    MULTIPLY_WEIGHTS(LOW_IS_SIGNED, 2, 6, 7);
    if constexpr (LEVELS == 2) {
      LOAD_TILE(7, chunk.weights[0][1][depth * TILE_HEIGHT], PLANE);
      MULTIPLY_WEIGHTS(HIGH_IS_SIGNED, 1, 6, 7);
      LOAD_TILE(7, chunk.weights[1][1][depth * TILE_HEIGHT], PLANE);
      MULTIPLY_WEIGHTS(HIGH_IS_SIGNED, 3, 6, 7);
    }
    between(depth);
  }
  if constexpr (HAS_MIN) {
    _tile_stored(4, out[0].mins, TILE_BYTES);
    _tile_stored(5, out[1].mins, TILE_BYTES);
  }
  _tile_stored(0, out[0].products[0], TILE_BYTES);
  _tile_stored(2, out[1].products[0], TILE_BYTES);
  if constexpr (LEVELS == 2) {
    _tile_stored(1, out[0].products[1], TILE_BYTES);
    _tile_stored(3, out[1].products[1], TILE_BYTES);
  }
}

// sums += a tile's sums for this number of rows. They are PANEL floats apart, and those of x `x_bytes`.
template <Format FORMAT>
inline void add_rows(const TiledSums& from, long first, long count, const QuantizedSuper& x, long x_bytes,
                     const Scaling& scaling, float* sums) {
  constexpr Expansion EXPANSION = expansion_of(FORMAT);
  const int32_t* products = from.products[0][first];
  const char* scale = reinterpret_cast<const char*>(&x.scale) + first * x_bytes;
  sums += first * PANEL;
#pragma GCC unroll 4
  for (long r = 0; r < count; r++, products += LANES, scale += x_bytes, sums += PANEL) {
    Integers total = load_vector<Integers>(products);
    if constexpr (levels_of(EXPANSION) == 2)
      total += load_vector<Integers>(products + TILE_HEIGHT * LANES) << (EXPANSION == Expansion::SPLIT_SCALES ? 3 : 8);
    if constexpr (EXPANSION == Expansion::NEGATIVE) total = -total;
    Vector mins{};
    if constexpr (layout_of(FORMAT).has_min)
      mins = load_vector<Vector>(reinterpret_cast<const float*>(products) + 2 * TILE_HEIGHT * LANES);
    float x_scale;
    std::memcpy(&x_scale, scale, sizeof(x_scale));
    const Vector before = load_vector<Vector>(sums);
    const Vector sum = add_super<layout_of(FORMAT).has_min>(before, total, mins, x_scale, scaling);
    std::memcpy(sums, &sum, sizeof(sum));
  }
}

// What multiply_chunks_in_tiles calls.
template <Format FORMAT>
struct SuperTiles {
  using P = Places<FORMAT>;
  static constexpr Expansion EXPANSION = expansion_of(FORMAT);
  using Expanded = ExpandedChunk<levels_of(EXPANSION)>;
  using Sums = TiledSums;
  using Part = TiledPart<QuantizedSuper, TiledSums>;

  static const QuantizedSuper* row(const RowLine* x, long) { return supers_in(x); }
  static void configure(long rows) { configure_for_supers(rows); }
  static void expand(const uint8_t* chunk, long group, Expanded& out) { expand_group<FORMAT>(chunk, group, out); }
  template <class Between>
  static void multiply(const QuantizedSuper& x, long x_bytes, const Expanded& chunk, Sums* out, Between&& between) {
    multiply_chunk<EXPANSION, P::L.has_min>(x, x_bytes, chunk, out, between);
  }
  // Adds a quarter of the rows to their sums.
  static void add(const Part& part, int quarter, long x_bytes) {
    const long rows = part.end - part.first, each = (rows + QUARTERS - 1) / QUARTERS;
    const long begin = std::min(quarter * each, rows);
    for (int half = 0; half < 2; half++) {
      const Scaling scaling = load_scaling<FORMAT>(part.chunk, half * LANES);
      const auto add_some = [&](long first, long count) {
        add_rows<FORMAT>(part.found[half], first, count, *part.x, x_bytes, scaling, part.sums + half * LANES);
      };
      if (rows == TILE_HEIGHT)
        add_some(quarter * (TILE_HEIGHT / QUARTERS), TILE_HEIGHT / QUARTERS);
      else
        add_some(part.first + begin, std::min(each, rows - begin));
    }
  }
};

}  // namespace oaiserve

#endif
