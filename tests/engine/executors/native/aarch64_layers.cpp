// Layers that keep a state, mixtures of experts and adapters: see aarch64_products.cpp.

#include "aarch64_requests.h"
#include "delta.h"
#include "experts.h"
#include "mamba.h"

namespace {

// The tokens of one sequence, in steps that have as many of them as `cuts` says. Its state is the second one of a pool.
template <class Body>
void for_steps_of(const Array<int64_t>& cuts, void* const* states, Body&& body) {
  const int32_t place = 1;
  long first = 0;
  for (long cut = 0; cut < cuts.count; first += cuts[cut++]) {
    const int32_t starts[2] = {0, int32_t(cuts[cut])};
    StepInput step{};
    step.num_tokens = cuts[cut], step.num_sequences = 1;
    step.query_start = starts, step.state_places = &place, step.states = states;
    body(step, first);
  }
}

}  // namespace

// A convolution and a gated delta net: outputs [tokens, value_heads * value_dim].
void delta(const Array<int64_t>& numbers) {
  const DeltaHeads heads{numbers[0], numbers[1], numbers[2], numbers[3], 0, numbers[4] != 0, 1.0f};
  const long taps = numbers[5], values = heads.value_heads * heads.value_dim, channels = 2 * heads.keys() + values;
  const Array<float> x = read<float>(), rates = read<float>(), decays = read<float>();
  const Array<float> weight = read<float>(), speeds = read<float>(), biases = read<float>();
  const Array<int64_t> cuts = read<int64_t>();
  Array<float> inputs(2 * channels * taps), memory(2 * values * heads.key_dim);
  void* states[2] = {inputs.data.get(), memory.data.get()};
  for_steps_of(cuts, states, [&](const StepInput& step, long first) {
    Buffer<float> rows(channels), rows_of_rates(heads.value_heads), rows_of_decays(heads.decays());
    fill(rows, (const float*)&x[first * channels], step.num_tokens, channels);
    fill(rows_of_rates, (const float*)&rates[first * heads.value_heads], step.num_tokens, heads.value_heads);
    fill(rows_of_decays, (const float*)&decays[first * heads.decays()], step.num_tokens, heads.decays());
    compute(Convolve<float>{rows, {channels, taps, weight, nullptr, Activation::silu, -1, -1, 0}}, step);
    compute(PrepareDelta{rows, rows_of_rates, rows_of_decays, heads, speeds, biases}, step);
    if (heads.fades_by_row)
      compute(DeltaRule<true>{rows, rows_of_rates, rows_of_decays, heads, 0}, step);
    else
      compute(DeltaRule<false>{rows, rows_of_rates, rows_of_decays, heads, 0}, step);
    Array<float> out(step.num_tokens * values);
    for (long row = 0; row < step.num_tokens; row++)
      std::memcpy(&out[row * values], rows.row(row) + 2 * heads.keys(), size_t(values) * sizeof(float));
    write(out);
  });
}

// The recurrence of Mamba 2: outputs [tokens, heads * head_dim].
void scan(const Array<int64_t>& numbers) {
  const long width = numbers[0] * numbers[1], times = width + 2 * numbers[2] * numbers[3];
  const ScanHeads heads{numbers[0], numbers[1], numbers[2], numbers[3], times, 0.001f, 10.0f};
  const Array<float> x = read<float>(), speeds = read<float>(), biases = read<float>(), skips = read<float>();
  const Array<int64_t> cuts = read<int64_t>();
  const long row_width = times + heads.heads;
  Array<float> memory(2 * width * heads.state_dim);
  void* states[2] = {nullptr, memory.data.get()};
  for_steps_of(cuts, states, [&](const StepInput& step, long first) {
    Buffer<float> rows(row_width + heads.heads);
    fill(rows, (const float*)&x[first * row_width], step.num_tokens, row_width);
    compute(PrepareScan{rows, heads, speeds, biases}, step);
    compute(Scan{rows, heads, skips, 0}, step);
    write_rows(rows, step.num_tokens, width);
  });
}

