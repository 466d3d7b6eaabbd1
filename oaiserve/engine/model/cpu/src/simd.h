// Vectors of sixteen lanes on any CPU. They use GCC's vector extensions, and intrinsics where the compiler does not
// find the best instruction by itself.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace oaiserve {

constexpr int LANES = 16;

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));

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

inline f32x16 splat(float x) { return x - f32x16{}; }
inline f32x16 load(const float* p) {
  f32x16 v;
  memcpy(&v, p, 64);
  return v;
}
inline void store(float* p, f32x16 v) { memcpy(p, &v, 64); }

inline f32x16 load(const bf16* p) {
  u16x16 v;
  memcpy(&v, p, 32);
  return (f32x16)(__builtin_convertvector(v, u32x16) << 16);
}
// Rounds to nearest even. NaN stays NaN.
inline void store(bf16* p, f32x16 v) {
#if defined(__AVX512BF16__)
  __m256bh out = _mm512_cvtneps_pbh((__m512)v);
  memcpy(p, &out, 32);
#else
  u32x16 bits = (u32x16)v;
  u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  u32x16 is_nan = (u32x16)(v != v);
  u16x16 out = __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fc0), u16x16);
  memcpy(p, &out, 32);
#endif
}

// Rounds to the nearest integers, which the type must have room for.
template <class Integer, class Bits>
void store_integers(Integer* p, f32x16 v) {
  // 1.5 * 2^23: the integer is in the last bits of the sum.
  const Bits out = __builtin_convertvector((u32x16)(v + 12582912.0f), Bits);
  memcpy(p, &out, sizeof(out));
}
inline void store(int8_t* p, f32x16 v) { store_integers<int8_t, u8x16>(p, v); }
inline void store(int16_t* p, f32x16 v) { store_integers<int16_t, u16x16>(p, v); }

inline f32x16 max(f32x16 a, f32x16 b) { return a > b ? a : b; }
inline u32x16 max(u32x16 a, u32x16 b) { return a > b ? a : b; }
inline f32x16 min(f32x16 a, f32x16 b) { return a < b ? a : b; }

inline float sum(f32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float total = 0;
  for (int i = 0; i < LANES; i++) total += v[i];
  return total;
#endif
}
inline float max(f32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float most = v[0];
  for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
  return most;
#endif
}

inline uint32_t max(u32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epu32((__m512i)v);
#else
  uint32_t most = v[0];
  for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
  return most;
#endif
}

// Returns e^x with a relative error of about 1e-7, as 2^round(t) times a polynomial in the rest, where t = x log2(e).
// The result is 0 below -87.3, infinity from 88.4 on, and NaN for NaN.
inline f32x16 exp(f32x16 x) {
  const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding and subtracting it rounds to an integer
  f32x16 clamped = min(max(x, splat(-87.3f)), splat(88.8f));
  f32x16 whole = (clamped * 1.44269504f + magic) - magic;
  f32x16 rest = clamped - whole * 0.693359375f + whole * 2.12194440e-4f;  // ln 2 in two parts
  f32x16 p = splat(1.9875691500e-4f);
  p = p * rest + 1.3981999507e-3f;
  p = p * rest + 8.3334519073e-3f;
  p = p * rest + 4.1665795894e-2f;
  p = p * rest + 1.6666665459e-1f;
  p = p * rest + 5.0000001201e-1f;
  p = p * rest * rest + rest + 1.0f;
  f32x16 scale = (f32x16)((__builtin_convertvector(whole, i32x16) + 127) << 23);
  f32x16 out = p * scale;
  out = x > 88.72f ? splat(INFINITY) : out;
  out = x < -87.3f ? splat(0.0f) : out;
  return x == x ? out : x;
}

// Returns the natural logarithm of positive numbers with a relative error of about 1e-7, as the exponent times ln 2 and a
// polynomial in the rest. Infinity stays infinity, and NaN stays NaN.
inline f32x16 log(f32x16 x) {
  const u32x16 bits = (u32x16)x;
  f32x16 exponent = __builtin_convertvector((i32x16)(bits >> 23) - 127, f32x16);
  f32x16 rest = (f32x16)((bits & 0x7fffff) | 0x3f800000);
  exponent = rest > 1.41421356f ? exponent + 1.0f : exponent;
  rest = (rest > 1.41421356f ? rest * 0.5f : rest) - 1.0f;
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
  return x < INFINITY ? out : x;
}

}  // namespace oaiserve
