// Vectors of sixteen lanes on any CPU, in one register or several. They use GCC's vector extensions, and intrinsics where
// the compiler does not find the best instruction by itself.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVXVNNI__) && !defined(__AVX512F__)
#define WITH_AVX_VNNI  // Dot products of integers in the registers of AVX2, as Intel's client CPUs have them since 2021.
#endif

namespace oaiserve {

constexpr int LANES = 16;

// The number of floats in a register.
#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

typedef float Vector __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t VectorBits __attribute__((vector_size(WIDTH * 4)));
typedef int32_t Integers __attribute__((vector_size(WIDTH * 4)));
typedef uint16_t Halves __attribute__((vector_size(WIDTH * 2)));
typedef uint8_t Bytes __attribute__((vector_size(WIDTH)));
typedef int8_t SignedBytes __attribute__((vector_size(WIDTH)));

template <class To, class From>
To convert(From v) {
  return __builtin_convertvector(v, To);
}
template <class Mask, class V>
V select(Mask mask, V yes, V no) {
  return mask ? yes : no;
}

// A vector of two halves. GCC keeps vectors that are wider than a register in memory.
template <class V>
struct Two {
  using Element = std::remove_cvref_t<decltype(V{}[0])>;
  V low, high;

  Two() = default;
  Two(V low, V high) : low(low), high(high) {}
  template <class W>
  explicit Two(const Two<W>& bits) : low((V)bits.low), high((V)bits.high) {}

  Element operator[](int i) const { return i < int(sizeof(V) / 4) ? low[i] : high[i - int(sizeof(V) / 4)]; }
  Two operator-() const { return {-low, -high}; }
  Two operator~() const { return {~low, ~high}; }
#define FOR_EACH_HALF(op)                                                                     \
  friend auto operator op(Two a, Two b) { return two(a.low op b.low, a.high op b.high); }     \
  friend auto operator op(Two a, Element b) { return two(a.low op b, a.high op b); }          \
  friend auto operator op(Element a, Two b) { return two(a op b.low, a op b.high); }
  FOR_EACH_HALF(+)
  FOR_EACH_HALF(-)
  FOR_EACH_HALF(*)
  FOR_EACH_HALF(/)
  FOR_EACH_HALF(&)
  FOR_EACH_HALF(|)
  FOR_EACH_HALF(<<)
  FOR_EACH_HALF(>>)
  FOR_EACH_HALF(<)
  FOR_EACH_HALF(>)
  FOR_EACH_HALF(==)
  FOR_EACH_HALF(!=)
#undef FOR_EACH_HALF
  template <class B>
  Two& operator+=(B b) { return *this = *this + b; }
  template <class B>
  Two& operator-=(B b) { return *this = *this - b; }
  template <class B>
  Two& operator*=(B b) { return *this = *this * b; }
  template <class B>
  Two& operator|=(B b) { return *this = *this | b; }

 private:
  template <class H>
  static Two<H> two(H low, H high) { return {low, high}; }
};

template <class To, class V>
To convert(Two<V> v) {
  using Half = decltype(To::low);
  return {convert<Half>(v.low), convert<Half>(v.high)};
}
template <class M, class V>
Two<V> select(Two<M> mask, Two<V> yes, Two<V> no) {
  return {select(mask.low, yes.low, no.low), select(mask.high, yes.high, no.high)};
}

template <class V>
struct Wider {
  using Type = std::conditional_t<WIDTH == 16, V, std::conditional_t<WIDTH == 8, Two<V>, Two<Two<V>>>>;
};
using f32x16 = Wider<Vector>::Type;
using i32x16 = Wider<Integers>::Type;
using u32x16 = Wider<VectorBits>::Type;

struct bf16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

// A vector at any address. GCC for aarch64 would take a vector that memcpy copies for an integer, and move it through the
// registers of integers.
template <class V>
struct [[gnu::packed, gnu::may_alias]] Unaligned {
  V vector;
};

inline f32x16 splat(float x) { return x - f32x16{}; }

// 1.5 * 2^23. Adding it to a number rounds to an integer, which the last bits of the sum are.
constexpr float MAGIC = 12582912.0f;

#if defined(__AVX2__)
// Stores the last byte of each lane. GCC's own conversion moves bytes one by one.
inline void store_last_bytes(VectorBits v, void* p) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)v));
#else
  const __m256i bytes = _mm256_shuffle_epi8((__m256i)v, _mm256_set1_epi32(0x0c080400));  // of each half, in its first lane
  _mm_storel_epi64((__m128i*)p, _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)));
