// SPDX-License-Identifier: Apache-2.0
// Commands that need no LibTorch, and what the build is.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <new>

#include "espalier/commands/command.h"
#include "espalier/commands/plan_of_model.h"
#include "espalier/ops/kernels/cpu/instruction_set.h"
#include "espalier/python/bindings.h"
#include "espalier/python/caller.h"
#include "espalier/runtime/progress.h"

namespace espalier {

/// The commit that the library was built from: 12 hexadecimal digits, followed by "-dirty" if tracked files
/// differed from it; "unknown" outside of git. Every build updates its source (cmake/WriteCommit.cmake).
extern const char* const kCommit;

namespace python {
namespace {

namespace nb = nanobind;
using commands::Caller;
using commands::Command;

Command command_of(const std::string& name, const Caller& caller) {
  if (name == "inspect") return commands::inspect_command(caller);
  if (name == "plan") return commands::plan_command(caller);
  ESPALIER_ASSERT(name == "synth");
  return commands::synth_command(caller);
}

std::pair<int, std::string> run_command(const std::string& name, const NamedBytes& options,
                                        nb::handle caller_object) {
  const Caller caller = caller_of(caller_object);
  const NamedTexts texts = texts_of(options);
  const Interruptible guard;
  try {
    const commands::Result result = command_of(name, caller)(texts);
    return {result.status, text_of(result.json)};
  } catch (const std::bad_alloc&) {
    throw std::runtime_error(out_of_memory_text());
  }
}

nb::dict build() {
  nb::dict properties;
  properties["espalier"] = ESPALIER_VERSION;
  properties["commit"] = kCommit;
  properties["compiler"] = ESPALIER_COMPILER;
  properties["build type"] = ESPALIER_BUILD_TYPE;
  properties["instruction set"] = std::string(instruction_set_name(instruction_set()));
  return properties;
}

}  // namespace

void bind_commands(nb::module_& module) {
  module.def("run_command", &run_command, nb::arg("name"), nb::arg("options"), nb::arg("caller"),
             "Runs inspect, plan or synth with options, pairs of name and text. Returns the exit status and "
             "what there is to print, as JSON.");
  module.def(
      "describe_command",
      [](const std::string& name) { return text_of(command_of(name, {}).options.description()); },
      nb::arg("name"), "Its options, as JSON.");
  module.def(
      "check_options",
      [](const std::string& name, const NamedBytes& options) { command_of(name, {}).set(texts_of(options)); },
      nb::arg("name"), nb::arg("options"),
      "Raises UsageError for options that the command lacks, and values that they cannot have.");
  module.def("build", &build,
             "Properties of this build. Raises InputError if ESPALIER_CPU names an "
             "instruction set that this machine lacks.");
  bind_process(module);
}

}  // namespace python
}  // namespace espalier
