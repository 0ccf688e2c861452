// SPDX-License-Identifier: Apache-2.0
// espalier: trains language models on trees of tokens.
#include <exception>
#include <optional>
#include <string>

#include <c10/util/Exception.h>

#include "espalier/base/mapped_file_guard.h"
#include "espalier/base/printable.h"
#include "espalier/cli/program.h"
#include "espalier/cli/signals.h"
#include "espalier/measure/kernel_check.h"
#include "espalier/runtime/out_of_memory.h"
#include "espalier/runtime/tensor_memory.h"

namespace {

std::string message_of(const std::exception& error) {
  using namespace espalier;
  if (const std::optional<std::string> memory = out_of_memory_message(error)) return printable(*memory);
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return printable_lines(torch_error != nullptr ? torch_error->what_without_backtrace() : error.what());
}

}  // namespace

int main(int argc, char** argv) {
  using namespace espalier;
  cli::prepare_process();
  guard_mapped_files();
  count_tensor_memory();
  reuse_freed_memory();
  check_kernels_by_this_program();
  return cli::run_program(argc, argv, message_of);
}
