// SPDX-License-Identifier: Apache-2.0
// Checkpoints that several ranks write together, each its part, and what becomes of them where one rank
// fails.
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/base/manifest.h"
#include "espalier/config/lora.h"
#include "espalier/model/weights/adapter_folder.h"
#include "tests/distributed/thread_ranks.h"
#include "tests/train/run/trainer_fixture.h"

namespace espalier::testing {
namespace {

namespace fs = std::filesystem;

std::set<std::string> names_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename());
  return names;
}

/// Checkpoints of a run that are being written.
std::vector<fs::path> unfinished(const fs::path& run) {
  std::vector<fs::path> folders;
  if (!fs::exists(run / "checkpoints")) return folders;
  for (const auto& entry : fs::directory_iterator(run / "checkpoints")) {
    if (entry.path().extension() == ".partial") folders.push_back(entry.path());
  }
  return folders;
}

/// A group with something that happens before a collective, or to what it gives.
class Watched : public Group {
 public:
  using Event = std::function<void(const Group& group, const at::Tensor& received)>;
  Watched(const Group& group, Event before, Event after)
      : group_(group), before_(std::move(before)), after_(std::move(after)) {}
  int64_t rank() const override { return group_.rank(); }
  int64_t size() const override { return group_.size(); }
  int64_t bucket_bytes() const override { return group_.bucket_bytes(); }
  at::Tensor gather(const at::Tensor& own) const override {
    if (before_) before_(group_, own);
    at::Tensor all = group_.gather(own);
    if (after_) after_(group_, all);
    return all;
  }
  std::function<at::Tensor()> exchange(const at::Tensor& rows, const std::vector<int64_t>& send,
                                       const std::vector<int64_t>& receive) const override {
    return group_.exchange(rows, send, receive);
  }

 private:
  const Group& group_;
  Event before_, after_;
};

/// What the ranks of a run have thrown, and what the first one has noted.
struct Ended {
  std::vector<std::string> thrown;
  std::string notes{};
};

class RankCheckpoints : public TrainerTest {
 protected:
  TrainOptions run_of(const std::string& name) {
    TrainOptions run = options(name);
    run.steps = 4;
    run.save_every = 1;
    return run;
  }

  static Ended train_on(int64_t ranks, const TrainOptions& options, const Watched::Event& before = {},
                        const Watched::Event& after = {}) {
    Ended ended;
    ended.thrown = ThreadRanks(ranks).run([&](const Group& group) {
      const Watched watched(group, before, after);
      TrainOptions own = options;
      own.group = &watched;
      TrainEvents events;
      if (group.is_first()) events.note = [&](const std::string& text) { ended.notes += text + "\n"; };
      train(training_rows(), own, events);
    });
    return ended;
  }

  static void expect_whole(const fs::path& run, int64_t step) {
    const fs::path folder = checkpoint_folder(run, step);
    EXPECT_TRUE(check_manifest(folder, checkpoint_name(step)).faults.empty()) << folder;
  }

  static void expect_near(const fs::path& folder, const fs::path& expected) {
    const Decoder found = load_decoder(folder, at::kDouble), other = load_decoder(expected, at::kDouble);
    for (size_t i = 0; i < other.weights().size(); ++i) {
      EXPECT_LE((found.weights()[i].value - other.weights()[i].value).abs().max().item<double>(), 1e-12)
          << found.weights()[i].name;
    }
  }
};

/// A model, and what is trained of it.
struct Saved {
  Family family;
  at::ScalarType dtype, save_dtype;
  bool has_lora = false;
};

Decoder decoder_of(const Saved& saved, const fs::path& model) {
  if (!saved.has_lora) return load_decoder(model, saved.dtype);
  const Decoder base = load_decoder(model, saved.dtype);
  const LoraOptions lora{.rank = 2, .alpha = 3, .targets = {kAllLinear}};
  Adapter adapter = random_adapter(adapted_maps(base.config(), lora.targets), lora, 6, at::kFloat);
  adapter.config = adapter_config(lora, {"q_proj"}, "base");
  return Decoder(base.config(), base.weights(), base.buffers(), adapter);
}

