// Dot products in registers, of which the inner loops of matrix products and of attention consist.
#pragma once

#include "simd.h"

namespace oaiserve {

// The number of neighbouring elements that a dot product multiplies at once: two of bfloat16 and of eight bits, one of
// float. These form a pack.
template <class T>
constexpr int PACK = 1;
template <>
constexpr int PACK<bf16> = 2;
template <>
constexpr int PACK<int8_t> = 2;

// a * b + c, rounded once where the CPU can. Compilers may choose so for `*` and `+`, too, but not everywhere alike.
inline Vector multiply_add(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
  return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

inline Vector multiply_add(float a, Vector b, Vector c) { return multiply_add(a - Vector{}, b, c); }

template <class V, class E>
V load_vector(const E* p) {
  return reinterpret_cast<const Unaligned<V>*>(p)->vector;
}

// WIDTH packs in registers: either one pack of each of WIDTH columns, or the same pack in all lanes (`splat`).
template <class T>
struct Packs;

template <>
struct Packs<float> {
  using Sum = Vector;
  Vector v;
  static Packs load(const float* p) { return {load_vector<Vector>(p)}; }
  static Packs splat(const float* p) { return {*p - Vector{}}; }
};
inline Vector dot(Vector sum, Packs<float> a, Packs<float> b) { return sum + a.v * b.v; }

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define WITH_BF16_DOTS  // An instruction multiplies pairs of bfloat16 and adds them.
template <>
struct Packs<bf16> {
  using Sum = Vector;
  VectorBits v;
  static Packs load(const bf16* p) { return {load_vector<VectorBits>(p)}; }
  static Packs splat(const bf16* p) {
    uint32_t pair;
    memcpy(&pair, p, 4);
    return {pair - VectorBits{}};
  }
};
inline Vector dot(Vector sum, Packs<bf16> a, Packs<bf16> b) {
#if defined(__AVX512BF16__)
  return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a.v, (__m512bh)b.v);
#else
  return (Vector)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a.v, (bfloat16x8_t)b.v);
#endif
}
#else
template <>
struct Packs<bf16> {
  using Sum = Vector;
  Vector first, second;  // elements of each pair
  static Packs load(const bf16* p) {
    const VectorBits pairs = load_vector<VectorBits>(p);
    return {(Vector)(pairs << 16), (Vector)high_halves(pairs)};
  }
  static Packs splat(const bf16* p) { return {to_float(p[0]) - Vector{}, to_float(p[1]) - Vector{}}; }
  static VectorBits high_halves(VectorBits pairs) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    alignas(32) static constexpr uint32_t MASK[WIDTH] = {~0xffffu, ~0xffffu, ~0xffffu, ~0xffffu,
                                                         ~0xffffu, ~0xffffu, ~0xffffu, ~0xffffu};
    asm("vpand %2, %1, %0" : "=x"(pairs) : "x"(pairs), "m"(MASK));  // GCC would keep the mask in a register
    return pairs;
#else
    return pairs & 0xffff0000u;
#endif
  }
};
inline Vector dot(Vector sum, Packs<bf16> a, Packs<bf16> b) { return sum + a.first * b.first + a.second * b.second; }
#endif

// Integers of eight bits, which those of sixteen bits multiply. Sums of some hundred products are exact.
template <>
struct Packs<int8_t> {
  using Sum = Integers;
  Integers v;  // pairs of sixteen bits
  static Packs load(const int8_t* p) {
    typedef int8_t Bytes __attribute__((vector_size(WIDTH * 2)));
    typedef int16_t Shorts __attribute__((vector_size(WIDTH * 4)));
    return {(Integers)__builtin_convertvector(load_vector<Bytes>(p), Shorts)};
  }
  static Packs splat(const int16_t* p) {
    int32_t pair;
    memcpy(&pair, p, 4);
    return {pair - Integers{}};
  }
};
inline Integers dot(Integers sum, Packs<int8_t> a, Packs<int8_t> b) {
#if defined(__AVX512VNNI__)
  return (Integers)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a.v, (__m512i)b.v);
#elif defined(__AVX512BW__)
  return sum + (Integers)_mm512_madd_epi16((__m512i)a.v, (__m512i)b.v);
#elif defined(WITH_AVX_VNNI)
  return (Integers)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a.v, (__m256i)b.v);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return sum + (Integers)_mm256_madd_epi16((__m256i)a.v, (__m256i)b.v);
#else
  return sum + (a.v << 16 >> 16) * (b.v << 16 >> 16) + (a.v >> 16) * (b.v >> 16);
#endif
}

}  // namespace oaiserve
