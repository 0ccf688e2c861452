// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/commands/device_kernels.h"

#include <charconv>

namespace espalier::cli {
namespace {

// An entry of CMAKE_CUDA_ARCHITECTURES: digits, `a` for exactly this version, and -real or -virtual for only
// one kind of code.
struct Architecture {
  int version = 0;
  bool exact = false, machine_code = true, ptx = true;

  explicit Architecture(std::string_view name) {
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), version);
    const std::string_view rest = name.substr(end - name.data());
    exact = rest.starts_with('a');
    machine_code = !rest.ends_with("-virtual");
    ptx = !rest.ends_with("-real");
  }

  KernelCode code(int capability) const {
    if (version == 0 || (exact && capability != version)) return KernelCode::kNone;
    const bool same_major = capability / 10 == version / 10 && capability >= version;
    if (machine_code && same_major) return KernelCode::kMachineCode;
    return ptx && capability >= version ? KernelCode::kPtx : KernelCode::kNone;
  }
};

constexpr int kAmpere = 80;

}  // namespace

std::string_view to_string(KernelCode code) {
  switch (code) {
    case KernelCode::kNone:
      return "none";
    case KernelCode::kMachineCode:
      return "machine code";
    case KernelCode::kPtx:
      return "PTX, compiled by the driver";
  }
  return "none";
}

KernelCode ampere_code(int compute_capability, std::string_view architectures) {
  KernelCode best = KernelCode::kNone;
  if (compute_capability < kAmpere) return best;
  while (!architectures.empty()) {
    const size_t comma = architectures.find(',');
    const KernelCode code = Architecture(architectures.substr(0, comma)).code(compute_capability);
    if (code == KernelCode::kMachineCode) return code;
    if (code == KernelCode::kPtx) best = code;
    architectures = comma == std::string_view::npos ? "" : architectures.substr(comma + 1);
  }
  return best;
}

}  // namespace espalier::cli