/// A step of random gradients, the same for any number of ranks.
void take_step(const Decoder& decoder, Optimizer& optimizer, const Group& group) {
  const at::NoGradGuard no_grad;
  double seed = 1;
  for (const Parameter& parameter : decoder.parameters()) {
    const at::ScalarType dtype = parameter.value.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const at::Tensor values = at::arange(parameter.value.numel(), at::TensorOptions(at::kDouble)) + seed++;
    at::Tensor(parameter.value).mutable_grad() = values.sin().to(dtype).view(parameter.value.sizes());
  }
  optimizer.update(0.01, 1);
  std::vector<at::Tensor> weights;
  for (const Parameter& parameter : decoder.parameters()) weights.push_back(parameter.value.detach());
  group.gather_parts(weights);
}

// Of tied and untied heads, fused experts, master weights, exact weights beside rounded ones, and adapters.
TEST_F(RankCheckpoints, AnyNumberOfRanksReadsTheBitsThatAnyOtherHasWritten) {
  const Saved all[] = {{Family::kLlama, at::kDouble, at::kDouble},
                       {Family::kQwen2, at::kBFloat16, at::kBFloat16},
                       {Family::kGraniteMoeHybrid, at::kFloat, at::kBFloat16},
                       {Family::kQwen3Moe, at::kFloat, at::kFloat},
                       {Family::kQwen3, at::kFloat, at::kBFloat16, /*has_lora=*/true}};
  for (const Saved& saved : all) {
    SCOPED_TRACE(fmt::format("{} {} {}", to_string(saved.family), dtype_name(saved.dtype), saved.has_lora));
    const fs::path folder = folder_ / fmt::format("{}-{}", to_string(saved.family), saved.has_lora);
    const fs::path model = folder / "model";
    fs::create_directories(folder);
    write_tiny_model(model, saved.family, kVocabSize, 7, saved.dtype);
    const SourceModel source(model);
    const RunState state{.step = 1, .data_hashes = {}, .settings = {}};
    for (const int64_t ranks : {1, 3, 2, 5}) {
      // Of five ranks the checkpoint is replaced, and of two it is written in the background.
      const auto thrown = ThreadRanks(ranks).run([&](const Group& group) {
        const Decoder decoder = decoder_of(saved, model);
        Optimizer optimizer(decoder, {}, group);
        take_step(decoder, optimizer, group);
        const CheckpointOptions options{source, saved.save_dtype, &group};
        const fs::path to = folder / std::to_string(ranks);
        for (const bool replaces : {false, true}) {
          if (replaces && ranks != 5) break;
          CheckpointWriter writer(to, options);
          writer.start(decoder, optimizer, state, /*in_background=*/ranks == 2);
          if (ranks == 2) take_step(decoder, optimizer, group);
          writer.finish(replaces);
        }
      });
      EXPECT_EQ(thrown, std::vector<std::string>(ranks));
      const ManifestReport report = check_manifest(folder / std::to_string(ranks), "step_1");
      EXPECT_TRUE(report.faults.empty() && report.extra.empty());
      const auto names = names_in(folder / std::to_string(ranks));
      EXPECT_EQ(names.contains("optimizer.safetensors"), ranks == 1);
      EXPECT_EQ(names.contains(fmt::format("optimizer-{0:05}-of-{0:05}.safetensors", ranks)), ranks > 1);
    }
    const Decoder expected = decoder_of(saved, model);
    Optimizer undivided(expected, {});
    take_step(expected, undivided, alone());
    for (const int64_t written : {1, 2, 3, 5}) {
      for (const int64_t ranks : {1, 2, 4}) {
        const auto thrown = ThreadRanks(ranks).run([&](const Group& group) {
          const Decoder decoder = decoder_of(saved, model);
          Decoder loaded = decoder;
          Optimizer optimizer(loaded, {}, group);
          load_checkpoint(folder / std::to_string(written), &loaded, &optimizer);
          for (size_t i = 0; i < expected.parameters().size(); ++i) {
            ESPALIER_CHECK(at::equal(loaded.parameters()[i].value, expected.parameters()[i].value),
                           "{} differs", expected.parameters()[i].name);
          }
          const OptimizerState found = optimizer.state(/*gathers=*/true), wanted = undivided.state();
          if (!group.is_first()) return;
          for (size_t i = 0; i < wanted.size(); ++i)
            ESPALIER_CHECK(at::equal(found.at(i).value, wanted[i].value), "{} differs", wanted[i].name);
        });
        EXPECT_EQ(thrown, std::vector<std::string>(ranks)) << written << " " << ranks;
      }
    }
  }
}

