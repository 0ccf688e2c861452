// SPDX-License-Identifier: Apache-2.0
// Attention over trees on the CPU beside what else there is, all sides interleaved in one run.
// Rates are per visible (query, key) pair and head: 4 d forward, 10 d backward. "mask" is ATen's attention
// with the mask of the tree as a tensor; "causal" the same on a chain of as many tokens, with no mask to
// read: the rate of a dense kernel. "GEMM" is at::mm of 1024 x 1024 matrices in the same dtype. Run:
// attention_bench --help
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <random>
#include <string>

#include "espalier/ops/attention/masked.h"
#include "espalier/ops/attention/tree_attention.h"
#include "espalier/ops/operator.h"
#include "espalier/runtime/tensor_memory.h"

namespace espalier {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  int64_t tokens = 4096;
  int rounds = 9;
  int threads = 0;  // 0: as it is
  uint64_t seed = 1;
  bool mask = true;
  bool cpu_time = false;
  std::string dtype = "all";
  int64_t node = -1;  // all
  int64_t dim = 0;    // all
};

struct Heads {
  int64_t queries, keys, dim;
};

constexpr Heads kHeads[] = {{9, 3, 64}, {16, 8, 128}};
constexpr int64_t kNodeTokens[] = {8, 32, 128, 512, 2048, 0};  // 0: one chain

/// subtree_end of a tree of `tokens` tokens whose nodes have `node_tokens` each and hang at random ones.
std::vector<int32_t> random_tree(int64_t tokens, int64_t node_tokens, uint64_t seed) {
  if (node_tokens == 0) node_tokens = tokens;
  const auto nodes = static_cast<size_t>(tokens / node_tokens);
  std::mt19937_64 random(seed);
  std::vector<std::vector<size_t>> children(nodes);
  for (size_t node = 1; node < nodes; ++node) {
    children[std::uniform_int_distribution<size_t>(0, node - 1)(random)].push_back(node);
  }
  std::vector<int32_t> ends;
  const std::function<void(size_t)> lay_out = [&](size_t node) {
    const size_t begin = ends.size();
    ends.resize(begin + static_cast<size_t>(node_tokens));
    for (const size_t child : children[node]) lay_out(child);
    std::fill_n(ends.begin() + static_cast<int64_t>(begin), node_tokens, static_cast<int32_t>(ends.size()));
  };
  lay_out(0);
  return ends;
}

double visible_pairs(const std::vector<int32_t>& ends) {
  double pairs = 0;
  for (size_t i = 0; i < ends.size(); ++i) pairs += static_cast<double>(ends[i]) - static_cast<double>(i);
  return pairs;
}

struct Side {
  std::string name;
  double flops;
  std::function<void()> work;
  std::vector<double> seconds = {};

  double median() {
    std::sort(seconds.begin(), seconds.end());
    return seconds[seconds.size() / 2];
  }
  double rate() { return flops / median() * 1e-9; }
};

