// SPDX-License-Identifier: Apache-2.0
#include "espalier/train/train_options.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/base/safetensors.h"
#include "espalier/model/model.h"
#include "espalier/model/weights/tensor_bytes.h"
#include "espalier/train/optimizer/diagnosis.h"
#include "tests/base/message_of.h"
#include "tests/base/scratch_folder.h"
#include "tests/engine/tiny_models.h"
#include "tests/test_seed.h"

namespace espalier::testing {
namespace {

// Gradients that a test sets by hand.
void set_gradients(const Decoder& decoder, const std::vector<at::Tensor>& values) {
  decoder.zero_gradients();
  for (size_t i = 0; i < values.size(); ++i) {
    const at::Tensor& value = decoder.parameters()[i].value;
    const at::Tensor rounded = values[i].to(value.scalar_type(), false, /*copy=*/true);
    at::Tensor(value).mutable_grad() =
        rounded.scalar_type() == at::kBFloat16 ? rounded.to(at::kFloat) : rounded;
  }
}

std::vector<at::Tensor> random_gradients(const Decoder& decoder, Rng& rng) {
  std::vector<at::Tensor> gradients;
  for (const Parameter& parameter : decoder.parameters()) {
    at::Tensor values = at::empty(parameter.value.sizes(), at::kDouble);
    for (int64_t i = 0; i < values.numel(); ++i) values.mutable_data_ptr<double>()[i] = rng.normal();
    gradients.push_back(values);
  }
  return gradients;
}

std::vector<at::Tensor> weights_of(const Decoder& decoder) {
  std::vector<at::Tensor> weights;
  for (const Parameter& parameter : decoder.parameters()) weights.push_back(parameter.value.detach().clone());
  return weights;
}

double largest_difference(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    largest = std::max(largest, (a[i].to(at::kDouble) - b[i].to(at::kDouble)).abs().max().item<double>());
  }
  return largest;
}

bool same_weights(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (!at::equal(a[i], b[i])) return false;
  }
  return true;
}

// Algorithm 2 of Loshchilov and Hutter (ICLR 2019) on plain doubles, its decay multiplied by the learning
// rate as LibTorch has it.
struct PlainAdamW {
  std::vector<double> p, m, v;
  double t = 0;

  void step(const std::vector<double>& g, double rate, double decay, const OptimizerOptions& options) {
    ++t;
    for (size_t i = 0; i < p.size(); ++i) {
      m[i] = options.beta1 * m[i] + (1 - options.beta1) * g[i];
      v[i] = options.beta2 * v[i] + (1 - options.beta2) * g[i] * g[i];
      const double m_hat = m[i] / (1 - std::pow(options.beta1, t));
      const double v_hat = v[i] / (1 - std::pow(options.beta2, t));
      p[i] -= rate * decay * p[i] + rate * m_hat / (std::sqrt(v_hat) + options.eps);
    }
  }
};

std::vector<double> doubles(const at::Tensor& tensor) {
  const at::Tensor values = tensor.to(at::kDouble).contiguous();
  return {values.const_data_ptr<double>(), values.const_data_ptr<double>() + values.numel()};
}

// As training does it (train/optimizer/step_trainer.cpp). Returns the norm before clipping.
double update(Optimizer* optimizer, double learning_rate) {
  const double norm = optimizer->gradient_norm();
  optimizer->update(learning_rate, norm);
  return norm;
}

