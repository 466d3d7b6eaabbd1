// What products with weights in the formats of GGUF files consist of: codes and scales of weights, and how exact sums
// of products are scaled and added.
#pragma once

#include "grids.h"

namespace oaiserve {

// Four bytes of x in all lanes, as `dot_quads` takes them.
inline Integers splat_quad(const int8_t* p) {
  int32_t quad;
  std::memcpy(&quad, p, 4);
  return quad - Integers{};
}

// Adds to each lane the dot product of four unsigned codes and four signed values.
inline Integers dot_quads(Integers sum, VectorBits codes, Integers x) {
#if defined(__AVX512VNNI__)
  return (Integers)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x);
#elif defined(WITH_AVX_VNNI)
  return (Integers)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)x);
#elif defined(__AVX512BW__)  // codes are below 128
  const __m512i pairs = _mm512_maddubs_epi16((__m512i)codes, (__m512i)x);
  return sum + (Integers)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__ARM_FEATURE_DOTPROD)
  return (Integers)vdotq_s32((int32x4_t)sum, (int8x16_t)codes, (int8x16_t)x);  // HAS_SIGNED_CODES
#else
  for (int byte = 0; byte < 4; byte++)
    sum += (Integers)(codes >> 8 * byte & 0xff) * (x << (24 - 8 * byte) >> 24);
  return sum;
#endif
}

// The entries of the format's table, plus its offset unless codes have a sign, at the places that the bytes say.
template <Layout L>
VectorBits look_up(VectorBits places) {
  alignas(64) static constexpr auto TABLE = [] {
    struct {
      uint8_t bytes[64];
    } table{};
    for (int i = 0; i < 64; i++) table.bytes[i] = uint8_t(L.at_place(i % 16) - (HAS_SIGNED_CODES<L> ? L.offset : 0));
    return table;
  }();
#if defined(__AVX512BW__)
  return (VectorBits)_mm512_shuffle_epi8(load_vector<__m512i>(TABLE.bytes), (__m512i)places);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return (VectorBits)_mm256_shuffle_epi8(load_vector<__m256i>(TABLE.bytes), (__m256i)places);
#elif defined(__aarch64__)
  return (VectorBits)vqtbl1q_u8(load_vector<uint8x16_t>(TABLE.bytes), (uint8x16_t)places);
#else
  typedef uint8_t Bytes __attribute__((vector_size(WIDTH * 4)));
  Bytes found = (Bytes)places;
  for (int i = 0; i < WIDTH * 4; i++) found[i] = TABLE.bytes[found[i]];
  return (VectorBits)found;
#endif
}

// Planes of step numbers, where a plane of low bits or of high bits has several quads.
template <Layout L>
constexpr long low_plane(int step) {
  return L.low_bits == 4 ? step : step / 2;
}
template <Layout L>
constexpr long high_plane(int step) {
  return step * L.high_bits / 4;
}

