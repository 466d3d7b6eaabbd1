// Products with weights whose scales are floats of 32 neighbours, with dot products or the matrix instruction of aarch64.
//
// A *strip* is four columns of a group, whose codes have signs and take 128 bytes. A tile of up to four rows keeps what a
// group has of x in registers, multiplies it with one strip after another, and scales and adds each strip's sums at once.
// So sums of 16 columns stay in registers, too, and nearly all instructions multiply. Codes of eight bits are in strips
// in memory, others are unpacked to strips for several rows.
//
// With dot products, a strip has the quads of its columns in the order of k, and a vector has sums of four columns. The
// matrix instruction (i8mm) multiplies two rows with two columns, eight numbers each, and adds the four sums, which share a
// vector: both columns of the first row, then both of the second. So eight neighbours along k of two columns share a
// vector, and these eight are an *octet*. A strip has the octets of its left columns, then those of its right ones.
//
// All sums are exact, and they are scaled and added as in block_product.h, so a row gets the same numbers from both.
#pragma once

#include "block_operands.h"

#if defined(WITH_LANE_DOTS)
#define WITH_STRIPS

namespace oaiserve {

constexpr int STRIPS = PANEL / WIDTH;
constexpr long STRIP_BYTES = WIDTH * BLOCK_GROUP;
constexpr int MOST_STRIP_ROWS = 4;
constexpr long UNPACKED_GROUPS = 8;  // at once, which stay in L1 with what rows of x have for them
constexpr long NEAR_GROUPS = 2, PREFETCHED_GROUPS = 8;  // for how many groups is prefetched at once, see Ahead
// From which number of rows on a format is multiplied in strips. Unpacking pays for several rows.
constexpr long least_strip_rows(const Layout& layout) { return layout.is_whole() ? 1 : IN_OCTETS ? 2 : 5; }

using Bytes16 = int8x16_t;

// [a0 a1 b0 b1] and [a2 a3 b2 b3].
template <class V>
void interleave_halves(V a, V b, V& low, V& high) {
  low = (V)vzip1q_s64((int64x2_t)a, (int64x2_t)b);
  high = (V)vzip2q_s64((int64x2_t)a, (int64x2_t)b);
}

// Calls body.operator()<I>() for each I below COUNT.
template <int COUNT, class Body>
[[gnu::always_inline]] inline void for_each(Body&& body) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
    (body.template operator()<I>(), ...);
  }(std::make_integer_sequence<int, COUNT>());
}

// Sums begin with an integer that is the float MAGIC, so that they are floats, too: MAGIC plus the sum. Subtracting it takes
// less time than converting integers. They are loaded, because the units that multiply have no time left.
static_assert(BLOCK_GROUP * 127 * 128 < 1 << 22);
inline Vector to_float(Integers sums) { return (Vector)sums - MAGIC; }

// Starts the sums of some strips. IN_PAIRS: neighbouring lanes are added in the end.
template <bool IN_PAIRS, int NUM_STRIPS, int EACH>
[[gnu::always_inline]] inline void start_sums(Integers (&sums)[NUM_STRIPS][EACH]) {
  constexpr int COUNT = NUM_STRIPS * EACH;
  constexpr float ODD = IN_PAIRS ? 0 : MAGIC;
  alignas(32) static constexpr float START[] = {MAGIC, ODD, MAGIC, ODD, MAGIC, ODD, MAGIC, ODD};
  for_each<(COUNT + 1) / 2>([&]<int I>() __attribute__((always_inline)) {
    constexpr int NEXT = 2 * I + 1;
    Integers& first = sums[2 * I / EACH][2 * I % EACH];
    if constexpr (NEXT < COUNT)
      asm volatile("ldp %q0, %q1, [%2]" : "=w"(first), "=w"(sums[NEXT / EACH][NEXT % EACH]) : "r"(START));
    else
      asm volatile("ldr %q0, [%1]" : "=w"(first) : "r"(START));
  });
}