double adamw_error(at::ScalarType dtype) {
  const Decoder decoder = tiny_decoder(tiny_config(Family::kQwen2, 11), 3, dtype);
  const OptimizerOptions options{
      .weight_decay = 0.1, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6, .max_grad_norm = 0};
  std::vector<PlainAdamW> plain;
  for (const at::Tensor& weight : weights_of(decoder)) {
    const std::vector<double> p = doubles(weight);
    plain.push_back({p, std::vector<double>(p.size()), std::vector<double>(p.size())});
  }
  Optimizer optimizer(decoder, options);
  Rng rng(test_seed(11));
  for (int step = 0; step < 20; ++step) {
    const double rate = 0.05 / (1 + step);
    const std::vector<at::Tensor> values = random_gradients(decoder, rng);
    set_gradients(decoder, values);
    update(&optimizer, rate);
    for (size_t i = 0; i < plain.size(); ++i) {
      plain[i].step(doubles(values[i].to(dtype)), rate, values[i].dim() >= 2 ? options.weight_decay : 0,
                    options);
    }
  }
  double worst = 0;
  for (size_t i = 0; i < plain.size(); ++i) {
    const std::vector<double> p = doubles(decoder.parameters()[i].value.detach());
    for (size_t j = 0; j < p.size(); ++j) worst = std::max(worst, std::abs(p[j] - plain[i].p[j]));
  }
  return worst;
}

TEST(OptimizerTest, AdamWIsThePapersInFloat64) {
  EXPECT_LT(adamw_error(at::kDouble), 1e-13);
}

TEST(OptimizerTest, AdamWIsThePapersInFloat32) {
  EXPECT_LT(adamw_error(at::kFloat), 2e-6);
}

TEST(OptimizerTest, SgdSubtractsTheGradientAndDecaysMatricesOnly) {
  for (const Family family : {Family::kQwen2, Family::kGptOss}) {
    const Decoder decoder = tiny_decoder(tiny_config(family, 11), 3);
    Optimizer optimizer(decoder, {.kind = OptimizerKind::kSgd, .weight_decay = 0.1, .max_grad_norm = 0});
    Rng rng(test_seed(12));
    const std::vector<at::Tensor> values = random_gradients(decoder, rng);
    std::vector<at::Tensor> expected = weights_of(decoder);
    int vectors = 0, tables_of_biases = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      const bool is_bias = decoder.parameters()[i].name.ends_with("bias");
      vectors += expected[i].dim() == 1;
      tables_of_biases += is_bias && expected[i].dim() == 2;
      const double decay = expected[i].dim() >= 2 && !is_bias ? 0.1 : 0;
      expected[i] = expected[i] - 0.5 * (values[i] + decay * expected[i]);
    }
    EXPECT_GT(vectors, 8);
    EXPECT_EQ(tables_of_biases, family == Family::kGptOss ? 4 : 0);
    set_gradients(decoder, values);
    update(&optimizer, 0.5);
    EXPECT_LT(largest_difference(weights_of(decoder), expected), 1e-15);
  }
}

TEST(OptimizerTest, ClipsTheGlobalNorm) {
  const Decoder decoder = tiny_decoder(tiny_config(Family::kLlama, 11), 3);
  Rng rng(test_seed(13));
  const std::vector<at::Tensor> values = random_gradients(decoder, rng);
  double squares = 0;
  for (const at::Tensor& value : values) squares += value.square().sum().item<double>();
  const double norm = std::sqrt(squares);
  for (const double limit : {0.25 * norm, 4 * norm}) {
    const std::vector<at::Tensor> before = weights_of(decoder);
    Optimizer optimizer(decoder, {.kind = OptimizerKind::kSgd, .max_grad_norm = limit});
    set_gradients(decoder, values);
    EXPECT_NEAR(update(&optimizer, 1), norm, 1e-12 * norm);
    const double scale = std::min(1.0, limit / (norm + 1e-6));
    std::vector<at::Tensor> expected;
    for (size_t i = 0; i < values.size(); ++i) expected.push_back(before[i] - scale * values[i]);
    EXPECT_LT(largest_difference(weights_of(decoder), expected), 1e-14);
  }
}