// The same quads of the left and the right columns, from what planes have of them. Where GCC calls this in place of
// inlining it, formats with high bits take twice as long.
template <Layout L>
[[gnu::always_inline]] inline void unpack_codes(VectorBits low, VectorBits high, int step, VectorBits& left,
                                                VectorBits& right) {
  if constexpr (L.low_bits == 4) {
    left = low & 0x0f0f0f0fu;
#if defined(__aarch64__)
    right = (VectorBits)vshrq_n_u8((uint8x16_t)low, 4);
#else
    right = low >> 4 & 0x0f0f0f0fu;
#endif
  } else {
    low >>= step % 2 * 4;
    left = low & 0x03030303u;
    right = low >> 2 & 0x03030303u;
  }
  if constexpr (L.high_bits > 0) {
    constexpr int STEPS_EACH = 4 / L.high_bits;
    constexpr uint32_t MASK = (((1u << L.high_bits) - 1) << L.low_bits) * 0x01010101u;
    const auto moved = [&](int from) {  // bits from a place of a byte to above the low ones
      return (from >= L.low_bits ? high >> (from - L.low_bits) : high << (L.low_bits - from)) & MASK;
    };
    const int from = step % STEPS_EACH * 2 * L.high_bits;
#if defined(__aarch64__)
    if constexpr (STORED_SIGN<L> != 0) {
      // The high bits move to the top of their bytes, and down with copies of the sign. Then the low ones are inserted.
      const auto with_sign = [&](int place) __attribute__((always_inline)) {
        return (uint8x16_t)((int8x16_t)((uint8x16_t)high << (8 - L.high_bits - place)) >> (8 - L.code_bits()));
      };
      const uint8x16_t low_bits = vdupq_n_u8((1 << L.low_bits) - 1);
      left = (VectorBits)vbslq_u8(low_bits, (uint8x16_t)low, with_sign(from));
      if constexpr (L.low_bits == 4)
        right = (VectorBits)vsriq_n_u8(with_sign(from + L.high_bits), (uint8x16_t)low, 4);
      else
        right = (VectorBits)vbslq_u8(low_bits, (uint8x16_t)(low >> L.low_bits), with_sign(from + L.high_bits));
    } else {
      left = (left & ~MASK) | moved(from);  // one instruction, which selects bits
      right = (right & ~MASK) | moved(from + L.high_bits);
    }
#else
    left |= moved(from);
    right |= moved(from + L.high_bits);
#endif
  }
  if constexpr (L.is_codebook) {
    left = look_up<L>(left);
    right = look_up<L>(right);
  }
}

// Loads vectors that are neighbours in memory.
template <int COUNT>
[[gnu::always_inline]] inline void load_vectors(const uint8_t* p, VectorBits* out) {
#pragma GCC unroll 4
  for (int v = 0; v < COUNT; v++) out[v] = load_vector<VectorBits>(p + v * sizeof(VectorBits));
#if defined(__aarch64__)
#pragma GCC unroll 2
  for (int v = 0; v + 1 < COUNT; v += 2) asm("" : "+w"(out[v]), "+w"(out[v + 1]));  // One instruction loads both.
#endif
}

// The vectors of columns of a tile: SLICES times WIDTH neighbours on the left, and as many on the right.
template <Layout L, int SLICES>
struct TileColumns {
  static constexpr int VECTORS = 2 * SLICES;
  long first;  // column of the left half

  long at(int v) const { return v / SLICES * LANES + first + v % SLICES * WIDTH; }

  // Loads the codes of a step of a group. Where GCC calls this in place of inlining it, formats with high bits take twice
  // as long.
  [[gnu::always_inline]] void load(const uint8_t* codes, long low_bytes, int step, VectorBits (&out)[VECTORS]) const {
    codes += first * 4;
    if constexpr (L.is_whole()) {
      for (int half = 0; half < 2; half++) load_vectors<SLICES>(codes + (2 * step + half) * PLANE, out + half * SLICES);
      if constexpr (!HAS_SIGNED_CODES<L>)
        for (VectorBits& of_columns : out) of_columns ^= in_each_byte(128);
    } else {
      VectorBits low[SLICES], high[SLICES]{};
      load_vectors<SLICES>(codes + low_plane<L>(step) * PLANE, low);
      if constexpr (L.high_bits > 0) load_vectors<SLICES>(codes + low_bytes + high_plane<L>(step) * PLANE, high);
#pragma GCC unroll 4
      for (int i = 0; i < SLICES; i++) unpack_codes<L>(low[i], high[i], step, out[i], out[SLICES + i]);
    }
  }
};

// Loads the same quads of the left and the right columns: `p` points to the quads of WIDTH columns.
template <Layout L>
[[gnu::always_inline]] inline void load_codes(const uint8_t* p, long low_bytes, int step, VectorBits& left, VectorBits& right) {
  VectorBits codes[2];
  TileColumns<L, 1>{0}.load(p, low_bytes, step, codes);
  left = codes[0];
  right = codes[1];
}

