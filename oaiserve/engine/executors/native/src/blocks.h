// Weights in the formats of GGUF files, arranged for products: close to the file's bits per weight, and read in order.
//
// A panel has 32 columns, as in gemm.h. Along k it is a sequence of chunks, of 256 or 32 neighbours. A chunk begins with
// the scales of its 32 columns and goes on with the codes of its groups. A group of codes consists of planes of 64 bytes:
// four bytes for each of 16 columns. Each plane has a few bits of several *quads*, four neighbours along k that one
// instruction multiplies; quad 2 i is of the left 16 columns, and 2 i + 1 is the same of the right 16. Codes of eight
// bits are stored less their offset, with a sign, because the tiles of AMX load them as they are.
#pragma once

#include "block_rows.h"
#include "gemm.h"

namespace oaiserve {

constexpr long PLANE = 64;           // bytes
constexpr int QUADS = 16;            // quads of a group
constexpr int STEPS = QUADS / 2;     // along k
constexpr long READ_AHEAD = 128;     // bytes of a row of a file

// Where the parts of a panel are, in bytes.
template <Format FORMAT>
struct Places {
  static constexpr Layout L = layout_of(FORMAT);
  static constexpr long GROUPS = L.chunk() / BLOCK_GROUP;  // groups of a chunk
  static constexpr long FLOATS = PANEL * 2 * L.scales();   // 16-bit scales, or minimums
  static constexpr long INTEGERS = L.is_super ? PANEL * L.runs() : 0;  // integers of a group
  static constexpr long MINS = FLOATS;
  static constexpr long SMALL_SCALES = MINS + (L.has_zero ? PANEL * L.scales() : L.has_min ? FLOATS : 0);
  static constexpr long SMALL_MINS = SMALL_SCALES + INTEGERS * GROUPS;
  static constexpr long HEAD = SMALL_MINS + (L.has_min && !L.has_nibbles() ? INTEGERS * GROUPS : 0);
  static constexpr long LOW = QUADS * PLANE * L.low_bits / 8, HIGH = QUADS * PLANE * L.high_bits / 8;
  static constexpr long CHUNK = HEAD + GROUPS * (LOW + HIGH);
  static constexpr long codes(long group) { return HEAD + group * (LOW + HIGH); }
};
static_assert(Places<Format::Q4_K>::CHUNK % PLANE == 0 && Places<Format::IQ4_XS>::CHUNK % PLANE == 0);
static_assert(Places<Format::Q4_128>::HEAD % PLANE == 0);

struct BlockPanel {
  const uint8_t* data;
  Format format;
};

// The weights W [n, k] of a linear layer in the formats of GGUF files, which may differ from panel to panel. The decoder
// owns the panels, which are aligned to 64 bytes. `bias` is [n] or null.
struct BlockLinear {
  using Input = RowLine;
  long n, k;
  const BlockPanel* panels;
  const float* bias;

