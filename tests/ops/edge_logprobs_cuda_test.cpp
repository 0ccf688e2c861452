// edge_logprobs on a GPU, whichever way this build computes it.
#include "espalier/ops/edge_logprobs.h"

#include <gtest/gtest.h>

#include "espalier/ops/edge_logprobs_blocks.h"
#include "espalier/ops/reference.h"
#include "tests/ops/cuda_device.h"
#include "tests/ops/edge_problems.h"

namespace espalier::testing {
namespace {

constexpr at::ScalarType kDtypes[] = {at::kDouble, at::kFloat, at::kBFloat16};

void expect_right(const EdgeProblem& given, const Results& ours, at::ScalarType dtype) {
  const Results exact = given.run(reference::edge_logprobs, at::kDouble, at::kCPU);
  const Results plain = given.run(reference::edge_logprobs, dtype, at::kCPU);
  for (size_t i = 0; i < exact.size(); ++i) {
    EXPECT_LE(relative_error(ours[i], exact[i]),
              dtype == at::kDouble ? 1e-12 : 2 * relative_error(plain[i], exact[i]))
        << dtype << ", result " << i;
  }
}

/// The problem's tensors on the GPU, for calls of the two passes by themselves.
struct OnCuda {
  at::ScalarType sums;
  double start;  // of sums; in float32 one would cost as much precision as the reference has
  at::Tensor hidden, weight, row, target, grad_out;

  OnCuda(const EdgeProblem& given, at::ScalarType dtype)
      : sums(dtype == at::kDouble ? at::kDouble : at::kFloat),
        start(dtype == at::kFloat ? 0 : 1),
        hidden(given.hidden.to(at::kCUDA, dtype)),
        weight(given.weight.to(at::kCUDA, dtype)),
        row(given.edge_row.to(at::kCUDA)),
        target(given.edge_target.to(at::kCUDA)),
        grad_out(given.grad_out.to(at::kCUDA, sums)) {}

  at::Tensor start_of(const at::Tensor& tensor) const {
    return at::full(tensor.sizes(), start, tensor.options().dtype(sums));
  }
};

TEST(EdgeLogprobsCuda, EqualTheReference) {
  SKIP_WITHOUT_CUDA();
  for (const at::ScalarType dtype : kDtypes) {
    uint64_t seed = 100;
    for (const EdgeSizes& sizes :
         {EdgeSizes{63, 190, 8, 65}, EdgeSizes{63, 190, 24, 1023}, EdgeSizes{65, 20, 64, 576},
          EdgeSizes{1023, 3000, 16, 2801}, EdgeSizes{130, 260, 576, 5003}}) {
      SCOPED_TRACE(++seed);
      const EdgeProblem given(seed, sizes, dtype);
      expect_right(given, given.run(edge_logprobs, dtype, at::kCUDA), dtype);
    }
  }
}

TEST(EdgeLogprobsCuda, EqualTheReferenceAcrossBlocks) {
  SKIP_WITHOUT_CUDA();
  for (const at::ScalarType dtype : kDtypes) {
    const EdgeProblem given(111, {301, 700, 32, 1300}, dtype);
    const OnCuda there(given, dtype);
    for (const LogitBlock& size : {LogitBlock{128, 512}, LogitBlock{301, 100}, LogitBlock{7, 1300}}) {
      const auto [logprobs, lse] =
          detail::edge_logprobs_by_blocks(there.hidden, there.weight, there.row, there.target, size);
      const at::Tensor grad_hidden = there.start_of(there.hidden), grad_weight = there.start_of(there.weight);
      detail::add_edge_logprobs_gradients(
          {there.grad_out, there.hidden, there.weight, there.row, there.target, lse}, grad_hidden,
          grad_weight, size);
      expect_right(given,
                   {logprobs.cpu(), grad_hidden.sub(there.start).cpu(), grad_weight.sub(there.start).cpu()},
                   dtype);
    }
  }
}

TEST(EdgeLogprobsCuda, TakeARowWithAllEdges) {
  SKIP_WITHOUT_CUDA();
  for (const at::ScalarType dtype : kDtypes) {
    EdgeProblem given(114, {9, 400, 8, 1300}, dtype);
    given.edge_row.fill_(4);
    expect_right(given, given.run(edge_logprobs, dtype, at::kCUDA), dtype);
  }
}

TEST(EdgeLogprobsCuda, AddToTheGradientThatIsThere) {
  SKIP_WITHOUT_CUDA();
  for (const at::ScalarType dtype : kDtypes) {
    const EdgeProblem given(115, {300, 700, 32, 1300}, dtype);
    const OnCuda there(given, dtype);
    const auto [logprobs, lse] = edge_logprobs_forward(there.hidden, there.weight, there.row, there.target);
    const at::Tensor sum = there.start_of(there.weight);
    const at::Tensor grad_hidden =
        edge_logprobs_backward(there.grad_out, there.hidden, there.weight, there.row, there.target, lse, sum);
    expect_right(given, {logprobs.cpu(), grad_hidden.cpu(), sum.sub(there.start).cpu()}, dtype);
  }
}

// +-10,000 and a little, all of which float32 holds exactly: what is wrong comes from softmax alone.
TEST(EdgeLogprobsCuda, ExtremeLogits) {
  SKIP_WITHOUT_CUDA();
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    EdgeProblem given(112, {65, 200, 5, 1023});
    given.hidden.mul_(8).round_().div_(8);
    given.weight.mul_(8).round_().div_(8);
    given.hidden.select(1, 0).sign_().mul_(100);
    given.weight.select(1, 0).fill_(100);
    for (at::Tensor* input : {&given.hidden, &given.weight}) *input = input->to(dtype).to(at::kDouble);
    given.grad_out = given.grad_out.to(at::kFloat).to(at::kDouble);
    expect_right(given, given.run(edge_logprobs, dtype, at::kCUDA), dtype);
  }
}

TEST(EdgeLogprobsCuda, HaveTheSameBitsFromRunToRun) {
  SKIP_WITHOUT_CUDA();
  for (const at::ScalarType dtype : kDtypes) {
    const EdgeProblem given(113, {1100, 3000, 64, 9001}, dtype);
    const Results first = given.run(edge_logprobs, dtype, at::kCUDA);
    for (int run = 0; run < 3; ++run) {
      const Results again = given.run(edge_logprobs, dtype, at::kCUDA);
      for (size_t i = 0; i < first.size(); ++i) {
        EXPECT_TRUE(same_bits(first[i], again[i])) << dtype << ", result " << i;
      }
    }
  }
}

TEST(EdgeLogprobsCuda, TakeNoEdgesAndNoRows) {
  SKIP_WITHOUT_CUDA();
  const auto cuda = at::TensorOptions(at::kCUDA).dtype(at::kBFloat16);
  for (const int64_t num_rows : {0, 3}) {
    const at::Tensor hidden = at::randn({num_rows, 8}, cuda), weight = at::randn({9, 8}, cuda);
    const at::Tensor none = at::empty({0}, cuda.dtype(at::kLong));
    const auto [logprobs, lse] = edge_logprobs_forward(hidden, weight, none, none);
    const at::Tensor sum = at::zeros({9, 8}, cuda.dtype(at::kFloat));
    const at::Tensor grad = edge_logprobs_backward(logprobs, hidden, weight, none, none, lse, sum);
    EXPECT_EQ(logprobs.numel(), 0);
    EXPECT_EQ(grad.abs().sum().item<double>() + sum.abs().sum().item<double>(), 0);
  }
}

}  // namespace
}  // namespace espalier::testing
