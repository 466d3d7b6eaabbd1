// The KV cache of a layer: its layout, and how keys and values are written into it, as they are or in eight bits.
//
// The keys of sixteen tokens of one head form a panel, and so do their values. Sixteen keys are stored side by side, so
// that one `dot` adds to sixteen scores. Values are stored so that one `dot` adds PACK weighted values to sixteen
// outputs.
//
// In eight bits, a number is an integer times a scale, which numbers of the same token and head share: all of a value,
// and KEY_GROUP neighbours of a key. Keys have more scales than values, because in some families a few numbers of each
// key are many times as large as the others, which would be rounded by their scale. Where it is known which ones these
// are, the numbers of all keys have fixed sizes, too: keys are divided by them before they are rounded, and queries are
// multiplied by them. What is stored of a token depends on this token's numbers alone.
//
// Where the keys and values of all heads are made from one latent vector, that vector is stored in place of them. It is the
// beginning of the only key, and also the value, so there are no panels of values: attention turns those of keys.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <variant>

#include "packs.h"

namespace oaiserve {

constexpr long PANEL_KEYS = LANES;  // tokens of a panel
// The most numbers of a key and of a value. Those of latent vectors are the longest: the value is a part of the key. Heads
// have no more numbers than a value may have.
constexpr long MAX_KEY_DIM = 576, MAX_VALUE_DIM = 512;
constexpr long KEY_GROUP = 32;  // the most numbers of a key in eight bits that share a scale

constexpr long divide_up(long a, long b) { return (a + b - 1) / b; }

// The size of the scales of one panel of keys in eight bits, and of one panel of values, in bytes.
inline long key_scale_bytes(long key_dim) { return divide_up(key_dim, KEY_GROUP) * PANEL_KEYS * long(sizeof(float)); }
constexpr long VALUE_SCALE_BYTES = PANEL_KEYS * sizeof(float);

// The KV cache of one layer, of numbers S: those of the step, or int8_t. The caller owns `keys` and `values`. Both are
// panels [num_blocks][kv_heads][block_size/16]. With P = PACK<S>, a panel of keys is S[key_dim/P][16][P], and one of
// values S[16/P][value_dim][P]. In eight bits, scales lie before the numbers of a panel: float[key_dim/KEY_GROUP][16] of
// keys and float[16] of values. block_size and both dims are multiples of 16. Slots without a token may hold anything, even
// NaN. Without `values`, a value is the first value_dim numbers of its key. key_sizes is float[kv_heads][key_dim], powers
// of two, for a cache in eight bits alone; null: all are 1.
template <class S>
struct PagedCache {
  static constexpr bool IS_SCALED = std::is_same_v<S, int8_t>;
  S* keys;
  S* values;
  long kv_heads, key_dim, value_dim, block_size;
  const float* key_sizes = nullptr;