double seconds_now(bool cpu_time) {
  if (!cpu_time) return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

/// One call of each side in turn, as often as asked; a first round is not counted.
void measure(std::vector<Side>& sides, const Options& options) {
  for (int round = -1; round < options.rounds; ++round) {
    for (Side& side : sides) {
      const double begin = seconds_now(options.cpu_time);
      side.work();
      if (round >= 0) side.seconds.push_back(seconds_now(options.cpu_time) - begin);
    }
  }
}

/// The inputs of one cell of the table, and what backward needs of forward.
struct Case {
  Heads heads;
  double scale;
  double pairs;
  at::Tensor subtree_end, none, q, k, v, grad_out, out, lse;
  detail::TreeAttentionArguments arguments;

  Case(const std::vector<int32_t>& ends, const Heads& shape, at::ScalarType dtype)
      : heads(shape), scale(1 / std::sqrt(static_cast<double>(shape.dim))), pairs(visible_pairs(ends)) {
    const auto tokens = static_cast<int64_t>(ends.size());
    const auto normal = [&](int64_t count) { return at::randn({tokens, count, shape.dim}).to(dtype); };
    subtree_end = at::tensor(ends, at::kInt);
    none = at::empty({0, 5}, at::kLong);
    q = normal(shape.queries), k = normal(shape.keys), v = normal(shape.keys),
    grad_out = normal(shape.queries);
    arguments = {q, k, v, {subtree_end}, {scale}, {{}, {}, none}};
    std::tie(out, lse) = masked_chunks::tree_attention(arguments);
  }
  double flops(int per_dim) const {
    return per_dim * pairs * static_cast<double>(heads.queries) * static_cast<double>(heads.dim);
  }
};

at::Tensor head_first(const at::Tensor& tensor) {
  return tensor.transpose(0, 1).unsqueeze(0);
}

Side fused(const Case& c, bool backward) {
  if (!backward) {
    return {"tiles", c.flops(4), [&c] {
              const at::NoGradGuard guard;
              tree_attention(c.q, c.k, c.v, {c.subtree_end}, {c.scale});
            }};
  }
  return {"tiles", c.flops(10), [&c] {
            detail::call<"tree_attention_backward", detail::TreeAttentionGradients>(
                detail::TreeAttentionBackward{c.grad_out, c.out, c.lse, c.arguments});
          }};
}

/// ATen's kernel with keys and values as they are: it reads grouped heads itself. No mask: causal.
Side aten(const Case& c, bool backward, const at::Tensor& mask) {
  const std::optional<at::Tensor> additive = mask.defined() ? std::optional(mask) : std::nullopt;
  const bool causal = !mask.defined();
  const auto forward = [&c, additive, causal] {
    return at::_scaled_dot_product_flash_attention_for_cpu(head_first(c.q), head_first(c.k), head_first(c.v),
                                                           0.0, causal, additive, c.scale);
  };
  const char* name = causal ? "causal" : "mask";
  if (!backward) return {name, c.flops(4), [forward] { forward(); }};
  const auto [out, lse] = forward();
  return {name, c.flops(10), [&c, out, lse, additive, causal] {
            at::_scaled_dot_product_flash_attention_for_cpu_backward(head_first(c.grad_out), head_first(c.q),
                                                                     head_first(c.k), head_first(c.v), out,
                                                                     lse, 0.0, causal, additive, c.scale);
          }};
}

Side gemm(at::ScalarType dtype) {
  const at::Tensor a = at::randn({1024, 1024}).to(dtype), b = at::randn({1024, 1024}).to(dtype);
  return {"GEMM", 2.0 * 1024 * 1024 * 1024, [a, b] { at::mm(a, b); }};
}

void row(const Options& options, const Heads& heads, at::ScalarType dtype, int64_t node_tokens,
         bool backward) {
  const Case tree(random_tree(options.tokens, node_tokens, options.seed), heads, dtype);
  const Case chain(random_tree(options.tokens, 0, options.seed), heads, dtype);
  std::vector<Side> sides{fused(tree, backward), aten(chain, backward, {}), gemm(dtype)};
  if (options.mask) {
    const at::Tensor key = at::arange(tree.subtree_end.size(0)), query = key.unsqueeze(1);
    const at::Tensor visible = query.ge(key).logical_and(query.lt(tree.subtree_end));
    const at::Tensor mask = at::zeros(visible.sizes(), at::TensorOptions(dtype));
    mask.masked_fill_(visible.logical_not(), -std::numeric_limits<double>::infinity());
    sides.push_back(aten(tree, backward, mask));
  }
  measure(sides, options);
  const double ours = sides[0].rate(), causal = sides[2].rate(), peak = sides[3].rate();
  fmt::print("| {} | {}/{}/{} | {} | {} | {:.2f} | {:.0f} | {:.2f} | {:.2f} | {:.2f} | {} |\n",
             dtype == at::kFloat ? "float32" : "bfloat16", heads.queries, heads.keys, heads.dim,
             node_tokens == 0 ? "chain" : std::to_string(node_tokens), backward ? "backward" : "forward",
             sides[0].median() * 1e3, ours, ours / peak, ours / causal, ours / sides[1].rate(),
             options.mask ? fmt::format("{:.1f}", ours / sides[4].rate()) : "-");
  std::fflush(stdout);
}

void table(const Options& options) {
  fmt::print("Random trees of {} tokens, seed {}, {} threads, medians of {} rounds.\n\n", options.tokens,
             options.seed, at::get_num_threads(), options.rounds);
  fmt::print(
      "| dtype | heads/key heads/dim | node tokens | pass | ms | GFLOP/s | of GEMM | x causal | x blocks | x "
      "mask "
      "|\n|---|---|---:|---|---:|---:|---:|---:|---:|---:|\n");
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    if (options.dtype != "all" && (options.dtype == "float32") != (dtype == at::kFloat)) continue;
    for (const Heads& heads : kHeads) {
      if (options.dim != 0 && heads.dim != options.dim) continue;
      for (const int64_t node_tokens : kNodeTokens) {
        if (options.node >= 0 && node_tokens != options.node) continue;
        for (const bool backward : {false, true}) row(options, heads, dtype, node_tokens, backward);
      }
    }
  }
}

[[noreturn]] void usage(int status) {
  std::fputs(
      "attention [--tokens N=4096] [--rounds N=9] [--threads N] [--seed N=1] [--dtype float32|bfloat16|all]\n"
      "          [--node TOKENS|0] [--dim D]"
      "          [--no-mask] [--cpu-time]\n"
      "Prints a markdown table of tree attention beside mask blocks, causal attention and attention with a "
      "mask.\n"
      "--no-mask leaves the last out; --cpu-time counts seconds of the calling thread (with --threads 1).\n",
      status == 0 ? stdout : stderr);
  std::exit(status);
}

Options parse(const std::vector<std::string>& arguments) {
  Options options;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& flag = arguments[i];
    const auto value = [&] {
      if (i + 1 == arguments.size()) usage(2);
      return arguments[++i];
    };
    if (flag == "--help")
      usage(0);
    else if (flag == "--tokens")
      options.tokens = std::stoll(value());
    else if (flag == "--rounds")
      options.rounds = std::stoi(value());
    else if (flag == "--threads")
      options.threads = std::stoi(value());
    else if (flag == "--seed")
      options.seed = std::stoull(value());
    else if (flag == "--node")
      options.node = std::stoll(value());
    else if (flag == "--dim")
      options.dim = std::stoll(value());
    else if (flag == "--dtype")
      options.dtype = value();
    else if (flag == "--no-mask")
      options.mask = false;
    else if (flag == "--cpu-time")
      options.cpu_time = true;
    else
      usage(2);
  }
  return options;
}

}  // namespace
}  // namespace espalier

int main(int argc, char** argv) {
  const auto options = espalier::parse({argv + 1, argv + argc});
  if (options.threads > 0) at::set_num_threads(options.threads);
  espalier::reuse_freed_memory();
  espalier::table(options);
}
