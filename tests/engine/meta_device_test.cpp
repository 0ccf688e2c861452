// SPDX-License-Identifier: Apache-2.0
// A step on the meta device, whose tensors have no values: reading one throws, and so does mixing them with
// tensors of another device. What passes here makes the host wait for no device, and leaves no tensor behind
// on the wrong one.
#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/WrapDimUtils.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include "tests/engine/outcome.h"
#include "tests/engine/tiny_models.h"
#include "tests/test_seed.h"

namespace espalier::testing {
namespace {

// LibTorch has these for the meta device in Python only.
at::Tensor index_select_meta(const at::Tensor& self, int64_t dim, const at::Tensor& index) {
  TORCH_CHECK(index.device() == self.device() && index.dim() == 1, "index_select: index on ", index.device());
  std::vector<int64_t> sizes = self.sizes().vec();
  sizes.at(at::maybe_wrap_dim(dim, self.dim())) = index.size(0);
  return at::empty(sizes, self.options());
}

// As TensorIterator has it: scalars may come from the CPU.
void check_on_meta(const char* op, std::initializer_list<at::Tensor> tensors) {
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK(tensor.is_meta() || (tensor.is_cpu() && tensor.dim() == 0), op, ": ", tensor.device());
  }
}

at::Tensor where_meta(const at::Tensor& condition, const at::Tensor& self, const at::Tensor& other) {
  check_on_meta("where", {condition, self, other});
  return at::empty(at::infer_size(condition.sizes(), at::infer_size(self.sizes(), other.sizes())),
                   at::TensorOptions(at::kMeta).dtype(at::result_type(self, other)));
}

at::Tensor& logical_and_meta(const at::Tensor& self, const at::Tensor& other, at::Tensor& out) {
  check_on_meta("logical_and", {self, other, out});
  out.resize_(at::infer_size(self.sizes(), other.sizes()));
  return out;
}

at::Tensor& masked_fill_meta(at::Tensor& self, const at::Tensor& mask, const at::Scalar&) {
  check_on_meta("masked_fill", {self, mask});
  return self;
}

at::Tensor& masked_fill_tensor_meta(at::Tensor& self, const at::Tensor& mask, const at::Tensor& value) {
  check_on_meta("masked_fill", {self, mask, value});
  return self;
}

TORCH_LIBRARY_IMPL(aten, Meta, m) {
  m.impl("index_select", &index_select_meta);
  m.impl("where.self", &where_meta);
  m.impl("logical_and.out", &logical_and_meta);
  m.impl("masked_fill_.Scalar", &masked_fill_meta);
  m.impl("masked_fill_.Tensor", &masked_fill_tensor_meta);
}

Decoder on_meta(const Decoder& decoder, at::ScalarType dtype) {
  std::vector<Parameter> parameters;
  for (const Parameter& parameter : decoder.parameters()) {
    const auto options = at::TensorOptions(at::kMeta).dtype(dtype);
    parameters.push_back({parameter.name, at::empty(parameter.value.sizes(), options).requires_grad_()});
  }
  return Decoder(decoder.config(), std::move(parameters));
}

struct Course {
  Strategy strategy;
  CheckpointActivations checkpoint;
  ObjectiveKind objective;
};

std::vector<Course> courses() {
  std::vector<Course> all;
  for (const ObjectiveKind objective : {ObjectiveKind::kSft, ObjectiveKind::kGrpo}) {
    for (const Strategy strategy :
         {Strategy::kPartition, Strategy::kTreePacking, Strategy::kAppendOnly, Strategy::kSequencePacking}) {
      for (const CheckpointActivations checkpoint :
           {CheckpointActivations::kNone, CheckpointActivations::kLayer, CheckpointActivations::kPiece}) {
        if (checkpoint == CheckpointActivations::kPiece && strategy != Strategy::kPartition) continue;
        all.push_back({strategy, checkpoint, objective});
      }
    }
  }
  return all;
}

// Runs the case on the meta device and, for the counts, on the CPU.
void expect_same_course(Family family, at::ScalarType dtype, const Course& tried) {
  Rng rng(test_seed(5), 79);
  const Trajectories trajectories = random_trajectories(rng, Shape::kDeep, {.for_grpo = true, .draws = 4});
  const ObjectiveOptions objective{.kind = tried.objective};
  const int64_t budget = tried.strategy == Strategy::kPartition ? 9 : 60;
  const Step step = make_step(trajectories, all_rows(trajectories),
                              {.plan = {tried.strategy, budget, tried.checkpoint}, .objective = objective});
  if (tried.strategy == Strategy::kPartition) {
    EXPECT_GE(step.plan.micro_batches.size(), 3u);
  }
  const Decoder decoder = tiny_decoder(tiny_config(family, 19), 4, dtype), meta = on_meta(decoder, dtype);

  const Loss loss(trajectories, objective);
  const PendingStep pending = start_forward_backward(meta, step, loss);
  const StepResult result = forward_backward(decoder, step, loss);
  EXPECT_TRUE(pending.sums.values().is_meta());
  EXPECT_EQ(pending.counts.work.tokens, result.work.tokens);
  EXPECT_EQ(pending.counts.work.pairs, result.work.pairs);
  EXPECT_EQ(pending.counts.work.logit_rows, result.work.logit_rows);
  EXPECT_EQ(pending.counts.recomputed.tokens, result.recomputed.tokens);
  EXPECT_EQ(pending.counts.terms, result.terms);
  EXPECT_EQ(pending.meters.size(), result.measured.size());
  const std::vector<at::Tensor> gradients = meta.gradients(), expected = decoder.gradients();
  for (size_t i = 0; i < gradients.size(); ++i) {
    ASSERT_TRUE(gradients[i].defined()) << decoder.parameters()[i].name;
    EXPECT_TRUE(gradients[i].is_meta());
    EXPECT_EQ(gradients[i].sizes(), expected[i].sizes());
    EXPECT_EQ(gradients[i].scalar_type(), expected[i].scalar_type());
  }
}

TEST(MetaDevice, AStepReadsNothingFromItsDevice) {
  constexpr at::ScalarType kDtypes[] = {at::kDouble, at::kFloat, at::kBFloat16};
  size_t turn =
      0;  // every family and every course meets each dtype, since 3 does not divide the number of families
  for (const Course& tried : courses()) {
    for (const Family family : kDenseFamilies) {  // a mixture of experts reads how many tokens each has
      const at::ScalarType dtype = kDtypes[turn++ % std::size(kDtypes)];
      SCOPED_TRACE(fmt::format("{} {} checkpoint {} {} {}", to_string(family), at::toString(dtype),
                               espalier::to_string(tried.checkpoint), espalier::to_string(tried.strategy),
                               tried.objective == ObjectiveKind::kSft ? "sft" : "grpo"));
      EXPECT_NO_THROW(expect_same_course(family, dtype, tried));
    }
  }
}

// Controls: what the test above rests on.
TEST(MetaDevice, ReadingAndMixingThrow) {
  const at::Tensor meta = at::ones({3}, at::TensorOptions(at::kMeta).dtype(at::kDouble));
  EXPECT_ANY_THROW(meta.sum().item<double>());
  EXPECT_ANY_THROW(meta.cpu());
  EXPECT_ANY_THROW(meta + at::ones({3}, at::kDouble));
}

TEST(MetaDevice, ReadingTheSumsOfAStepThrows) {
  const Trajectories trajectories = from_rows({{1, 2, 3, 4}, {1, 2, 5}});
  const Step step = make_step(trajectories, all_rows(trajectories), {});
  const Decoder meta = on_meta(tiny_decoder(tiny_config(Family::kLlama, 19), 4), at::kFloat);
  EXPECT_ANY_THROW(forward_backward(meta, step, Loss(trajectories, ObjectiveOptions{})));
}

}  // namespace
}  // namespace espalier::testing