  // The index of the panel with the token at `offset` of a block.
  long panel(long block, long kv_head, long offset) const {
    return ((block * kv_heads + kv_head) * block_size + offset) / PANEL_KEYS;
  }
  // Where the numbers of a panel begin.
  S* key_panel(long panel) const {
    const long scales = IS_SCALED ? key_scale_bytes(key_dim) : 0;
    return keys + panel * (scales + PANEL_KEYS * key_dim) + scales;
  }
  S* value_panel(long panel) const {
    const long scales = IS_SCALED ? VALUE_SCALE_BYTES : 0;
    return values + panel * (scales + PANEL_KEYS * value_dim) + scales;
  }
};

// The scales before the numbers of a panel.
inline float* scales_of(int8_t* numbers, long scale_bytes) { return reinterpret_cast<float*>(numbers - scale_bytes); }
inline const float* scales_of(const int8_t* numbers, long scale_bytes) {
  return reinterpret_cast<const float*>(numbers - scale_bytes);
}

// Rounds n numbers to integers, of which the largest is the largest of its type. Returns their scale, which is NaN if a
// number is NaN or infinite. n is a multiple of 16.
template <class X, class Integer>
float quantize(const X* numbers, long n, Integer* out) {
  constexpr float LARGEST = std::numeric_limits<Integer>::max();
  u32x16 bits{};  // bits of the largest number so far without its sign, which are ordered like numbers; NaN is the largest
  for (long i = 0; i < n; i += LANES) bits = max(bits, (u32x16)load(numbers + i) & 0x7fffffffu);
  const uint32_t largest_bits = max(bits);
  float largest;
  memcpy(&largest, &largest_bits, sizeof(largest));
  const float factor = LARGEST / std::max(largest, 1e-30f);
  for (long i = 0; i < n; i += LANES) store(out + i, load(numbers + i) * factor);
  return std::isfinite(largest) ? largest / LARGEST : NAN;
}

// Writes the key of a token into its slot, which is block * block_size + offset. Different threads may write different
// slots at the same time. write_value writes the value. X are numbers of the step, or floats.
template <class S, class X>
void write_key(const PagedCache<S>& cache, long slot, long kv_head, const X* key) {
  constexpr long P = PACK<S>;
  alignas(64) S numbers[MAX_KEY_DIM];
  const long block = slot / cache.block_size, offset = slot % cache.block_size, lane = offset % PANEL_KEYS;
  S* panel = cache.key_panel(cache.panel(block, kv_head, offset));
  if constexpr (PagedCache<S>::IS_SCALED) {
    alignas(64) float sized[MAX_KEY_DIM];
    const float* sizes = cache.key_sizes ? cache.key_sizes + kv_head * cache.key_dim : nullptr;
    for (long d = 0; d < cache.key_dim; d += LANES)
      store(sized + d, sizes ? load(key + d) / load(sizes + d) : load(key + d));
    float* scales = scales_of(panel, key_scale_bytes(cache.key_dim)) + lane;
    for (long d = 0; d < cache.key_dim; d += KEY_GROUP, scales += PANEL_KEYS)
      *scales = quantize(sized + d, std::min(KEY_GROUP, cache.key_dim - d), numbers + d);
  } else {
    for (long d = 0; d < cache.key_dim; d += LANES) store(numbers + d, load(key + d));
  }
  for (long d = 0; d < cache.key_dim; d += P) memcpy(panel + d * PANEL_KEYS + lane * P, numbers + d, sizeof(S) * P);
}
template <class S, class X>
void write_value(const PagedCache<S>& cache, long slot, long kv_head, const X* value) {
  constexpr long P = PACK<S>;
  alignas(64) S numbers[MAX_VALUE_DIM];
  const long block = slot / cache.block_size, offset = slot % cache.block_size, token = offset % PANEL_KEYS;
  S* panel = cache.value_panel(cache.panel(block, kv_head, offset));
  if constexpr (PagedCache<S>::IS_SCALED)
    scales_of(panel, VALUE_SCALE_BYTES)[token] = quantize(value, cache.value_dim, numbers);
  else
    for (long d = 0; d < cache.value_dim; d += LANES) store(numbers + d, load(value + d));
  S* pack = panel + token / P * P * cache.value_dim;
  for (long d = 0; d < cache.value_dim; d++) pack[d * P + token % P] = numbers[d];
}

// Writes the first `value_dim` numbers of the first `count` keys of a panel as a panel of values, with zeros in place of
// the other keys.
template <class T>
void turn_panel(const T* keys, long count, long value_dim, T* values) {
  constexpr long P = PACK<T>;
  for (long d = 0; d < value_dim; d++)
    for (long k = 0; k < PANEL_KEYS; k++)
      values[(k / P * value_dim + d) * P + k % P] = k < count ? keys[d / P * P * PANEL_KEYS + k * P + d % P] : T{};
}

#if defined(__AVX512BW__)
// The same in registers. Two neighbouring numbers of two neighbouring keys are 64 bits, which stay together: eight vectors
// of eight such are transposed at once.
inline void turn_panel(const bf16* keys, long count, long value_dim, bf16* values) {
  const __mmask16 seen = __mmask16((1u << count) - 1);
  // Makes a, c, b, d of the numbers a and b of a key, and c and d of the next one.
  const __m512i by_number = _mm512_broadcast_i32x4(_mm_set_epi64x(0x0f0e0b0a0d0c0908, 0x0706030205040100));
  for (long d = 0; d < value_dim; d += LANES) {
    __m512i numbers[8], even[4], odd[4];  // pairs of numbers, and of these those of the even and the odd pairs of keys
    for (int i = 0; i < 8; i++) {
      const __m512i pair = _mm512_maskz_loadu_epi32(seen, keys + (d + 2 * i) * PANEL_KEYS);
      numbers[i] = _mm512_shuffle_epi8(pair, by_number);
    }
    for (int i = 0; i < 4; i++) {
      even[i] = _mm512_unpacklo_epi64(numbers[2 * i], numbers[2 * i + 1]);
      odd[i] = _mm512_unpackhi_epi64(numbers[2 * i], numbers[2 * i + 1]);
    }
    const auto store_pairs = [&](const __m512i* from, bf16* out) {
      const __m512i a = _mm512_shuffle_i64x2(from[0], from[1], 0x44), b = _mm512_shuffle_i64x2(from[2], from[3], 0x44);
      const __m512i c = _mm512_shuffle_i64x2(from[0], from[1], 0xee), e = _mm512_shuffle_i64x2(from[2], from[3], 0xee);
      const long step = 4 * value_dim;  // to the next pair but one
      _mm512_storeu_si512(out, _mm512_shuffle_i64x2(a, b, 0x88));
      _mm512_storeu_si512(out + step, _mm512_shuffle_i64x2(a, b, 0xdd));
      _mm512_storeu_si512(out + 2 * step, _mm512_shuffle_i64x2(c, e, 0x88));
      _mm512_storeu_si512(out + 3 * step, _mm512_shuffle_i64x2(c, e, 0xdd));
    };
    store_pairs(even, values + 2 * d);
    store_pairs(odd, values + 2 * (value_dim + d));
  }
}
#endif

// The cache of a layer of a step that computes in T. `is_int8` says which of both it is.
template <class T>
using AnyCache = std::variant<PagedCache<T>, PagedCache<int8_t>>;

// Such a cache as the caller passes it. CacheMemory in library.py has the same layout.
struct CacheMemory {
  void *keys, *values;
  long kv_heads, key_dim, value_dim, block_size;
  bool is_int8;
  const float* key_sizes;

  template <class T>
  AnyCache<T> as() const {
    if (is_int8) return typed<int8_t>();
    return typed<T>();
  }

 private:
  template <class S>
  PagedCache<S> typed() const {
    return {static_cast<S*>(keys), static_cast<S*>(values), kv_heads, key_dim, value_dim, block_size,
            key_sizes};
  }
};

}  // namespace oaiserve
