// SPDX-License-Identifier: Apache-2.0
// The parts that ranks have of tensors and of the state of an optimiser, and files of them.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "espalier/base/file.h"
#include "espalier/config/lora.h"
#include "espalier/model/weights/rank_files.h"
#include "espalier/model/weights/tensor_bytes.h"
#include "espalier/runtime/tensor_memory.h"
#include "espalier/train/optimizer/optimizer.h"
#include "tests/base/message_of.h"
#include "tests/base/scratch_folder.h"
#include "tests/distributed/thread_ranks.h"
#include "tests/engine/tiny_models.h"

namespace espalier::testing {
namespace {

constexpr int64_t kVocab = 19;

/// One of several ranks by itself: nothing that it does may need the others.
class Single : public Group {
 public:
  Single(int64_t rank, int64_t size) : rank_(rank), size_(size) {}
  int64_t rank() const override { return rank_; }
  int64_t size() const override { return size_; }
  at::Tensor gather(const at::Tensor&) const override { throw std::logic_error("gather"); }
  std::function<at::Tensor()> exchange(const at::Tensor&, const std::vector<int64_t>&,
                                       const std::vector<int64_t>&) const override {
    throw std::logic_error("exchange");
  }

 private:
  int64_t rank_, size_;
};

TEST(PartsOfRanks, PartsAreTheTensor) {
  for (const int64_t numel : {1, 63, 64, 65, 640, 1000}) {
    for (int64_t ranks = 1; ranks <= 5; ++ranks) {
      const at::Tensor tensor = at::arange(numel).view({numel, 1});
      std::vector<at::Tensor> parts;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const at::Tensor part = Single(rank, ranks).part(tensor);
        EXPECT_EQ(part.storage().data(), tensor.storage().data());
        EXPECT_LE(part.numel(), numel / ranks + 64);
        parts.push_back(part.view(-1));
      }
      EXPECT_TRUE(at::equal(at::cat(parts), tensor.view(-1))) << numel << " of " << ranks;
    }
  }
}

// Whatever the shapes, dtypes and buckets.
TEST(PartsOfRanks, SumsAreMadeInTheOrderOfTheRanks) {
  constexpr int64_t kRanks = 3;
  std::vector<std::vector<at::Tensor>> given(kRanks);
  for (std::vector<at::Tensor>& own : given) {
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kFloat})
      for (const int64_t rows : {1, 40, 700}) own.push_back(at::randn({rows, 7}, dtype));
  }
  const auto thrown = ThreadRanks(kRanks).run([&](const Group& group) {
    std::vector<at::Tensor> sums;
    for (const at::Tensor& own : given[group.rank()]) sums.push_back(own.clone());
    group.add_up(sums);
    for (size_t i = 0; i < sums.size(); ++i) {
      ESPALIER_CHECK(at::equal(sums[i], given[0][i] + given[1][i] + given[2][i]), "sum {} differs", i);
    }
  });
  EXPECT_EQ(thrown, std::vector<std::string>(kRanks));
}

struct Update {
  at::ScalarType dtype;
  OptimizerKind kind;
  bool has_lora;
};

Decoder decoder_of(const Update& update) {
  const Decoder base = tiny_decoder(tiny_config(Family::kQwen3, kVocab), 5, update.dtype);
  if (!update.has_lora) return base;
  const LoraOptions lora{.rank = 2, .alpha = 3, .targets = {kAllLinear}};
  const Adapter adapter = random_adapter(adapted_maps(base.config(), lora.targets), lora, 6,
                                         update.dtype == at::kDouble ? at::kDouble : at::kFloat);
  return Decoder(base.config(), base.weights(), base.buffers(), adapter);
}

std::vector<at::Tensor> values_of(const Decoder& decoder) {
  std::vector<at::Tensor> values;
  for (const Parameter& parameter : decoder.parameters()) values.push_back(parameter.value.detach());
  return values;
}

void give_gradients(const Decoder& decoder, const std::vector<at::Tensor>& gradients) {
  for (size_t i = 0; i < gradients.size(); ++i)
    at::Tensor(decoder.parameters()[i].value).mutable_grad() = gradients[i].clone();
}

