// SPDX-License-Identifier: Apache-2.0
// What _core and _engine need alike to run commands for Python.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <utility>
#include <vector>

#include "espalier/commands/command.h"

namespace espalier::python {

/// A Caller whose functions are methods of a Python object (espalier.commands.native.Caller), which must
/// outlive it. They acquire the GIL, and throw nanobind::python_error where Python raises.
commands::Caller caller_of(nanobind::handle object);

/// Options as Python gives them: texts are bytes, because names of files need not be UTF-8.
using NamedBytes = std::vector<std::pair<std::string, nanobind::bytes>>;
NamedTexts texts_of(const NamedBytes& options);

/// JSON for Python. Bytes that are not UTF-8, such as those of file names, are replaced.
std::string text_of(const nlohmann::ordered_json& json);

/// Adds listen, remove_temporaries and guard_files, which every library of the process has for itself.
void bind_process(nanobind::module_& module);

}  // namespace espalier::python
