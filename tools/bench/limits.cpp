// Prints what a thread's instructions multiply at most, and what its products with weights in each format and its attention
// reach: lines of a name, a number of rows or of a prompt's last tokens (0 for an instruction), and billions of operations per
// second of CPU time.

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <vector>

#include "attention.h"
#include "block_product.h"

using namespace oaiserve;

namespace {

constexpr long TURNS = 60, REPEATED = 2000;
constexpr long K = 1536, PANELS = 4;  // which stay in L2

template <class Work>
void print(const char* name, long rows, double operations, Work&& work) {
  const auto now_ns = [] {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return double(now.tv_sec) * 1e9 + double(now.tv_nsec);
  };
  double least = 1e30;
  for (long turn = 0; turn < TURNS; turn++) {
    const double begun = now_ns();
    work();
    least = std::min(least, now_ns() - begun);
  }
  std::printf("%s %ld %.3f\n", name, rows, operations / least);
}

#if defined(__AVX512F__)
#define REGISTER "%%zmm"
#else
#define REGISTER "%%ymm"
#endif
constexpr long REGISTER_BYTES = sizeof(Vector);
#define INTO(instruction, number) instruction " " REGISTER "0, " REGISTER "1, " REGISTER #number "\n"
#define IN_FOUR(name, a, b, c, d) INTO(name, a) INTO(name, b) INTO(name, c) INTO(name, d)
#define LIMIT(name, multiplied)                                                                                     \
  print(name, 0, 12.0 * REPEATED * 2 * double(multiplied), [] {                                                     \
    for (long i = 0; i < REPEATED; i++)                                                                             \
      asm volatile(IN_FOUR(name, 2, 3, 4, 5) IN_FOUR(name, 6, 7, 8, 9) IN_FOUR(name, 10, 11, 12, 13)                \
                   : : : "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", \
                         "xmm13");                                                                                  \
  })

// Memory for `count` elements, which begins where a cache line does.
template <class T>
class Lines {
 public:
  explicit Lines(long count) : lines_(size_t(count) * sizeof(T) / sizeof(RowLine) + 1) {}
  T* data() { return reinterpret_cast<T*>(lines_.data()); }

 private:
  std::vector<RowLine> lines_;
};

alignas(64) float sums[BLOCK_ROWS * PANEL];

template <Format FORMAT>
void print_products(const char* name, long rows) {
  const long bytes = K / Places<FORMAT>::L.chunk() * Places<FORMAT>::L.bytes, panel_bytes = block_panel_bytes(FORMAT, K);
  const std::vector<uint8_t> file(size_t(bytes), 0x11);
  const std::vector<const uint8_t*> columns(PANEL, file.data());
  Lines<uint8_t> panels((PANELS + 1) * panel_bytes);
  for (long panel = 0; panel < PANELS; panel++)
    pack_panel<FORMAT>(columns.data(), nullptr, K, panels.data() + panel * panel_bytes);
  const long stride = most_lines(K);
  Lines<RowLine> x(rows * stride);
  std::vector<float> numbers(K);
  for (long i = 0; i < K; i++) numbers[size_t(i)] = float(i * 37 % 101 - 50);
  RowForms forms;
  (Places<FORMAT>::L.is_super ? forms.supers : forms.groups) = true;
  for (long row = 0; row < rows; row++) quantize_part(numbers.data(), 0, K, K, forms, x.data() + row * stride);
  const Tiles<RowLine> tiles;
  alignas(64) static constexpr float BIAS[PANEL] = {};
  print(name, rows, 2.0 * double(rows * K * PANELS * PANEL), [&] {
    for (long panel = 0; panel < PANELS; panel++) {
      const uint8_t* const data = panels.data() + panel * panel_bytes;
      multiply_panel<FORMAT>(data, x.data(), stride, rows, K, BIAS, sums, data + panel_bytes);
    }
  });
}

template <class T>
void print_products(const char* name, long rows) {
  Lines<T> panels((PANELS + 1) * panel_size<T>(K)), x(rows * K);
  const Linear<T> linear{PANELS * PANEL, K, panels.data(), nullptr};
  print(name, rows, 2.0 * double(rows * K * PANELS * PANEL), [&] {
    multiply_panels(linear, x.data(), K, rows, 0, PANELS, Next<Linear<T>>{&linear, 0},
                    [&](long row, long, f32x16 left, f32x16 right) {
                      store(sums + row * PANEL, left);
                      store(sums + row * PANEL + LANES, right);
                    });
  });
}

// Attention of the last tokens of a prompt, with the heads of the demo model. S are the numbers of the cache.
template <class T, class S>
void print_attention(const char* name, long tokens) {
  constexpr long KEYS = 2000, GROUP = 3, DIM = 64, BLOCK = 32, BLOCKS = (KEYS + BLOCK - 1) / BLOCK;
  constexpr long PANEL_BYTES = PANEL_KEYS * (DIM * long(sizeof(S)) + (PagedCache<S>::IS_SCALED ? 2 * long(sizeof(float)) : 0));
  Lines<uint8_t> keys(BLOCKS * BLOCK / PANEL_KEYS * PANEL_BYTES), values(BLOCKS * BLOCK / PANEL_KEYS * PANEL_BYTES);
  const PagedCache<S> cache{reinterpret_cast<S*>(keys.data()), reinterpret_cast<S*>(values.data()), 1, DIM, DIM, BLOCK};
  float numbers[DIM];
  const auto set = [&](long seed) {
    for (long i = 0; i < DIM; i++) numbers[i] = float((seed * 31 + i * 37) % 101 - 50) / 50;
  };
  for (long key = 0; key < KEYS; key++) {
    set(key);
    write_key(cache, key, 0, numbers);
    write_value(cache, key, 0, numbers);
  }
  Lines<T> queries(tokens * GROUP * DIM), out(tokens * GROUP * DIM);
  for (long row = 0; row < tokens * GROUP; row++) {
    set(row);
    for (long i = 0; i < DIM; i += LANES) store(queries.data() + row * DIM + i, load(numbers + i));
  }
  std::vector<int32_t> table(BLOCKS);
  for (long block = 0; block < BLOCKS; block++) table[size_t(block)] = int32_t(block);
  const int32_t starts[] = {0, int32_t(tokens)}, lengths[] = {int32_t(KEYS)};
  StepInput step{};
  step.num_tokens = tokens, step.num_sequences = 1, step.table_width = BLOCKS;
  step.query_start = starts, step.seq_lens = lengths, step.block_tables = table.data();
  AttentionPlan plan;
  make_plan(plan, step, GROUP, 1, DIM, 0, false, 1);
  const AttentionOptions options{GROUP, 0.125f, 0, 0.0f, nullptr, false};
  const double seen = double(tokens) * (double(KEYS) - double(tokens - 1) / 2);  // pairs of a token and a key
  print(name, tokens, 2.0 * GROUP * seen * (DIM + DIM), [&] {
    for (long item = 0; item < long(plan.items.size()); item++)
      attend_item(plan, item, options, cache, queries.data(), GROUP * DIM, out.data(), GROUP * DIM);
  });
}

}  // namespace