#if defined(WITH_SHORT_SUMS)
// The fewest rows whose products are summed in sixteen bits, if codes have less than eight. With AVX-512, fewer rows take
// less time if each instruction's products are widened.
#if defined(__AVX512F__)
constexpr int LEAST_SHORT_ROWS = 3;
#else
constexpr int LEAST_SHORT_ROWS = 1;
#endif

// Whether products with a format are summed in sixteen bits. Where an instruction sums in 32 bits, only those are whose
// scales change so often that unpacking codes once for several tiles gains more.
constexpr bool has_short_sums([[maybe_unused]] const Layout& layout) {
#if defined(WITH_AVX_VNNI)
  return layout.is_super && layout.run < BLOCK_GROUP;
#endif
  return true;
}
#endif

// The offset that sums of products have. Codes of eight bits may have a sign instead, and have one in short_tiles.h.
constexpr int summed_offset(const Layout& layout) {
#if defined(WITH_SHORT_SUMS)
  if (has_short_sums(layout) && !layout.is_small()) return 0;
#elif defined(__ARM_FEATURE_DOTPROD)
  if (has_signed_codes(layout)) return 0;
#endif
  return layout.offset;
}

// Calls body(step) for each step. If there are high bits, how these are shifted depends on the step, which therefore
// should be known to the compiler. Without them, this costs registers, and with AVX2 a sixth of the speed.
template <Layout L, int STEPS_OF_RUN, bool IS_UNROLLED = (L.high_bits > 0), class Body>
[[gnu::always_inline]] inline void for_steps(Body&& body) {
  if constexpr (IS_UNROLLED || L.high_bits > 0) {
#pragma GCC unroll 8
    for (int step = 0; step < STEPS_OF_RUN; step++) body(step);
  } else {
    for (int step = 0; step < STEPS_OF_RUN; step++) body(step);
  }
}

#if defined(__ARM_FEATURE_DOTPROD)
#define WITH_LANE_DOTS
// dots [ROWS] of columns += their codes of COUNT steps, from `first` on, times FACTOR, times x. The instruction takes a
// quad of x from a vector of four.
template <Layout L, int COUNT, int FACTOR = 1, int SLICES, int ROWS, class XOf>
[[gnu::always_inline]] inline void add_lane_dots(Integers (&dots)[ROWS][2 * SLICES], TileColumns<L, SLICES> columns,
                                                 const uint8_t* codes, long low_bytes, int first, XOf&& x_of) {
  constexpr int QUADS_EACH = 4;
#pragma GCC unroll 2
  for (int step = first; step < first + COUNT; step += QUADS_EACH) {
    int8x16_t x[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) x[r] = load_vector<int8x16_t>(x_of(r) + 4 * step);
    const auto add = [&]<int QUAD>(std::integral_constant<int, QUAD>) __attribute__((always_inline)) {
      VectorBits of_step[2 * SLICES];
      columns.load(codes, low_bytes, step + QUAD, of_step);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int v = 0; v < 2 * SLICES; v++)
          dots[r][v] =
              (Integers)vdotq_laneq_s32((int32x4_t)dots[r][v], (int8x16_t)(of_step[v] * FACTOR), x[r], QUAD);
    };
    [&]<int... QUAD>(std::integer_sequence<int, QUAD...>) __attribute__((always_inline)) {
      (add(std::integral_constant<int, QUAD>()), ...);
    }(std::make_integer_sequence<int, QUADS_EACH>());
  }
}
#endif

