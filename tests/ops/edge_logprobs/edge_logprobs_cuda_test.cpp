// SPDX-License-Identifier: Apache-2.0
// edge_logprobs on a GPU, whichever way this build computes it.
#include "espalier/ops/edge_logprobs/edge_logprobs.h"

#include <gtest/gtest.h>

#include "espalier/ops/edge_logprobs/blocks.h"
#include "tests/ops/cuda_device.h"
#include "tests/ops/edge_logprobs/edge_problems.h"
#include "tests/ops/edge_logprobs/reference.h"

namespace espalier::testing {
namespace {

constexpr at::ScalarType kDtypes[] = {at::kDouble, at::kFloat, at::kBFloat16};

/// Judges problems of one kind: float64 one by one, the errors of other dtypes together.
class Judge {
 public:
  explicit Judge(at::ScalarType dtype) : dtype_(dtype) {}

  /// How many problems to judge, of so many independent values.
  int64_t draws(int64_t values) const { return dtype_ == at::kDouble ? 1 : draws_for(values); }

  void add(const EdgeProblem& given, const Results& ours) {
    const Results exact = given.run(reference::edge_logprobs, at::kDouble, at::kCPU);
    if (dtype_ == at::kDouble) {
      EXPECT_LE(worst_error(ours, exact), 1e-12);
    } else {
      errors_.add(ours, given.run(reference::edge_logprobs, dtype_, at::kCPU), exact);
    }
  }
  void expect_right() const {
    if (dtype_ == at::kDouble) return;
    EXPECT_TRUE(errors_.at_most_twice_the_plain()) << dtype_;
  }

 private:
  at::ScalarType dtype_;
  PooledErrors errors_;
};

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
      SCOPED_TRACE(::testing::Message() << "from seed " << seed + 1 << " on, " << sizes.num_rows
                                        << " rows of " << sizes.vocabulary);
      Judge judge(dtype);
      for (int64_t draw = judge.draws(std::min(sizes.num_rows, sizes.num_edges)); draw > 0; --draw) {
        const EdgeProblem given(++seed, sizes, dtype);
        judge.add(given, given.run(edge_logprobs, dtype, at::kCUDA));
      }
      judge.expect_right();
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
          {there.grad_out, {there.hidden, there.weight, there.row, there.target}, lse}, grad_hidden,
          grad_weight, size);
      Judge judge(dtype);
      judge.add(given,
                {logprobs.cpu(), grad_hidden.sub(there.start).cpu(), grad_weight.sub(there.start).cpu()});
      judge.expect_right();
    }
  }
}

TEST(EdgeLogprobsCuda, TakeARowWithAllEdges) {
  SKIP_WITHOUT_CUDA();
  for (const at::ScalarType dtype : kDtypes) {
    Judge judge(dtype);
    for (int64_t draw = 0; draw < judge.draws(1); ++draw) {  // one row, one sum
      EdgeProblem given(1140 + draw, {9, 400, 8, 1300}, dtype);
      given.edge_row.fill_(4);
      judge.add(given, given.run(edge_logprobs, dtype, at::kCUDA));
    }
    judge.expect_right();
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
    Judge judge(dtype);
    judge.add(given, {logprobs.cpu(), grad_hidden.cpu(), sum.sub(there.start).cpu()});
    judge.expect_right();
  }
}

// +-10,000 and a little, all of which float32 holds exactly: what is wrong comes from softmax alone.
TEST(EdgeLogprobsCuda, ExtremeLogits) {
  SKIP_WITHOUT_CUDA();
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    Judge judge(dtype);
    for (int64_t draw = 0; draw < judge.draws(65); ++draw) {
      const EdgeProblem given = extreme_edge_problem(1120 + draw, {65, 200, 5, 1023}, dtype);
      judge.add(given, given.run(edge_logprobs, dtype, at::kCUDA));
    }
    judge.expect_right();
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
