// SPDX-License-Identifier: Apache-2.0
#include "espalier/verify/verify.h"

#include <gtest/gtest.h>

#include "espalier/base/check.h"
#include "espalier/data/builder.h"
#include "tests/base/scratch_folder.h"
#include "tests/distributed/thread_ranks.h"
#include "tests/engine/tiny_models.h"
#include "tests/objective/random_objective.h"
#include "tests/ops/gemm/forced_products.h"
#include "tests/test_seed.h"

namespace espalier::testing {
namespace {

constexpr int64_t kVocabSize = 19;

Trajectories rows_to_verify(bool for_grpo) {
  Rng rng(test_seed(31));
  return random_trajectories(rng, Shape::kMixed,
                             {.vocab_size = kVocabSize, .max_rows = 12, .for_grpo = for_grpo});
}

int64_t longest(const Trajectories& trajectories) {
  int64_t longest = 0;
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    longest = std::max(longest, trajectories.row_size(row));
  }
  return longest;
}

std::vector<PlanOptions> plans(const Trajectories& trajectories) {
  const int64_t smallest = longest(trajectories);
  return {{Strategy::kTreePacking, 0},
          {Strategy::kTreePacking, smallest},
          {Strategy::kTreePacking, smallest + 20},
          {Strategy::kAppendOnly, smallest},
          {Strategy::kSequencePacking, 0},
          {Strategy::kSequencePacking, smallest + 5},
          {Strategy::kPartition, 0},
          {Strategy::kPartition, smallest / 2},
          {Strategy::kPartition, 5, CheckpointActivations::kLayer},
          {Strategy::kPartition, 5, CheckpointActivations::kPiece, true}};
}

std::vector<std::string> keys(const nlohmann::ordered_json& json) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : json.items()) keys.push_back(key);
  return keys;
}

class VerifyTest : public ::testing::TestWithParam<Family> {
 protected:
  VerifyOptions options(at::ScalarType dtype, bool wide = false) {
    const auto model = folder_ / fmt::format("model-{}-{}", static_cast<int>(dtype), wide);
    if (!std::filesystem::exists(model)) write_tiny_model(model, GetParam(), kVocabSize, 9, dtype, wide);
    VerifyOptions options;
    options.model = model;
    options.dtype = dtype;
    return options;
  }

  ScratchFolder folder_;
};

/// Rows of two tokens: nothing but the first one predicts, and it sees only itself.
Trajectories rows_of_two_tokens(uint64_t seed, int64_t rows) {
  Rng rng(test_seed(seed));
  TrajectoriesBuilder builder;
  for (int64_t row = 0; row < rows; ++row) {
    TrajectoryRow given;
    for (int token = 0; token < 2; ++token)
      given.input_ids.push_back(static_cast<int32_t>(rng.between(0, kVocabSize - 1)));
    builder.append(given, kVocabSize);
  }
  return builder.finish();
}

TEST_P(VerifyTest, PassesWhereGradientsOfQueriesAndKeysAreZero) {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    const VerifyReport report = verify(rows_of_two_tokens(seed, seed % 3 + 1), options(at::kDouble));
    EXPECT_TRUE(report.passed) << "seed " << seed << ": " << to_json(report).dump();
    EXPECT_LE(report.grad_rel_error_max, 1e-12);
  }
}

TEST_P(VerifyTest, PassesInFloat64UnderEveryPlan) {
  for (const bool for_grpo : {false, true}) {
    const Trajectories trajectories = rows_to_verify(for_grpo);
    for (const PlanOptions& plan : plans(trajectories)) {
      VerifyOptions run = options(at::kDouble);
      run.plan = plan;
      if (for_grpo) run.objective.kind = ObjectiveKind::kGrpo;
      const VerifyReport report = verify(trajectories, run);
      SCOPED_TRACE(fmt::format("{} budget {} {}", to_string(plan.strategy), plan.token_budget,
                               to_json(report).dump()));
      EXPECT_TRUE(report.passed);
      EXPECT_LE(report.grad_rel_error_max, 1e-12);
      EXPECT_LE(report.loss_rel_error, 1e-12);
      EXPECT_LE(report.logprob_abs_error_max, 1e-12);
      EXPECT_TRUE(report.isolation_bitwise);
      EXPECT_EQ(report.dtype, "float64");
      EXPECT_EQ(report.flat_tokens, trajectories.num_tokens());
      EXPECT_LT(report.tree_tokens, report.flat_tokens);
      if (plan.token_budget == 0) {
        EXPECT_GT(report.isolation_trials, 0);
        EXPECT_EQ(report.encoded_tokens,
                  plan.strategy == Strategy::kSequencePacking ? report.flat_tokens : report.tree_tokens);
      }
    }
  }
}

