// SPDX-License-Identifier: Apache-2.0
// The checks of operators pass those of the CPU, and find what is wrong with others.
#include "espalier/qualify/operator_family.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>

#include "espalier/ops/guarded_output.h"
#include "espalier/qualify/families.h"
#include "espalier/qualify/operator_families.h"

namespace espalier::testing {
namespace {

using Tensors = std::vector<at::Tensor>;
using Visit = std::function<void(const qualify::OperatorProblem&)>;
using Change = std::function<Tensors(const Tensors& inputs, Tensors results)>;

/// The family with other results for the problems of one operation, in one dtype.
qualify::OperatorFamily changed(qualify::OperatorFamily family, at::ScalarType dtype,
                                const std::string& operation, const Change& change) {
  const auto all = family.for_each_problem;
  family.dtypes = {dtype};
  family.for_each_problem = [all, operation, change](at::ScalarType of, const Visit& visit) {
    all(of, [&](qualify::OperatorProblem problem) {
      if (problem.operation != operation) return;
      problem.ours = [ours = problem.ours, change](const Tensors& in) { return change(in, ours(in)); };
      visit(problem);
    });
  };
  return family;
}

std::string fault_of(const qualify::OperatorFamily& family) {
  return qualify::check_operators(family, at::kCPU).fault;
}

void expect_start(const std::string& text, const std::string& start) {
  EXPECT_TRUE(text.starts_with(start)) << text << "\nexpected to start with\n" << start;
}

class OperatorFamilies : public ::testing::TestWithParam<const char*> {};

TEST_P(OperatorFamilies, OfTheCpuPass) {
  const qualify::Finding finding = qualify::check_family(GetParam(), at::kCPU);
  EXPECT_EQ(finding.fault, "");
  EXPECT_GE(finding.checks, 3 * 9);
}

INSTANTIATE_TEST_SUITE_P(Names, OperatorFamilies, ::testing::Values("head", "distribution", "products"));

// Each wrong in one way that a kernel can be wrong in.
TEST(OperatorFamily, AWrongRowIsFound) {
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const std::string fault = fault_of(
        changed(qualify::head_family(), dtype, "edge_logprobs", [](const Tensors& in, Tensors results) {
          if (in[0].size(0) == 1023) results[1].select(0, in[3].max().item<int64_t>()).zero_();
          return results;
        }));
    expect_start(fault, std::string(c10::toString(dtype)) + ", edge_logprobs: gradient of hidden: expected");
    EXPECT_NE(fault.find("worst on 1023 rows, 3000 edges"), std::string::npos) << fault;
  }
}

TEST(OperatorFamily, AForgottenTargetOfTheHeadIsFound) {
  const std::string fault = fault_of(changed(qualify::head_family(), at::kBFloat16, "edge_logprobs by blocks",
                                             [](const Tensors& in, Tensors results) {
                                               // As if the targets of the last row had been in no block.
                                               results[0].masked_fill_(in[3].eq(in[0].size(0) - 1), 0);
                                               return results;
                                             }));
  expect_start(fault, "BFloat16, edge_logprobs by blocks: log-probabilities: expected");
}

TEST(OperatorFamily, AnOptionOfTheDistributionThatIsIgnoredIsFound) {
  const std::string fault =
      fault_of(changed(qualify::distribution_family(), at::kFloat, "edge_distribution with bias",
                       [](const Tensors&, Tensors results) {
                         results[4].zero_();
                         return results;
                       }));
  expect_start(fault, "Float, edge_distribution with bias: gradient of bias: expected");
}

TEST(OperatorFamily, SumsInLowPrecisionAreFound) {
  // As of a library that cuts a sum into four parts and joins them in bfloat16.
  const std::string fault =
      fault_of(changed(qualify::product_family(at::kCUDA), at::kBFloat16, "long products",
                       [](const Tensors& in, Tensors results) {
                         const at::Tensor a = in[0].t().to(at::kFloat), b = in[1].to(at::kFloat);
                         at::Tensor sum = at::zeros({a.size(0), b.size(1)}, at::kBFloat16);
                         const int64_t part = a.size(1) / 4;
                         for (int64_t k = 0; k < a.size(1); k += part) {
                           sum = sum + a.slice(1, k, k + part).mm(b.slice(0, k, k + part)).to(at::kBFloat16);
                         }
                         results[0] = sum.to(at::kFloat);
                         return results;
                       }));
  expect_start(fault, "BFloat16, long products: product: expected an error of at most 2 times");
}

TEST(OperatorFamily, ProductsOfTheCpuPassWhereNothingIsRounded) {
  const std::string fault = fault_of(changed(qualify::product_family(at::kCUDA), at::kBFloat16,
                                             "long products", [](const Tensors& in, Tensors results) {
                                               results[0] = in[0].t().to(at::kFloat).mm(in[1].to(at::kFloat));
                                               results[1] =
                                                   (results[0] + in[2].to(at::kFloat)).to(at::kBFloat16);
                                               results[2] = in[3] + results[0];
                                               return results;
                                             }));
  EXPECT_EQ(fault, "");
}

TEST(OperatorFamily, Tf32WhereFloat32IsPromisedIsFound) {
  for (const char* operation : {"short products", "long products"}) {
    const std::string fault = fault_of(changed(
        qualify::product_family(at::kCUDA), at::kFloat, operation, [](const Tensors& in, Tensors results) {
          const auto tf32 = [](const at::Tensor& x) {  // ten bits of the fraction
            return x.contiguous().view(at::kInt).bitwise_and(~0x1fff).view(at::kFloat);
          };
          results[0] = tf32(in[0]).t().mm(tf32(in[1]));
          return results;
        }));
    expect_start(fault, fmt::format("Float, {}: product: expected an error", operation));
  }
}

TEST(OperatorFamily, ValuesThatAreNotFiniteAreFound) {
  const std::string fault = fault_of(
      changed(qualify::head_family(), at::kFloat, "edge_logprobs", [](const Tensors& in, Tensors results) {
        if (in[1].size(0) == 2003) results[2].view(-1)[7] = std::nan("");
        return results;
      }));
  EXPECT_EQ(fault,
            "Float, edge_logprobs: gradient of weight: values that are not finite or of another shape or "
            "dtype, on 130 rows, 260 edges, hidden size 200, vocabulary 2003");
}

TEST(OperatorFamily, ResultsOfAnotherDtypeAreFound) {
  const std::string fault = fault_of(
      changed(qualify::head_family(), at::kBFloat16, "edge_logprobs", [](const Tensors&, Tensors results) {
        results[1] = results[1].to(at::kFloat);
        return results;
      }));
  expect_start(fault,
               "BFloat16, edge_logprobs: gradient of hidden: values that are not finite or of another shape "
               "or dtype");
}

TEST(OperatorFamily, OtherBitsInAnotherRunAreFoundWhereEqualOnesArePromised) {
  int64_t runs = 0;
  qualify::OperatorFamily family =
      changed(qualify::head_family(), at::kFloat, "edge_logprobs", [&runs](const Tensors&, Tensors results) {
        results[0].view(-1)[0].mul_(1 + 1e-6 * static_cast<double>(runs++ % 2));
        return results;
      });
  EXPECT_EQ(fault_of(family),
            "Float, edge_logprobs, 63 rows, 190 edges, hidden size 8, vocabulary 65: log-probabilities has "
            "other bits in another run");
  family.repeatable = false;
  EXPECT_EQ(fault_of(family), "");
}

TEST(OperatorFamily, AWriteBeyondAnOutputIsFound) {
  int64_t beyond = 0;
  const qualify::OperatorFamily family = changed(
      qualify::head_family(), at::kFloat, "edge_logprobs", [&beyond](const Tensors&, Tensors results) {
        const at::Tensor written = output_like(results[0].sizes(), results[0].options());
        written.copy_(results[0]);
        // The second run has no guards.
        if (results[0].size(0) == 20 && written.storage_offset() > 0) {
          float* end = written.mutable_data_ptr<float>() + written.numel();
          end[beyond - 1] = end[-1];  // without `beyond` the last value itself
        }
        results[0] = written;
        return results;
      });
  EXPECT_EQ(fault_of(family), "");
  beyond = 1;
  EXPECT_EQ(
      fault_of(family),
      "Float, edge_logprobs, 65 rows, 20 edges, hidden size 64, vocabulary 576: writes beyond its outputs");
}

TEST(OperatorFamily, ALackingResultIsFound) {
  const std::string fault = fault_of(
      changed(qualify::head_family(), at::kFloat, "edge_logprobs", [](const Tensors&, Tensors results) {
        results.pop_back();
        return results;
      }));
  expect_start(fault,
               "Float, edge_logprobs, 63 rows, 190 edges, hidden size 8, vocabulary 65: lacks results");
}

TEST(OperatorFamily, FloorsOfSums) {
  EXPECT_EQ(qualify::error_of_sum(1), 0x1p-25);
  EXPECT_EQ(qualify::error_of_sum(16'384), 0x1p-18);
  EXPECT_EQ(qualify::error_of_tensor_core_sum(1), 0x1p-25);
  EXPECT_EQ(qualify::error_of_tensor_core_sum(16'384), 0x1p-14);
}

}  // namespace
}  // namespace espalier::testing
