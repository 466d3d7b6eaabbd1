// The weight formats of GGUF files, which pack neighbours along k into blocks, and the forms in which they stay in memory.
//
// A weight is (code - offset) * scale + minimum, where the code has some bits of its own, and neighbours share scale and
// minimum. Formats differ in how a file arranges these; `read_group` says it for each. In memory all have one
// arrangement (blocks.h), which a few numbers describe: `Layout`. Three more formats, of no file, are for the checkpoints
// whose weights are (code - zero) * scale with an integer zero: a minimum in 16 bits would round it. One of them is for
// scales that 128 neighbours share, or a multiple of that.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>

namespace oaiserve {

constexpr long BLOCK_GROUP = 32;  // neighbours along k that are read together
constexpr long SUPER = 256;       // neighbours that share a scale of their scales, in formats that have one

// As GGUF numbers them. Those above 1,000 are our own.
enum class Format : int32_t {
  Q4_0 = 2,
  Q4_1 = 3,
  Q5_0 = 6,
  Q5_1 = 7,
  Q8_0 = 8,
  Q2_K = 10,
  Q3_K = 11,
  Q4_K = 12,
  Q5_K = 13,
  Q6_K = 14,
  IQ2_XXS = 16,
  IQ2_XS = 17,
  IQ3_XXS = 18,
  IQ1_S = 19,
  IQ4_NL = 20,
  IQ3_S = 21,
  IQ2_S = 22,
  IQ4_XS = 23,
  IQ1_M = 29,
  TQ1_0 = 34,
  TQ2_0 = 35,
  MXFP4 = 39,
  Q4_Z = 1004,
  Q8_Z = 1008,
  Q4_128 = 1104,
  UNPACKED = 1200,  // what the formats of grids.h are unpacked to
};

// The codes of some formats are places in a table.
constexpr int8_t CODEBOOK[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t E2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // floats of four bits, doubled

struct Layout {
  long bytes;  // bytes of a block in a file, which has as many weights as a chunk
  int low_bits, high_bits;  // bits of a code: its lowest 2, 4 or 8, and 0 to 2 more
  int offset;
  int run;        // how many neighbours share a scale: 16, 32 or 128
  bool is_super;  // scales are small integers times a scale that 256 neighbours share
  bool has_min;
  bool is_codebook;
  bool is_e2m1 = false;  // the table is E2M1, and scales are powers of two, as bfloat16
  bool has_zero = false;  // the minimum is an integer times minus the scale
  bool is_unpacked = false;  // a chunk is unpacked before it is multiplied: see grids.h
  float factor = 1;  // a power of two, times the 16-bit scale

  // Runs of 16 with minimums, of which there are many, have both integers in one byte.
  constexpr bool has_nibbles() const { return has_min && run == 16; }
  constexpr int runs() const { return int(BLOCK_GROUP) / run; }
  constexpr bool is_long() const { return run > BLOCK_GROUP; }  // scales are floats of several groups
  constexpr bool is_whole() const { return low_bits == 8; }  // a code is a byte, and its offset 128
  constexpr int code_bits() const { return low_bits + high_bits; }
  constexpr long chunk() const { return is_super || is_long() ? SUPER : BLOCK_GROUP; }
  constexpr long scales() const { return is_long() ? SUPER / run : 1; }  // 16-bit floats of a column in a chunk
  constexpr long scale_of(long group) const { return is_long() ? group * BLOCK_GROUP / run : 0; }
  constexpr bool is_small() const { return code_bits() < 8 && (!is_codebook || is_e2m1); }  // a code is below 128
  // The entry of the table, plus the offset.
  constexpr int at_place(int place) const { return (is_e2m1 ? E2M1 : CODEBOOK)[place] + offset; }
};

// A format of grids.h.
constexpr Layout in_grid(long bytes) { return {.bytes = bytes, .is_super = true, .is_unpacked = true}; }

constexpr Layout layout_of(Format format) {
  switch (format) {
    case Format::Q4_0: return {18, 4, 0, 8, 32, false, false, false};
    case Format::Q4_1: return {20, 4, 0, 0, 32, false, true, false};
    case Format::Q5_0: return {22, 4, 1, 16, 32, false, false, false};
    case Format::Q5_1: return {24, 4, 1, 0, 32, false, true, false};
    case Format::Q8_0: return {34, 8, 0, 128, 32, false, false, false};
    case Format::Q2_K: return {84, 2, 0, 0, 16, true, true, false};
    case Format::Q3_K: return {110, 2, 1, 4, 16, true, false, false};
    case Format::Q4_K: return {144, 4, 0, 0, 32, true, true, false};
    case Format::Q5_K: return {176, 4, 1, 0, 32, true, true, false};
    case Format::Q6_K: return {210, 4, 2, 32, 16, true, false, false};
    case Format::IQ1_S: return in_grid(50);
    case Format::IQ1_M: return in_grid(56);
    case Format::TQ1_0: return in_grid(54);
    case Format::TQ2_0: return in_grid(66);
    case Format::IQ2_XXS: return in_grid(66);
    case Format::IQ2_XS: return in_grid(74);
    case Format::IQ2_S: return in_grid(82);
    case Format::IQ3_XXS: return in_grid(98);
    case Format::IQ3_S: return in_grid(110);
    case Format::UNPACKED: return {.low_bits = 8, .offset = 128, .run = 16, .is_super = true, .factor = 0.125f};
    case Format::IQ4_NL: return {18, 4, 0, 128, 32, false, false, true};
    case Format::IQ4_XS: return {136, 4, 0, 128, 32, true, false, true};
    case Format::MXFP4: return {17, 4, 0, 12, 32, false, false, true, true};
    case Format::Q4_Z: return {.bytes = 19, .low_bits = 4, .offset = 8, .run = 32, .has_min = true, .has_zero = true};
    case Format::Q8_Z: return {.bytes = 35, .low_bits = 8, .offset = 128, .run = 32, .has_min = true, .has_zero = true};
    case Format::Q4_128: return {.bytes = 134, .low_bits = 4, .offset = 8, .run = 128, .has_zero = true};
  }
  return {};
}

constexpr Format FORMATS[] = {
    Format::Q4_0,   Format::Q4_1,    Format::Q5_0,   Format::Q5_1,    Format::Q8_0,  Format::Q2_K,  Format::Q3_K,
    Format::Q4_K,   Format::Q5_K,    Format::Q6_K,   Format::IQ4_NL,  Format::IQ4_XS, Format::MXFP4, Format::Q4_Z,
    Format::Q8_Z,   Format::Q4_128,  Format::IQ2_XXS, Format::IQ2_XS, Format::IQ2_S, Format::IQ3_XXS, Format::IQ3_S,
    Format::IQ1_S,  Format::IQ1_M,   Format::TQ1_0,  Format::TQ2_0,
};

// Calls body.operator()<FORMAT>() for a format that is known when the program runs.
template <size_t I = 0, class Body>
auto for_format(Format format, Body&& body) {
  if constexpr (I + 1 < std::size(FORMATS))
    if (format != FORMATS[I]) return for_format<I + 1>(format, body);
  return body.template operator()<FORMATS[I]>();
}

// A group of 32 neighbours as it is read from a file. The 16-bit floats are as the file has them, or bfloat16.
struct Group {
  uint32_t codes[BLOCK_GROUP / 4];  // four in each
  uint16_t scale, min;              // those of the group, or of its block
  int8_t scales[2], mins[2];        // those of its runs, if scales are integers; the first minimum may be an integer zero
};

inline uint16_t half_at(const uint8_t* p) {
  uint16_t half;
  std::memcpy(&half, p, 2);
  return half;
}

// The same number in each of four bytes.
constexpr uint32_t in_each_byte(uint32_t byte) { return byte * 0x01010101u; }

// Four codes, of which each byte has some bits from a place on.
inline uint32_t four_at(const uint8_t* p, long place, uint32_t mask) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return word >> place & in_each_byte(mask);
}

// Writes the nibbles of 16 bytes: first all low ones, then all high ones.
inline void read_nibbles(const uint8_t* p, uint32_t* codes) {
  for (int i = 0; i < 4; i++) codes[i] = four_at(p + 4 * i, 0, 15);
  for (int i = 0; i < 4; i++) codes[4 + i] = four_at(p + 4 * i, 4, 15);
}

// Adds a fifth bit, which are 32 bits in the order of k. A product has one copy of four bits for each byte, shifted by
// seven more, so that its own bit is the lowest there.
inline void add_bits(const uint8_t* p, uint32_t* codes) {
  uint32_t bits;
  std::memcpy(&bits, p, 4);
  for (int i = 0; i < 8; i++) {
    const uint32_t four = bits >> 4 * i & 15;
    codes[i] |= (four * (1 | 1 << 7 | 1 << 14 | 1 << 21) & in_each_byte(1)) << 4;
  }
}

// The six-bit scale and minimum of a group in the twelve bytes of Q4_K and Q5_K.
inline void read_six_bits(const uint8_t* p, long group, Group& out) {
  if (group < 4) {
    out.scales[0] = int8_t(p[group] & 63);
    out.mins[0] = int8_t(p[group + 4] & 63);
  } else {
    out.scales[0] = int8_t((p[group + 4] & 15) | (p[group - 4] >> 6) << 4);
    out.mins[0] = int8_t((p[group + 4] >> 4) | (p[group] >> 6) << 4);
  }
}

// The two-bit codes of Q2_K and Q3_K: each 32 bytes have four groups.
inline void read_pairs(const uint8_t* p, long group, uint32_t* codes) {
  for (int i = 0; i < 8; i++) codes[i] = four_at(p + group / 4 * 32 + 4 * i, group % 4 * 2, 3);
}

// 2^(exponent - 128) as bfloat16: half of what the exponent says, because E2M1 is doubled.
inline uint16_t scale_of_exponent(uint8_t exponent) {
  return uint16_t(exponent < 2 ? 0x20 << exponent : (exponent - 1) << 7);
}

// Reads a group of a block, by its number in the block.
template <Format FORMAT>
void read_group(const uint8_t* block, long group, Group& out) {
  if constexpr (FORMAT == Format::Q4_0 || FORMAT == Format::IQ4_NL) {
    out.scale = half_at(block);
    read_nibbles(block + 2, out.codes);
  } else if constexpr (FORMAT == Format::Q4_1) {
    out.scale = half_at(block);
    out.min = half_at(block + 2);
    read_nibbles(block + 4, out.codes);
  } else if constexpr (FORMAT == Format::Q5_0) {
    out.scale = half_at(block);
    read_nibbles(block + 6, out.codes);
    add_bits(block + 2, out.codes);
  } else if constexpr (FORMAT == Format::Q5_1) {
    out.scale = half_at(block);
    out.min = half_at(block + 2);
    read_nibbles(block + 8, out.codes);
    add_bits(block + 4, out.codes);
  } else if constexpr (FORMAT == Format::Q8_0) {
    out.scale = half_at(block);
    for (int i = 0; i < 8; i++) out.codes[i] = four_at(block + 2 + 4 * i, 0, 255) ^ in_each_byte(128);  // adds 128
  } else if constexpr (FORMAT == Format::Q2_K) {
    out.scale = half_at(block + 80);
    out.min = half_at(block + 82);
    read_pairs(block + 16, group, out.codes);
    for (int run = 0; run < 2; run++) {
      out.scales[run] = int8_t(block[2 * group + run] & 15);
      out.mins[run] = int8_t(block[2 * group + run] >> 4);
    }
  } else if constexpr (FORMAT == Format::Q3_K) {
    out.scale = half_at(block + 108);
    read_pairs(block + 32, group, out.codes);
    for (int i = 0; i < 8; i++) out.codes[i] |= four_at(block + 4 * i, group, 1) << 2;
    const uint8_t* scales = block + 96;
    for (int run = 0; run < 2; run++) {
      const long i = 2 * group + run;
      const int low = i < 8 ? scales[i] & 15 : scales[i - 8] >> 4;
      out.scales[run] = int8_t((low | (scales[8 + i % 4] >> i / 4 * 2 & 3) << 4) - 32);
    }
  } else if constexpr (FORMAT == Format::Q4_K || FORMAT == Format::Q5_K) {
    constexpr bool HAS_FIFTH = FORMAT == Format::Q5_K;
    out.scale = half_at(block);
    out.min = half_at(block + 2);
    read_six_bits(block + 4, group, out);
    const uint8_t* codes = block + (HAS_FIFTH ? 48 : 16) + group / 2 * 32;
    for (int i = 0; i < 8; i++) out.codes[i] = four_at(codes + 4 * i, group % 2 * 4, 15);
    if constexpr (HAS_FIFTH)
      for (int i = 0; i < 8; i++) out.codes[i] |= four_at(block + 16 + 4 * i, group, 1) << 4;
  } else if constexpr (FORMAT == Format::Q6_K) {
    out.scale = half_at(block + 208);
    const uint8_t* low = block + group / 4 * 64 + group % 2 * 32;
    const uint8_t* high = block + 128 + group / 4 * 32;
    for (int i = 0; i < 8; i++)
      out.codes[i] = four_at(low + 4 * i, group % 4 / 2 * 4, 15) | four_at(high + 4 * i, group % 4 * 2, 3) << 4;
    for (int run = 0; run < 2; run++) out.scales[run] = int8_t(block[192 + 2 * group + run]);
  } else if constexpr (FORMAT == Format::IQ4_XS) {
    out.scale = half_at(block);
    const int low = block[4 + group / 2] >> group % 2 * 4 & 15, high = half_at(block + 2) >> group * 2 & 3;
    out.scales[0] = int8_t((low | high << 4) - 32);
    read_nibbles(block + 8 + group * 16, out.codes);
  } else if constexpr (FORMAT == Format::MXFP4) {
    out.scale = scale_of_exponent(block[0]);
    read_nibbles(block + 1, out.codes);
  } else if constexpr (FORMAT == Format::Q4_Z || FORMAT == Format::Q8_Z) {
    out.scale = half_at(block);
    out.mins[0] = int8_t(block[2]);
    if constexpr (FORMAT == Format::Q4_Z)
      read_nibbles(block + 3, out.codes);
    else
      std::memcpy(out.codes, block + 3, sizeof(out.codes));
  } else if constexpr (FORMAT == Format::Q4_128) {
    const long scale = layout_of(FORMAT).scale_of(group);
    out.scale = half_at(block + 2 * scale);
    out.mins[0] = int8_t(block[4 + scale]);
    read_nibbles(block + 6 + group * 16, out.codes);
  }
}

// Reads a group of MXFP4 from a checkpoint that has scales apart, and neighbours in the same byte.
inline void read_apart(const uint8_t* codes, uint8_t exponent, Group& out) {
  uint8_t in_order[BLOCK_GROUP];
  for (int i = 0; i < 16; i++) {
    in_order[2 * i] = codes[i] & 15;
    in_order[2 * i + 1] = codes[i] >> 4;
  }
  std::memcpy(out.codes, in_order, sizeof(in_order));
  out.scale = scale_of_exponent(exponent);
}

}  // namespace oaiserve
