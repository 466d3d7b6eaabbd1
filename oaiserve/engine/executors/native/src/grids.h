// Formats of GGUF files with one to three bits a weight: IQ1, IQ2 and IQ3, whose codes are places in a table of points,
// and TQ1_0 and TQ2_0, whose weights are -1, 0 or 1.
//
// A point has four or eight neighbours along k. Weights are a point's numbers, with signs of their own in IQ2 and IQ3,
// plus or minus an eighth in IQ1, times a small odd integer that 16 or 32 neighbours share, times a float of 256. In
// memory, a panel has the places, the signs and the integers of 256 numbers of 32 columns, with nearly as many bits as
// the file. Products can't read these. So each chunk is unpacked to bytes right before it is multiplied, once for all
// rows: to Format::UNPACKED. That stays in L1, and then products are those of any format whose scales are integers.
//
// Points come from the caller (set_grid) as signed bytes, times a factor that makes the float of 256 an eighth of the
// file's in every format: 1 for IQ2, 2 for IQ3_XXS, 8 for IQ3_S; for IQ1 they are 8 times the point plus 1. All are exact.
#pragma once

#include <atomic>

#include "blocks.h"

namespace oaiserve {

struct Grid {
  int weights;    // of a point; 0: there are no points
  int high_bits;  // bits of a place beyond eight
  bool has_signs;
  int runs;                // with an integer each, of 256 weights
  int codes_of_byte = 0;   // without points
  bool has_minus = false;  // A bit says that a point is less by two: behind each place, or behind the integer of a group.