TEST_F(RankCheckpoints, ShardsAreStandardOnesOfAboutEqualSize) {
  const TrainOptions run = run_of("run");
  EXPECT_EQ(train_on(3, run).thrown, std::vector<std::string>(3));
  const fs::path folder = checkpoint_folder(run.out, 4);
  EXPECT_EQ(names_in(folder),
            (std::set<std::string>{"config.json", "manifest.json", "model-00001-of-00003.safetensors",
                                   "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors",
                                   "model.safetensors.index.json", "optimizer-00001-of-00003.safetensors",
                                   "optimizer-00002-of-00003.safetensors",
                                   "optimizer-00003-of-00003.safetensors", "trainer_state.json"}));
  size_t all = 0, largest = 0, largest_tensor = 0;
  const auto index = nlohmann::json::parse(read_text(folder / "model.safetensors.index.json"));
  for (int64_t rank = 0; rank < 3; ++rank) {
    const fs::path shard = rank_file(folder / "model.safetensors", {rank, 3});
    size_t bytes = 0;
    const SafetensorsFile file(shard);
    for (const TensorView& tensor : file.tensors()) {
      EXPECT_EQ(index["weight_map"][tensor.name], shard.filename().string());
      bytes += tensor.bytes.size();
      largest_tensor = std::max(largest_tensor, tensor.bytes.size());
    }
    all += bytes;
    largest = std::max(largest, bytes);
  }
  EXPECT_EQ(index["metadata"]["total_size"], all);
  EXPECT_LE(largest, all / 3 + largest_tensor);
  // Transformers and this program open a folder in the same way.
  TrainOptions one = run_of("one");
  ASSERT_TRUE(train(training_rows(), one, {}));
  for (const int64_t step : {1, 4})
    expect_near(checkpoint_folder(run.out, step), checkpoint_folder(one.out, step));
}

TEST_F(RankCheckpoints, RunsGoOnWithAnyNumberOfRanks) {
  const TrainOptions whole = run_of("whole");
  ASSERT_TRUE(train(training_rows(), whole, {}));
  for (const bool in_background : {false, true}) {
    TrainOptions run = run_of(in_background ? "background" : "run");
    run.save_in_background = in_background;
    run.resume = true;
    for (const int64_t ranks : {1, 3, 2, 1}) {
      run.steps = whole.steps - 3 + std::ssize(checkpoints(run.out));
      EXPECT_EQ(train_on(ranks, run).thrown, std::vector<std::string>(ranks));
    }
    for (int64_t step = 1; step <= 4; ++step)
      expect_near(checkpoint_folder(run.out, step), checkpoint_folder(whole.out, step));
  }
}

/// Lets the last rank fail once to write its part of the optimiser's state of this step.
Watched::Event obstacle(const fs::path& run, const std::string& step) {
  return [run, step, is_there = std::make_shared<bool>(false)](const Group& group, const at::Tensor&) {
    if (group.rank() + 1 < group.size() || *is_there) return;
    for (const fs::path& folder : unfinished(run)) {
      if (!folder.filename().string().starts_with("." + step + ".")) continue;
      fs::create_directory(rank_file(folder / "optimizer.safetensors", {group.rank(), group.size()}));
      *is_there = true;
    }
  };
}

