// SPDX-License-Identifier: Apache-2.0
// The elementwise operators of ops/elementwise/elementwise.h beside compositions of ATen's, both sides
// interleaved in one run. GB/s count every tensor that is read or written once; "copy" is at::copy_ of a
// float32 tensor of the same number of elements. Run: elementwise_bench --help
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "espalier/ops/checks.h"
#include "espalier/ops/elementwise/elementwise.h"

namespace espalier {
namespace {

using Clock = std::chrono::steady_clock;
using Work = std::function<void()>;

struct Options {
  int64_t tokens = 2048;
  int rounds = 15;
};

double seconds_of(const Work& work) {
  const auto begin = Clock::now();
  work();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// One line of the table.
struct Case {
  std::string op;
  double tensors;  // of the size of x, that are read or written once
  Work aten, fused;
};

/// Norms by the operators of ATen that need the fewest passes.
struct AtenNorm {
  at::Tensor x, weight, inverse_rms;

  at::Tensor forward() {
    const at::Tensor wide = x.to(detail::accumulator_dtype(x.scalar_type()));
    inverse_rms = at::rsqrt(at::mean(wide * wide, {-1}, /*keepdim=*/true).add_(1e-6));
    return (wide * inverse_rms).to(x.scalar_type()).mul_(weight);
  }
  at::Tensor backward(const at::Tensor& grad_y) const {
    const auto wide = inverse_rms.scalar_type();
    const at::Tensor grad = grad_y.to(wide), normalised = x.to(wide) * inverse_rms;
    at::Tensor product = grad * normalised;
    const at::Tensor grad_weight = product.flatten(0, -2).sum(0);
    const at::Tensor wide_weight = weight.to(wide);
    const at::Tensor mean = product.mul_(wide_weight).mean({-1}, /*keepdim=*/true);
    return (grad * wide_weight).addcmul_(normalised, mean, -1).mul_(inverse_rms).to(x.scalar_type());
  }
};

std::vector<Case> norm_cases(const at::Tensor& x, const at::Tensor& other) {
  const at::Tensor weight = at::randn({x.size(-1)}).to(x.scalar_type());
  AtenNorm aten{x, weight, {}};
  aten.forward();
  const RmsNormOutput output = rms_norm_forward(x, {}, weight, 1e-6);
  const RmsNormGradient given{other, {}, x, weight, output.inverse_rms};
  RmsNormGradient joined = given;
  joined.grad_sum = other;
  return {
      {"norm", 2, [=]() mutable { aten.forward(); }, [=] { rms_norm_forward(x, {}, weight, 1e-6); }},
      {"norm backward", 3, [=] { aten.backward(other); }, [=] { rms_norm_backward(given, {true, true}); }},
      {"add, norm", 4,
       [=] {
         AtenNorm norm{x + other, weight, {}};
         norm.forward();
       },
       [=] { rms_norm_forward(x, other, weight, 1e-6); }},
      {"add, fused norm", 4, [=] { rms_norm_forward(x + other, {}, weight, 1e-6); },
       [=] { rms_norm_forward(x, other, weight, 1e-6); }},
      {"add, norm backward", 4, [=] { aten.backward(other).add_(other); },
       [=] { rms_norm_backward(joined, {true, true}); }},
      {"add, fused norm backward", 4, [=] { rms_norm_backward(given, {true, true}).x.add_(other); },
       [=] { rms_norm_backward(joined, {true, true}); }}};
}

at::Tensor aten_rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const int64_t half = x.size(-1) / 2;
  const at::Tensor wide = x.to(cos.scalar_type());
  const at::Tensor lower = wide.narrow(-1, 0, half), upper = wide.narrow(-1, half, half);
  at::Tensor turned = at::empty(x.sizes(), wide.options());
  at::Tensor turned_lower = turned.narrow(-1, 0, half), turned_upper = turned.narrow(-1, half, half);
  at::mul_out(turned_lower, lower, cos).addcmul_(upper, sin, -1);
  at::mul_out(turned_upper, upper, cos).addcmul_(lower, sin, 1);
  return turned.to(x.scalar_type());
}

Case rotary_case(const at::Tensor& x, int64_t dim) {
  const at::Tensor heads = x.view({x.size(0), -1, dim});
  const at::Tensor cos = at::rand({x.size(0), dim / 2}), sin = at::rand({x.size(0), dim / 2});
  return {"rotary", 2, [=] { aten_rotary(heads, cos.unsqueeze(1), sin.unsqueeze(1)); },
          [=] { rotary(heads, cos, sin); }};
}

std::vector<Case> swiglu_cases(const at::Tensor& gate, const at::Tensor& up) {
  const at::Tensor grad = at::randn(gate.sizes()).to(gate.scalar_type());
  const at::Tensor activated = at::silu(gate);
  static const auto backward = c10::Dispatcher::singleton()
                                   .findSchemaOrThrow("espalier::swiglu_backward", "")
                                   .typed<std::tuple<at::Tensor, at::Tensor>(
                                       const at::Tensor&, const at::Tensor&, const at::Tensor&)>();
  return {{"swiglu", 3, [=] { at::silu(gate) * up; }, [=] { swiglu(gate, up); }},
          {"swiglu backward", 5,
           [=] {
             const at::Tensor grad_up = grad * activated;
             at::silu_backward(grad * up, gate);
           },
           [=] { backward.call(grad, gate, up); }}};
}

void print_row(const Case& given, const at::Tensor& x, const Options& options) {
  const at::Tensor from = at::zeros(x.sizes()), to = at::zeros(x.sizes());
  std::vector<double> aten, fused, ratio, copy;
  for (int round = -2; round < options.rounds; ++round) {
    const double a = seconds_of(given.aten), f = seconds_of(given.fused);
    const double c = seconds_of([&] { at::Tensor(to).copy_(from); });
    if (round < 0) continue;
    aten.push_back(a), fused.push_back(f), ratio.push_back(a / f), copy.push_back(c);
  }
  const auto bytes = static_cast<double>(x.nbytes());
  fmt::print("| {} | {} | {} x {} | {:.3f} | {:.3f} | {:.2f} | {:.1f} | {:.1f} |\n", given.op,
             x.scalar_type() == at::kFloat ? "float32" : "bfloat16", x.size(0), x.size(1), median(aten) * 1e3,
             median(fused) * 1e3, median(ratio), given.tensors * bytes / median(fused) * 1e-9,
             2.0 * static_cast<double>(from.nbytes()) / median(copy) * 1e-9);
  std::fflush(stdout);
}

void table(const Options& options) {
  const at::NoGradGuard no_grad;
  fmt::print("{} threads, medians of {} rounds.\n\n", at::get_num_threads(), options.rounds);
  fmt::print(
      "| operator | dtype | shape | ATen ms | fused ms | ATen / fused | fused GB/s | copy GB/s |\n"
      "|---|---|---|---:|---:|---:|---:|---:|\n");
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const int64_t width : {576, 1536, 4096}) {
      const at::Tensor x = at::randn({options.tokens, width}).to(dtype), other = at::randn_like(x);
      std::vector<Case> cases = swiglu_cases(x, other);
      if (width != 1536) {
        for (const Case& given : norm_cases(x, other)) cases.push_back(given);
        cases.push_back(rotary_case(x, 64));
      }
      for (const Case& given : cases) print_row(given, x, options);
    }
  }
}

[[noreturn]] void usage(int status) {
  std::fputs("elementwise_bench [--tokens N=2048] [--rounds N=15] [--threads N]\nPrints a markdown table.\n",
             status == 0 ? stdout : stderr);
  std::exit(status);
}

Options parse(const std::vector<std::string>& arguments) {
  Options options;
  for (size_t i = 0; i < arguments.size(); i += 2) {
    if (arguments[i] == "--help") usage(0);
    if (i + 1 == arguments.size()) usage(2);
    const int value = std::stoi(arguments[i + 1]);
    if (arguments[i] == "--tokens") {
      options.tokens = value;
    } else if (arguments[i] == "--rounds") {
      options.rounds = value;
    } else if (arguments[i] == "--threads") {
      at::set_num_threads(value);
    } else {
      usage(2);
    }
  }
  return options;
}

}  // namespace
}  // namespace espalier

int main(int argc, char** argv) {
  // As the engine does: memory that is freed stays mapped, on both sides.
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, -1);
  mallopt(M_TOP_PAD, 64 << 20);
  espalier::table(espalier::parse({argv + 1, argv + argc}));
}