// A lane of a vector, as a factor.
template <int LANE>
struct Lane {
  Vector vector;
  friend Vector operator*(Vector a, Lane b) {
    Vector product;
    asm("fmul %0.4s, %1.4s, %2.s[%3]" : "=w"(product) : "w"(a), "w"(b.vector), "i"(LANE));
    return product;
  }
  friend Vector multiply_add(Lane a, Vector b, Vector c) {
    asm("fmla %0.4s, %1.4s, %2.s[%3]" : "+w"(c) : "w"(b), "w"(a.vector), "i"(LANE));
    return c;
  }
};

// Loads two vectors with one instruction.
[[gnu::always_inline]] inline void load_pair(const uint8_t* p, VectorBits& first, VectorBits& second) {
  first = load_vector<VectorBits>(p);
  second = load_vector<VectorBits>(p + sizeof(VectorBits));
  asm("" : "+w"(first), "+w"(second));
}

// What a group has of the rows of a tile, in registers, and how these are multiplied with strips.
template <int ROWS>
struct GroupOfRows {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  static constexpr int PAIRS = (ROWS + 1) / 2, SUMS = ROWS == 1 ? 1 : 2 * PAIRS;  // vectors of sums of a strip
  Bytes16 octets[PAIRS][4];  // of both rows, or twice those of a single row
  Vector scales[PAIRS];

  // Loads a group, and advances to the next one.
  template <bool HAS_MIN>
  [[gnu::always_inline]] void load(const QuantizedGroup* (&rows)[ROWS]) {
    for_each<PAIRS>([&]<int PAIR>() __attribute__((always_inline)) {
      // A last row without a partner is its own.
      constexpr bool HAS_PARTNER = 2 * PAIR + 1 < ROWS;
      const QuantizedGroup &a = *rows[2 * PAIR]++, &b = HAS_PARTNER ? *rows[2 * PAIR + 1]++ : a;
      VectorBits first_a, second_a;
      load_pair(reinterpret_cast<const uint8_t*>(a.values), first_a, second_a);
      VectorBits first_b = first_a, second_b = second_a;
      if constexpr (HAS_PARTNER) load_pair(reinterpret_cast<const uint8_t*>(b.values), first_b, second_b);
      interleave_halves((Bytes16)first_a, (Bytes16)first_b, octets[PAIR][0], octets[PAIR][1]);
      interleave_halves((Bytes16)second_a, (Bytes16)second_b, octets[PAIR][2], octets[PAIR][3]);
      const auto scale_of_a = (float64x2_t)vld1q_dup_f32(&a.scale);
      scales[PAIR] = (Vector)scale_of_a;
      if constexpr (HAS_PARTNER) scales[PAIR] = (Vector)vzip1q_f64(scale_of_a, (float64x2_t)vld1q_dup_f32(&b.scale));
    });
  }
  template <int COUNT>
  [[gnu::always_inline]] void multiply(const uint8_t* strips, Integers (&dots)[COUNT][SUMS]) const {
    constexpr int EACH = ROWS == 1 ? 2 : SUMS;
    Integers sums[COUNT][EACH];
    start_sums<ROWS == 1>(sums);
    for_each<4>([&]<int I>() __attribute__((always_inline)) {
      for_each<COUNT>([&]<int STRIP>() __attribute__((always_inline)) {
        VectorBits first, second;
        load_pair(strips + STRIP * STRIP_BYTES + 2 * I * sizeof(Bytes16), first, second);
        for_each<2 * PAIRS>([&]<int J>() __attribute__((always_inline)) {
          constexpr int PAIR = J % PAIRS, CODES = J / PAIRS;
          Integers& sum = sums[STRIP][2 * PAIR + I / 2];
          const Bytes16 x = octets[PAIR][I % 2 * 2 + CODES], codes = (Bytes16)(CODES == 0 ? first : second);
          if constexpr (ROWS == 1)
            sum = (Integers)vdotq_s32((int32x4_t)sum, codes, x);
          else
            sum = (Integers)vmmlaq_s32((int32x4_t)sum, x, codes);
        });
      });
    });
    for_each<COUNT>([&]<int STRIP>() __attribute__((always_inline)) {
      if constexpr (ROWS == 1)
        dots[STRIP][0] = (Integers)vpaddq_s32((int32x4_t)sums[STRIP][0], (int32x4_t)sums[STRIP][1]);
      else
        for_each<SUMS>([&]<int I>() __attribute__((always_inline)) { dots[STRIP][I] = sums[STRIP][I]; });
    });
  }
  template <bool HAS_MIN>
  [[gnu::always_inline]] void add(const Integers (&dots)[SUMS], const Scaling& scaling, Vector (&sums)[SUMS]) const {
    static_assert(!HAS_MIN);
    Scaling halves[2] = {scaling, scaling};
    if constexpr (ROWS > 1) interleave_halves(scaling.scale, scaling.scale, halves[0].scale, halves[1].scale);
    for_each<SUMS>([&]<int I>() __attribute__((always_inline)) {
      const struct {
        Vector scale;
      } x{scales[I / 2]};
      sums[I] = add_group<false>(sums[I], to_float(dots[I]), x, halves[I % 2]);
    });
  }
  // Turns numbers of rows into those of sums, or back.
  [[gnu::always_inline]] static void turn(Vector (&v)[SUMS]) {
    for_each<SUMS / 2>([&]<int I>() __attribute__((always_inline)) {
      interleave_halves(v[2 * I], v[2 * I + 1], v[2 * I], v[2 * I + 1]);
    });
  }
#else
  static constexpr int SUMS = ROWS;
  Bytes16 quads[ROWS][2];
  Vector scales, scaled_sums;

