// SPDX-License-Identifier: Apache-2.0
// train MODEL ROWS OUT STEPS: supervised training of a Hugging Face model folder on the rows of a file. A
// checkpoint is written after every second step; where OUT has some, the run goes on from the newest.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>

#include "espalier/config/config.h"
#include "espalier/data/reader.h"
#include "espalier/measure/planning.h"
#include "espalier/train/run/trainer.h"

namespace {

void train(const std::filesystem::path& model, const char* file, const std::filesystem::path& out,
           int64_t steps) {
  const espalier::DecoderConfig config = espalier::read_config(model);
  const espalier::Trajectories rows = espalier::read_trajectories(file, {.vocab_size = config.vocab_size});
  espalier::TrainOptions options;
  options.model = model;
  options.out = out;
  options.plan = espalier::Planning().options(rows);  // how `espalier train` plans by default
  options.learning_rate = 1e-3;
  options.steps = steps;
  options.save_every = 2;
  options.resume = std::filesystem::exists(out / "checkpoints");
  espalier::check_train_options(options);

  espalier::TrainEvents events;
  events.started = [](int64_t total, int64_t done) {
    std::printf("%lld of %lld steps are done\n", static_cast<long long>(done), static_cast<long long>(total));
  };
  events.step = [](int64_t step, const nlohmann::ordered_json& metrics) {
    std::printf("step %lld: loss %.6f\n", static_cast<long long>(step), metrics["loss"].get<double>());
  };
  events.saved = [](const std::filesystem::path& folder) { std::printf("saved %s\n", folder.c_str()); };
  events.note = [](const std::string& text) { std::fprintf(stderr, "%s\n", text.c_str()); };
  espalier::train(rows, options, events);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: %s MODEL ROWS OUT STEPS\n", argv[0]);
    return 2;
  }
  try {
    train(argv[1], argv[2], argv[3], std::atoll(argv[4]));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train: %s\n", error.what());
    return 1;
  }
}
