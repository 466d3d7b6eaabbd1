// Linear layers over weights of eight bits. They take half the memory of bfloat16, and half the time where reading the
// weights takes most of it.
//
// About 128 neighbours along k form a group, which shares a scale. It multiplies sums over the group, not the weights,
// because bfloat16 holds the weights exactly only without scales. For few rows of x, weights are converted to the type
// of x in registers. For many rows, a group is converted once, to memory, for all of them.
#pragma once

#include <cmath>
#include <type_traits>

#include "gemm.h"

namespace oaiserve {

constexpr long FUSED_ROWS = 2 * TILE_ROWS;  // up to so many rows, converting in registers is faster, even for each tile
constexpr long GROUP = 128;                 // the most neighbours that share a scale
constexpr long INT8_AHEAD = 12 << 10;       // how far ahead memory is read, in bytes; one group would not be enough

// The quantized weights W [n, k] of a linear layer, for x of type T. The decoder owns them. A panel has 32 columns and
// consists of groups_of(k) groups with nearly the same number of steps. A group is bf16[32] scales and
// int8[steps][32][PACK] weights, zero beyond n and k. Panels are aligned to 64 bytes. `bias` is [n] or null.
template <class T>
struct Int8Linear {
  using Input = T;
  long n, k;
  const int8_t* panels;
  const float* bias;
};

template <class T>
constexpr bool READS_OTHERS<Int8Linear<T>> = true;

inline long groups_of(long k) { return (k + GROUP - 1) / GROUP; }
template <class T>
long int8_group_begin(long k, long group) {  // the first step of a group
  return steps_of<T>(k) * group / groups_of(k);
}
// The size of one panel in bytes.
template <class T>
long int8_panel_size(long k) {
  return groups_of(k) * PANEL * long(sizeof(bf16)) + panel_size<T>(k);
}

// Quantizes n columns of length k into panels, in the layout of Int8Linear. The error of a weight is at most 1/254 of
// the largest weight of its group, and a little more for the largest ones, because scales are rounded.
template <class T, class Columns>
void quantize_columns(const Columns& columns, long n, long k, int8_t* panels) {
  for (long first = 0; first < n; first += PANEL)
    for (long group = 0; group < groups_of(k); group++) {
      const long from = int8_group_begin<T>(k, group) * PACK<T>, to = int8_group_begin<T>(k, group + 1) * PACK<T>;
      bf16* scales = reinterpret_cast<bf16*>(panels);
      panels += PANEL * sizeof(bf16);
      for (long c = 0; c < PANEL; c++) {
        const auto* weights = columns(first + c);
        const long end = weights ? std::min(to, k) : from;
        float most = 0;
        for (long i = from; i < end; i++) most = std::max(most, std::fabs(to_float(weights[i])));
        bf16 rounded[LANES];
        store(rounded, splat(most / 127));
        scales[c] = rounded[0];
        const float scale = to_float(scales[c]), per_weight = scale > 0 ? 1 / scale : 0;
        for (long i = from; i < to; i++) {
          const float value = i < end ? std::nearbyint(to_float(weights[i]) * per_weight) : 0;
          panels[((i - from) / PACK<T> * PANEL + c) * PACK<T> + i % PACK<T>] =
              int8_t(std::max(-127.0f, std::min(value, 127.0f)));
        }
      }
      panels += (to - from) * PANEL;
    }
}

// Loads weights and converts them to floats.
template <class V>
V load_int8(const int8_t* p) {
#if defined(__AVX512F__)
  // The mask selects all lanes. The intrinsic without a mask does the same, but makes GCC 12 warn of its own header.
  const __m512i integers = _mm512_maskz_cvtepi8_epi32(0xffff, load_vector<__m128i>(p));
  return __builtin_convertvector((i32x16)integers, V);
#elif defined(__AVX2__)
  if constexpr (requires(V v) { v.low; })
    return {load_int8<Vector>(p), load_int8<Vector>(p + WIDTH)};
  else
    return (V)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  V v;
  for (size_t i = 0; i < sizeof(V) / sizeof(float); i++) v[i] = p[i];
  return v;
#endif
}

// Loads WIDTH packs of weights and converts them to the type of the second argument, whose value does not matter.
inline Packs<float> packs_of(const int8_t* p, float) { return {load_int8<Vector>(p)}; }
inline Packs<bf16> packs_of(const int8_t* p, bf16) {
#if defined(__AVX512BF16__)
  const Vector low = load_int8<Vector>(p), high = load_int8<Vector>(p + WIDTH);
  return {(VectorBits)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low)};
#else
  typedef int16_t Pairs __attribute__((vector_size(WIDTH * 2)));
  const Integers pairs = __builtin_convertvector(load_vector<Pairs>(p), Integers);
  return {__builtin_convertvector(pairs << 24 >> 24, Vector), __builtin_convertvector(pairs >> 8, Vector)};
#endif
}