  template <bool HAS_MIN>
  [[gnu::always_inline]] void load(const QuantizedGroup* (&rows)[ROWS]) {
    for_each<ROWS>([&]<int ROW>() __attribute__((always_inline)) {
      VectorBits first, second;
      load_pair(reinterpret_cast<const uint8_t*>(rows[ROW]->values), first, second);
      quads[ROW][0] = (Bytes16)first, quads[ROW][1] = (Bytes16)second;
      if constexpr (HAS_MIN)
        scaled_sums = (Vector)vld1q_lane_f32(&rows[ROW]->scaled_sum, (float32x4_t)scaled_sums, ROW);
      // GCC doesn't find the instruction that advances the pointer, too.
      asm("ld1 {%0.s}[%2], [%1], %3"
          : "+w"(scales), "+r"(rows[ROW])
          : "i"(ROW), "r"(sizeof(QuantizedGroup)), "m"(*rows[ROW]));
    });
  }
  template <int COUNT>
  [[gnu::always_inline]] void multiply(const uint8_t* strips, Integers (&dots)[COUNT][SUMS]) const {
    start_sums<false>(dots);
    for_each<4>([&]<int I>() __attribute__((always_inline)) {
      for_each<COUNT>([&]<int STRIP>() __attribute__((always_inline)) {
        VectorBits first, second;
        load_pair(strips + STRIP * STRIP_BYTES + 2 * I * sizeof(Bytes16), first, second);
        for_each<2 * ROWS>([&]<int J>() __attribute__((always_inline)) {
          constexpr int ROW = J % ROWS, CODES = J / ROWS;
          Integers& sum = dots[STRIP][ROW];
          const auto codes = (int8x16_t)(CODES == 0 ? first : second);
          sum = (Integers)vdotq_laneq_s32((int32x4_t)sum, codes, quads[ROW][I / 2], I % 2 * 2 + CODES);
        });
      });
    });
  }
  template <bool HAS_MIN>
  [[gnu::always_inline]] void add(const Integers (&dots)[SUMS], const Scaling& scaling, Vector (&sums)[SUMS]) const {
    for_each<ROWS>([&]<int ROW>() __attribute__((always_inline)) {
      const struct {
        Lane<ROW> scale, scaled_sum;
      } x{{scales}, {scaled_sums}};
      sums[ROW] = add_group<HAS_MIN>(sums[ROW], to_float(dots[ROW]), x, scaling);
    });
  }
  static void turn(Vector (&)[SUMS]) {}
#endif
};