  // What its panels read of a row of x.
  RowForms forms() const {
    RowForms found;
    for (long panel = 0; panel < panels_of(n); panel++) {
      const Layout layout = layout_of(panels[panel].format);
      (layout.is_super ? found.supers : layout.is_long() ? found.longs : found.groups) = true;
    }
    return found;
  }
};

// These functions are in blocks.cpp, for each format.

// Packs the rows of a panel as pack_panel of its format does.
void pack_panel(Format format, const uint8_t* const* rows, const uint8_t* const* scales, long k, uint8_t* panel);

// out [k] = a row of the weights. Slow: bytes of a row are far from each other.
void expand_row(const BlockLinear& w, long row, float* out);

// Multiplies as multiply_panel of gemm.h does.
void multiply_panel(const BlockLinear& w, const RowLine* x, long x_stride, long rows, long panel, float* sums, long next);

// Starts the sums [rows, PANEL] of a panel with its bias. If that is null, they have been started.
inline void start_sums(float* sums, long rows, const float* bias) {
  for (long r = 0; bias && r < rows; r++) std::memcpy(sums + r * PANEL, bias, PANEL * sizeof(float));
}

inline float half_to_float(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, rest = uint32_t(half & 0x7fff) << 13;
  float value, scale;
  const uint32_t bits = (half & 0x7c00) == 0x7c00 ? rest | 0x7f800000 : rest, power = 0x77800000;  // 2^112
  std::memcpy(&value, &bits, 4);
  std::memcpy(&scale, &power, 4);
  if ((half & 0x7c00) != 0x7c00) value *= scale;
  return sign ? -value : value;
}

// Writes the planes of a group that have `bits` bits of each code, from `place` on. `codes` has those of all columns.
template <int BITS>
void pack_planes(const uint32_t (&codes)[STEPS][PANEL], int place, uint8_t* planes) {
  constexpr int QUADS_EACH = 8 / BITS;
  for (int quad = 0; quad < QUADS; quad += QUADS_EACH, planes += PLANE) {
    u32x16 plane{};
    for (int i = 0; i < QUADS_EACH; i++) {
      u32x16 four;
      std::memcpy(&four, codes[(quad + i) / 2] + (quad + i) % 2 * LANES, sizeof(four));
      plane |= (four >> place & in_each_byte(0xff >> (8 - BITS))) << i * BITS;
    }
    std::memcpy(planes, &plane, sizeof(plane));
  }
}

// Whether codes are loaded less their offset, with a sign. On aarch64 the CPU multiplies signed codes: those of eight bits
// have to have a sign, and those of supers have one because subtracting the offset from sums takes longer.
template <Layout L>
constexpr bool HAS_SIGNED_CODES = false;
#if defined(__ARM_FEATURE_DOTPROD)
constexpr bool has_signed_codes(const Layout& layout) { return !layout.is_small() || layout.is_super; }
template <Layout L>
  requires(has_signed_codes(L))
constexpr bool HAS_SIGNED_CODES<L> = true;
#endif

// What codes are stored with in exclusive or: as if their offset, which is half of all codes, were subtracted.
template <Layout L>
constexpr uint32_t STORED_SIGN =
    L.is_whole() || (HAS_SIGNED_CODES<L> && L.high_bits > 0) ? in_each_byte(uint32_t(L.offset)) : 0;

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool IN_OCTETS = true;  // see strip_tiles.h
#else
constexpr bool IN_OCTETS = false;
#endif
// Whether a format of groups is multiplied in strips, which have no registers for more than a scale next to octets.
constexpr bool has_strips(const Layout& layout) {
#if defined(__ARM_FEATURE_DOTPROD)
  return !layout.is_super && !layout.is_long() && !(IN_OCTETS && (layout.has_min || layout.is_e2m1));
#endif
  return false;
}

// The place of a quad in a group's codes. Codes of eight bits are in strips, if these are multiplied.
template <Layout L>
constexpr int place_of(int step, int column) {
  if constexpr (!L.is_whole() || !has_strips(L)) return step * PANEL + column;
  if constexpr (IN_OCTETS) return column / 2 * 16 + step / 2 * 4 + column % 2 * 2 + step % 2;
  return column / 4 * 32 + step * 4 + column % 4;
}

// A scale, or a minimum, of a format.
template <Layout L>
float float_at(const uint8_t* p) {
  if constexpr (L.is_e2m1) return to_float(bf16{half_at(p)});
  return half_to_float(half_at(p)) * L.factor;
}

// Prefetches bytes that are read soon, or written.
template <bool IS_WRITTEN>
void prefetch_lines(const uint8_t* p, long bytes) {
  for (long line = 0; line < bytes; line += 64) __builtin_prefetch(p + line, IS_WRITTEN);
}

// Packs the rows of a file that are the 32 columns of a panel. A column without a row (null) is zero. The scales of
// MXFP4 are in rows of their own unless `scales` is null.
//
// The memory of the next chunk is prefetched for writing: stores are done in order, so one that waits for memory stops
// all that follow. Rows are prefetched for reading, because a CPU doesn't follow 32 of them by itself.
template <Format FORMAT>
void pack_panel(const uint8_t* const* rows, const uint8_t* const* scales, long k, uint8_t* panel) {
  using P = Places<FORMAT>;
  constexpr Layout L = P::L;
  alignas(64) uint32_t codes[STEPS][PANEL] = {};
  for (long chunk = 0; chunk < k / L.chunk(); chunk++, panel += P::CHUNK) {
    std::memset(panel, 0, P::HEAD);
    for (long i = 0; i < P::GROUPS; i++) {
      prefetch_lines<true>(panel + P::CHUNK + i * P::CHUNK / P::GROUPS, P::CHUNK / P::GROUPS);
      for (long column = 0; column < PANEL; column++) {
        if (!rows[column]) continue;
        Group group;
        if (FORMAT == Format::MXFP4 && scales) {
          read_apart(rows[column] + chunk * BLOCK_GROUP / 2, scales[column][chunk], group);
        } else {
          const uint8_t* block = rows[column] + chunk * L.bytes;
          if (i == 0) prefetch_lines<false>(block + READ_AHEAD, L.bytes);
          read_group<FORMAT>(block, i, group);
        }
        const long place = L.scale_of(i) * PANEL + column;  // place of its scale
        std::memcpy(panel + place * 2, &group.scale, 2);
        if constexpr (L.has_zero)
          panel[P::MINS + place] = uint8_t(group.mins[0]);
        else if constexpr (L.has_min)
          std::memcpy(panel + P::MINS + column * 2, &group.min, 2);
        if constexpr (L.is_super)
          for (int run = 0; run < L.runs(); run++) {
            const long at = i * P::INTEGERS + run * PANEL + column;
            if constexpr (L.has_nibbles())
              panel[P::SMALL_SCALES + at] = uint8_t(group.scales[run] | group.mins[run] << 4);
            else
              panel[P::SMALL_SCALES + at] = uint8_t(group.scales[run]);
            if constexpr (L.has_min && !L.has_nibbles()) panel[P::SMALL_MINS + at] = uint8_t(group.mins[run]);
          }
        for (int step = 0; step < STEPS; step++) {
          const int quad = place_of<L>(step, int(column));
          codes[quad / PANEL][quad % PANEL] = group.codes[step];
        }
      }
      for (auto& of_step : codes)
        for (uint32_t& quad : of_step) quad ^= STORED_SIGN<L>;
      pack_planes<L.low_bits>(codes, 0, panel + P::codes(i));
      if constexpr (L.high_bits > 0) pack_planes<L.high_bits>(codes, L.low_bits, panel + P::codes(i) + P::LOW);
    }
  }
}

// The code of one weight of a group, as it is in the planes.
template <Layout L>
int code_at(const uint8_t* codes, long low_bytes, long column, long place) {
  const int at = place_of<L>(int(place / 4), int(column)), quad = at / LANES;
  const long byte = at % LANES * 4 + place % 4;
  constexpr int LOW_QUADS = 8 / L.low_bits;
  int code = codes[quad / LOW_QUADS * PLANE + byte] >> quad % LOW_QUADS * L.low_bits & (0xff >> (8 - L.low_bits));
  if constexpr (L.high_bits > 0) {
    constexpr int HIGH_QUADS = 8 / L.high_bits;
    const int high = codes[low_bytes + quad / HIGH_QUADS * PLANE + byte] >> quad % HIGH_QUADS * L.high_bits;
    code |= (high & ((1 << L.high_bits) - 1)) << L.low_bits;
  }
  code ^= int(STORED_SIGN<L> & 0xff);
  return L.is_codebook ? L.at_place(code) : code;
}

// out [k] = a column of a panel: the weights themselves. Slow: bytes of a column are far from each other.
template <Format FORMAT>
void expand_column(const uint8_t* panel, long column, long k, float* out) {
  using P = Places<FORMAT>;
  constexpr Layout L = P::L;
  for (long chunk = 0; chunk < k / L.chunk(); chunk++, panel += P::CHUNK) {
    for (long i = 0; i < P::GROUPS; i++) {
      const long place = L.scale_of(i) * PANEL + column;
      const float scale = float_at<L>(panel + place * 2);
      float min = 0;
      if constexpr (L.has_zero)
        min = -scale * float(int8_t(panel[P::MINS + place]));
      else if constexpr (L.has_min)
        min = float_at<L>(panel + P::MINS + place * 2);
      constexpr int RUN = std::min(L.run, int(BLOCK_GROUP));
      for (int run = 0; run < BLOCK_GROUP / RUN; run++, out += RUN) {
        const long at = P::SMALL_SCALES + i * P::INTEGERS + run * PANEL + column;
        float run_scale = scale, run_min = min;
        if constexpr (L.has_nibbles()) {
          run_scale *= float(panel[at] & 15);
          run_min *= -float(panel[at] >> 4);
        } else if constexpr (L.is_super) {
          run_scale *= float(int8_t(panel[at]));
          if constexpr (L.has_min) run_min *= -float(panel[at + P::SMALL_MINS - P::SMALL_SCALES]);
        }
        for (int j = 0; j < RUN; j++)
          out[j] = float(code_at<L>(panel + P::codes(i), P::LOW, column, run * RUN + j) - L.offset) * run_scale + run_min;
      }
    }
  }
}

}  // namespace oaiserve