TEST_F(RankCheckpoints, AnErrorOfOneRankIsMadeUpFor) {
  TrainOptions whole = run_of("whole");
  EXPECT_EQ(train_on(3, whole).thrown, std::vector<std::string>(3));
  for (const bool in_background : {false, true}) {
    TrainOptions run = run_of(in_background ? "background" : "run");
    run.save_in_background = in_background;
    run.save_every = 2;
    run.rescue_dir = folder_ / (run.out.filename().string() + "-rescue");
    const Ended ended = train_on(3, run, obstacle(run.out, "step_2"));
    EXPECT_EQ(ended.thrown, std::vector<std::string>(3));
    EXPECT_NE(ended.notes.find("warning: step 2 could not be saved: rank 2: cannot write"), std::string::npos)
        << ended.notes;
    // In the background it is found at a later step, which then is rescued or saved.
    EXPECT_TRUE(in_background || ended.notes.find("instead") != std::string::npos) << ended.notes;
    EXPECT_TRUE(unfinished(run.out).empty());
    EXPECT_EQ(newest(run.out), "step_4");
    expect_same_files(checkpoint_folder(run.out, 4), checkpoint_folder(whole.out, 4));
    EXPECT_EQ(newest(run.rescue_dir), "");
  }
}

TEST_F(RankCheckpoints, AnErrorOfOneRankAtTheEndLeavesTheLastGoodOne) {
  TrainOptions run = run_of("run");
  run.rescue_dir = folder_ / "rescue";
  const Ended ended = train_on(2, run, obstacle(run.out, "step_4"));
  EXPECT_NE(ended.thrown[0].find("rank 1: cannot write"), std::string::npos) << ended.thrown[0];
  EXPECT_NE(ended.thrown[0].find("step 4 is in "), std::string::npos) << ended.thrown[0];
  EXPECT_NE(ended.thrown[1].find("cannot write"), std::string::npos) << ended.thrown[1];
  EXPECT_EQ(newest(run.out), "step_3");
  expect_whole(run.out, 3);
  EXPECT_TRUE(unfinished(run.out).empty());
  // The ranks wrote that together, too.
  EXPECT_TRUE(
      names_in(checkpoint_folder(run.rescue_dir, 4)).contains("optimizer-00002-of-00002.safetensors"));
  run.resume = true;
  EXPECT_EQ(train_on(3, run).thrown, std::vector<std::string>(3));
  EXPECT_EQ(newest(run.out), "step_4");
  EXPECT_EQ(newest(run.rescue_dir), "");
}

TEST_F(RankCheckpoints, TheBestOneAndThatOfAnErrorAreWrittenTogether) {
  TrainOptions run = run_of("run");
  run.save_every = 0;
  const HeldOut held_out{.trajectories = training_rows(), .options = {.every = 2, .keep_best = true}};
  const auto thrown = ThreadRanks(2).run([&](const Group& group) {
    TrainOptions own = run;
    own.group = &group;
    TrainEvents events;
    events.step = [&](int64_t step, const nlohmann::ordered_json&) {
      if (step == 3) throw std::runtime_error("planned");
    };
    train(training_rows(), own, events, nullptr, &held_out);
  });
  EXPECT_NE(thrown[0].find("planned; saved " + checkpoint_folder(run.out, 3).string()), std::string::npos)
      << thrown[0];
  for (const fs::path& folder : {best_checkpoint_folder(run.out), checkpoint_folder(run.out, 3)})
    EXPECT_TRUE(names_in(folder).contains("optimizer-00002-of-00002.safetensors")) << folder;
}

/// The last rank is told of a folder that is not there, as where the ranks have no file system in common.
void go_elsewhere(const Group& group, const at::Tensor& received) {
  if (group.rank() == 0 || received.scalar_type() != at::kByte) return;
  const std::string_view text(static_cast<const char*>(received.const_data_ptr()), received.numel());
  const size_t at = text.find(".partial");
  if (at != std::string_view::npos) static_cast<char*>(received.mutable_data_ptr())[at] = '_';
}

