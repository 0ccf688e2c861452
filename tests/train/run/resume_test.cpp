// SPDX-License-Identifier: Apache-2.0
// What --resume takes and what it refuses: damaged and poisoned checkpoints, other models, data and flags.
#include "espalier/train/run/resume.h"
#include "espalier/model/init.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>
#include <optional>

#include "espalier/base/check.h"
#include "espalier/base/manifest.h"
#include "espalier/base/safetensors.h"
#include "espalier/data/builder.h"
#include "espalier/model/init.h"
#include "espalier/train/run/epochs.h"
#include "tests/base/message_of.h"
#include "tests/train/run/trainer_fixture.h"

namespace espalier::testing {
namespace {

namespace fs = std::filesystem;

class ResumeTest : public TrainerTest {
 protected:
  // A run of `steps` steps with a checkpoint after each.
  TrainOptions finished_run(const std::string& name, int64_t steps,
                            ObjectiveKind objective = ObjectiveKind::kSft,
                            std::optional<LoraOptions> lora = {}) {
    TrainOptions run = options(name, at::kFloat);
    run.objective.kind = objective;
    run.lora = std::move(lora);
    run.steps = steps;
    run.save_every = 1;
    EXPECT_TRUE(train(training_rows(is_policy_gradient(objective)), run, {}));
    return run;
  }

  static fs::path step(const TrainOptions& run, int64_t number) { return checkpoint_folder(run.out, number); }

  // Resumes up to `steps` and returns what was noted.
  static std::string resume_to(TrainOptions run, int64_t steps, const Trajectories& rows = training_rows()) {
    run.resume = true;
    run.steps = steps;
    std::string notes;
    TrainEvents events;
    events.note = [&](const std::string& text) { notes += text + "\n"; };
    EXPECT_TRUE(train(rows, run, events));
    return notes;
  }

