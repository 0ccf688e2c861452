// SPDX-License-Identifier: Apache-2.0
// sample MODEL ROWS OUT: four completions of the prompt of each row, as rows with behaviour
// log-probabilities. Shared prompts are encoded once.
#include <cstdio>
#include <exception>
#include <filesystem>

#include "espalier/config/config.h"
#include "espalier/config/stop_ids.h"
#include "espalier/data/reader.h"
#include "espalier/data/writer.h"
#include "espalier/model/weights/weights.h"
#include "espalier/sample/sampler.h"

namespace {

void sample(const std::filesystem::path& model, const char* file, const std::filesystem::path& out) {
  const espalier::Decoder decoder = espalier::load_decoder(model, at::kFloat);
  const espalier::DecoderConfig config = espalier::read_config(model);
  const espalier::Trajectories rows = espalier::read_trajectories(file, {.vocab_size = config.vocab_size});
  const espalier::Trajectories prompts = espalier::prompts_of(rows);
  espalier::SampleOptions options;
  options.samples = 4;
  options.max_new_tokens = 32;
  options.stop_ids = espalier::read_stop_ids(model);
  const espalier::SampleResult result = espalier::sample(decoder, prompts, options);
  write_trajectories(out, rows_of(result.completions, rows, prompts, options));
  std::printf("%zu completions of %lld prompts\n", result.completions.size(),
              static_cast<long long>(prompts.num_rows()));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: %s MODEL ROWS OUT\n", argv[0]);
    return 2;
  }
  try {
    sample(argv[1], argv[2], argv[3]);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "sample: %s\n", error.what());
    return 1;
  }
}