// And saved state is that of one process: 3 ranks begin, 2 continue, and then one.
TEST(PartsOfRanks, UpdatesOfPartsHaveTheBitsOfThoseOfTheWhole) {
  const Update updates[] = {
      {at::kDouble, OptimizerKind::kAdamW, false},   {at::kFloat, OptimizerKind::kAdamW, false},
      {at::kBFloat16, OptimizerKind::kAdamW, false}, {at::kBFloat16, OptimizerKind::kSgd, false},
      {at::kFloat, OptimizerKind::kSgd, false},      {at::kBFloat16, OptimizerKind::kAdamW, true}};
  for (const Update& update : updates) {
    SCOPED_TRACE(fmt::format("{} {} {}", dtype_name(update.dtype), to_string(update.kind), update.has_lora));
    const ScratchFolder folder;
    const OptimizerOptions options{.kind = update.kind, .weight_decay = 0.1, .max_grad_norm = 0.5};
    const Decoder whole = decoder_of(update);
    Optimizer optimizer(whole, options);
    for (int64_t ranks = 3; ranks >= 1; --ranks) {
      std::vector<at::Tensor> before, gradients;
      for (const at::Tensor& value : values_of(whole)) {
        before.push_back(value.clone());
        gradients.push_back(
            at::randn(value.sizes(), value.scalar_type() == at::kDouble ? at::kDouble : at::kFloat));
      }
      give_gradients(whole, gradients);
      const double norm = optimizer.gradient_norm();
      optimizer.update(0.01, norm);
      const auto from = folder / std::to_string(ranks + 1), to = folder / std::to_string(ranks);
      const auto thrown = ThreadRanks(ranks).run([&](const Group& group) {
        const Decoder own = decoder_of(update);
        for (size_t i = 0; i < before.size(); ++i) values_of(own)[i].copy_(before[i]);
        give_gradients(own, gradients);
        Optimizer divided(own, options, group);
        if (ranks < 3) divided.load(from);
        const double found = group.reduce({divided.gradient_norm()}, {RankReduction::kNorm}).front();
        ESPALIER_CHECK(std::abs(found - norm) <= 1e-14 * norm, "norm {}, expected {}", found, norm);
        divided.update(0.01, norm);
        group.gather_parts(values_of(own));
        for (size_t i = 0; i < before.size(); ++i) {
          ESPALIER_CHECK(at::equal(values_of(own)[i], values_of(whole)[i]), "{} differs",
                         own.parameters()[i].name);
        }
        save_state(divided.state(), rank_file(to, {group.rank(), group.size()}));
        const OptimizerState state = divided.state(/*gathers=*/true);
        if (group.is_first()) save_state(state, folder / "gathered");
      });
      EXPECT_EQ(thrown, std::vector<std::string>(ranks));
      save_state(optimizer.state(), folder / "whole");
      EXPECT_EQ(read_text(folder / "gathered"), read_text(folder / "whole"));
      const std::vector<SafetensorsFile> files = open_rank_files(to);
      EXPECT_EQ(std::ssize(files), ranks);
      for (const Parameter& entry : optimizer.state()) {
        if (entry.name == "step") continue;
        const at::Tensor joined = at::empty_like(entry.value);
        read_part(files, entry.name, entry.value.sizes(), 0, joined);
        EXPECT_TRUE(at::equal(joined, entry.value)) << entry.name;
      }
    }
  }
}

TEST(PartsOfRanks, EachHasItsPartOfTheState) {
  count_tensor_memory();
  const nlohmann::json config = tiny_config_json(Family::kLlama, 512, /*wide=*/true);
  const Decoder decoder = tiny_decoder(parse_config(config, "tiny config"), 5, at::kFloat);
  double numel = 0;
  for (const at::Tensor& value : values_of(decoder)) numel += static_cast<double>(value.numel());
  for (const int64_t ranks : {1, 2, 4}) {
    const int64_t before = tensor_memory();
    const Single group(ranks - 1, ranks);
    const Optimizer optimizer(decoder, {}, group);
    const auto taken = static_cast<double>(tensor_memory() - before);
    EXPECT_NEAR(taken / (optimizer_bytes(OptimizerKind::kAdamW, at::kFloat, ranks) * numel), 1, 0.03)
        << ranks;
  }
}

TEST(PartsOfRanks, FilesThatDoNotBelongTogetherAreRefused) {
  const ScratchFolder folder;
  const Decoder decoder = decoder_of({at::kFloat, OptimizerKind::kAdamW, false});
  const auto write = [&](const std::filesystem::path& file, int64_t ranks) {
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const Single group(rank, ranks);
      save_state(Optimizer(decoder, {}, group).state(), rank_file(file, {rank, ranks}));
    }
  };
  const auto error = [&](const std::string& name) {
    return message_of<InputError>([&] { Optimizer(decoder, {}).load(folder / name); });
  };
  EXPECT_NE(error("none").find("expected a file, or those of ranks"), std::string::npos);
  write(folder / "whole", 3);
  EXPECT_EQ(error("whole"), "");
  std::filesystem::remove(folder / "whole-00002-of-00003");
  EXPECT_NE(error("whole").find("whole-00002-of-00003"), std::string::npos);
  // A piece of another number of ranks has other elements.
  write(folder / "other", 2);
  std::filesystem::rename(folder / "other-00002-of-00002", folder / "whole-00002-of-00003");
  EXPECT_NE(error("whole").find("elements, received"), std::string::npos) << error("whole");
}

}  // namespace
}  // namespace espalier::testing