  static std::string refusal(TrainOptions run, const Trajectories& rows = training_rows()) {
    run.resume = true;
    run.steps = 9;
    return message_of<InputError>([&] { train(rows, run, {}); });
  }
};

void flip_bit(const fs::path& file, size_t bit) {
  std::string text = read_text(file);
  text.at(bit / 8) = static_cast<char>(text.at(bit / 8) ^ (1 << bit % 8));
  write_text(file, text);
}

// Writes one value into a tensor of a safetensors file, as if the run had done so: the manifest agrees.
void poison(const fs::path& folder, const char* file, const std::string& name, float value) {
  std::string text = read_text(folder / file);
  {
    const SafetensorsFile tensors(folder / file);
    const TensorView& tensor = tensors.at(name);
    const size_t begin = tensor.bytes.data() - tensors.mapping()->bytes().data();
    ASSERT_EQ(tensor.dtype, "F32");
    std::memcpy(text.data() + begin + 8, &value, sizeof value);
  }
  write_text(folder / file, text);
  write_manifest(folder, folder.filename().string());
}

struct Damage {
  const char* name;
  std::function<void(const fs::path&)> apply;
  const char* words;  // of the message
};

TEST_F(ResumeTest, FallsBackToTheNewestCheckpointThatIsWhole) {
  const TrainOptions whole = finished_run("whole", 5);
  const std::vector<Damage> damages = {
      {"flipped weights", [](const fs::path& f) { flip_bit(f / "model.safetensors", 40'001); }, "checksum"},
      {"flipped optimizer", [](const fs::path& f) { flip_bit(f / "optimizer.safetensors", 80'003); },
       "optimizer.safetensors"},
      {"flipped tokens of the header", [](const fs::path& f) { flip_bit(f / "model.safetensors", 100); },
       "checksum"},
      {"flipped manifest", [](const fs::path& f) { flip_bit(f / kManifestFile, 900); }, ""},
      {"cut short", [](const fs::path& f) { fs::resize_file(f / "optimizer.safetensors", 5000); },
       "5000 bytes"},
      {"missing", [](const fs::path& f) { fs::remove(f / "optimizer.safetensors"); }, "missing"},
      {"extra weights",
       [](const fs::path& f) { fs::copy_file(f / "model.safetensors", f / "resume.safetensors"); },
       "resume.safetensors does not belong"},
      {"of another step",
       [](const fs::path& f) {
         fs::copy_file(f.parent_path() / "step_1/optimizer.safetensors", f / "optimizer.safetensors",
                       fs::copy_options::overwrite_existing);
       },
       "checksum"},
      {"another step whole",
       [](const fs::path& f) {
         fs::remove_all(f);
         fs::copy(f.parent_path() / "step_1", f);
       },
       "step_1"},
      {"state of another step",
       [](const fs::path& f) {
         fs::copy_file(f.parent_path() / "step_1/trainer_state.json", f / kStateFile,
                       fs::copy_options::overwrite_existing);
         write_manifest(f, f.filename().string());
       },
       "expected the step of the folder"},
      {"NaN weights",
       [](const fs::path& f) {
         poison(f, "model.safetensors", "model.norm.weight", std::numeric_limits<float>::quiet_NaN());
       },
       "`model.norm.weight`: as float32 it holds 1 value of 16 that is not finite"},
      {"infinite moments",
       [](const fs::path& f) {
         poison(f, "optimizer.safetensors", "exp_avg_sq.model.norm.weight",
                std::numeric_limits<float>::infinity());
       },
       "exp_avg_sq.model.norm.weight"},
      {"zeroed block of a checkpoint without a manifest",
       [](const fs::path& f) {
         fs::remove(f / kManifestFile);
         fs::resize_file(f / "model.safetensors", 4096);
       },
       "model.safetensors"},
  };
  for (const Damage& damage : damages) {
    SCOPED_TRACE(damage.name);
    TrainOptions run = whole;
    run.out = folder_ / damage.name;
    fs::copy(whole.out, run.out, fs::copy_options::recursive);
    for (const int64_t number : {5, 4}) fs::remove_all(step(run, number));
    damage.apply(step(run, 3));
    const std::string notes = resume_to(run, 5);
    EXPECT_NE(notes.find("step_3 cannot be used"), std::string::npos) << notes;
    EXPECT_NE(notes.find(damage.words), std::string::npos) << notes;
    EXPECT_NE(notes.find("falling back to " + step(run, 2).string()), std::string::npos) << notes;
    EXPECT_TRUE(fs::exists(step(run, 3).string() + ".damaged"));
    expect_same_files(step(whole, 5), step(run, 5));
    expect_same_files(step(whole, 3), step(run, 3));
    EXPECT_EQ(losses(whole.out), losses(run.out));
  }
}

TEST_F(ResumeTest, IsRefusedWhereNoCheckpointIsWhole) {
  const TrainOptions run = finished_run("run", 2);
  for (const int64_t number : {1, 2}) flip_bit(step(run, number) / "model.safetensors", 40'001);
  const std::string message = refusal(run);
  EXPECT_NE(message.find("step_2 cannot be used: model.safetensors"), std::string::npos) << message;
  EXPECT_NE(message.find("1 before it"), std::string::npos) << message;
  EXPECT_EQ(newest(run.out), "step_2");  // nothing was renamed
}

TEST_F(ResumeTest, OlderCheckpointsWithoutAManifestAreTaken) {
  const TrainOptions whole = finished_run("whole", 4), run = finished_run("run", 2);
  fs::remove(step(run, 2) / kManifestFile);
  const fs::path file = step(run, 2) / kStateFile;
  auto state = nlohmann::ordered_json::parse(read_text(file));
  state.erase("format");
  state.erase("data_hashes");
  write_text(file, state.dump());
  const std::string notes = resume_to(run, 4);
  EXPECT_NE(notes.find("has no manifest.json"), std::string::npos) << notes;
  EXPECT_NE(notes.find("has no hashes of its data"), std::string::npos) << notes;
  expect_same_files(step(whole, 4), step(run, 4));
}

TEST_F(ResumeTest, FilesThatWereAddedBesideAreNamedOnly) {
  const TrainOptions run = finished_run("run", 1);
  write_text(step(run, 1) / "NOTES.md", "mine");
  const std::string notes = resume_to(run, 2);
  EXPECT_NE(notes.find("NOTES.md"), std::string::npos) << notes;
}

TEST_F(ResumeTest, AnotherModelIsRefusedByTheKeyThatDiffers) {
  TrainOptions run = finished_run("run", 1);
  struct Change {
    const char* key;
    nlohmann::json value;
  };
  const fs::path original = run.model;
  for (const Change& change : {Change{"rope_theta", 500.0}, Change{"num_hidden_layers", 1},
                               Change{"rms_norm_eps", 0.01}, Change{"tie_word_embeddings", true}}) {
    nlohmann::json config = tiny_config_json(Family::kQwen3, kVocabSize);
    config[change.key] = change.value;
    const fs::path file = folder_ / (std::string(change.key) + ".json");
    write_text(file, config.dump());
    run.model = folder_ / change.key;
    init_model({.config = file, .out = run.model, .dtype = at::kDouble});
    const std::string message = refusal(run);
    EXPECT_NE(message.find(change.key), std::string::npos) << message;
    EXPECT_NE(message.find("another model"), std::string::npos) << message;
  }
  // What says nothing about the model may differ.
  nlohmann::json config = tiny_config_json(Family::kQwen3, kVocabSize);
  config["transformers_version"] = "9.9";
  config["torch_dtype"] = "float64";
  run.model = folder_ / "same";
  fs::copy(original, run.model);
  write_text(run.model / "config.json", config.dump());
  resume_to(run, 2);
}

// Rows with every column that a run reads.
std::vector<TrajectoryRow> full_rows() {
  std::vector<TrajectoryRow> rows;
  for (int32_t i = 0; i < 4; ++i) {
    TrajectoryRow row;
    row.input_ids = {1, 2, 3 + i, 4};
    row.loss_weights = {1, 1, 0.5, 1};
    row.logprobs = {0, -1, -2, -1.5};
    row.reward = i % 2;
    row.group_id = std::string(i < 2 ? "a" : "b");
    row.trajectory_id = std::to_string(i);
    rows.push_back(row);
  }
  return rows;
}

Trajectories built(const std::vector<TrajectoryRow>& rows) {
  TrajectoriesBuilder builder;
  for (const TrajectoryRow& row : rows) builder.append(row);
  return builder.finish();
}

TEST_F(ResumeTest, OtherDataOfEqualSizeIsRefusedByTheColumnThatDiffers) {
  TrainOptions run = options("run", at::kFloat);
  run.objective.kind = ObjectiveKind::kGrpo;
  run.steps = 1;
  ASSERT_TRUE(train(built(full_rows()), run, {}));
  struct Change {
    const char* column;
    std::function<void(TrajectoryRow*)> apply;
  };
  const std::vector<Change> changes = {
      {"input_ids", [](TrajectoryRow* row) { row->input_ids[3] = 5; }},
      {"loss_weights", [](TrajectoryRow* row) { row->loss_weights[2] = 0.25; }},
      {"logprobs", [](TrajectoryRow* row) { row->logprobs[1] = -1.25; }},
      {"logprobs", [](TrajectoryRow* row) { row->logprobs.clear(); }},
      {"advantages", [](TrajectoryRow* row) { row->advantage = 0.5; }},
      {"reward", [](TrajectoryRow* row) { row->reward = 3; }},
      {"group_id", [](TrajectoryRow* row) { row->group_id = std::string("c"); }},
  };
  for (const Change& change : changes) {
    std::vector<TrajectoryRow> rows = full_rows();
    change.apply(&rows[1]);
    const std::string message = refusal(run, built(rows));
    EXPECT_NE(message.find(fmt::format("the data's {} ", change.column)), std::string::npos) << message;
  }
  std::vector<TrajectoryRow> renamed = full_rows();
  for (TrajectoryRow& row : renamed) row.trajectory_id += "-again";
  resume_to(run, 2, built(renamed));
}

TEST_F(ResumeTest, TheLearningRateMayChangeWithAWord) {
  TrainOptions run = finished_run("run", 1);
  run.learning_rate = 0.001;
  const std::string notes = resume_to(run, 2);
  EXPECT_NE(notes.find("learning-rate was 0.01, and is 0.001 from here on"), std::string::npos) << notes;
}

TEST_F(ResumeTest, AChangedNumberOfStepsChangesAScheduleWithAWord) {
  const char* words =
      "steps was 1, and is 2 from here on: the learning rate continues as in a run of so many steps";
  for (const auto& [name, scheduler] :
       {std::pair("linear", SchedulerKind::kLinear), std::pair("cosine", SchedulerKind::kCosine)}) {
    TrainOptions run = options(name, at::kFloat);
    run.scheduler = scheduler;
    run.steps = 1;
    ASSERT_TRUE(train(training_rows(), run, {}));
    std::string notes = resume_to(run, 2);
    EXPECT_NE(notes.find(words), std::string::npos) << notes;
    notes = resume_to(run, 2);
    EXPECT_EQ(notes.find("steps was"), std::string::npos) << notes;
    // By epochs as well, of which each has as many steps as there are batches.
    TrainOptions epochs = options(std::string(name) + "-epochs", at::kFloat);
    epochs.scheduler = scheduler;
    epochs.epochs = 1;
    ASSERT_TRUE(train(training_rows(), epochs, {}));
    epochs.epochs = 2;
    notes = resume_to(epochs, 0);
    const int64_t per_epoch = steps_per_epoch(training_rows(), epochs);
    EXPECT_NE(notes.find(fmt::format("steps was {}, and is {} from", per_epoch, 2 * per_epoch)),
              std::string::npos)
        << notes;
  }
  const std::string notes = resume_to(finished_run("constant", 1), 2);
  EXPECT_EQ(notes.find("steps was"), std::string::npos) << notes;
}

// Of a run on the same rows as one source of them, or as two.
std::vector<MixSource> mix_of(const std::vector<int64_t>& rows, double weight) {
  std::vector<MixSource> mix;
  for (const int64_t num_rows : rows) {
    mix.push_back({.name = fmt::format("source{}", mix.size()), .weight = weight, .num_rows = num_rows});
  }
  return mix;
}

TEST_F(ResumeTest, AMixCannotBeDroppedOrAdded) {
  const int64_t rows = training_rows().num_rows();
  const TrainOptions plain = finished_run("plain", 1);
  TrainOptions mixed = options("mixed", at::kFloat);
  mixed.mix = mix_of({rows - 4, 4}, 2);
  mixed.steps = 1;
  ASSERT_TRUE(train(training_rows(), mixed, {}));

  TrainOptions run = mixed;
  run.mix.clear();
  std::string message = refusal(run);
  EXPECT_NE(message.find("--resume: mix was 2 sources in the run"), std::string::npos) << message;
  EXPECT_NE(message.find("received none"), std::string::npos) << message;
  run.objective.shared_targets = SharedTargets::kOnce;  // other settings differ as well
  message = refusal(run);
  EXPECT_NE(message.find("--resume: mix was 2 sources in the run"), std::string::npos) << message;
  run = mixed;
  run.mix = mix_of({rows - 4, 4}, 3);
  message = refusal(run);
  EXPECT_NE(message.find("--resume: mix was ["), std::string::npos) << message;
  EXPECT_NE(message.find("\"weight\":3.0"), std::string::npos) << message;

  run = plain;
  run.mix = mix_of({rows}, 1);
  message = refusal(run);
  EXPECT_NE(message.find("--resume: mix was none in the run"), std::string::npos) << message;
  EXPECT_NE(message.find("received 1 source;"), std::string::npos) << message;
  resume_to(mixed, 2);
}

TEST_F(ResumeTest, EverySettingThatDecidesTheWeightsHasToStay) {
  const TrainOptions run = finished_run("run", 1, ObjectiveKind::kGrpo,  // which reads most of them
                                        LoraOptions{.rank = 3, .alpha = 6, .targets = {"q_proj"}});
  int64_t refused = 0;
  const auto refuses = [&](const char* name, const auto& change) {
    TrainOptions changed = run;
    change(changed);
    EXPECT_NE(run_settings(changed).fixed[name], run_settings(run).fixed[name]) << name;
    const std::string message = refusal(changed, training_rows(/*for_grpo=*/true));
    EXPECT_NE(message.find(fmt::format("--resume: {} was ", name)), std::string::npos) << message;
    ++refused;
  };
  refuses("objective", [](TrainOptions& o) { o.objective.kind = ObjectiveKind::kSft; });
  refuses("shared-targets", [](TrainOptions& o) { o.objective.shared_targets = SharedTargets::kOnce; });
  refuses("normalize", [](TrainOptions& o) { o.objective.normalize = Normalize::kSequence; });
  refuses("clip-low", [](TrainOptions& o) { o.objective.clip_low = 0.3; });
  refuses("clip-high", [](TrainOptions& o) { o.objective.clip_high = 0.3; });
  refuses("dual-clip", [](TrainOptions& o) { o.objective.dual_clip = 3; });
  refuses("baseline", [](TrainOptions& o) { o.objective.baseline = Baseline::kLeaveOneOut; });
  refuses("scale-rewards", [](TrainOptions& o) { o.objective.scale_rewards = false; });
  refuses("turn-discount", [](TrainOptions& o) { o.objective.turn_discount = 0.5; });
  refuses("importance-weights",
          [](TrainOptions& o) { o.objective.importance_weights = ImportanceWeights::kMask; });
  refuses("importance-level",
          [](TrainOptions& o) { o.objective.importance_level = ImportanceLevel::kSequence; });
  refuses("importance-cap", [](TrainOptions& o) { o.objective.importance_cap = 5; });
  refuses("importance-floor", [](TrainOptions& o) { o.objective.importance_floor = 0.25; });
  refuses("kl-coef", [](TrainOptions& o) { o.objective.kl_coef = 0.125; });
  refuses("kl-estimator", [](TrainOptions& o) { o.objective.kl_estimator = KlEstimator::kK1; });
  refuses("kl-in", [](TrainOptions& o) { o.objective.kl_in = KlPlace::kReward; });
  refuses("beta", [](TrainOptions& o) { o.objective.beta = 0.5; });
  refuses("margin", [](TrainOptions& o) { o.objective.margin = 0.5; });
  refuses("chosen-weight", [](TrainOptions& o) { o.objective.chosen_weight = 2; });
  refuses("rejected-weight", [](TrainOptions& o) { o.objective.rejected_weight = 2; });
  refuses("entropy-coef", [](TrainOptions& o) { o.objective.entropy_coef = 0.5; });
  refuses("router-aux-loss-coef", [](TrainOptions& o) { o.objective.router_aux_loss_coef = 0.01; });
  refuses("router-z-loss-coef", [](TrainOptions& o) { o.objective.router_z_loss_coef = 0.01; });
  refuses("strategy", [](TrainOptions& o) { o.plan.strategy = Strategy::kPartition; });
  refuses("token-budget", [](TrainOptions& o) { o.plan.token_budget = 1234; });
  refuses("memory-budget", [](TrainOptions& o) { o.plan.memory_budget = 1'000'000'000; });
  refuses("checkpoint-activations",
          [](TrainOptions& o) { o.plan.checkpoint_activations = CheckpointActivations::kLayer; });
  refuses("offload-context", [](TrainOptions& o) { o.plan.offload_context = true; });
  refuses("lora-rank", [](TrainOptions& o) { o.lora->rank = 2; });
  refuses("lora-alpha", [](TrainOptions& o) { o.lora->alpha = 3; });
  refuses("lora-rslora", [](TrainOptions& o) { o.lora->rslora = true; });
  refuses("lora-targets", [](TrainOptions& o) { o.lora->targets = {"v_proj"}; });
  refuses("freeze-pad-embedding", [](TrainOptions& o) { o.freeze_pad_embedding = true; });
  refuses("dtype", [](TrainOptions& o) { o.dtype = at::kBFloat16; });
  refuses("save-dtype", [](TrainOptions& o) { o.save_dtype = at::kBFloat16; });
  refuses("optimizer", [](TrainOptions& o) { o.optimizer.kind = OptimizerKind::kSgd; });
  refuses("weight-decay", [](TrainOptions& o) { o.optimizer.weight_decay = 0.125; });
  refuses("max-grad-norm", [](TrainOptions& o) { o.optimizer.max_grad_norm = 0.125; });
  refuses("beta1", [](TrainOptions& o) { o.optimizer.beta1 = 0.125; });
  refuses("beta2", [](TrainOptions& o) { o.optimizer.beta2 = 0.125; });
  refuses("eps", [](TrainOptions& o) { o.optimizer.eps = 0.125; });
  refuses("scheduler", [](TrainOptions& o) { o.scheduler = SchedulerKind::kCosine; });
  refuses("warmup-steps", [](TrainOptions& o) { o.warmup_steps = 7; });
  refuses("batch-size", [](TrainOptions& o) { o.batch_size = 4; });
  refuses("shuffle", [](TrainOptions& o) { o.shuffle = Shuffle::kGroups; });
  refuses("seed", [](TrainOptions& o) { o.seed = 99; });
  TrainOptions distilled = run;  // ref-topk is of an objective that reads few of the others
  distilled.objective.ref_topk = RefTopk::kRest;
  EXPECT_NE(run_settings(distilled).fixed["ref-topk"], run_settings(run).fixed["ref-topk"]);
  ++refused;
  EXPECT_EQ(refused, static_cast<int64_t>(run_settings(run).fixed.size()));  // none is left out
  EXPECT_EQ(read_run_state(step(run, 1)).settings, run_settings(run));
}

TEST_F(ResumeTest, ASettingThatDidNotExistHadItsDefault) {
  const TrainOptions run = finished_run("run", 1);
  const fs::path file = step(run, 1) / kStateFile;
  auto state = nlohmann::ordered_json::parse(read_text(file));
  state["settings"]["fixed"].erase("router-z-loss-coef");
  write_text(file, state.dump());
  fs::remove(step(run, 1) / kManifestFile);  // which would find the file changed
  TrainOptions changed = run;
  changed.objective.router_z_loss_coef = 0.01;
  EXPECT_NE(refusal(changed, training_rows(false)).find("router-z-loss-coef was 0.0 in"), std::string::npos);
  resume_to(run, 2);
}

TEST_F(ResumeTest, AStateWithoutSettingsIsTakenWithANote) {
  const TrainOptions run = finished_run("run", 1);
  const fs::path file = step(run, 1) / kStateFile;
  auto state = nlohmann::ordered_json::parse(read_text(file));
  state["format"] = 2;
  state.erase("settings");
  write_text(file, state.dump());
  fs::remove(step(run, 1) / kManifestFile);  // which would find the file changed
  const std::string notes = resume_to(run, 2);
  EXPECT_NE(notes.find("settings"), std::string::npos) << notes;
}

TEST_F(ResumeTest, StatesAreChecked) {
  const TrainOptions run = finished_run("run", 1);
  const fs::path file = step(run, 1) / kStateFile;
  const auto good = nlohmann::ordered_json::parse(read_text(file));
  EXPECT_EQ(read_run_state(step(run, 1)).step, 1);
  const auto refused = [&](const char* key, const nlohmann::ordered_json& value) {
    auto state = good;
    if (value.is_null()) {
      state.erase(key);
    } else {
      state[key] = value;
    }
    write_text(file, state.dump());
    const std::string message = message_of<InputError>([&] { read_run_state(step(run, 1)); });
    EXPECT_NE(message.find(key), std::string::npos) << value.dump() << ": " << message;
    EXPECT_NE(message.find(kStateFile), std::string::npos) << message;
  };
  for (const nlohmann::ordered_json& value :
       {nlohmann::ordered_json(), nlohmann::ordered_json(UINT64_MAX), nlohmann::ordered_json(-5),
        nlohmann::ordered_json(0), nlohmann::ordered_json(2), nlohmann::ordered_json(1.0),
        nlohmann::ordered_json("1"), nlohmann::ordered_json::array({1}), nlohmann::ordered_json(true),
        nlohmann::ordered_json(INT64_MIN)}) {
    refused("step", value);
  }
  for (const char* key : {"data_rows", "data_tokens"}) {
    for (const nlohmann::ordered_json& value :
         {nlohmann::ordered_json(), nlohmann::ordered_json(UINT64_MAX), nlohmann::ordered_json(-1)})
      refused(key, value);
  }
  refused("format", 6);
  refused("skipped_steps", -1);
  refused("format", "2");
  refused("data_hashes", 3);
  refused("data_hashes", {{"input_ids", 3}});
  refused("settings", 3);
  refused("settings", {{"fixed", {{"beta1", 0.9}}}});
  for (const char* text : {"", "[]", "7", "{", "null"}) {
    write_text(file, text);
    EXPECT_THROW(read_run_state(step(run, 1)), InputError) << text;
  }
}

TEST(StepOf, KnowsStepFoldersOnly) {
  EXPECT_EQ(step_of("run/checkpoints/step_12"), 12);
  EXPECT_EQ(step_of("step_0"), 0);
  for (const char* name : {"step_", "step_-4", "step_+4", "step_04", "step_4x", "step_99999999999999999999",
                           ".step_4", "step_4.damaged", "other"})
    EXPECT_EQ(step_of(name), -1) << name;
}

}  // namespace
}  // namespace espalier::testing