/// Ranks that put what they receive in the wrong places.
class Misplacing : public Group {
 public:
  explicit Misplacing(const Group& ranks) : ranks_(ranks) {}
  int64_t rank() const override { return ranks_.rank(); }
  int64_t size() const override { return ranks_.size(); }
  at::Tensor gather(const at::Tensor& own) const override { return ranks_.gather(own); }
  std::function<at::Tensor()> exchange(const at::Tensor& rows, const std::vector<int64_t>& send,
                                       const std::vector<int64_t>& receive) const override {
    return [received = ranks_.exchange(rows, send, receive)] { return received().flip(-1); };
  }

 private:
  const Group& ranks_;
};

/// What each of several ranks reports.
std::vector<VerifyReport> verify_on_ranks(const Trajectories& trajectories, VerifyOptions options,
                                          int64_t ranks, bool misplaced = false) {
  std::vector<VerifyReport> reports(ranks);
  const std::vector<std::string> thrown = ThreadRanks(ranks).run([&](const Group& group) {
    const Misplacing misplacing(group);
    VerifyOptions own = options;
    own.group = misplaced ? &misplacing : &group;
    reports[group.rank()] = verify(trajectories, own);
  });
  for (const std::string& error : thrown) EXPECT_EQ(error, "");
  return reports;
}

TEST_P(VerifyTest, PassesOnSeveralRanks) {
  const Trajectories trajectories = rows_to_verify(true);
  for (const int64_t ranks : {2, 3, 20}) {  // 20: some without rows
    VerifyOptions run = options(at::kDouble);
    run.plan = {Strategy::kPartition, 7};
    if (ranks == 2) run.objective.kind = ObjectiveKind::kGrpo;
    const VerifyReport one = verify(trajectories, run);
    const std::vector<VerifyReport> reports = verify_on_ranks(trajectories, run, ranks);
    for (const VerifyReport& report : reports) {
      EXPECT_TRUE(report.passed) << ranks << " ranks: " << to_json(report).dump();
      EXPECT_LE(report.grad_rel_error_max, 1e-12);
      EXPECT_EQ(report.flat_tokens, one.flat_tokens);
      EXPECT_EQ(report.tree_tokens, one.tree_tokens);
      EXPECT_GE(report.encoded_tokens, one.tree_tokens);
      EXPECT_EQ(to_json(report).dump(), to_json(reports[0]).dump());
    }
  }
}

TEST_P(VerifyTest, FailsOnEveryRankWithWrongSums) {
  for (const VerifyReport& report :
       verify_on_ranks(rows_to_verify(false), options(at::kDouble), 2, /*misplaced=*/true)) {
    EXPECT_FALSE(report.passed);
    EXPECT_GT(report.grad_rel_error_max, 1e-3);
  }
}

/// Trajectories whose tree has so many tokens or more.
Trajectories mixed_trajectories(int64_t tree_tokens) {
  for (int64_t draws = 4;; ++draws) {
    Rng rng(test_seed(32));
    Trajectories trajectories =
        random_trajectories(rng, Shape::kMixed, {.vocab_size = kVocabSize, .draws = draws});
    if (forest_of(trajectories, {}).tree_tokens() >= tree_tokens) return trajectories;
  }
}

TEST_P(VerifyTest, PassesInLowerPrecisionByErrorRatio) {
  // Some hundred tokens and no parameter of few values: else ratios are those of single rounding errors,
  // which are anything (tests/error_ratio.h). Not many copies of a token: the per-trajectory run rounds each
  // by itself, so that their errors cancel in part.
  const Trajectories trajectories = mixed_trajectories(300);
  const auto passes = [&](at::ScalarType dtype, const PlanOptions& plan) {
    VerifyOptions run = options(dtype, /*wide=*/true);
    run.plan = plan;
    // An expert has few of the tokens and a decay few values, so the worst of their ratios is higher by
    // chance.
    if (has_experts(GetParam()) || has_recurrent_layers(GetParam())) run.max_error_ratio = 3;
    const VerifyReport report = verify(trajectories, run);
    SCOPED_TRACE(
        fmt::format("{} budget {} {}", to_string(plan.strategy), plan.token_budget, to_json(report).dump()));
    ASSERT_GE(report.tree_tokens, 300);
    EXPECT_TRUE(report.passed);
    EXPECT_GT(report.error_ratio_max, 0);
    EXPECT_LE(report.error_ratio_max, run.max_error_ratio);
    EXPECT_LE(report.error_ratio_median, 1.5);
    EXPECT_GT(report.grad_rel_error_max, 1e-12);  // it did run in the lower precision
    EXPECT_TRUE(report.isolation_bitwise);
  };
  // In each dtype the plan with most cuts and one of the others, such that the families together have all of
  // them; in float64 each family has all. With one kind of MLP each, every choice of products under the plan
  // with most cuts.
  const std::vector<PlanOptions> all = plans(trajectories);
  const size_t others = all.size() - 1;
  auto turn = static_cast<size_t>(GetParam());
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    passes(dtype, all.back());
    passes(dtype, all[turn % others]);
    turn += 2;
    if (GetParam() == Family::kLlama || GetParam() == Family::kQwen3Moe) {
      for_each_product_choice([&] { passes(dtype, all.back()); });
    }
  }
}

