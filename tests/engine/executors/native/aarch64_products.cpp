// The native code's operations, for another CPU's emulator: it has no Python.
//
// The program reads requests from its input and writes a reply to each, until the input ends: test_aarch64.py keeps it
// running, because an emulator translates code when it first runs. A request is an operation, whole numbers, and arrays;
// each array begins with its length in bytes.

#include "aarch64_requests.h"
#include "activation.h"
#include "attention.h"
#include "blocks.cpp"

FILE *input, *output;

namespace {

// y [rows, n] = x times all panels, in blocks of rows as a step has them.
template <class Weights, class X>
Array<float> multiply(const Weights& w, const X* x, long x_stride, long rows) {
  Array<float> y(rows * w.n);
  multiply_panels(w, x, x_stride, rows, 0, panels_of(w.n), Next<Weights>{&w, 0},
                  [&](long row, long column, f32x16 left, f32x16 right) {
                    alignas(64) float values[PANEL];
                    store(values, left);
                    store(values + LANES, right);
                    for (long c = column; c < std::min(column + PANEL, w.n); c++) y[row * w.n + c] = values[c - column];
                  });
  return y;
}

// Products of the rows `from` to before `end` of x, for each of several such pairs.
template <class Weights, class X>
void write_products(const Weights& w, const X* x, long x_stride) {
  const Array<int64_t> ranges = read<int64_t>();
  for (long i = 0; i < ranges.count; i += 2)
    write(multiply(w, x + ranges[i] * x_stride, x_stride, ranges[i + 1] - ranges[i]));
}

void blocks(const Array<int64_t>& numbers) {
  const Format format = Format(numbers[0]);
  const long n = numbers[1], k = numbers[2];
  const bool with_rests = numbers[3] != 0;
  const Array<uint8_t> points = read<uint8_t>();
  set_grid(format, (const uint8_t*)points);
  const Array<uint8_t> bytes = read<uint8_t>();
  const Array<float> x = read<float>(), bias = read<float>();
  const long row_bytes = bytes.count / n, rows = x.count / k, stride = most_lines(k), panels = panels_of(n);
  Array<uint8_t> packed(panels * block_panel_bytes(format, k));
  std::vector<BlockPanel> found;
  for (long panel = 0; panel < panels; panel++) {
    const uint8_t* columns[PANEL] = {};
    for (long c = 0; c < PANEL && panel * PANEL + c < n; c++) columns[c] = &bytes[(panel * PANEL + c) * row_bytes];
    uint8_t* const to = &packed[panel * block_panel_bytes(format, k)];
    pack_panel(format, columns, nullptr, k, to);
    found.push_back({to, format});
  }
  const BlockLinear weights{n, k, found.data(), bias.count ? (const float*)bias : nullptr};
  RowForms forms = weights.forms();
  forms.rests = with_rests;
  Array<RowLine> lines(rows * stride);
  for (long r = 0; r < rows; r++) quantize_part((const float*)&x[r * k], 0, k, k, forms, &lines[r * stride]);
  write_products(weights, (const RowLine*)lines, stride);
}

template <class T>
void linear(const Array<int64_t>& numbers) {
  const long n = numbers[1], k = numbers[2];
  const Array<T> weights = converted<T>(read<float>()), x = converted<T>(read<float>());
  const Array<float> bias = read<float>();
  Array<T> panels(panels_of(n) * panel_size<T>(k));
  pack_columns<T>(columns_of((const T*)weights, n, k), n, k, (T*)panels);
  write_products(Linear<T>{n, k, panels, bias.count ? (const float*)bias : nullptr}, (const T*)x, k);
}

// Attention of sequences of which each has some new tokens, whose keys and values are already in the cache.
template <class T, class S>
void attention(const Array<int64_t>& numbers) {
  const long heads = numbers[2], kv_heads = numbers[3], key_dim = numbers[4], value_dim = numbers[5];
  const long window = numbers[6], block_size = 16, threads = numbers[7];
  const bool is_latent = numbers[9] != 0;  // values are parts of their keys
  const Array<int64_t> lengths = read<int64_t>(), queries = read<int64_t>();
  const Array<float> query = read<float>(), key = read<float>(), value = read<float>();  // of all tokens
  const Array<T> q = converted<T>(query);
  const long sequences = lengths.count;
  std::vector<int32_t> starts{0}, lens, table;
  long width = 0, blocks = 0, tokens = 0;
  for (long b = 0; b < sequences; b++) width = std::max(width, divide_up(lengths[b], block_size));
  for (long b = 0; b < sequences; b++) {
    starts.push_back(int32_t(starts.back() + queries[b]));
    lens.push_back(int32_t(lengths[b]));
    for (long i = 0; i < width; i++) table.push_back(int32_t(blocks++));
  }
  const long cache_bytes = blocks * kv_heads * block_size * (std::max(key_dim, value_dim) * long(sizeof(S)) + 256);
  Array<uint8_t> keys(cache_bytes), values(cache_bytes);
  S* const own_values = is_latent ? nullptr : (S*)(void*)(uint8_t*)values;
  PagedCache<S> cache{(S*)(void*)(uint8_t*)keys, own_values, kv_heads, key_dim, value_dim, block_size};
  for (long b = 0; b < sequences; b++)
    for (long i = 0; i < lengths[b]; i++, tokens++)
      for (long head = 0; head < kv_heads; head++) {
        const long slot = table[size_t(b * width + i / block_size)] * block_size + i % block_size;
        write_key(cache, slot, head, &key[(tokens * kv_heads + head) * key_dim]);
        if (!is_latent) write_value(cache, slot, head, &value[(tokens * kv_heads + head) * value_dim]);
      }
  StepInput step{};
  step.num_tokens = starts.back(), step.num_sequences = sequences, step.table_width = width;
  step.query_start = starts.data(), step.seq_lens = lens.data(), step.block_tables = table.data();
  AttentionPlan plan;
  make_plan(plan, step, heads, kv_heads, value_dim, window, false, int(threads));
  const AttentionOptions options{heads, 0.2f, window, float(numbers[8]), nullptr, false};
  Array<T> out(starts.back() * heads * value_dim);
  for (long item = 0; item < long(plan.items.size()); item++)
    attend_item(plan, item, options, cache, (const T*)q, heads * key_dim, (T*)out, heads * value_dim);
  Array<float> found(out.count);
  for (long i = 0; i < out.count; i += LANES) store(&found[i], load(&out[i]));
  write(found);
}

void functions() {
  const Array<float> x = read<float>(), weight = read<float>();
  Array<float> y(x.count);
  const auto write_all = [&](auto&& function) {
    for (long i = 0; i < x.count; i += LANES) store(&y[i], function(load(&x[i])));
    write(y);
  };
  write_all([](f32x16 v) { return exp(v); });
  write_all([](f32x16 v) { return log(max(v, -v)); });
  write_all([](f32x16 v) { return tanh(v); });
  write_all([](f32x16 v) { return softplus(v); });
  for (int i = 0; i <= int(Activation::sigmoid); i++) write_all([&](f32x16 v) { return activate(Activation(i), v); });
  for (const bool subtracts_mean : {false, true}) {
    Normalize{weight, weight, weight.count, 1e-6f, subtracts_mean}((const float*)x, (float*)y);
    write(y);
  }
  Array<bf16> rounded(x.count);
  for (long i = 0; i < x.count; i += LANES) store(&rounded[i], load(&x[i]));
  write_all([&, i = 0L](f32x16) mutable { return load(&rounded[(i++) * LANES]); });
}

}  // namespace

int main() {
  input = stdin;
  output = stdout;
  for (int next; (next = std::fgetc(input)) != EOF;) {
    const Array<int64_t> numbers = read<int64_t>();
    switch (next) {
      case 'b': blocks(numbers); break;
      case 'l': numbers[0] ? linear<bf16>(numbers) : linear<float>(numbers); break;
      case 'a':
        if (numbers[1])
          numbers[0] ? attention<bf16, int8_t>(numbers) : attention<float, int8_t>(numbers);
        else
          numbers[0] ? attention<bf16, bf16>(numbers) : attention<float, float>(numbers);
        break;
      case 'f': functions(); break;
      case 'd': delta(numbers); break;
      case 's': scan(numbers); break;
      case 'e': numbers[0] ? experts<bf16>(numbers) : experts<float>(numbers); break;
      case 'r': numbers[0] ? adapters<bf16>(numbers) : adapters<float>(numbers); break;
      default: return 4;
    }
    write_length(END);
    std::fflush(output);
  }
}
