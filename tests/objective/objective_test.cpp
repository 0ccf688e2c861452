// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/objective.h"
#include "espalier/base/options.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "espalier/base/check.h"
#include "espalier/engine/step.h"
#include "tests/base/message_of.h"
#include "tests/engine/tiny_models.h"
#include "tests/objective/evaluate.h"
#include "tests/objective/random_objective.h"

namespace espalier::testing {
namespace {

struct Expected {
  std::vector<int64_t> positions;
  std::vector<double> coefficients;
};

// Rows 0 and 1 share tokens 0..2, row 2 repeats row 0, row 3 has no loss, row 4 stands alone.
Trajectories weighted() {
  TrajectoriesBuilder builder;
  builder.append({.input_ids = {1, 2, 3, 4}, .loss_weights = {5, 0, 1, 2}});
  builder.append({.input_ids = {1, 2, 3, 5}, .loss_weights = {5, 0.5, 3, 4}});
  builder.append({.input_ids = {1, 2, 3, 4}, .loss_weights = {5, 0, 7, 0}});
  builder.append({.input_ids = {8, 9}, .loss_weights = {1, 0}});
  builder.append({.input_ids = {6, 7}, .loss_weights = {0, 2}});
  return builder.finish();
}

void expect_terms(const ObjectiveOptions& options, const std::vector<Expected>& expected) {
  const Trajectories trajectories = weighted();
  const Forest forest = forest_of(trajectories, {});
  const Csr<Term> terms = step_terms(trajectories, all_rows(trajectories), forest, options);
  ASSERT_EQ(terms.num_rows(), static_cast<int64_t>(expected.size()));
  for (size_t k = 0; k < expected.size(); ++k) {
    ASSERT_EQ(terms.row_size(k), static_cast<int64_t>(expected[k].positions.size())) << "row " << k;
    for (size_t t = 0; t < expected[k].positions.size(); ++t) {
      EXPECT_EQ(terms.row(k)[t].position, expected[k].positions[t]) << "row " << k << " term " << t;
      EXPECT_DOUBLE_EQ(terms.row(k)[t].coefficient, expected[k].coefficients[t])
          << "row " << k << " term " << t;
    }
  }
}

constexpr double kSum = 1 + 2 + 0.5 + 3 + 4 + 7 + 2;  // 19.5
constexpr double kOnceSum = 1 + 2 + 0.5 + 4 + 2;      // 9.5

TEST(StepTerms, TokenSum) {
  expect_terms({}, {{{2, 3}, {1 / kSum, 2 / kSum}},
                    {{1, 2, 3}, {0.5 / kSum, 3 / kSum, 4 / kSum}},
                    {{2}, {7 / kSum}},
                    {{}, {}},
                    {{1}, {2 / kSum}}});
}

TEST(StepTerms, TokenOnce) {
  // Token 1 is first trained on by row 1, token 2 by row 0; all tokens of row 2 are already taken.
  expect_terms({.shared_targets = SharedTargets::kOnce}, {{{2, 3}, {1 / kOnceSum, 2 / kOnceSum}},
                                                          {{1, 3}, {0.5 / kOnceSum, 4 / kOnceSum}},
                                                          {{}, {}},
                                                          {{}, {}},
                                                          {{1}, {2 / kOnceSum}}});
}

TEST(StepTerms, SequenceSum) {
  // Four rows with loss, each with a quarter.
  expect_terms({.normalize = Normalize::kSequence}, {{{2, 3}, {1.0 / 3 / 4, 2.0 / 3 / 4}},
                                                     {{1, 2, 3}, {0.5 / 7.5 / 4, 3 / 7.5 / 4, 4 / 7.5 / 4}},
                                                     {{2}, {1.0 / 4}},
                                                     {{}, {}},
                                                     {{1}, {1.0 / 4}}});
}

TEST(StepTerms, SequenceOnce) {
  expect_terms({.shared_targets = SharedTargets::kOnce, .normalize = Normalize::kSequence},
               {{{2, 3}, {1.0 / 3 / 3, 2.0 / 3 / 3}},
                {{1, 3}, {0.5 / 4.5 / 3, 4 / 4.5 / 3}},
                {{}, {}},
                {{}, {}},
                {{1}, {1.0 / 3}}});
}

TEST(StepTerms, Constant) {
  expect_terms({.normalize = Normalize::kConstant, .normalize_constant = 4},
               {{{2, 3}, {0.25, 0.5}}, {{1, 2, 3}, {0.125, 0.75, 1}}, {{2}, {1.75}}, {{}, {}}, {{1}, {0.5}}});
}

TEST(StepTerms, MeanOfSums) {
  expect_terms({.normalize = Normalize::kSequenceSum},
               {{{2, 3}, {0.25, 0.5}}, {{1, 2, 3}, {0.125, 0.75, 1}}, {{2}, {1.75}}, {{}, {}}, {{1}, {0.5}}});
}

TEST(StepTerms, Group) {
  // Rows 0 and 2 are a group with weights 3 + 7; rows 1 and 4 are separate groups: three with loss.
  Trajectories trajectories = weighted();
  trajectories.group_id = {"a", "", "a", "b", ""};
  const Csr<Term> terms = step_terms(trajectories, all_rows(trajectories), forest_of(trajectories, {}),
                                     {.normalize = Normalize::kGroup});
  EXPECT_DOUBLE_EQ(terms.row(0)[0].coefficient, 1.0 / 10 / 3);
  EXPECT_DOUBLE_EQ(terms.row(0)[1].coefficient, 2.0 / 10 / 3);
  EXPECT_DOUBLE_EQ(terms.row(1)[1].coefficient, 3 / 7.5 / 3);
  EXPECT_DOUBLE_EQ(terms.row(2)[0].coefficient, 7.0 / 10 / 3);
  EXPECT_DOUBLE_EQ(terms.row(4)[0].coefficient, 1.0 / 3);
}

TEST(StepTerms, CountOnlyTheRowsOfTheStep) {
  const Trajectories trajectories = weighted();
  const std::vector<int64_t> rows{4, 0};
  const Csr<Term> terms = step_terms(trajectories, rows, forest_of(trajectories, rows), {});
  ASSERT_EQ(terms.num_rows(), 2);
  EXPECT_DOUBLE_EQ(terms.row(0)[0].coefficient, 2.0 / 5);
  EXPECT_DOUBLE_EQ(terms.row(1)[0].coefficient, 1.0 / 5);
}

// Sums of parts, as several processes would have them, divide as those of the whole.
TEST(StepTerms, SumsOfPartsDivideAsTheWhole) {
  Trajectories trajectories = weighted();
  trajectories.group_id = {"a", "", "a", "b", "c"};  // `a` stands in both parts, `b` has no loss
  const std::vector<std::vector<int64_t>> rows_of_parts{{0, 1}, {2, 3, 4}};
  for (const Normalize normalize : {Normalize::kToken, Normalize::kSequence, Normalize::kSequenceSum,
                                    Normalize::kGroup, Normalize::kConstant}) {
    const ObjectiveOptions options{.normalize = normalize, .normalize_constant = 4};
    const std::vector<int64_t> all = all_rows(trajectories);
    const Csr<Term> whole = step_terms(trajectories, all, forest_of(trajectories, all), options);
    std::vector<Csr<Term>> parts;
    LossSums sums;
    for (const std::vector<int64_t>& rows : rows_of_parts) {
      parts.push_back(weighted_terms(trajectories, rows, forest_of(trajectories, rows), {}));
      sums += loss_sums(trajectories, rows, parts.back());
    }
    EXPECT_EQ(sums.weight, kSum);
    EXPECT_EQ(sums.rows_with_loss, 4);
    EXPECT_EQ(sums.groups_with_loss(), 3);
    size_t next = 0;
    for (size_t part = 0; part < parts.size(); ++part) {
      divide_terms(trajectories, rows_of_parts[part], sums, options, &parts[part]);
      for (const Term& term : parts[part].values)
        EXPECT_DOUBLE_EQ(term.coefficient, whole.values[next++].coefficient);
    }
    EXPECT_EQ(next, whole.values.size());
  }
}

TEST(StepTerms, NoLossAtAllIsAnError) {
  const Trajectories trajectories = weighted();
  const std::vector<int64_t> rows{3};
  EXPECT_THROW(step_terms(trajectories, rows, forest_of(trajectories, rows), {}), InputError);
}

TEST(StepTerms, AllTermsAreEveryTokenButTheFirst) {
  const Trajectories trajectories = weighted();
  const Csr<Term> terms = all_terms(trajectories, std::vector<int64_t>{3, 0});
  ASSERT_EQ(terms.offsets, (std::vector<int64_t>{0, 1, 4}));
  EXPECT_EQ(terms.values[3].position, 3);
  EXPECT_EQ(terms.values[3].coefficient, 1);
}

TEST(ObjectiveValueTest, SftIsWeightedCrossEntropy) {
  const Result result = evaluate({}, {{-1, 0, 0, false, 0.25}, {-3, 0, 0, false, 0.5}});
  EXPECT_DOUBLE_EQ(result.value.loss.item<double>(), 1.75);
  EXPECT_EQ(result.gradient, (std::vector<double>{-0.25, -0.5}));
  EXPECT_TRUE(result.value.metrics.empty());
}

constexpr ObjectiveOptions kClipped{.kind = ObjectiveKind::kGrpo, .clip_low = 0.2, .clip_high = 0.3};

TEST(ObjectiveValueTest, GrpoInsideTheClipIsTheRatio) {
  const double ratio = std::exp(0.1);
  const Result result = evaluate(kClipped, {{-1, 2, -1.1, true, 0.5}, {-1, -2, -1.1, true, 0.5}});
  EXPECT_NEAR(result.value.loss.item<double>(), 0, 1e-15);
  EXPECT_NEAR(result.gradient[0], -0.5 * ratio * 2, 1e-14);
  EXPECT_NEAR(result.gradient[1], 0.5 * ratio * 2, 1e-14);
  EXPECT_EQ(result.metric("clip_fraction"), 0);
  EXPECT_NEAR(result.metric("ratio_mean"), 2 * ratio, 1e-14);
  EXPECT_NEAR(result.metric("ratio_min"), ratio, 1e-14);
  EXPECT_NEAR(result.metric("mismatch_kl"), 2 * (ratio - 1 - 0.1), 1e-14);
}

TEST(ObjectiveValueTest, GrpoClipsOnlyWhatWouldGoFurther) {
  const double high = std::exp(1.0), low = std::exp(-1.0);
  struct Case {
    double logprob, advantage, loss, gradient;
    int64_t clipped;
  };
  // Old log-prob -2 throughout. Upwards with gain, downwards with loss: clipped, no gradient. The other two
  // are pulled back with the full ratio.
  const Case cases[] = {
      {-1, 2, -1.3 * 2, 0, 1},
      {-1, -2, high * 2, high * 2, 0},
      {-3, 2, -low * 2, -low * 2, 0},
      {-3, -2, 0.8 * 2, 0, 1},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(fmt::format("log-prob {} advantage {}", c.logprob, c.advantage));
    const Result result = evaluate(kClipped, {{c.logprob, c.advantage, -2, true, 3}});
    EXPECT_NEAR(result.value.loss.item<double>(), 3 * c.loss, 1e-13);
    EXPECT_NEAR(result.gradient[0], 3 * c.gradient, 1e-13);
    EXPECT_EQ(result.metric("clip_fraction"), c.clipped);
  }
}

TEST(ObjectiveValueTest, GrpoWithoutBehaviourLogprobsHasRatioOne) {
  // Loss -A, gradient -A d log p, whatever stands in the place of the old log-prob.
  const Result result = evaluate(kClipped, {{-1, 2, 0, false, 0.5}, {-4, -3, 0, false, 0.25}});
  EXPECT_DOUBLE_EQ(result.value.loss.item<double>(), -0.5 * 2 + 0.25 * 3);
  EXPECT_EQ(result.gradient, (std::vector<double>{-1, 0.75}));
  EXPECT_EQ(result.metric("clip_fraction"), 0);
  EXPECT_EQ(result.metric("ratio_mean"), 2);
  EXPECT_EQ(result.metric("mismatch_kl"), 0);
}

TEST(ObjectiveFlags, Parse) {
  EXPECT_EQ(objective_named("sft").kind, ObjectiveKind::kSft);
  EXPECT_EQ(objective_named("grpo").kind, ObjectiveKind::kGrpo);
  ObjectiveOptions options;
  parse_normalize("sequence", &options);
  EXPECT_EQ(options.normalize, Normalize::kSequence);
  parse_normalize("2.5e3", &options);
  EXPECT_EQ(options.normalize, Normalize::kConstant);
  EXPECT_EQ(options.normalize_constant, 2500);
  parse_normalize("token", &options);
  EXPECT_EQ(options.normalize, Normalize::kToken);
  for (const char* text : {"token", "sequence", "sequence-sum", "group", "2.5"}) {
    parse_normalize(text, &options);
    EXPECT_EQ(normalize_text(options), text);
  }
}

// The objective chooses the defaults of all others, wherever it is given.
TEST(ObjectiveFlags, FollowFromTheObjective) {
  const auto options_of = [](const NamedTexts& texts) {
    ObjectiveOptions options;
    OptionList list;
    add_objective_options(&options, &list);
    list.set(texts);
    return options;
  };
  const ObjectiveOptions dapo = options_of({{"clip-low", "0.1"}, {"objective", "dapo"}});
  EXPECT_EQ(dapo.clip_low, 0.1);
  EXPECT_EQ(dapo.clip_high, default_options(ObjectiveKind::kDapo).clip_high);
  EXPECT_TRUE(options_of({{"objective", "grpo"}}).scale_rewards);
  EXPECT_FALSE(options_of({{"objective", "grpo"}, {"baseline", "running"}}).scale_rewards);
  EXPECT_TRUE(options_of({{"objective", "reinforce"}, {"scale-rewards", "group"}}).scale_rewards);
  const nlohmann::ordered_json settings = objective_settings(dapo);
  EXPECT_EQ(settings["objective"], "dapo");
  EXPECT_EQ(settings["clip-high"], 0.28);
  EXPECT_EQ(settings["scale-rewards"], true);
  EXPECT_FALSE(settings.contains("log-entropy"));
}

TEST(ObjectiveFlags, RefuseOtherWords) {
  EXPECT_NE(message_of<InputError>([] { objective_named("sgd"); }).find("received `sgd`"), std::string::npos);
  ObjectiveOptions options;
  OptionList list;
  add_objective_options(&options, &list);
  EXPECT_EQ(message_of<InputError>([&] { list.set({{"shared-targets", ""}}); }),
            "--shared-targets: expected sum or once, received ``");
  for (const char* text : {"", "0", "-1", "nan", "inf", "tokens", "3x", "1e999"}) {
    ObjectiveOptions options;
    EXPECT_THROW(parse_normalize(text, &options), InputError) << text;
  }
}

}  // namespace
}  // namespace espalier::testing