  constexpr int points() const { return weights == 0 ? 0 : int(SUPER) / weights; }
  constexpr int places_of_word() const { return high_bits == 0 ? points() : 16 / (high_bits == 3 ? 4 : high_bits); }
  constexpr int place_bits() const { return has_minus ? 3 : high_bits; }  // of the high ones
  // With three high bits, a word of four places has the integer of the group in its last four bits.
  constexpr bool has_nibbles() const { return runs > 0 && high_bits != 3; }
  constexpr int planes() const { return weights == 0 ? (SUPER / 4 + codes_of_byte - 1) / codes_of_byte : 0; }
};

constexpr Grid grid_of(Format format) {
  switch (format) {
    case Format::IQ1_S: return {.weights = 8, .high_bits = 3, .has_signs = false, .runs = 8, .has_minus = true};
    case Format::IQ1_M: return {.weights = 8, .high_bits = 4, .has_signs = false, .runs = 16, .has_minus = true};
    case Format::IQ2_XXS: return {8, 0, true, 8};
    case Format::IQ2_XS: return {8, 1, true, 16};
    case Format::IQ2_S: return {8, 2, true, 16};
    case Format::IQ3_XXS: return {4, 0, true, 8};
    case Format::IQ3_S: return {4, 1, true, 8};
    case Format::TQ1_0: return {0, 0, false, 0, 5};
    default: return {0, 0, false, 0, 4};  // TQ2_0
  }
}

template <Format FORMAT>
constexpr bool IS_UNPACKED = layout_of(FORMAT).is_unpacked;

// Where the parts of a chunk are, in bytes. Each part has its number for all columns side by side.
template <Format FORMAT>
  requires(IS_UNPACKED<FORMAT>)
struct Places<FORMAT> {
  static constexpr Grid G = grid_of(FORMAT);
  static constexpr long NIBBLES = 2 * PANEL;  // behind the 16-bit scales: the integers, two in a byte
  static constexpr long LOW = NIBBLES + (G.has_nibbles() ? G.runs / 2 * PANEL : 0);  // the last eight bits of places
  static constexpr long PLANES = LOW;  // Without points, a byte has the codes of some steps, and a plane 4 of a column.
  static constexpr long HIGH = LOW + (G.points() + G.planes() * 4) * PANEL;  // the other bits of several places in 16 bits
  static constexpr long WORDS = G.high_bits == 0 ? 0 : G.points() / G.places_of_word();
  static constexpr long SIGNS = HIGH + WORDS * 2 * PANEL;  // 32 bits for a group: bit 8 j + s is that of number 4 s + j
  static constexpr long CHUNK = SIGNS + (G.has_signs ? SUPER / 8 * PANEL : 0);
};

inline long block_panel_bytes(Format format, long k) {
  return for_format(format, [k]<Format FORMAT>() { return k / layout_of(FORMAT).chunk() * Places<FORMAT>::CHUNK; });
}

// The points of a format, which the caller keeps. A point is as many bytes as it has weights.
template <Format FORMAT>
using Point = std::conditional_t<grid_of(FORMAT).weights == 8, uint64_t, uint32_t>;
template <Format FORMAT>
inline std::atomic<const Point<FORMAT>*> POINTS{nullptr};

inline void set_grid(Format format, const void* points) {
  for_format(format, [points]<Format FORMAT>() {
    if constexpr (IS_UNPACKED<FORMAT>) POINTS<FORMAT> = static_cast<const Point<FORMAT>*>(points);
  });
}

// -- reading files

// A block as it is read from a file.
struct GridBlock {
  uint16_t scale;
  uint16_t places[SUPER / 4];
  uint32_t signs[SUPER / BLOCK_GROUP];  // in the order of k
  uint8_t nibbles[SUPER / 16];
  uint8_t codes[SUPER];  // 0, 1 or 2 without points; TQ2_0 also has 3
};

inline uint32_t word_at(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return word;
}

// Eight signs of which a file has seven: an even number of them is negative.
inline uint32_t eight_signs(uint32_t seven) { return seven | uint32_t(__builtin_parity(seven)) << 7; }

// The integer and the signs of a group in 32 bits, as IQ2_XXS and IQ3_XXS have them.
inline void read_signs(uint32_t word, long group, GridBlock& out) {
  out.nibbles[group] = uint8_t(word >> 28);
  out.signs[group] = 0;
  for (int i = 0; i < 4; i++) out.signs[group] |= eight_signs(word >> 7 * i & 127) << 8 * i;
}

inline uint8_t nibble_at(const uint8_t* p, long i) { return p[i / 2] >> i % 2 * 4 & 15; }

template <Format FORMAT>
void read_block(const uint8_t* block, GridBlock& out) {
  constexpr Grid G = grid_of(FORMAT);
  constexpr long GROUPS = SUPER / BLOCK_GROUP;
  const uint8_t* const low = block + 2;
  out.scale = half_at(block);
  if constexpr (FORMAT == Format::IQ2_XXS) {
    for (long i = 0; i < GROUPS; i++) {
      for (int j = 0; j < 4; j++) out.places[4 * i + j] = low[8 * i + j];
      read_signs(word_at(low + 8 * i + 4), i, out);
    }
  } else if constexpr (FORMAT == Format::IQ2_XS) {
    for (long i = 0; i < GROUPS; i++) {
      out.signs[i] = 0;
      for (int j = 0; j < 4; j++) {
        const uint16_t both = half_at(low + 2 * (4 * i + j));
        out.places[4 * i + j] = both & 511;
        out.signs[i] |= eight_signs(both >> 9) << 8 * j;
      }
    }
    for (int i = 0; i < G.runs; i++) out.nibbles[i] = nibble_at(block + 66, i);
  } else if constexpr (FORMAT == Format::IQ2_S) {
    for (int i = 0; i < G.points(); i++) out.places[i] = uint16_t(low[i] | (block[66 + i / 4] >> i % 4 * 2 & 3) << 8);
    std::memcpy(out.signs, block + 34, sizeof(out.signs));
    for (int i = 0; i < G.runs; i++) out.nibbles[i] = nibble_at(block + 74, i);
  } else if constexpr (FORMAT == Format::IQ3_XXS) {
    for (int i = 0; i < G.points(); i++) out.places[i] = low[i];
    for (long i = 0; i < GROUPS; i++) read_signs(word_at(block + 66 + 4 * i), i, out);
  } else if constexpr (FORMAT == Format::IQ3_S) {
    for (int i = 0; i < G.points(); i++) out.places[i] = uint16_t(low[i] | (block[66 + i / 8] >> i % 8 & 1) << 8);
    std::memcpy(out.signs, block + 74, sizeof(out.signs));
    for (int i = 0; i < G.runs; i++) out.nibbles[i] = nibble_at(block + 106, i);
  } else if constexpr (FORMAT == Format::IQ1_S) {
    for (long i = 0; i < GROUPS; i++) {
      const uint16_t high = half_at(block + 34 + 2 * i);
      for (int j = 0; j < 4; j++) out.places[4 * i + j] = uint16_t(low[4 * i + j] | (high >> 3 * j & 7) << 8);
      out.nibbles[i] = uint8_t(high >> 12);
    }
  } else if constexpr (FORMAT == Format::IQ1_M) {
    out.scale = 0;
    for (int i = 0; i < G.points(); i++) out.places[i] = uint16_t(block[i] | nibble_at(block + 32, i) << 8);
    for (int i = 0; i < G.runs; i++) {
      const uint16_t four = half_at(block + 48 + i / 4 * 2);
      out.nibbles[i] = four >> i % 4 * 3 & 7;
      if (i % 4 == 0) out.scale |= uint16_t(four >> 12 << i);
    }
  } else if constexpr (FORMAT == Format::TQ1_0) {
    out.scale = half_at(block + 52);
    const auto read = [&](const uint8_t* from, int bytes, int digits, uint8_t* to) {
      for (int i = 0, power = 1; i < digits; i++, power *= 3)
        for (int j = 0; j < bytes; j++) *to++ = uint8_t((from[j] * power & 255) * 3 >> 8);
    };
    read(block, 32, 5, out.codes);
    read(block + 32, 16, 5, out.codes + 160);
    read(block + 48, 4, 4, out.codes + 240);
  } else {  // TQ2_0
    out.scale = half_at(block + 64);
    for (int i = 0; i < SUPER; i++) out.codes[i] = block[i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
  }
}

// Bits 0, 4, 8, ... as the last eight bits.
inline uint32_t each_fourth_bit(uint32_t bits) {
  bits &= 0x11111111u;
  bits = (bits | bits >> 3) & 0x03030303u;
  bits = (bits | bits >> 6) & 0x000f000fu;
  return (bits | bits >> 12) & 0xff;
}

// Does what pack_panel of blocks.h does.
template <Format FORMAT>
  requires(IS_UNPACKED<FORMAT>)
void pack_panel(const uint8_t* const* rows, const uint8_t* const*, long k, uint8_t* panel) {
  using P = Places<FORMAT>;
  constexpr Grid G = P::G;
  constexpr long BYTES = layout_of(FORMAT).bytes;
  for (long chunk = 0; chunk < k / SUPER; chunk++, panel += P::CHUNK) {
    std::memset(panel, 0, P::CHUNK);
    for (long column = 0; column < PANEL; column++) {
      if (!rows[column]) continue;
      prefetch_lines<false>(rows[column] + chunk * BYTES + READ_AHEAD, BYTES);
      GridBlock block;
      read_block<FORMAT>(rows[column] + chunk * BYTES, block);
      std::memcpy(panel + 2 * column, &block.scale, 2);
      for (long i = 0; G.has_nibbles() && i < G.runs; i++)
        panel[P::NIBBLES + i / 2 * PANEL + column] |= uint8_t(block.nibbles[i] << i % 2 * 4);
      for (long i = 0; i < G.points(); i++) {
        panel[P::LOW + i * PANEL + column] = uint8_t(block.places[i]);
        if constexpr (G.high_bits > 0) {
          uint8_t* const to = panel + P::HIGH + (i / G.places_of_word() * PANEL + column) * 2;
          auto word = uint16_t(half_at(to) | block.places[i] >> 8 << i % G.places_of_word() * G.high_bits);
          if constexpr (!G.has_nibbles()) word |= uint16_t(block.nibbles[i / 4] << 12);
          std::memcpy(to, &word, 2);
        }
      }
      for (int i = 0; i < G.planes() * 4; i++) {
        const auto code = [&](int j) {
          const int at = (i / 4 * G.codes_of_byte + j) * 4 + i % 4;
          return at < SUPER ? int(block.codes[at]) : 0;
        };
        int byte = 0;
        if constexpr (G.codes_of_byte == 4) {
          for (int j = 0; j < 4; j++) byte |= code(j) << 2 * j;
        } else {
          for (int j = 0; j < G.codes_of_byte; j++) byte = 3 * byte + code(j);
          byte = (byte * 256 + 242) / 243;  // the digits behind the point, rounded up
        }
        panel[P::PLANES + i / 4 * 4 * PANEL + column * 4 + i % 4] = uint8_t(byte);
      }
      for (long i = 0; G.has_signs && i < SUPER / BLOCK_GROUP; i++) {
        uint32_t signs = 0;
        for (int j = 0; j < 4; j++) signs |= each_fourth_bit(block.signs[i] >> j) << 8 * j;
        std::memcpy(panel + P::SIGNS + (i * PANEL + column) * 4, &signs, 4);
      }
    }
  }
}

// -- unpacking

using Unpacked = Places<Format::UNPACKED>;
static_assert(Unpacked::CHUNK == Unpacked::HEAD + SUPER * PANEL && Unpacked::MINS == PANEL * 2);

typedef uint16_t Shorts __attribute__((vector_size(WIDTH * 4)));
typedef uint8_t ShortBytes __attribute__((vector_size(WIDTH * 2)));
typedef int8_t QuadBytes __attribute__((vector_size(WIDTH * 4)));

#if defined(WITH_INTEGER_TILES)
// codes = the quads of a group, of all columns, with their signs. CPUs with AMX gather faster than they load and store
// one by one. Others may take much longer.
template <Format FORMAT>
[[gnu::always_inline]] inline void unpack_group(const uint8_t* chunk, long group, uint8_t* codes) {
  using P = Places<FORMAT>;
  constexpr Grid G = P::G;
  constexpr long COUNT = BLOCK_GROUP / G.weights;
  constexpr int QUADS_EACH = G.weights / 4;
  const __m512i zero = _mm512_setzero_si512();
  const auto* const points = POINTS<FORMAT>.load(std::memory_order_relaxed);
  for (long column = 0; column < PANEL; column += WIDTH) {
    __m512i signs = zero;
    if constexpr (G.has_signs) signs = load_vector<__m512i>(chunk + P::SIGNS + (group * PANEL + column) * 4);
#pragma GCC unroll 8
    for (long i = 0; i < COUNT; i++) {
      const long point = group * COUNT + i;
      __m512i places = _mm512_cvtepu8_epi32(load_vector<__m128i>(chunk + P::LOW + point * PANEL + column));
      __mmask16 is_less = 0;
      if constexpr (G.high_bits > 0) {
        const long word = point / G.places_of_word();
        const int shift = int(point % G.places_of_word()) * G.high_bits;
        const __m512i words =
            _mm512_cvtepu16_epi32(load_vector<__m256i>(chunk + P::HIGH + (word * PANEL + column) * 2));
        const __m512i high = _mm512_srli_epi32(_mm512_slli_epi32(words, 8), unsigned(shift));
        // places | high & mask
        places = _mm512_ternarylogic_epi32(places, high, _mm512_set1_epi32(((1 << G.place_bits()) - 1) << 8), 0xf8);
        if constexpr (G.has_minus)
          is_less = _mm512_test_epi32_mask(words, _mm512_set1_epi32(G.high_bits == 3 ? 1 << 15 : 8 << shift));
      }
      __m512i quads[QUADS_EACH];
      if constexpr (QUADS_EACH == 1) {
        quads[0] = _mm512_i32gather_epi32(places, points, 4);
      } else {
        const __m512i left = _mm512_i32gather_epi64(_mm512_castsi512_si256(places), points, 8);
        const __m512i right = _mm512_i32gather_epi64(_mm512_extracti64x4_epi64(places, 1), points, 8);
        const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        quads[0] = _mm512_permutex2var_epi32(left, even, right);
        quads[1] = _mm512_permutex2var_epi32(left, _mm512_add_epi32(even, _mm512_set1_epi32(1)), right);
      }
#pragma GCC unroll 2
      for (int quad = 0; quad < QUADS_EACH; quad++) {
        const long step = i * QUADS_EACH + quad;
        __m512i values = quads[quad];
        if constexpr (G.has_signs) {
          const __mmask64 is_negative = _mm512_test_epi8_mask(signs, _mm512_set1_epi8(char(1 << step)));
          values = _mm512_mask_sub_epi8(values, is_negative, zero, values);
        }
        if constexpr (G.has_minus)
          values = _mm512_add_epi8(values, _mm512_maskz_set1_epi32(is_less, int(in_each_byte(uint8_t(-2)))));
        std::memcpy(codes + (step * PANEL + column) * 4, &values, sizeof(values));
      }
    }
  }
}
#else
// The points of a group, of all columns.
template <Format FORMAT>
struct CopiedPoints {
  using P = Places<FORMAT>;
  static constexpr Grid G = P::G;
  using Point = oaiserve::Point<FORMAT>;
  static constexpr long COUNT = BLOCK_GROUP / G.weights;
  alignas(64) Point points[COUNT][PANEL];

  void copy(const uint8_t* chunk, long group) {
    const uint8_t* const low = chunk + P::LOW + group * COUNT * PANEL;
    if constexpr (G.high_bits == 0) return copy_at(low);
    alignas(64) uint16_t places[COUNT * PANEL];
    for (long i = 0; i < COUNT; i++) {
      const long point = group * COUNT + i;
      const uint8_t* const words = chunk + P::HIGH + point / G.places_of_word() * 2 * PANEL;
      const auto shift = uint16_t(point % G.places_of_word() * G.high_bits);
      for (long column = 0; column < PANEL; column += 2 * WIDTH) {
        const Shorts high = load_vector<Shorts>(words + 2 * column) >> shift & uint16_t((1 << G.place_bits()) - 1);
        const Shorts both = high << 8 | convert<Shorts>(load_vector<ShortBytes>(low + i * PANEL + column));
        std::memcpy(places + i * PANEL + column, &both, sizeof(both));
      }
    }
    asm("" : "+m"(places));  // GCC would take them from vectors, one by one
    copy_at(places);
  }
  // Copies with two loads and a store for each point. GCC would put several into a vector first.
  template <class Place>
  [[gnu::always_inline]] void copy_at(const Place* places) {
    const Point* const from = POINTS<FORMAT>.load(std::memory_order_relaxed);
    volatile Point* const to = points[0];
#pragma GCC unroll 16
    for (long i = 0; i < COUNT * PANEL; i++) to[i] = from[size_t(places[i])];
  }
  // codes = the quads of all columns for each step, with these signs.
  [[gnu::always_inline]] void store(const uint8_t* signs, uint8_t* codes) const {
    constexpr int QUADS_EACH = G.weights / 4;
    for (long column = 0; column < PANEL; column += WIDTH) {
      const auto of_columns = G.has_signs ? load_vector<VectorBits>(signs + column * 4) : VectorBits{};
#pragma GCC unroll 8
      for (int step = 0; step < STEPS; step++) {
        const Point* const from = points[step / QUADS_EACH] + column;
        uint32_t quads[WIDTH];
        for (int i = 0; i < WIDTH; i++) quads[i] = uint32_t(from[i] >> step % QUADS_EACH * 32);
        auto values = load_vector<QuadBytes>((const uint8_t*)quads);
        if constexpr (G.has_signs) {
          const QuadBytes is_negative = (QuadBytes)(of_columns << (7 - step)) < 0;
          values = (values ^ is_negative) - is_negative;
        }
        std::memcpy(codes + (step * PANEL + column) * 4, &values, sizeof(values));
      }
    }
  }
};

// Subtracts two from the points of a group whose bit in `words` says so.
template <Format FORMAT>
void subtract_twos(const uint8_t* words, uint8_t* codes) {
  constexpr Grid G = grid_of(FORMAT);
  for (long point = 0; point < 4; point++)
    for (long column = 0; column < PANEL; column += WIDTH) {
      const auto bits = convert<VectorBits>(load_vector<Halves>(words + 2 * column));
      const auto is_less = (Integers)(bits << (G.high_bits == 3 ? 16 : 28 - 4 * point)) >> 31;
      const QuadBytes less = (QuadBytes)(is_less & int32_t(in_each_byte(uint8_t(-2))));
      for (int step = 0; step < 2; step++) {
        uint8_t* const quads = codes + ((2 * point + step) * PANEL + column) * 4;
        const QuadBytes values = load_vector<QuadBytes>(quads) + less;
        std::memcpy(quads, &values, sizeof(values));
      }
    }
}
#endif

// Calls body(step, codes) with the quads of each step of WIDTH columns, from a chunk's planes on. Codes are 0 to 3.
template <Format FORMAT, class Body>
[[gnu::always_inline]] inline void for_planes(const uint8_t* planes, long column, Body&& body) {
  constexpr int STEPS_EACH = grid_of(FORMAT).codes_of_byte;
  for (long plane = 0; plane < grid_of(FORMAT).planes(); plane++) {
    const auto bits = load_vector<VectorBits>(planes + (plane * PANEL + column) * 4);
    [[maybe_unused]] Shorts even = (Shorts)bits & 255, odd = (Shorts)bits >> 8;
#pragma GCC unroll 5
    for (int i = 0; i < STEPS_EACH; i++) {
      if (plane * STEPS_EACH + i >= SUPER / 4) break;  // The last byte has fewer codes.
      VectorBits found;
      if constexpr (STEPS_EACH == 4) {
        found = bits >> 2 * i & in_each_byte(3);
      } else {
        even *= 3;  // The next digit moves to before the point.
        odd *= 3;
        found = (VectorBits)(even >> 8 | (odd & 0xff00));
        even &= 255;
        odd &= 255;
      }
      body(plane * STEPS_EACH + i, found);
    }
  }
}

// Unpacks codes without points to -8, 0, 8, or 16.
template <Format FORMAT>
void unpack_planes(const uint8_t* planes, uint8_t* codes) {
  for (long column = 0; column < PANEL; column += WIDTH)
    for_planes<FORMAT>(planes, column, [&](long step, VectorBits found) {
      const QuadBytes values = (QuadBytes)(found << 3) - 8;
      std::memcpy(codes + (step * PANEL + column) * 4, &values, sizeof(values));
    });
}

// out = a chunk of a panel, as a chunk of Format::UNPACKED.
template <Format FORMAT>
void unpack_chunk(const uint8_t* chunk, uint8_t* out) {
  using P = Places<FORMAT>;
  constexpr Grid G = P::G;
  constexpr long GROUPS = SUPER / BLOCK_GROUP;
  std::memcpy(out, chunk, P::NIBBLES);
  uint8_t* const scales = out + Unpacked::SMALL_SCALES;
  if constexpr (G.runs == 0) {
    std::memset(scales, 1, 16 * PANEL);
    return unpack_planes<FORMAT>(chunk + P::PLANES, out + Unpacked::codes(0));
  } else {
    for (int run = 0; run < 16; run++) {
      const int i = run * G.runs / 16;
      const auto odd = [&](int nibble) { return uint8_t(nibble * 2 + 1); };
      for (long column = 0; column < PANEL; column++)
        if constexpr (G.has_nibbles())
          scales[run * PANEL + column] = odd(chunk[P::NIBBLES + i / 2 * PANEL + column] >> i % 2 * 4 & 15);
        else
          scales[run * PANEL + column] = odd(half_at(chunk + P::HIGH + (i * PANEL + column) * 2) >> 12 & 7);
    }
#if defined(WITH_INTEGER_TILES)
    for (long group = 0; group < GROUPS; group++) unpack_group<FORMAT>(chunk, group, out + Unpacked::codes(group));
#else
    // Points are copied a group ahead, because a wide load waits for all narrow stores to what it reads.
    CopiedPoints<FORMAT> copied[2];
    copied[0].copy(chunk, 0);
    for (long group = 0; group < GROUPS; group++) {
      uint8_t* const codes = out + Unpacked::codes(group);
      if (group + 1 < GROUPS) copied[(group + 1) % 2].copy(chunk, group + 1);
      copied[group % 2].store(chunk + P::SIGNS + group * PANEL * 4, codes);
      if constexpr (G.has_minus) subtract_twos<FORMAT>(chunk + P::HIGH + group * PANEL * 2, codes);
    }
#endif
  }
}

// A chunk that was unpacked.
struct alignas(64) UnpackedChunk {
  uint8_t bytes[Unpacked::CHUNK];
};

// Does what expand_column of blocks.h does.
template <Format FORMAT>
  requires(IS_UNPACKED<FORMAT>)
void expand_column(const uint8_t* panel, long column, long k, float* out) {
  UnpackedChunk chunk;
  for (long c = 0; c < k / SUPER; c++, out += SUPER) {
    unpack_chunk<FORMAT>(panel + c * Places<FORMAT>::CHUNK, chunk.bytes);
    expand_column<Format::UNPACKED>(chunk.bytes, column, SUPER, out);
  }
}

}  // namespace oaiserve
