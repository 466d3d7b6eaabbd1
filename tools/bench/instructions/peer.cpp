// Multiplies with llama.cpp's library: PROGRAM FORMAT FILE. Weights are arranged as llama.cpp arranges them for this CPU.

#include <cstring>
#include <random>
#include <vector>

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "products.h"

namespace {

ggml_type type_named(const char* name) {
  for (int type = 0; type < GGML_TYPE_COUNT; type++)
    if (ggml_type_name(ggml_type(type)) && !strcasecmp(ggml_type_name(ggml_type(type)), name)) return ggml_type(type);
  std::fprintf(stderr, "ggml has no type %s\n", name);
  std::exit(3);
}

std::vector<float> normal_numbers(long count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> numbers(count);
  for (float& number : numbers) number = normal(generator);
  return numbers;
}

ggml_context* new_context() { return ggml_init({1 << 20, nullptr, true}); }

// Puts the matrix where llama.cpp would: into the first of the CPU's special buffers whose product it supports.
void place(ggml_tensor* matrix, ggml_backend_dev_t device) {
  ggml_context* const context = new_context();
  ggml_tensor* const product = ggml_mul_mat(context, matrix, ggml_new_tensor_2d(context, GGML_TYPE_F32, K, 512));
  const auto special = (ggml_backend_dev_get_extra_bufts_t)ggml_backend_reg_get_proc_address(
      ggml_backend_dev_backend_reg(device), "ggml_backend_dev_get_extra_bufts");
  ggml_backend_buffer_type_t found = ggml_backend_cpu_buffer_type();
  for (ggml_backend_buffer_type_t* type = special(device); type && *type; type++) {
    matrix->buffer = ggml_backend_buft_alloc_buffer(*type, 0);
    const bool is_supported = ggml_backend_dev_supports_op(device, product);
    ggml_backend_buffer_free(matrix->buffer);
    matrix->buffer = nullptr;
    if (!is_supported) continue;
    found = *type;
    break;
  }
  std::printf("%s\n", ggml_backend_buft_name(found));
  ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(found, ggml_backend_buft_get_alloc_size(found, matrix));
  ggml_backend_tensor_alloc(buffer, matrix, ggml_backend_buffer_get_base(buffer));
  ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
  ggml_free(context);
}

}  // namespace

int main(int, char** arguments) {
  const ggml_type type = type_named(arguments[1]);
  FILE* const file = opened(arguments[2], "wb");
  ggml_backend_t backend = ggml_backend_cpu_init();
  ggml_backend_cpu_set_n_threads(backend, 1);

  const std::vector<float> weights = normal_numbers(N * K, 1), x = normal_numbers(MOST_ROWS * K, 2);
  std::vector<char> quantized(ggml_row_size(type, K) * N);
  ggml_quantize_chunk(type, weights.data(), quantized.data(), 0, N, K, nullptr);
  ggml_context* const of_weights = new_context();
  ggml_tensor* const matrix = ggml_new_tensor_2d(of_weights, type, K, N);
  place(matrix, ggml_backend_get_device(backend));
  ggml_backend_tensor_set(matrix, quantized.data(), 0, quantized.size());
  std::fwrite(quantized.data(), 1, quantized.size(), file);
  std::fwrite(x.data(), sizeof(float), x.size(), file);

  std::vector<float> y(MOST_ROWS * N);
  for (const long rows : ROWS) {
    ggml_context* const context = new_context();
    ggml_tensor* const inputs = ggml_new_tensor_2d(context, GGML_TYPE_F32, K, rows);
    ggml_tensor* const product = ggml_mul_mat(context, matrix, inputs);
    ggml_cgraph* const graph = ggml_new_graph(context);
    ggml_build_forward_expand(graph, product);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(context, backend);
    ggml_backend_tensor_set(inputs, x.data(), 0, ggml_nbytes(inputs));
    ggml_backend_graph_compute(backend, graph);  // which allocates memory for itself
    mark();
    ggml_backend_graph_compute(backend, graph);
    mark();
    ggml_backend_tensor_get(product, y.data(), 0, ggml_nbytes(product));
    ggml_backend_buffer_free(buffer);
    ggml_free(context);
  }
  std::fwrite(y.data(), sizeof(float), y.size(), file);
  return std::fclose(file);
}
