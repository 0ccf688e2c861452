// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/kernel_check.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <torch/version.h>
#include <unistd.h>

#include <cstdlib>

#include "espalier/base/hash.h"
#include "espalier/base/units.h"
#include "espalier/cli/output.h"
#include "espalier/cli/progress.h"
#include "espalier/measure/calibrate.h"
#include "espalier/ops/attention/proven.h"
#include "espalier/qualify/families.h"
#include "espalier/runtime/device.h"

namespace espalier::cli {
namespace {

// Of this very program, even where its file has been replaced meanwhile.
constexpr const char* kProgram = "/proc/self/exe";

bool& checks_kernels() {
  static bool checks = false;
  return checks;
}

// The program, and the library with the kernels.
std::string build_id() {
  Dl_info info{};
  const bool found =
      dladdr(reinterpret_cast<void*>(&attention_kind), &info) != 0 && info.dli_fname != nullptr;
  std::string id = hash_file(kProgram);
  if (found && std::filesystem::path(info.dli_fname).extension() == ".so") id += hash_file(info.dli_fname);
  return id;
}

nlohmann::ordered_json verdict_key(const CudaDriver& driver, const LibTorchCuda& torch, int index) {
  const CudaDevice& device = driver.devices.at(index);
  return {{"version", 1},
          {"device", device.name},
          {"compute_capability", device.compute_capability},
          {"driver", driver.version},
          {"driver_cuda", driver.cuda},
          {"libtorch", TORCH_VERSION},
          {"libtorch_cuda", torch.version},
          {"build", build_id()}};
}

// Nobody waits any more for a check whose parent was killed.
void end_when_forgotten() {
  constexpr unsigned kSeconds = 600;
  ::alarm(kSeconds);
}

Finding finding_of(const std::string& family, c10::Device device) {
  try {
    Finding finding = check_family(family, device);
    synchronize(device);
    return finding;
  } catch (const c10::OutOfMemoryError&) {
    throw;  // says nothing about kernels
  } catch (const c10::Error& error) {
    return {.checks = 0, .fault = error.what_without_backtrace()};
  }
}

}  // namespace

void check_kernels_by_this_program() {
  checks_kernels() = true;
}

std::vector<Verdict> kernel_verdicts(const CudaDriver& driver, const LibTorchCuda& torch, int index,
                                     bool again) {
  Progress progress("checking kernels");
  Qualification qualification;
  qualification.key = verdict_key(driver, torch, index);
  qualification.folder = cache_folder();
  qualification.again = again;
  qualification.command = [index](const std::string& family, const std::filesystem::path& finding) {
    return std::vector<std::string>{kProgram,    "device",        "--check",
                                    family,      "--device",      fmt::format("cuda:{}", index),
                                    "--finding", finding.string()};
  };
  qualification.note = [&](const std::string& text) { progress.line("espalier: " + text); };
  qualification.progress = [&](double done, const std::string& family) { progress.update(done, family); };
  return qualify(attention_families(at::kCUDA), qualification);
}

ProvenAttention proven_attention(const std::vector<Verdict>& verdicts, const std::string& device_name,
                                 int index) {
  ProvenAttention proven;
  for (const Verdict& verdict : verdicts) {
    const auto kind = attention_kind_named(verdict.family);
    if (!kind || !verdict.served) continue;
    if (verdict.fault.empty()) {
      proven.kinds.push_back(*kind);
      continue;
    }
    proven.warning += fmt::format(
        "{}attention `{}` is not used on {}: {} (shown by `espalier device --check {} --device cuda:{}`)",
        proven.warning.empty() ? "warning: " : "; ", verdict.family, device_name, verdict.fault,
        verdict.family, index);
  }
  if (!proven.warning.empty() && proven.kinds.empty()) {
    proven.warning += "; none is right, and `masked` is used all the same";
  }
  return proven;
}

void prove_kernels(int index) {
  const char* named = std::getenv("ESPALIER_ATTENTION");
  if (!checks_kernels() || (named != nullptr && *named != '\0')) return;
  const CudaDriver driver = cuda_driver();
  const LibTorchCuda torch = libtorch_cuda();
  if (!cuda_fault(driver, torch).empty() || index >= static_cast<int>(driver.devices.size())) return;
  ProvenAttention proven = proven_attention(kernel_verdicts(driver, torch, index, /*again=*/false),
                                            driver.devices[index].name, index);
  if (!proven.warning.empty()) log_line("espalier: {}", proven.warning);
  set_proven_attention(std::move(proven.kinds));
}

int run_check(const std::string& family, const std::string& device_name, const std::filesystem::path& file) {
  if (!file.empty()) end_when_forgotten();
  const at::Device device = parse_device(device_name);
  open_device(device);
  const Finding finding = finding_of(family, device);
  if (!file.empty()) {
    write_finding(finding, file);
    return 0;
  }
  if (!finding.fault.empty()) {
    print_output("{}: FAILED: {}\n", family, finding.fault);
    return 1;
  }
  if (finding.checks == 0) {
    print_output("{}: not for {} in this build\n", family, device.str());
  } else {
    print_output("{}: passed {}\n", family, count_of(finding.checks, "check", "checks"));
  }
  return 0;
}

}  // namespace espalier::cli