// A mixture of experts: what each token gets [tokens, hidden].
template <class T>
void experts(const Array<int64_t>& numbers) {
  const long count = numbers[1], top_k = numbers[2], hidden = numbers[3], inner = numbers[4];
  const Array<T> x = converted<T>(read<float>()), router = converted<T>(read<float>());
  const Array<T> gate = converted<T>(read<float>()), up = converted<T>(read<float>()), down = converted<T>(read<float>());
  StepInput step{};
  step.num_tokens = x.count / hidden;

  std::vector<Array<T>> panels;  // of the router, and of each expert's two layers
  const auto packed = [&](const auto& columns, long n, long k) {
    panels.emplace_back(panels_of(n) * panel_size<T>(k));
    pack_columns<T>(columns, n, k, (T*)panels.back());
    return Linear<T>{n, k, panels.back(), nullptr};
  };
  const Linear<T> of_router = packed(columns_of((const T*)router, count, hidden), count, hidden);
  std::vector<Linear<T>> of_gates, of_downs;
  std::vector<const Linear<T>*> gates, downs;
  for (long expert = 0; expert < count; expert++) {
    const long at = expert * inner * hidden;
    of_gates.push_back(packed(columns_of_gated((const T*)&gate[at], (const T*)&up[at], inner, hidden), gated_columns(inner), hidden));
    of_downs.push_back(packed(columns_of((const T*)&down[at], hidden, inner), hidden, inner));
  }
  for (long expert = 0; expert < count; expert++) {
    gates.push_back(&of_gates[size_t(expert)]);
    downs.push_back(&of_downs[size_t(expert)]);
  }

  Assignment assignment(count, top_k);
  assignment.reserve(step.num_tokens);
  Buffer<T> rows(hidden), sorted(hidden, top_k), between(gated_columns(inner), top_k);
  Buffer<float> logits(panels_of(count) * PANEL), products(panels_of(hidden) * PANEL, top_k), out(hidden);
  fill(rows, (const T*)x, step.num_tokens, hidden);
  sorted.reserve(step.num_tokens), between.reserve(step.num_tokens), logits.reserve(step.num_tokens);
  products.reserve(step.num_tokens), out.reserve(step.num_tokens);
  const Routing routing{count, top_k, 1, 1, nullptr, nullptr, 1.0f, false, false, true};
  compute(Route<T>{rows, logits, of_router, nullptr, routing, assignment}, step);
  compute(SortRows{assignment}, step);
  for (long row = 0; row < step.num_tokens * top_k; row++) GatherRows<T>{rows, sorted, hidden, assignment}.row(step, row);
  compute(ExpertGate<T, Linear<T>>{sorted, between, {gates, assignment}, {Activation::silu, 0, 0}}, step);
  compute(ExpertProject<float, Linear<T>>{between, products, {downs, assignment}}, step);
  compute(Combine{products, out, hidden, assignment, false, 1.0f}, step);
  write_rows(out, step.num_tokens, hidden);
}
template void experts<float>(const Array<int64_t>&);
template void experts<bf16>(const Array<int64_t>&);

// What an adapter adds to the products of rows, [tokens, n], where those with -1 have none.
template <class T>
void adapters(const Array<int64_t>& numbers) {
  const long k = numbers[1], n = numbers[2], rank = numbers[3], padded = divide_up(rank, RANKS) * RANKS;
  const Array<T> x = converted<T>(read<float>()), a = converted<T>(read<float>()), b = converted<T>(read<float>());
  const Array<float> scales = read<float>();
  const Array<int32_t> of_tokens = read<int32_t>();
  std::vector<int32_t> firsts(size_t(n / LANES)), counts(size_t(n / LANES), int32_t(padded));
  Array<T> groups(n * padded);
  for (long column = 0; column < n; column++)
    for (long i = 0; i < rank; i++)
      groups[column / LANES * LANES * padded + (i / PACK<T> * LANES + column % LANES) * PACK<T> + i % PACK<T>] = b[column * rank + i];
  Adapter<T> adapter(1);
  adapter.set(0, k, rank, a, scales, n / LANES, firsts.data(), counts.data(), groups);
  const void* const pointers[] = {&adapter};
  StepInput step{};
  step.num_tokens = of_tokens.count, step.num_adapters = 1, step.adapters = pointers, step.token_adapters = of_tokens;
  AdapterRows<T> rows;
  rows.make(step);
  Buffer<T> inputs(k);
  fill(inputs, (const T*)x, step.num_tokens, k);
  const Site<T> site{&rows, 0};
  compute(Adapt<T>{inputs, site, 1, k}, step);
  Array<float> out(step.num_tokens * n);
  for (long row = 0; row < step.num_tokens; row++)
    for (long column = 0; column < n; column += LANES) store(&out[row * n + column], site.add(row, column, splat(0)));
  write(out);
}
template void adapters<float>(const Array<int64_t>&);
template void adapters<bf16>(const Array<int64_t>&);