// Norm by norm, in float64, squared and summed in order: bitwise identical, whatever the dtype of the
// gradients.
TEST(OptimizerTest, TheGlobalNormIsThatOfTheTensorsOneByOne) {
  EXPECT_EQ(global_norm({}), 0);
  EXPECT_EQ(global_norm({at::Tensor()}), 0);
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat}) {
    const Decoder decoder = tiny_decoder(tiny_config(Family::kQwen2, 11), 3, dtype);
    Rng rng(test_seed(17));
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& values : random_gradients(decoder, rng)) gradients.push_back(values.to(dtype));
    gradients[1].reset();
    gradients.push_back(at::empty({0}, dtype));
    gradients.push_back(at::full({70'000}, 0.1, dtype));
    double squares = 0;
    for (const at::Tensor& gradient : gradients) {
      if (!gradient.defined()) continue;
      const double norm = gradient.norm(2, at::kDouble).item<double>();
      squares += norm * norm;
    }
    EXPECT_EQ(global_norm(gradients), std::sqrt(squares));
    gradients[2].view(-1)[0] = std::numeric_limits<double>::quiet_NaN();
    EXPECT_TRUE(std::isnan(global_norm(gradients)));
  }
}

TEST(OptimizerTest, ANormThatIsNotFiniteChangesNothing) {
  for (const double bad :
       {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    const Decoder decoder = tiny_decoder(tiny_config(Family::kLlama, 11), 3);
    const Decoder twin = cast_decoder(decoder, at::kDouble);
    Optimizer optimizer(decoder, {}), twin_optimizer(twin, {});
    Rng rng(test_seed(14));
    std::vector<at::Tensor> values = random_gradients(decoder, rng);
    set_gradients(decoder, values);
    update(&optimizer, 0.1);
    set_gradients(twin, values);
    update(&twin_optimizer, 0.1);

    std::vector<at::Tensor> spoilt = values;
    spoilt[2] = values[2].clone();
    spoilt[2].view(-1)[1] = bad;
    set_gradients(decoder, spoilt);
    EXPECT_THROW(update(&optimizer, 0.1), InputError);
    EXPECT_TRUE(same_weights(weights_of(decoder), weights_of(twin)));
    // Moments and step count are as before, too: the next step equals the twin's.
    set_gradients(decoder, values);
    set_gradients(twin, values);
    update(&optimizer, 0.1);
    update(&twin_optimizer, 0.1);
    EXPECT_TRUE(same_weights(weights_of(decoder), weights_of(twin)));
  }
}

// Finite gradients whose squares, or whose product with the learning rate, float32 cannot hold.
TEST(OptimizerTest, UpdatesThatWouldOverflowAreRefusedBeforeAnythingChanges) {
  struct Case {
    OptimizerKind kind;
    double gradient, rate;
    bool overflows;
  };
  for (const Case& c :
       {Case{OptimizerKind::kAdamW, 1e20, 0.1, true}, Case{OptimizerKind::kAdamW, 1e15, 0.1, false},
        Case{OptimizerKind::kSgd, 1e35, 1e5, true}, Case{OptimizerKind::kSgd, 1e25, 1e5, false}}) {
    const Decoder decoder = tiny_decoder(tiny_config(Family::kLlama, 11), 3, at::kFloat);
    const Decoder before = cast_decoder(decoder, at::kFloat);
    Optimizer optimizer(decoder, {.kind = c.kind, .max_grad_norm = 0});
    Rng rng(15);
    std::vector<at::Tensor> values = random_gradients(decoder, rng);
    for (at::Tensor& value : values) value = (value * c.gradient).to(at::kFloat);
    set_gradients(decoder, values);
    EXPECT_TRUE(std::isfinite(optimizer.gradient_norm()));
    const std::string message = message_of<NonFiniteError>([&] { update(&optimizer, c.rate); });
    EXPECT_EQ(message.find("would overflow float32") != std::string::npos, c.overflows) << message;
    EXPECT_EQ(same_weights(weights_of(decoder), weights_of(before)), c.overflows);
    for (const Parameter& entry : optimizer.state()) EXPECT_EQ(nonfinite_text(entry.value), "") << entry.name;
    EXPECT_EQ(nonfinite_parameters(decoder), "");
  }
}

// Settings with which weights that are finite would no longer be.
TEST(OptimizerTest, SettingsThatWouldBreakWeightsAreRefusedBeforeAnythingChanges) {
  struct Case {
    at::ScalarType dtype;
    OptimizerOptions options;
    double rate;
    const char* refused;  // a part of the message
  };
  for (const Case& c :
       {Case{at::kFloat, {.eps = 1e-46}, 0.1, "eps 1e-46 is below"},
        Case{at::kBFloat16, {.eps = 1e-46}, 0.1, "eps 1e-46 is below"},
        Case{at::kDouble, {.eps = 1e-46}, 0.1, ""},
        Case{at::kDouble, {.eps = 1e-310}, 0.1, "eps 1e-310 is below"},
        Case{at::kFloat, {.eps = 1e-12}, 0.1, ""},
        Case{at::kFloat, {.weight_decay = 1e40}, 0.1, "weight decay 1e+40"},
        Case{at::kFloat, {.weight_decay = 1e30}, 0.1, ""},
        Case{at::kFloat, {.kind = OptimizerKind::kSgd, .weight_decay = 1e40}, 0.1, "weight decay 1e+40"},
        Case{at::kFloat, {.beta1 = 0.9, .beta2 = 0.9, .eps = 1e-30}, 1e-2, ""},
        Case{at::kFloat, {.beta1 = 0.99, .beta2 = 0, .eps = 1e-30}, 1e-2, "would overflow"}}) {
    const Decoder decoder = tiny_decoder(tiny_config(Family::kLlama, 11), 3, c.dtype);
    const Decoder before = cast_decoder(decoder, c.dtype);
    Optimizer optimizer(decoder, c.options);
    // Of some weights there is no gradient, so that their second moments are 0.
    std::vector<at::Tensor> values;
    for (const Parameter& parameter : decoder.parameters()) {
      values.push_back(at::zeros_like(parameter.value, c.dtype == at::kBFloat16 ? at::kFloat : c.dtype));
      values.back().view(-1)[0] = 1;
    }
    set_gradients(decoder, values);
    const std::string message = message_of<NonFiniteError>([&] { update(&optimizer, c.rate); });
    EXPECT_EQ(message.empty(), *c.refused == 0) << message;
    EXPECT_NE(message.find(c.refused), std::string::npos) << message;
    EXPECT_EQ(same_weights(weights_of(decoder), weights_of(before)), !message.empty());
    for (const Parameter& entry : optimizer.state()) EXPECT_EQ(nonfinite_text(entry.value), "") << entry.name;
    EXPECT_EQ(nonfinite_parameters(decoder), "");
  }
}

TEST(OptimizerTest, OptionsOutOfRangeAreRefused) {
  const Decoder decoder = tiny_decoder(tiny_config(Family::kLlama, 11), 3);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const OptimizerOptions& options :
       {OptimizerOptions{.beta1 = 1}, OptimizerOptions{.beta2 = 1}, OptimizerOptions{.beta1 = nan},
        OptimizerOptions{.weight_decay = nan}, OptimizerOptions{.eps = 0},
        OptimizerOptions{.max_grad_norm = nan}}) {
    EXPECT_THROW(Optimizer(decoder, options), InputError);
  }
}

TEST(OptimizerTest, AStateThatIsNotFiniteIsNotSaved) {
  const ScratchFolder folder;
  const Decoder decoder = tiny_decoder(tiny_config(Family::kLlama, 11), 3);
  Optimizer optimizer(decoder, {});
  Rng rng(16);
  set_gradients(decoder, random_gradients(decoder, rng));
  update(&optimizer, 0.1);
  save_state(optimizer.state(), folder / "good");
  std::string text = read_text(folder / "good");
  {
    const SafetensorsFile file(folder / "good");
    const TensorView& moments = file.at("exp_avg_sq.model.norm.weight");
    const double nan = std::numeric_limits<double>::quiet_NaN();
    std::memcpy(text.data() + (moments.bytes.data() - file.mapping()->bytes().data()), &nan, sizeof nan);
  }
  write_text(folder / "bad", text);
  OptimizerState state = optimizer.state();
  state.back().value.fill_(std::numeric_limits<double>::infinity());
  for (const std::string& message :
       {message_of<NonFiniteError>([&] { Optimizer(decoder, {}).load(folder / "bad"); }),
        message_of<NonFiniteError>([&] { save_state(state, folder / "out"); })}) {
    EXPECT_TRUE(message.starts_with("optimiser state: `exp_avg_sq.model.norm.weight` holds ")) << message;
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "out"));
}