TEST_F(RankCheckpoints, WithoutACommonFolderTheFirstRankWritesAll) {
  const TrainOptions one = run_of("one");
  ASSERT_TRUE(train(training_rows(), one, {}));
  for (const bool in_background : {false, true}) {
    TrainOptions run = run_of(in_background ? "background" : "run");
    run.save_in_background = in_background;
    const Ended ended = train_on(2, run, {}, go_elsewhere);
    EXPECT_EQ(ended.thrown, std::vector<std::string>(2));
    const std::string note = "warning: not every process sees the files that rank 0 writes in ";
    const size_t at = ended.notes.find(note);
    EXPECT_NE(at, std::string::npos) << ended.notes;
    EXPECT_EQ(ended.notes.find(note, at + 1), std::string::npos) << "once";
    EXPECT_EQ(names_in(checkpoint_folder(run.out, 4)), names_in(checkpoint_folder(one.out, 4)));
    expect_near(checkpoint_folder(run.out, 4), checkpoint_folder(one.out, 4));
  }
}

// Nor gathered on the first rank, which would have all of it in memory.
TEST_F(RankCheckpoints, NoValueIsSentWhereAllSeeTheFolder) {
  for (const bool is_common : {true, false}) {
    const TrainOptions run = run_of(is_common ? "common" : "other");
    std::atomic<int> sent{0};
    const auto count = [&](const Group&, const at::Tensor& own) {
      if (own.is_floating_point() && !unfinished(run.out).empty()) ++sent;
    };
    EXPECT_EQ(train_on(2, run, count, is_common ? Watched::Event() : go_elsewhere).thrown,
              std::vector<std::string>(2));
    EXPECT_EQ(sent > 0, !is_common);
  }
}

// All ranks forget the same checkpoints, and go on together.
TEST_F(RankCheckpoints, AFolderThatIsRemovedIsMadeAgain) {
  for (const bool evaluates : {false, true}) {
    TrainOptions run = run_of(evaluates ? "evaluates" : "run");
    run.save_every = 0;
    run.learning_rate = 1e-300;  // no evaluation is better than the one that is lost
    HeldOut held_out{.trajectories = training_rows(), .options = {.every = 1, .keep_best = true}};
    const auto thrown = ThreadRanks(2).run([&](const Group& group) {
      TrainOptions own = run;
      own.group = &group;
      TrainEvents events;
      events.step = [&](int64_t step, const nlohmann::ordered_json&) {
        if (group.is_first() && step == 2) fs::remove_all(run.out);
      };
      train(training_rows(), own, events, nullptr, evaluates ? &held_out : nullptr);
    });
    EXPECT_EQ(thrown, std::vector<std::string>(2));
    EXPECT_EQ(newest(run.out), "step_4");
    expect_whole(run.out, 4);
    EXPECT_EQ(fs::exists(best_checkpoint_folder(run.out)), evaluates);
  }
}

// A rank that is gone in any phase of a checkpoint leaves the ones before whole, and the run goes on from
// there.
TEST_F(RankCheckpoints, ALostRankInAnyPhaseLosesNothingThatWasSaved) {
  TrainOptions whole = run_of("whole");
  whole.steps = 2;
  EXPECT_EQ(train_on(2, whole).thrown, std::vector<std::string>(2));
  int losses = 0;
  for (const int64_t lost : {0, 1}) {
    for (int phase = 0;; ++phase) {
      TrainOptions run = run_of(fmt::format("run-{}-{}", lost, phase));
      run.steps = 2;
      int calls = -1;  // collectives of the lost rank since the first checkpoint
      const Ended ended = train_on(2, run, [&](const Group& group, const at::Tensor&) {
        if (group.rank() != lost || (calls < 0 && !fs::exists(checkpoint_folder(run.out, 1)))) return;
        if (++calls >= phase) throw std::logic_error("lost");
      });
      if (ended.thrown == std::vector<std::string>(2)) break;
      ++losses;
      expect_whole(run.out, 1);
      expect_same_files(checkpoint_folder(run.out, 1), checkpoint_folder(whole.out, 1));
      run.resume = true;
      EXPECT_EQ(train_on(2, run).thrown, std::vector<std::string>(2));
      EXPECT_TRUE(unfinished(run.out).empty());
      for (const int64_t step : {1, 2})
        expect_same_files(checkpoint_folder(run.out, step), checkpoint_folder(whole.out, step));
      fs::remove_all(run.out);
    }
  }
  EXPECT_GT(losses, 20);
}

}  // namespace
}  // namespace espalier::testing