// Some groups of a panel: their chunks, and their codes in strips unless these are in the chunks.
struct StripGroups {
  const uint8_t *chunk, *codes;
  long count;
};

// The scales and minimums of two strips.
template <Format FORMAT>
[[gnu::always_inline]] inline void load_scalings(const uint8_t* chunk, long column, Scaling* out) {
  constexpr Layout L = layout_of(FORMAT);
  if constexpr (L.has_min || L.is_e2m1) {
    out[0] = load_scaling<FORMAT>(chunk, column);
    out[1] = load_scaling<FORMAT>(chunk, column + WIDTH);
  } else {
    const float16x8_t halves = load_vector<float16x8_t>(chunk + column * 2);
    out[0].scale = vcvt_f32_f16(vget_low_f16(halves));
    out[1].scale = vcvt_high_f32_f16(halves);
  }
}

// sums [ROWS, PANEL] = start + rows of x times some groups. Rows of `start` are `start_stride` floats apart.
template <Format FORMAT, int ROWS>
Ahead strip_tile(const StripGroups& groups, const QuantizedGroup* x, long x_stride, const float* start,
                 long start_stride, float* sums, Ahead ahead) {
  using P = Places<FORMAT>;
  using Rows = GroupOfRows<ROWS>;
  constexpr int AT_ONCE = ROWS <= 2 ? STRIPS : STRIPS / 2;
  constexpr int TOGETHER = ROWS > 2 ? 1 : ROWS == 2 || IN_OCTETS ? 2 : 4;  // so that enough sums do not wait for each other
  for (int first = 0; first < STRIPS; first += AT_ONCE) {
    const QuantizedGroup* rows[ROWS];
    for (int r = 0; r < ROWS; r++) rows[r] = x + r * x_stride;
    Vector sum[AT_ONCE][Rows::SUMS];
    for_each<AT_ONCE>([&]<int STRIP>() __attribute__((always_inline)) {
      for_each<Rows::SUMS>([&]<int R>() __attribute__((always_inline)) {
        sum[STRIP][R] = load_vector<Vector>(start + std::min(R, ROWS - 1) * start_stride + (first + STRIP) * WIDTH);
      });
      Rows::turn(sum[STRIP]);
    });
    const uint8_t* chunk = groups.chunk;
    const uint8_t* codes = (P::L.is_whole() ? chunk + P::codes(0) : groups.codes) + first * STRIP_BYTES;
    const long stretch = ROWS == 1 ? groups.count : ahead.near ? NEAR_GROUPS : PREFETCHED_GROUPS;
    for (long g = 0; g < groups.count; g += stretch) {
      const long count = std::min(stretch, groups.count - g);
      if (ROWS > 1 && first == 0) ahead.prefetch_chunk<NEAR_GROUPS * P::CHUNK>(STEPS * int(count));
      const uint8_t* const end = chunk + count * P::CHUNK;
      for (; chunk != end; chunk += P::CHUNK, codes += P::L.is_whole() ? P::CHUNK : STRIPS * STRIP_BYTES) {
        if constexpr (ROWS == 1) ahead.prefetch_bytes<P::CHUNK>();
        Rows of_x;
        of_x.template load<P::L.has_min>(rows);
        Scaling scalings[2];
        for_each<AT_ONCE / TOGETHER>([&]<int I>() __attribute__((always_inline)) {
          Integers dots[TOGETHER][Rows::SUMS];
          of_x.multiply(codes + I * TOGETHER * STRIP_BYTES, dots);
          for_each<TOGETHER>([&]<int J>() __attribute__((always_inline)) {
            constexpr int STRIP = I * TOGETHER + J;
            if constexpr (STRIP % 2 == 0) load_scalings<FORMAT>(chunk, (first + STRIP) * WIDTH, scalings);
            of_x.template add<P::L.has_min>(dots[J], scalings[STRIP % 2], sum[STRIP]);
          });
        });
      }
    }
    for_each<AT_ONCE>([&]<int STRIP>() __attribute__((always_inline)) {
      Rows::turn(sum[STRIP]);
      for_each<ROWS>([&]<int R>() __attribute__((always_inline)) {
        store_lanes(sums + R * PANEL + (first + STRIP) * WIDTH, sum[STRIP][R]);
      });
    });
  }
  return ahead;
}