TEST(OptimizerTest, MasterWeightsGatherWhatBfloat16CannotHold) {
  const Decoder decoder = tiny_decoder(tiny_config(Family::kLlama, 11), 3, at::kBFloat16);
  const size_t norm = decoder.parameters().size() - 1;  // model.norm.weight, near 1
  at::Tensor weight = decoder.parameters()[norm].value.detach();
  weight.fill_(1);
  Optimizer optimizer(decoder, {.kind = OptimizerKind::kSgd, .max_grad_norm = 0});
  std::vector<at::Tensor> values;
  for (const Parameter& parameter : decoder.parameters())
    values.push_back(at::zeros_like(parameter.value, at::kDouble));
  values[norm].fill_(0x1p-12);
  // Below 1 bfloat16 has steps of 2^-8: one update of 2^-12 is lost in it, 16 of them are one step.
  for (int step = 1; step <= 16; ++step) {
    set_gradients(decoder, values);
    update(&optimizer, 1);
    if (step <= 7) {
      EXPECT_TRUE(at::equal(weight, at::ones_like(weight))) << step;
    }
  }
  EXPECT_TRUE(at::equal(weight, at::full_like(weight, 1 - 0x1p-8)));
}

TEST(OptimizerTest, ParametersWithoutGradientStayAsTheyAre) {
  const Decoder decoder = tiny_decoder(tiny_config(Family::kLlama, 11), 3);
  const std::vector<at::Tensor> before = weights_of(decoder);
  Optimizer optimizer(decoder, {.weight_decay = 0.5});
  Rng rng(test_seed(15));
  std::vector<at::Tensor> values = random_gradients(decoder, rng);
  values.resize(1);
  set_gradients(decoder, values);
  update(&optimizer, 0.1);
  const std::vector<at::Tensor> after = weights_of(decoder);
  EXPECT_FALSE(at::equal(after[0], before[0]));
  for (size_t i = 1; i < after.size(); ++i) EXPECT_TRUE(at::equal(after[i], before[i]));
}