#endif
}
#endif

// The elements of E at `p`, in lanes of V, and back. Numbers become bfloat16 by rounding to nearest even, where NaN stays
// NaN, and integers by rounding to the nearest; E must have room for them.
template <class V, class E>
[[gnu::always_inline]] inline V load_lanes(const E* p) {
  if constexpr (requires(V v) { v.low; }) {
    using Half = decltype(V::low);
    return {load_lanes<Half>(p), load_lanes<Half>(p + sizeof(Half) / 4)};
  } else if constexpr (sizeof(E) == 4) {
    V v;
    memcpy(&v, p, sizeof(v));
    return v;
  } else {
    Halves v;
    memcpy(&v, p, sizeof(v));
#if defined(__aarch64__)
    return (V)vshll_n_u16((uint16x4_t)v, 16);
#else
    return (V)(__builtin_convertvector(v, VectorBits) << 16);
#endif
  }
}
template <class V, class E>
[[gnu::always_inline]] inline void store_lanes(E* p, V v) {
  if constexpr (requires { v.low; }) {
    store_lanes(p, v.low);
    store_lanes(p + sizeof(v.low) / 4, v.high);
  } else if constexpr (sizeof(E) == 4) {
    reinterpret_cast<Unaligned<V>*>(p)->vector = v;
  } else if constexpr (std::is_same_v<E, bf16>) {
#if defined(__AVX512BF16__)
    __m256bh out = _mm512_cvtneps_pbh((__m512)v);
    memcpy(p, &out, 32);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    const bfloat16x4_t out = vcvt_bf16_f32((float32x4_t)v);
    memcpy(p, &out, sizeof(out));
#else
    const VectorBits bits = (VectorBits)v, is_nan = (VectorBits)(v != v);
    const VectorBits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Halves out = __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fc0), Halves);
    memcpy(p, &out, sizeof(out));
#endif
  } else {
    using Few = std::conditional_t<sizeof(E) == 1, Bytes, Halves>;
#if defined(__aarch64__)
    const uint16x4_t halves = vmovn_u32((uint32x4_t)(v + MAGIC));
    const uint8x8_t bytes = vmovn_u16(vcombine_u16(halves, halves));
    if constexpr (sizeof(Few) == sizeof(halves))
      memcpy(p, &halves, sizeof(Few));
    else
      memcpy(p, &bytes, sizeof(Few));
#else
    const auto integers = (VectorBits)(v + MAGIC);
#if defined(__AVX2__)
    if constexpr (sizeof(E) == 1) return store_last_bytes(integers, p);
#endif
    const Few out = convert<Few>(integers);
    memcpy(p, &out, sizeof(out));
#endif
  }
}
template <class E>
[[gnu::always_inline]] inline f32x16 load(const E* p) {
  return load_lanes<f32x16>(p);
}
template <class E>
[[gnu::always_inline]] inline void store(E* p, f32x16 v) {
  store_lanes(p, v);
}

// Stores the last byte of each lane of integers that MAGIC was added to.
inline void store_last_bytes(f32x16 v, int8_t* p) {
#if defined(__aarch64__)
  const auto halves = [](Two<Vector> v) { return (uint8x16_t)vuzp1q_u16((uint16x8_t)v.low, (uint16x8_t)v.high); };
  const uint8x16_t bytes = vuzp1q_u8(halves(v.low), halves(v.high));
  memcpy(p, &bytes, sizeof(bytes));
#else
  store_lanes(p, v - MAGIC);
#endif
}