// Reads the weights of a group, as PanelReader does for a panel: those of eight bits, or what `expand` makes of them.
template <class T, class Stored>
struct GroupReader {
  using Element = T;
  static constexpr bool IS_SCALED = true;
  const Stored* weights;
  const bf16* scales;

  GroupReader from(long step, long column) const {
    return {weights + (step * PANEL + column) * PACK<T>, scales + column};
  }
  Packs<T> load(long step, int v) const {
    const Stored* packs = weights + (step * PANEL + v * WIDTH) * PACK<T>;
    if constexpr (std::is_same_v<Stored, int8_t>)
      return packs_of(packs, T());
    else
      return Packs<T>::load(packs);
  }
  const T* packs(long step) const requires std::is_same_v<Stored, T> { return weights + step * PANEL * PACK<T>; }
  Vector scale(int v) const {
    Vector scale;
    for (int i = 0; i < WIDTH; i++) scale[i] = to_float(scales[v * WIDTH + i]);
    return scale;
  }
};

// out = the weights of a group without their scales, in the order of the panels of gemm.h.
template <class T>
void expand(const int8_t* weights, long steps, T* out) {
  for (long i = 0; i < steps * PANEL * PACK<T>; i += LANES) store(out + i, load_int8<f32x16>(weights + i));
}

// The same for pairs, which takes two thirds of the time, or less.
inline void expand(const int8_t* weights, long steps, bf16* out) {
  constexpr long AT_ONCE = WIDTH * PACK<bf16>;
  for (long i = 0; i < steps * PANEL * PACK<bf16>; i += AT_ONCE) {
    const Packs<bf16> packs = packs_of(weights + i, bf16());
#if defined(__AVX512BF16__)
    const VectorBits pairs = packs.v;
#else
    const VectorBits pairs = (VectorBits)packs.first >> 16 | (VectorBits)packs.second;
#endif
    memcpy(out + i, &pairs, sizeof(pairs));
  }
}

// Multiplies as multiply_panel of gemm.h does. The sums over groups are added in the order of k.
template <class T>
void multiply_panel(const Int8Linear<T>& w, const T* x, long x_stride, long rows, long panel, float* sums,
                    Next<Int8Linear<T>> next) {
  constexpr long SCALES = PANEL * sizeof(bf16);
  alignas(64) T expanded[(GROUP + PACK<T>) * PANEL];
  const long panel_bytes = int8_panel_size<T>(w.k), groups = groups_of(w.k);
  const int8_t* at = w.panels + panel * panel_bytes;
  const int8_t* const end = at + panel_bytes;
  const int8_t* const then = next.weights->panels + next.panel * panel_bytes;
  const PanelBias bias(w.bias, w.n, panel);
  const float* start = bias.values;
  long start_stride = 0;
  for (long group = 0; group < groups; group++) {
    const long first = int8_group_begin<T>(w.k, group), steps = int8_group_begin<T>(w.k, group + 1) - first;
    const long from = first * PACK<T>, to = std::min(from + steps * PACK<T>, w.k);
    const bf16* scales = reinterpret_cast<const bf16*>(at);
    const int8_t* ahead = at + INT8_AHEAD < end ? at + INT8_AHEAD : then + (at + INT8_AHEAD - end);
    const auto add = [&](const auto& reader) {
      ReadAhead lines = ReadAhead::from(ahead);
      multiply_rows(x + from, x_stride, rows, to - from, reader, start, start_stride, sums, lines, panel_bytes / groups);
    };
    if (rows <= FUSED_ROWS) {
      add(GroupReader<T, int8_t>{at + SCALES, scales});
    } else {
      expand(at + SCALES, steps, expanded);
      add(GroupReader<T, T>{expanded, scales});
    }
    start = sums;
    start_stride = PANEL;
    at += SCALES + steps * PANEL * PACK<T>;
  }
}

}  // namespace oaiserve
