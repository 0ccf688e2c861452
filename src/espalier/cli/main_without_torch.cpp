// SPDX-License-Identifier: Apache-2.0
// espalier-core: the commands of `espalier` that need no LibTorch.
#include <exception>
#include <new>

#include "espalier/base/printable.h"
#include "espalier/cli/program.h"
#include "espalier/cli/signals.h"
#include "espalier/runtime/progress.h"

int main(int argc, char** argv) {
  using namespace espalier;
  cli::prepare_process();
  return cli::run_program(argc, argv, [](const std::exception& error) {
    if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return printable(out_of_memory_text());
    return printable_lines(error.what());
  });
}