inline f32x16 max(f32x16 a, f32x16 b) { return select(a > b, a, b); }
inline u32x16 max(u32x16 a, u32x16 b) { return select(a > b, a, b); }
inline f32x16 min(f32x16 a, f32x16 b) { return select(a < b, a, b); }

// One number of all lanes: that of both halves, and so on.
template <class V, class Combine>
auto reduce(V v, Combine combine) {
  if constexpr (requires { v.low; }) {
    return reduce<decltype(v.low)>(combine(v.low, v.high), combine);
  } else {
    std::remove_cvref_t<decltype(v[0])> lanes[WIDTH];
    memcpy(lanes, &v, sizeof(v));
    for (int half = WIDTH / 2; half > 0; half /= 2)
      for (int i = 0; i < half; i++) lanes[i] = combine(lanes[i], lanes[i + half]);
    return lanes[0];
  }
}
inline float sum(f32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  return reduce(v, [](auto a, auto b) { return a + b; });
#endif
}
inline float max(f32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  return reduce(v, [](auto a, auto b) { return select(a > b, a, b); });
#endif
}
inline uint32_t max(u32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epu32((__m512i)v);
#elif defined(__aarch64__)
  const auto halves = select(v.low > v.high, v.low, v.high);
  return vmaxvq_u32((uint32x4_t)select(halves.low > halves.high, halves.low, halves.high));
#else
  return reduce(v, [](auto a, auto b) { return select(a > b, a, b); });
#endif
}

// Returns e^x with a relative error of about 1e-7, as 2^round(t) times a polynomial in the rest, where t = x log2(e).
// The result is 0 below -87.3, infinity from 88.4 on, and NaN for NaN.
[[gnu::always_inline]] inline f32x16 exp(f32x16 x) {
  f32x16 clamped = min(max(x, splat(-87.3f)), splat(88.8f));
  f32x16 whole = (clamped * 1.44269504f + MAGIC) - MAGIC;
  f32x16 rest = clamped - whole * 0.693359375f + whole * 2.12194440e-4f;  // ln 2 in two parts
  f32x16 p = splat(1.9875691500e-4f);
  p = p * rest + 1.3981999507e-3f;
  p = p * rest + 8.3334519073e-3f;
  p = p * rest + 4.1665795894e-2f;
  p = p * rest + 1.6666665459e-1f;
  p = p * rest + 5.0000001201e-1f;
  p = p * rest * rest + rest + 1.0f;
  f32x16 scale = (f32x16)((convert<i32x16>(whole) + 127) << 23);
  f32x16 out = p * scale;
  out = select(x > 88.72f, splat(INFINITY), out);
  out = select(x < -87.3f, splat(0.0f), out);
  return select(x == x, out, x);
}

// Returns the natural logarithm of positive numbers with a relative error of about 1e-7, as the exponent times ln 2 and a
// polynomial in the rest. Infinity stays infinity, and NaN stays NaN.
[[gnu::always_inline]] inline f32x16 log(f32x16 x) {
  const u32x16 bits = (u32x16)x;
  f32x16 exponent = convert<f32x16>((i32x16)(bits >> 23) - 127);
  f32x16 rest = (f32x16)((bits & 0x7fffff) | 0x3f800000);
  exponent = select(rest > 1.41421356f, exponent + 1.0f, exponent);
  rest = select(rest > 1.41421356f, rest * 0.5f, rest) - 1.0f;
  f32x16 p = splat(7.0376836292e-2f);
  p = p * rest - 1.1514610310e-1f;
  p = p * rest + 1.1676998740e-1f;
  p = p * rest - 1.2420140846e-1f;
  p = p * rest + 1.4249322787e-1f;
  p = p * rest - 1.6668057665e-1f;
  p = p * rest + 2.0000714765e-1f;
  p = p * rest - 2.4999993993e-1f;
  p = p * rest + 3.3333331174e-1f;
  const f32x16 squared = rest * rest;
  const f32x16 out = p * squared * rest - exponent * 2.12194440e-4f - squared * 0.5f + rest + exponent * 0.693359375f;
  return select(x < INFINITY, out, x);
}

}  // namespace oaiserve
