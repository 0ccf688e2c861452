// SPDX-License-Identifier: Apache-2.0
// Log-probabilities of edges on the CPU beside the plain composition of ATen (all logits, log_softmax,
// gather, and autograd's backward), all sides interleaved in one run. One edge per row. Extra memory: the
// most that tensors took during a pass beyond what they took before it, the gradients of hidden states and of
// the LM head's rows included where a pass makes them (the sum of the LM head's gradients is there before).
// "of GEMM": 2 R V C forward and 6 R V C backward (logits once more, two products) over the time, beside
// at::mm of the same products over a part of the vocabulary. Run: edge_logprobs_bench --help
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "espalier/ops/edge_logprobs/edge_logprobs.h"
#include "espalier/runtime/tensor_memory.h"

namespace espalier {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  int rounds = 5;
  int threads = 0;  // 0: as it is
  bool plain = true;
  std::string dtype = "all";
  std::vector<int64_t> vocabularies{49'152, 151'936};
  std::vector<int64_t> hidden_sizes{576, 1024};
  std::vector<int64_t> tokens{256, 1024, 4096};
};

struct Side {
  std::function<void()> work;
  std::vector<double> seconds = {};
  int64_t peak_bytes = 0;
  int64_t kept_bytes = 0;

  double median() {
    std::sort(seconds.begin(), seconds.end());
    return seconds[seconds.size() / 2];
  }
};

/// One call of each side in turn, as often as asked; a first round is not counted.
void measure(std::vector<Side>& sides, const Options& options) {
  for (int round = -1; round < options.rounds; ++round) {
    for (Side& side : sides) {
      reset_peak_tensor_memory();
      const int64_t before = tensor_memory();
      const auto begin = Clock::now();
      side.work();
      const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
      if (round >= 0) side.seconds.push_back(seconds);
      side.peak_bytes = peak_tensor_memory() - before;
      side.kept_bytes = tensor_memory() - before;
    }
  }
}

struct Case {
  at::Tensor hidden, weight, edge_row, edge_target, grad;
  int64_t rows, vocabulary, size;

  Case(int64_t rows, int64_t vocabulary, int64_t size, at::ScalarType dtype)
      : hidden(at::randn({rows, size}).to(dtype)),
        weight(at::randn({vocabulary, size}).mul_(0.05).to(dtype)),
        edge_row(at::arange(rows, at::kLong)),
        edge_target(at::randint(vocabulary, {rows}, at::kLong)),
        grad(at::randn({rows})),
        rows(rows),
        vocabulary(vocabulary),
        size(size) {
    // The sum to which both sides add.
    weight.mutable_grad() = at::zeros({vocabulary, size}, dtype == at::kDouble ? at::kDouble : at::kFloat);
  }
  double gflops(int products) const {
    return 2e-9 * products * static_cast<double>(rows) * static_cast<double>(vocabulary) *
           static_cast<double>(size);
  }
};

void add_ours(std::vector<Side>& sides, const Case& c, at::Tensor& lse) {
  sides.push_back({[&c, &lse] {
    lse = std::get<1>(edge_logprobs_forward(c.hidden, c.weight, c.edge_row, c.edge_target));
  }});
  sides.push_back({[&c, &lse] {
    edge_logprobs_backward(c.grad, c.hidden, c.weight, c.edge_row, c.edge_target, lse, c.weight.grad());
  }});
}

void add_plain(std::vector<Side>& sides, const Case& c, at::Tensor& logprobs,
               std::vector<at::Tensor>& leaves) {
  sides.push_back({[&c, &logprobs, &leaves] {
    leaves = {c.hidden.detach().requires_grad_(), c.weight.detach().requires_grad_()};
    logprobs = leaves[0].mm(leaves[1].t()).log_softmax(-1, at::kFloat).index({c.edge_row, c.edge_target});
  }});
  sides.push_back({[&c, &logprobs, &leaves] {
    const auto grads = torch::autograd::grad({logprobs}, {leaves[0], leaves[1]}, {c.grad});
    c.weight.grad().add_(grads[1]);
    logprobs.reset();
  }});
}

/// The three products of a pass over the first columns of the vocabulary. Returns their GFLOP.
double add_gemm(std::vector<Side>& sides, const Case& c) {
  const int64_t columns = std::min<int64_t>(c.vocabulary, 8192);
  const at::Tensor part = c.weight.slice(0, 0, columns),
                   logits = at::empty({c.rows, columns}, c.hidden.options());
  const at::Tensor to_hidden = at::empty_like(c.hidden), to_weight = at::empty_like(part);
  sides.push_back({[=, &c] {
    at::Tensor out = logits;
    at::mm_out(out, c.hidden, part.t());
  }});
  sides.push_back({[=, &c] {
    at::Tensor hidden_out = to_hidden, weight_out = to_weight;
    at::mm_out(hidden_out, logits, part);
    at::mm_out(weight_out, logits.t(), c.hidden);
  }});
  return c.gflops(1) * static_cast<double>(columns) / static_cast<double>(c.vocabulary);
}

