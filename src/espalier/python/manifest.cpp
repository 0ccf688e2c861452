// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/manifest.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/string.h>

#include <filesystem>
#include <string>

#include "espalier/python/bindings.h"

namespace espalier::python {

void bind_manifest(nanobind::module_& module) {
  module.def(
      "manifest_fault",
      [](const std::filesystem::path& folder, const std::string& title) {
        return on_files([&] { return espalier::manifest_fault(folder, title, [](const std::string&) {}); });
      },
      nanobind::arg("folder"), nanobind::arg("title"),
      "Compares a checkpoint with the checksums of its manifest. Returns the first fault in a sentence,\n"
      "empty if there is none. A checkpoint without a manifest has none.");
}

}  // namespace espalier::python