inline Vector load_halves(const uint8_t* p) {
#if defined(__AVX512F__)
  return (Vector)_mm512_maskz_cvtph_ps(0xffff, load_vector<__m256i>(p));
#elif defined(__F16C__)
  return (Vector)_mm256_cvtph_ps(load_vector<__m128i>(p));
#elif defined(__aarch64__)
  return (Vector)vcvt_f32_f16(load_vector<float16x4_t>(p));
#else
  Vector v;
  for (int i = 0; i < WIDTH; i++) v[i] = half_to_float(half_at(p + 2 * i));
  return v;
#endif
}

inline Integers load_integers(const uint8_t* p) {  // signed, with eight bits
#if defined(__AVX512F__)
  return (Integers)_mm512_maskz_cvtepi8_epi32(0xffff, load_vector<__m128i>(p));
#elif defined(__AVX2__)
  return (Integers)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#elif defined(__aarch64__)
  uint32_t bytes;  // GCC would widen one by one
  std::memcpy(&bytes, p, sizeof(bytes));
  return (Integers)vmovl_s16(vget_low_s16(vmovl_s8((int8x8_t)vdup_n_u32(bytes))));
#else
  typedef int8_t Bytes __attribute__((vector_size(WIDTH)));
  return __builtin_convertvector(load_vector<Bytes>(p), Integers);
#endif
}

inline Vector load_bfloat16s(const uint8_t* p) {
  return (Vector)(__builtin_convertvector(load_vector<Halves>(p), VectorBits) << 16);
}

// The scales and minimums of WIDTH columns, from a chunk on. Where scales of runs are integers, these are not in it.
struct Scaling {
  Vector scale, min;
};
template <Format FORMAT>
Scaling load_scaling(const uint8_t* chunk, long column) {
  using P = Places<FORMAT>;
  constexpr Layout L = P::L;
  Scaling out{L.is_e2m1 ? load_bfloat16s(chunk + column * 2) : load_halves(chunk + column * 2), {}};
  if constexpr (L.factor != 1) out.scale *= L.factor;
  if constexpr (L.has_zero)
#if defined(__aarch64__)
    out.min = -out.scale * __builtin_convertvector(load_integers(chunk + P::MINS + column), Vector);
#else
    out.min = -out.scale * convert<Vector>(load_vector<SignedBytes>(chunk + P::MINS + column));
#endif
  else if constexpr (L.has_min)
    out.min = load_halves(chunk + P::MINS + column * 2);
  return out;
}

// Adds to sums what 32 numbers of x and of weights make: their products and a minimum for each number of x, both scaled.
// X is a QuantizedGroup, or has vectors of what several rows have in place of it.
template <bool HAS_MIN, class Products, class X>
Vector add_group(Vector sum, Products products, const X& x, const Scaling& scaling) {
  const Vector scaled = __builtin_convertvector(products, Vector) * x.scale;
  sum = multiply_add(scaled, scaling.scale, sum);
  if constexpr (HAS_MIN) sum = multiply_add(x.scaled_sum, scaling.min, sum);
  return sum;
}

// The integer scales, or minimums, of WIDTH columns for a run of a group, in a format that has such.
template <Format FORMAT>
Integers load_small_scales(const uint8_t* chunk, long group, int run, long column) {
  using P = Places<FORMAT>;
  const Integers scales = load_integers(chunk + P::SMALL_SCALES + group * P::INTEGERS + run * PANEL + column);
  return P::L.has_nibbles() ? scales & 15 : scales;
}
template <Format FORMAT>
Integers load_small_mins(const uint8_t* chunk, long group, int run, long column) {
  using P = Places<FORMAT>;
  const long at = group * P::INTEGERS + run * PANEL + column;
  if constexpr (P::L.has_nibbles()) return load_integers(chunk + P::SMALL_SCALES + at) >> 4 & 15;
  return load_integers(chunk + P::SMALL_MINS + at);
}

