// SPDX-License-Identifier: Apache-2.0
// espalier: trains language models on trees of tokens.
#include <cstdlib>

#include "espalier/base/printable.h"
#include "espalier/cli/program.h"
#include "espalier/cli/signals.h"
#include "espalier/runtime/out_of_memory.h"
#include "espalier/runtime/tensor_memory.h"

int main(int argc, char** argv) {
  using namespace espalier;
  cli::prepare_process();
  count_tensor_memory();
  reuse_freed_memory();
  // In the end all is written. LibTorch would take a tenth of a second to forget its operators one by one.
  std::_Exit(cli::run_program(argc, argv,
                              [](const std::exception& error) { return printable_lines(text_of(error)); }));
}