int main() {
#if defined(WITH_BF16_TILES)
  constexpr long REQUEST_STATE = 0x1023, TILE_DATA = 18;
  if (syscall(SYS_arch_prctl, REQUEST_STATE, TILE_DATA) != 0) return 1;
  {
    const Tiles<bf16> tiles;
    Tiles<bf16>::set_rows(MOST_TILE_ROWS);
#define TILE_LIMIT(name, instruction)                                                       \
  print(name, 0, 4.0 * REPEATED * 2 * TILE_HEIGHT * TILE_FLOATS * TILE_LIMIT_DEPTH, [] {    \
    for (long i = 0; i < REPEATED; i++) {                                                   \
      instruction(0, 4, 6);                                                                 \
      instruction(1, 4, 7);                                                                 \
      instruction(2, 5, 6);                                                                 \
      instruction(3, 5, 7);                                                                 \
    }                                                                                       \
  })
#define TILE_LIMIT_DEPTH (TILE_BYTES / 2)
    TILE_LIMIT("tdpbf16ps", _tile_dpbf16ps);
#undef TILE_LIMIT_DEPTH
#define TILE_LIMIT_DEPTH TILE_BYTES
    TILE_LIMIT("tdpbssd", _tile_dpbssd);
  }
#endif
  LIMIT("vfmadd231ps", REGISTER_BYTES / 4);
#if defined(__AVX512BF16__)
  LIMIT("vdpbf16ps", REGISTER_BYTES / 2);
#endif
#if defined(__AVX512VNNI__)
  LIMIT("vpdpbusd", REGISTER_BYTES);
#endif
  LIMIT("vpmaddubsw", REGISTER_BYTES);
#if defined(__AVX512VNNI__)
  LIMIT("vpdpwssd", REGISTER_BYTES / 2);
#endif
  LIMIT("vpmaddwd", REGISTER_BYTES / 2);
  for (const long rows : {128L, 16L, 4L}) {
    print_products<float>("float32", rows);
    print_products<bf16>("bfloat16", rows);
    print_products<Format::Q5_0>("Q5_0", rows);
    print_products<Format::Q8_0>("Q8_0", rows);
    print_products<Format::Q4_K>("Q4_K", rows);
    print_products<Format::Q6_K>("Q6_K", rows);
    print_attention<float, float>("attention,float32", rows);
    print_attention<bf16, bf16>("attention,bfloat16", rows);
    print_attention<float, int8_t>("attention,int8", rows);
  }
}
