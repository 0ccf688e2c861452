// SPDX-License-Identifier: Apache-2.0
// verify MODEL ROWS: proves in float64 that loss and gradients on trees are those of training each row by
// itself.
#include <cstdio>
#include <exception>

#include "espalier/config/config.h"
#include "espalier/data/reader.h"
#include "espalier/measure/planning.h"
#include "espalier/verify/verify.h"

namespace {

bool verify(const char* model, const char* file) {
  const espalier::DecoderConfig config = espalier::read_config(model);
  const espalier::Trajectories rows = espalier::read_trajectories(file, {.vocab_size = config.vocab_size});
  espalier::VerifyOptions options;
  options.model = model;
  options.plan = espalier::Planning().options(rows);
  const espalier::VerifyReport report = espalier::verify(rows, options);
  std::printf("%s\n", to_json(report).dump(2).c_str());
  return report.passed;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s MODEL ROWS\n", argv[0]);
    return 2;
  }
  try {
    return verify(argv[1], argv[2]) ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "verify: %s\n", error.what());
    return 1;
  }
}