// Adds to sums what 256 numbers of x and of weights make. `products` are times the integer scales of their runs, and
// `mins` the sums of x times the integer minimums. Both are exact; the minimums as floats, too.
template <bool HAS_MIN>
Vector add_super(Vector sum, Integers products, Vector mins, float x_scale, const Scaling& scaling) {
  Vector scaled = __builtin_convertvector(products, Vector) * scaling.scale;
  if constexpr (HAS_MIN) scaled = multiply_add(mins, -scaling.min, scaled);
  return multiply_add(scaled, x_scale - Vector{}, sum);
}

// What a format whose scales are floats of 128 neighbours subtracts from the codes of WIDTH columns.
template <Format FORMAT>
Integers load_zeros(const uint8_t* chunk, long scale, long column) {
  using P = Places<FORMAT>;
  return load_integers(chunk + P::MINS + scale * PANEL + column) + P::L.offset;
}

// How products of 128 numbers become what 256 numbers of x and of weights make. Zeros are in the products.
struct LongScaling {
  Vector first, second;

  LongScaling(const uint8_t* chunk, long column)
      : first(load_halves(chunk + column * 2)), second(load_halves(chunk + (PANEL + column) * 2)) {}
  Vector add(Vector sum, Integers of_first, Integers of_second, float x_scale) const {
    const Vector scaled = __builtin_convertvector(of_first, Vector) * first;
    const Vector both = multiply_add(__builtin_convertvector(of_second, Vector), second, scaled);
    return multiply_add(both, x_scale - Vector{}, sum);
  }
};

constexpr long BLOCK_AHEAD = 4 << 10;  // how far ahead a panel is read that is multiplied once, in bytes
constexpr long BLOCK_NEAR = 1 << 10;   // and how far ahead what is in L2 by then
constexpr long MOST_PREFETCHED = 512;  // at once, if it is not read soon

// What products with a panel prefetch, `step` bytes at a time: few, because many lines at once would fill the buffers
// that weights and x are waiting for.
struct Ahead {
  const uint8_t *panel, *next;
  long panel_bytes, place;  // place in this panel, then in the next one, which goes to L2, since L1 is too small
  long step;
  const uint8_t* near = nullptr;  // as many bytes from there on, into L1
  long left = 0;                  // rest of what is prefetched already

  // For a panel that is multiplied in this number of steps: its own end and the beginning of the next one if it is read once,
  // and else all of the next one.
  static Ahead of(const uint8_t* panel, const uint8_t* next, long panel_bytes, long steps, bool is_once) {
    const long step = (panel_bytes + steps - 1) / steps;
    if (!is_once) return {panel, next, panel_bytes, panel_bytes, step};
    return {panel, next, panel_bytes, std::min(panel_bytes, BLOCK_AHEAD), step, panel + BLOCK_NEAR};
  }

  const uint8_t* address() const { return place < panel_bytes ? panel + place : next + (place - panel_bytes); }

#if defined(__aarch64__)
  // CPUs read ahead by themselves, up to the end of a page. This is for what comes later, in few instructions.
  template <long BYTES>
  void prefetch_bytes() {
    const uint8_t* const from = address();
#pragma GCC unroll 80
    for (long line = 0; line < BYTES; line += 64) __builtin_prefetch(from + line, 0, 2);
    place += BYTES;
  }

  // Takes this number of steps, with BYTES of a panel. If it is read once, as many bytes are prefetched.
  template <long BYTES>
  void prefetch_chunk(int steps) {
    if (near) return prefetch_bytes<BYTES>();
    prefetch(steps);
  }
#endif

  void prefetch(int steps = 1) {
#if defined(__aarch64__)
    for (left -= step * steps; left < 0; left += MOST_PREFETCHED) prefetch_bytes<MOST_PREFETCHED>();
    return;
#endif
    for (left -= step * steps; left < 0; left += 64, place += 64) {
      __builtin_prefetch(address(), 0, 2);
      if (!near) continue;
      __builtin_prefetch(near, 0, 3);
      near += 64;
    }
  }
};

}  // namespace oaiserve