TEST_P(VerifyTest, FailsWhenTheToleranceIsBelowTheError) {
  VerifyOptions run = options(at::kFloat);
  run.max_error_ratio = 1e-3;
  EXPECT_FALSE(verify(rows_to_verify(false), run).passed);
  run = options(at::kDouble);
  run.max_error = 1e-19;
  EXPECT_FALSE(verify(rows_to_verify(false), run).passed);
}

TEST_P(VerifyTest, PassesWhereTheLossCancels) {
  // Ratios of 1 and advantages of a group that sum to nothing: the loss is 0 but for rounding, its gradient
  // is not.
  VerifyOptions run = options(at::kDouble);
  run.objective.kind = ObjectiveKind::kGrpo;
  run.isolation_trials = 0;
  Rng rng(test_seed(5));
  for (int trial = 0; trial < 5; ++trial) {
    TrajectoriesBuilder builder;
    for (int32_t row = 0; row < 5; ++row) {
      builder.append({.input_ids = {1, 2, 3, row, 4, 5, row}, .reward = rng.uniform(), .group_id = "g"});
    }
    const VerifyReport report = verify(builder.finish(), run);
    EXPECT_TRUE(report.passed) << to_json(report).dump();
    EXPECT_LT(std::abs(report.reference_loss), 1e-14);
  }
}

TEST_P(VerifyTest, ReportsTheKeysThatItPromises) {
  const Trajectories trajectories = rows_to_verify(false);
  EXPECT_EQ(keys(to_json(verify(trajectories, options(at::kDouble)))),
            (std::vector<std::string>{
                "dtype", "device", "loss_rel_error", "grad_rel_error_max", "grad_rel_error_worst_parameter",
                "logprob_abs_error_max", "isolation_bitwise", "isolation_trials", "flat_tokens",
                "tree_tokens", "encoded_tokens", "loss", "pad_token_id", "freeze_pad_embedding", "passed"}));
  const nlohmann::ordered_json low = to_json(verify(trajectories, options(at::kFloat)));
  for (const char* key : {"dtype", "loss_rel_error", "grad_rel_error_max", "grad_rel_error_worst_parameter",
                          "logprob_abs_error_max", "error_ratio_max", "isolation_bitwise", "flat_tokens",
                          "tree_tokens", "passed"}) {
    EXPECT_TRUE(low.contains(key)) << key;
  }
  EXPECT_EQ(low["dtype"], "float32");
}

// Trained tokens are shared by trajectories with different advantages, and by both sides of pairs.
TEST(VerifyObjectives, PassInFloat64WithEveryNormaliserUnderEveryStrategy) {
  const ScratchFolder folder;
  write_tiny_model(folder / "model", Family::kQwen3, kVocabSize, 9, at::kDouble);
  Rng rng(test_seed(41));
  const Trajectories drawn = rows_to_verify(/*for_grpo=*/true);
  for (const std::string& name : objective_names()) {
    const ObjectiveKind kind = objective_named(name).kind;
    for (int64_t trial = 0; trial < 5; ++trial) {
      VerifyOptions run;
      run.model = folder / "model";
      run.objective = random_objective(rng, kind);
      if (!is_preference(kind)) run.objective.normalize = static_cast<Normalize>(trial);
      const Trajectories trajectories = rows_for(run.objective, drawn, rng);
      const std::vector<PlanOptions> all = plans(trajectories);
      for (size_t i = static_cast<size_t>(trial % 2); i < all.size(); i += 2) {
        run.plan = all[i];
        run.isolation_trials = 1;
        const VerifyReport report = verify(trajectories, run);
        EXPECT_TRUE(report.passed) << fmt::format("{}; {} budget {}: {}", describe(run.objective),
                                                  to_string(run.plan.strategy), run.plan.token_budget,
                                                  to_json(report).dump());
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Families, VerifyTest, ::testing::ValuesIn(kFamilies),
                         [](const auto& info) { return to_string(info.param); });

}  // namespace
}  // namespace espalier::testing
