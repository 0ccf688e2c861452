// SPDX-License-Identifier: Apache-2.0
// What the comparison with per-trajectory training must catch where layers are recurrent. The unspoilt way
// passes at 1e-12.
#include <gtest/gtest.h>

#include <numeric>

#include "tests/engine/outcome.h"
#include "tests/engine/tiny_models.h"

namespace espalier::testing {
namespace {

class RecurrentControls : public ::testing::TestWithParam<Family> {
 protected:
  RecurrentControls()
      : decoder_(tiny_decoder(tiny_config(GetParam(), 19), 5)),
        trajectories_(from_rows({{1, 2, 3, 4, 5, 6, 7, 8},
                                 {1, 2, 3, 4, 5, 9, 10, 11, 12, 13},
                                 {1, 2, 3, 4, 5, 9, 10, 14, 15, 16, 17},
                                 {1, 2, 3, 4, 5, 3, 2, 1, 0}})),
        reference_(reference_outcome(decoder_, trajectories_, objective_)) {}

  Step step(const PlanOptions& plan) const {
    return make_step(trajectories_, all_rows(trajectories_), {.plan = plan, .objective = objective_});
  }

  double error_of(const Outcome& outcome) const {
    return std::max(loss_error(outcome, reference_), gradient_error(outcome, reference_));
  }
  double error_of(const Step& step) const {
    return error_of(tree_outcome(decoder_, trajectories_, step, objective_));
  }

  Decoder decoder_;
  ObjectiveOptions objective_;
  Trajectories trajectories_;
  Outcome reference_;
};

TEST_P(RecurrentControls, StatesAndConvolutionsThatDoNotBranchAreCaught) {
  std::vector<Batch> batches = make_batches(trajectories_, step({}), objective_);
  ASSERT_EQ(batches.size(), 1u);
  EXPECT_LE(error_of(batch_outcome(decoder_, batches, objective_)), 1e-12);
  NodeStructure chain = *batches[0].nodes;
  std::iota(chain.prev.begin(), chain.prev.end(), -1);
  batches[0].nodes = std::make_shared<const NodeStructure>(chain);
  EXPECT_GT(error_of(batch_outcome(decoder_, batches, objective_)), 1e-4);
}

TEST_P(RecurrentControls, APathThatGoesOnAtAnotherCutIsCaught) {
  Step cut = step({Strategy::kPartition, 4});
  EXPECT_LE(error_of(cut), 1e-12);
  int64_t spoilt = 0;
  for (MicroBatch& micro_batch : cut.plan.micro_batches) {
    if (micro_batch.parent < 0) continue;
    for (int64_t& run : micro_batch.context_runs) {
      const auto cuts = cut.cuts.row(micro_batch.parent);
      if (cuts.size() < 2) continue;
      run = run == cuts[0] ? cuts[1] : cuts[0];
      ++spoilt;
    }
  }
  ASSERT_GT(spoilt, 0);
  EXPECT_GT(error_of(cut), 1e-4);
}

INSTANTIATE_TEST_SUITE_P(Families, RecurrentControls,
                         ::testing::Values(Family::kQwen3_5, Family::kMamba2, Family::kGraniteMoeHybrid),
                         [](const auto& info) { return std::string(to_string(info.param)); });

}  // namespace
}  // namespace espalier::testing