void expect_round_trip(at::ScalarType dtype, OptimizerKind kind) {
  const ScratchFolder folder;
  const OptimizerOptions options{.kind = kind, .weight_decay = 0.01};
  const Decoder decoder = tiny_decoder(tiny_config(Family::kQwen3, 11), 3, dtype);
  Optimizer optimizer(decoder, options);
  Rng rng(test_seed(16));
  for (int step = 0; step < 3; ++step) {
    set_gradients(decoder, random_gradients(decoder, rng));
    update(&optimizer, 0.01);
  }
  save_state(optimizer.state(), folder / "state.safetensors");

  // Another model of the same kind: weights are the checkpoint's, moments and masters the file's.
  const Decoder other = cast_decoder(decoder, dtype);
  Optimizer resumed(other, options);
  resumed.load(folder / "state.safetensors");
  const std::vector<at::Tensor> values = random_gradients(decoder, rng);
  set_gradients(decoder, values);
  set_gradients(other, values);
  update(&optimizer, 0.01);
  update(&resumed, 0.01);
  EXPECT_TRUE(same_weights(weights_of(decoder), weights_of(other)));
}

TEST(OptimizerTest, SavedStateContinuesBitForBit) {
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    for (const OptimizerKind kind : {OptimizerKind::kAdamW, OptimizerKind::kSgd})
      expect_round_trip(dtype, kind);
  }
}