/// Of a forward pass and the backward pass that follows, in MB.
std::string peak_megabytes(const Side& forward, const Side& backward) {
  const int64_t bytes = std::max(forward.peak_bytes, forward.kept_bytes + backward.peak_bytes);
  return fmt::format("{:.1f}", static_cast<double>(bytes) * 1e-6);
}

void row(const Options& options, const Case& c) {
  at::Tensor lse, logprobs;
  std::vector<at::Tensor> leaves;
  std::vector<Side> sides;
  add_ours(sides, c, lse);
  const double gemm_gflops = add_gemm(sides, c);
  if (options.plain) add_plain(sides, c, logprobs, leaves);
  measure(sides, options);
  const double forward = sides[0].median(), backward = sides[1].median();
  const double logits = gemm_gflops / sides[2].median();
  const double products = 3 * gemm_gflops / (sides[2].median() + sides[3].median());
  const char* dtype = c.hidden.scalar_type() == at::kFloat ? "float32" : "bfloat16";
  fmt::print("| {} | {} | {} | {} | {:.0f} | {:.0f} | {:.2f} | {:.2f} | {} |", dtype, c.vocabulary, c.size,
             c.rows, forward * 1e3, backward * 1e3, c.gflops(1) / forward / logits,
             c.gflops(3) / backward / products, peak_megabytes(sides[0], sides[1]));
  if (options.plain) {
    const double plain_forward = sides[4].median(), plain_backward = sides[5].median();
    fmt::print(" {:.0f} | {:.0f} | {} | {:.2f} |", plain_forward * 1e3, plain_backward * 1e3,
               peak_megabytes(sides[4], sides[5]), (plain_forward + plain_backward) / (forward + backward));
  }
  fmt::print("\n");
  std::fflush(stdout);
}

void table(const Options& options) {
  fmt::print("{} threads, medians of {} rounds.\n\n", at::get_num_threads(), options.rounds);
  fmt::print(
      "| dtype | vocabulary | hidden | tokens | forward ms | backward ms | of GEMM | of GEMM | extra MB "
      "|{}\n",
      options.plain ? " plain forward | plain backward | plain MB | x plain |" : "");
  fmt::print("|---|---:|---:|---:|---:|---:|---:|---:|---:|{}\n",
             options.plain ? "---:|---:|---:|---:|" : "");
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    if (options.dtype != "all" && (options.dtype == "float32") != (dtype == at::kFloat)) continue;
    for (const int64_t vocabulary : options.vocabularies) {
      for (const int64_t size : options.hidden_sizes) {
        for (const int64_t tokens : options.tokens) row(options, Case(tokens, vocabulary, size, dtype));
      }
    }
  }
}

[[noreturn]] void usage(int status) {
  std::fputs(
      "edge_logprobs_bench [--vocabulary N]... [--hidden N]... [--tokens N]... [--dtype "
      "float32|bfloat16|all]\n"
      "                    [--rounds N=5] [--threads N] [--no-plain]\n"
      "Prints a markdown table of edge_logprobs beside hidden W^T, log_softmax, gather. The first "
      "--vocabulary,\n"
      "--hidden or --tokens replaces the default list, others add to it.\n",
      status == 0 ? stdout : stderr);
  std::exit(status);
}

Options parse(const std::vector<std::string>& arguments) {
  Options options;
  bool given[3] = {};
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& flag = arguments[i];
    const auto value = [&] {
      if (i + 1 == arguments.size()) usage(2);
      return arguments[++i];
    };
    const auto add_to = [&](std::vector<int64_t>& list, bool& seen) {
      if (!seen) list.clear();
      seen = true;
      list.push_back(std::stoll(value()));
    };
    if (flag == "--help")
      usage(0);
    else if (flag == "--vocabulary")
      add_to(options.vocabularies, given[0]);
    else if (flag == "--hidden")
      add_to(options.hidden_sizes, given[1]);
    else if (flag == "--tokens")
      add_to(options.tokens, given[2]);
    else if (flag == "--rounds")
      options.rounds = std::stoi(value());
    else if (flag == "--threads")
      options.threads = std::stoi(value());
    else if (flag == "--dtype")
      options.dtype = value();
    else if (flag == "--no-plain")
      options.plain = false;
    else
      usage(2);
  }
  return options;
}

}  // namespace
}  // namespace espalier

int main(int argc, char** argv) {
  espalier::count_tensor_memory();
  espalier::reuse_freed_memory();
  const auto options = espalier::parse({argv + 1, argv + argc});
  if (options.threads > 0) at::set_num_threads(options.threads);
  espalier::table(options);
}