// Unpacks a group into strips.
template <Format FORMAT>
void unpack_strips(const uint8_t* chunk, uint8_t* out) {
  using P = Places<FORMAT>;
#pragma GCC unroll 4
  for (int slice = 0; slice < STRIPS / 2; slice++)
#pragma GCC unroll 4
    for (int step = 0; step < STEPS; step += 2) {
      VectorBits codes[2][2];
      for (int i = 0; i < 2; i++)
        load_codes<P::L>(chunk + P::codes(0) + slice * sizeof(Bytes16), P::LOW, step + i, codes[i][0], codes[i][1]);
      for (int half = 0; half < 2; half++) {
        Bytes16* const strip = reinterpret_cast<Bytes16*>(out + (half * STRIPS / 2 + slice) * STRIP_BYTES);
        const auto first = (uint32x4_t)((Bytes16)codes[0][half] - int8_t(summed_offset(P::L)));
        const auto second = (uint32x4_t)((Bytes16)codes[1][half] - int8_t(summed_offset(P::L)));
        if constexpr (IN_OCTETS) {
          strip[step / 2] = (Bytes16)vzip1q_u32(first, second);
          strip[STEPS / 2 + step / 2] = (Bytes16)vzip2q_u32(first, second);
        } else {
          strip[step] = (Bytes16)first;
          strip[step + 1] = (Bytes16)second;
        }
      }
    }
}

// sums [rows, PANEL] = bias + x [rows, k] times a panel.
template <Format FORMAT>
void multiply_in_strips(const uint8_t* panel, const RowLine* x, long x_stride, long rows, long k, const float* bias,
                        float* sums, const uint8_t* next) {
  using P = Places<FORMAT>;
  const long groups = k / BLOCK_GROUP, tiles = (rows + MOST_STRIP_ROWS - 1) / MOST_STRIP_ROWS;
  Ahead ahead = Ahead::of(panel, next, block_panel_bytes(FORMAT, k), groups * STEPS * tiles, tiles == 1);
  alignas(64) uint8_t unpacked[P::L.is_whole() ? 1 : UNPACKED_GROUPS][STRIPS * STRIP_BYTES];
  const long at_once = P::L.is_whole() ? groups : UNPACKED_GROUPS;
  const float* start = bias;
  long start_stride = 0;
  for (long first = 0; first < groups; first += at_once) {
    const uint8_t* chunk = panel + first * P::CHUNK;
    const StripGroups some{chunk, unpacked[0], std::min(at_once, groups - first)};
    if constexpr (!P::L.is_whole())
      for (long g = 0; g < some.count; g++) unpack_strips<FORMAT>(chunk + g * P::CHUNK, unpacked[g]);
    for (long row = 0, height; row < rows; row += height) {
      const long rest = rows - row;
      height = rest == MOST_STRIP_ROWS + 1 ? MOST_STRIP_ROWS - 1 : std::min(rest, long(MOST_STRIP_ROWS));
      for_each<MOST_STRIP_ROWS>([&]<int I>() {
        if (height == I + 1)
          ahead = strip_tile<FORMAT, I + 1>(some, groups_in(x + row * x_stride, k) + first, x_stride,
                                            start + row * start_stride, start_stride, sums + row * PANEL, ahead);
      });
    }
    start = sums;
    start_stride = PANEL;
  }
}

}  // namespace oaiserve

#endif