TEST(OptimizerTest, StateOfAnotherRunIsRefused) {
  const ScratchFolder folder;
  const DecoderConfig config = tiny_config(Family::kLlama, 11);
  const Decoder fp32 = tiny_decoder(config, 3, at::kFloat), fp64 = tiny_decoder(config, 3, at::kDouble);
  const Decoder larger = tiny_decoder(tiny_config(Family::kLlama, 12), 3, at::kFloat);
  save_state(Optimizer(fp32, {}).state(), folder / "state.safetensors");
  const auto load = [&](const Decoder& decoder, OptimizerKind kind) {
    return message_of<InputError>(
        [&] { Optimizer(decoder, {.kind = kind}).load(folder / "state.safetensors"); });
  };
  EXPECT_EQ(load(fp32, OptimizerKind::kAdamW), "");
  EXPECT_NE(load(fp32, OptimizerKind::kSgd).find("same optimizer"), std::string::npos);
  EXPECT_NE(load(fp64, OptimizerKind::kAdamW).find("expected F64"), std::string::npos);
  EXPECT_NE(load(larger, OptimizerKind::kAdamW).find("exp_avg.model.embed_tokens.weight"), std::string::npos);
}

TEST(Schedule, FactorsByHand) {
  struct Case {
    SchedulerKind kind;
    int64_t step, steps, warmup;
    double factor;
  };
  const Case cases[] = {
      {SchedulerKind::kConstant, 0, 10, 0, 1},
      {SchedulerKind::kConstant, 9, 10, 0, 1},
      {SchedulerKind::kConstant, 0, 10, 3, 0.25},
      {SchedulerKind::kConstant, 2, 10, 3, 0.75},
      {SchedulerKind::kConstant, 3, 10, 3, 1},
      {SchedulerKind::kLinear, 0, 10, 0, 1},
      {SchedulerKind::kLinear, 4, 10, 0, 0.6},
      {SchedulerKind::kLinear, 10, 10, 0, 0},
      {SchedulerKind::kLinear, 2, 12, 2, 1},
      {SchedulerKind::kLinear, 7, 12, 2, 0.5},
      {SchedulerKind::kCosine, 0, 8, 0, 1},
      {SchedulerKind::kCosine, 4, 8, 0, 0.5},
      {SchedulerKind::kCosine, 2, 8, 0, 0.5 + 0.25 * std::sqrt(2.0)},
      {SchedulerKind::kCosine, 8, 8, 0, 0},
      {SchedulerKind::kCosine, 1, 10, 4, 0.4},
      {SchedulerKind::kLinear, 5, 5, 5, 1},
  };
  for (const Case& c : cases) {
    EXPECT_NEAR(schedule_factor(c.kind, c.step, c.steps, c.warmup), c.factor, 1e-15)
        << static_cast<int>(c.kind) << " " << c.step << "/" << c.steps << " warm-up " << c.warmup;
  }
}

TEST(Schedule, WordsAreOptions) {
  TrainOptions options;
  OptionList list;
  add_optimizer_options(&options, &list, /*schedules=*/true);
  list.set({{"scheduler", "cosine"}, {"optimizer", "sgd"}});
  EXPECT_EQ(options.scheduler, SchedulerKind::kCosine);
  EXPECT_EQ(options.optimizer.kind, OptimizerKind::kSgd);
  EXPECT_EQ(message_of<InputError>([&] { list.set({{"scheduler", "step"}}); }),
            "--scheduler: expected constant, linear or cosine, received `step`");
  EXPECT_EQ(message_of<InputError>([&] { list.set({{"optimizer", "Adam"}}); }),
            "--optimizer: expected adamw or sgd, received `Adam`");
}

}  // namespace
}  // namespace espalier::testing
