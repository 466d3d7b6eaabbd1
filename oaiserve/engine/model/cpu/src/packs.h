// Sums of products in registers: what the inner loops of matrix products and of attention are made of.
#pragma once

#include "simd.h"

namespace oaiserve {

// A dot product takes this many neighbours at once: pairs of bfloat16, single floats.
template <class T>
constexpr int PACK = 1;
template <>
constexpr int PACK<bf16> = 2;

// Floats in a register. GCC keeps wider vectors, like those of simd.h where there is no AVX-512, in memory: outside of
// inner loops this does not matter much.
#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

typedef float Vector __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t VectorBits __attribute__((vector_size(WIDTH * 4)));

template <class V, class E>
V load_vector(const E* p) {
  V v;
  memcpy(&v, p, sizeof(v));
  return v;
}

// WIDTH packs: of as many columns, or one of x in all lanes.
template <class T>
struct Packs;

template <>
struct Packs<float> {
  Vector v;
  static Packs load(const float* p) { return {load_vector<Vector>(p)}; }
  static Packs splat(const float* p) { return {*p - Vector{}}; }
};
inline Vector dot(Vector sum, Packs<float> a, Packs<float> b) { return sum + a.v * b.v; }

#if defined(__AVX512BF16__)
template <>
struct Packs<bf16> {
  VectorBits v;
  static Packs load(const bf16* p) { return {load_vector<VectorBits>(p)}; }
  static Packs splat(const bf16* p) {
    uint32_t pair;
    memcpy(&pair, p, 4);
    return {pair - VectorBits{}};
  }
};
inline Vector dot(Vector sum, Packs<bf16> a, Packs<bf16> b) {
  return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a.v, (__m512bh)b.v);
}
#else
template <>
struct Packs<bf16> {
  Vector first, second;  // of each pair
  static Packs load(const bf16* p) {
    const VectorBits pairs = load_vector<VectorBits>(p);
    return {(Vector)(pairs << 16), (Vector)(pairs & 0xffff0000u)};
  }
  static Packs splat(const bf16* p) { return {to_float(p[0]) - Vector{}, to_float(p[1]) - Vector{}}; }
};
inline Vector dot(Vector sum, Packs<bf16> a, Packs<bf16> b) { return sum + a.first * b.first + a.second * b.second; }
#endif

}  // namespace oaiserve
