// Multiplies with the native code of oaiserve: PROGRAM FORMAT FILE. Prints by how much its products differ from the
// peer's, as a share of the largest.

#include <cstring>
#include <string>
#include <vector>

#include "block_product.h"
#include "step.h"
#include "products.h"

using namespace oaiserve;

namespace {

template <class T>
struct Array {
  AlignedArray<T, 64> data;

  explicit Array(long count) : data(make_aligned<T, 64>(size_t(count))) { std::memset((void*)data.get(), 0, size_t(count) * sizeof(T)); }
  operator T*() const { return data.get(); }
};

template <class T>
Array<T> read(FILE* file, long count) {
  Array<T> numbers(count);
  if (std::fread((T*)numbers, sizeof(T), size_t(count), file) != size_t(count)) std::exit(2);
  return numbers;
}

// Products of all numbers of rows. `prepare` is what else a step does with rows before it multiplies them.
template <class Weights, class T, class Prepare>
void multiply_all(const Weights& w, const T* x, long x_stride, Prepare&& prepare, float* y) {
  for (const long rows : ROWS) {
    mark();
    prepare(rows);
    multiply_panels(w, x, x_stride, rows, 0, panels_of(N), Next<Weights>{&w, 0},
                    [&](long row, long column, f32x16 left, f32x16 right) {
                      store(y + row * N + column, left);
                      store(y + row * N + column + LANES, right);
                    });
    mark();
  }
}

void multiply_blocks(Format format, const uint8_t* weights, const float* x, float* y) {
  const Layout layout = layout_of(format);
  const long row_bytes = K / layout.chunk() * layout.bytes, panel_bytes = block_panel_bytes(format, K);
  const Array<uint8_t> packed(panels_of(N) * panel_bytes);
  std::vector<BlockPanel> panels;
  for (long panel = 0; panel < panels_of(N); panel++) {
    const uint8_t* columns[PANEL];
    for (long c = 0; c < PANEL; c++) columns[c] = weights + (panel * PANEL + c) * row_bytes;
    uint8_t* const to = packed + panel * panel_bytes;
    for_format(format, [&]<Format FORMAT>() { pack_panel<FORMAT>(columns, nullptr, K, to); });
    panels.push_back({to, format});
  }
  const BlockLinear w{N, K, panels.data(), nullptr};
  const long stride = most_lines(K);
  const Array<RowLine> lines(MOST_ROWS * stride);
  multiply_all(w, (const RowLine*)lines, stride, [&](long rows) {
    for (long r = 0; r < rows; r++) quantize_part(x + r * K, 0, K, K, w.forms(), lines + r * stride);
  }, y);
}

void multiply_plain(const bf16* weights, const float* x, float* y) {
  const Array<bf16> panels(panels_of(N) * panel_size<bf16>(K)), rounded(MOST_ROWS * K);
  pack_columns<bf16>(columns_of(weights, N, K), N, K, (bf16*)panels);
  multiply_all(Linear<bf16>{N, K, panels, nullptr}, (const bf16*)rounded, K, [&](long rows) {
    for (long i = 0; i < rows * K; i += LANES) store(rounded + i, load(x + i));
  }, y);
}

}  // namespace

int main(int, char** arguments) {
  const std::string name = arguments[1];
  FILE* const file = opened(arguments[2], "rb");
  const Format format = name == "Q4_K"   ? Format::Q4_K
                        : name == "Q6_K" ? Format::Q6_K
                        : name == "Q4_0" ? Format::Q4_0
                                         : Format::Q8_0;
  const Layout layout = layout_of(format);
  const bool is_plain = name == "BF16";
  const auto weights = read<uint8_t>(file, is_plain ? N * K * 2 : N * K / layout.chunk() * layout.bytes);
  const auto x = read<float>(file, MOST_ROWS * K), of_peer = read<float>(file, MOST_ROWS * N);
  const Array<float> y(MOST_ROWS * N);
  if (is_plain)
    multiply_plain((const bf16*)(const void*)(const uint8_t*)weights, x, y);
  else
    multiply_blocks(format, weights, x, y);
  float difference = 0, largest = 0;
  for (long i = 0; i < MOST_ROWS * N; i++) {
    difference = std::max(difference, std::fabs(y[i] - of_peer[i]));
    largest = std::max(largest, std::fabs(of_peer[i]));
  }
  std::printf("%g\n", double(difference / largest));
}
