// SPDX-License-Identifier: Apache-2.0
#include "espalier/measure/kernel_check.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <torch/version.h>
#include <unistd.h>

#include <fmt/ranges.h>

#include <map>
#include <mutex>
#include <new>

#include "espalier/base/environment.h"
#include "espalier/base/hash.h"
#include "espalier/base/messages.h"
#include "espalier/base/units.h"
#include "espalier/measure/calibrate.h"
#include "espalier/ops/attention/cuda.h"
#include "espalier/ops/attention/library.h"
#include "espalier/qualify/families.h"
#include "espalier/runtime/device.h"
#include "espalier/runtime/progress.h"

namespace espalier {
namespace {

// Of this very program, even where its file has been replaced meanwhile.
constexpr const char* kProgram = "/proc/self/exe";

KernelCheckCommand& check_command() {
  static KernelCheckCommand command;
  return command;
}

// The shared library that something is in, or the program.
std::string file_of(void* address) {
  Dl_info info{};
  const bool found = dladdr(address, &info) != 0 && info.dli_fname != nullptr;
  return found && std::filesystem::path(info.dli_fname).extension() == ".so" ? info.dli_fname : kProgram;
}

// What has the checks, and the library with the kernels.
std::string build_id() {
  return hash_file(file_of(reinterpret_cast<void*>(&run_check))) +
         hash_file(file_of(reinterpret_cast<void*>(&attention_kind)));
}

nlohmann::ordered_json verdict_key(const CudaDriver& driver, const LibTorchCuda& torch, int index) {
  const CudaDevice& device = driver.devices.at(index);
  return {{"version", 3},
          {"device", device.name},
          {"compute_capability", device.compute_capability},
          {"driver", driver.version},
          {"driver_cuda", driver.cuda},
          {"libtorch", TORCH_VERSION},
          {"libtorch_cuda", torch.version},
          {"library", library::name(index)},
          {"build", build_id()}};
}

// Nobody waits any more for a check whose parent was killed.
void end_when_forgotten() {
  constexpr unsigned kSeconds = 600;
  ::alarm(kSeconds);
}

constexpr std::string_view kHead = "head";

// Whether the environment says what runs, whatever the verdict.
bool is_named(const std::string& family) {
  if (attention_kind_named(family)) return !environment(kAttentionVariable).empty();
  return family == kHead && !environment(kHeadVariable).empty();
}

// `what`, why, and the command that shows it.
std::string explained(const std::string& what, const qualify::Verdict& verdict, int index) {
  return fmt::format("{}: {} (shown by `espalier device --check {} --device cuda:{}`)", what, verdict.fault,
                     verdict.family, index);
}

std::string fault_text(const qualify::Verdict& verdict, const std::string& device_name, int index) {
  const std::string& family = verdict.family;
  if (attention_kind_named(family)) {
    return explained(fmt::format("attention `{}` is not used on {}", family, device_name), verdict, index);
  }
  if (family == kHead) {
    return explained(
        fmt::format("kernels of `{}` are not used on {}, operators of LibTorch are", family, device_name),
        verdict, index);
  }
  return explained(
      fmt::format("`{}` cannot be trusted on {}, and nothing stands in for it", family, device_name), verdict,
      index);
}

// Of families that could not be checked and are used all the same; the reason of the first.
std::string unchecked_text(const std::vector<qualify::Verdict>& verdicts, const std::string& device_name,
                           int index) {
  std::vector<std::string> names;
  for (const qualify::Verdict& verdict : verdicts) names.push_back(verdict.family);
  return explained(fmt::format("`{}` could not be checked on {}", fmt::join(names, "`, `"), device_name),
                   verdicts.front(), index);
}

qualify::Finding finding_of(const std::string& family, c10::Device device) {
  try {
    qualify::Finding finding = qualify::check_family(family, device);
    synchronize(device);
    return finding;
  } catch (const c10::OutOfMemoryError&) {
    throw;  // says nothing about kernels
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const InputError&) {
    throw;
  } catch (const c10::Error& error) {
    return {.checks = 0, .fault = error.what_without_backtrace()};
  } catch (const std::exception& error) {  // as of a launch that failed
    return {.checks = 0, .fault = error.what()};
  }
}

}  // namespace

void check_kernels_by(KernelCheckCommand command) {
  check_command() = std::move(command);
}

void check_kernels_by_this_program() {
  check_kernels_by(
      [](const std::string& family, const std::string& device, const std::filesystem::path& finding) {
        return std::vector<std::string>{kProgram,   "device", "--check",   family,
                                        "--device", device,   "--finding", finding.string()};
      });
}

std::vector<qualify::Verdict> kernel_verdicts(const CudaDriver& driver, const LibTorchCuda& torch, int index,
                                              bool again) {
  Progress progress("checking kernels");
  qualify::Qualification qualification;
  qualification.key = verdict_key(driver, torch, index);
  qualification.folder = cache_folder();
  qualification.again = again;
  qualification.command = [index](const std::string& family, const std::filesystem::path& finding) {
    return check_command()(family, fmt::format("cuda:{}", index), finding);
  };
  qualification.note = [&](const std::string& text) { progress.line("espalier: " + text); };
  qualification.progress = [&](double done, const std::string& family) { progress.update(done, family); };
  return qualify::verdicts_on(qualify::kernel_families(at::kCUDA), qualification);
}

ProvenKernels proven_kernels(const std::vector<qualify::Verdict>& verdicts, const std::string& device_name,
                             int index) {
  ProvenKernels proven;
  std::vector<std::string> faults;
  std::vector<qualify::Verdict> unchecked;
  bool any_attention = false;
  for (const qualify::Verdict& verdict : verdicts) {
    const auto kind = attention_kind_named(verdict.family);
    any_attention = any_attention || kind;
    if (!verdict.served) continue;
    const bool is_right = verdict.fault.empty();
    const bool is_used = is_right || !verdict.lasting;
    if (kind && is_used) proven.kernels.attention.push_back(*kind);
    if (verdict.family == kHead) proven.kernels.head = is_used;
    if (is_right) continue;
    if (is_used) {
      unchecked.push_back(verdict);
    } else {
      faults.push_back(fault_text(verdict, device_name, index));
    }
  }
  if (!unchecked.empty()) faults.push_back(unchecked_text(unchecked, device_name, index));
  if (faults.empty()) return proven;
  if (any_attention && proven.kernels.attention.empty()) {
    faults.emplace_back("no attention is right, and `masked` is used all the same");
  }
  proven.warning = fmt::format("warning: {}", fmt::join(faults, "; "));
  return proven;
}

CudaKernels prove_kernels(int index) {
  static std::map<int, CudaKernels> proven;
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  if (!check_command()) return {};
  if (const auto found = proven.find(index); found != proven.end()) return found->second;
  const CudaDriver driver = cuda_driver();
  const LibTorchCuda torch = libtorch_cuda();
  if (!cuda_fault(driver, torch).empty() || index >= static_cast<int>(driver.devices.size())) return {};
  std::vector<qualify::Verdict> verdicts = kernel_verdicts(driver, torch, index, /*again=*/false);
  const std::string& name = driver.devices[index].name;
  const CudaKernels kernels = proven_kernels(verdicts, name, index).kernels;
  std::erase_if(verdicts, [](const qualify::Verdict& verdict) { return is_named(verdict.family); });
  const std::string warning = proven_kernels(verdicts, name, index).warning;
  if (!warning.empty()) log_line("espalier: {}", warning);
  return proven[index] = kernels;
}

int run_check(const std::string& family, const std::string& device_name, const std::filesystem::path& file) {
  KernelChoice kernels = kernel_choice();
  if (!file.empty()) {
    end_when_forgotten();
    // A verdict is on our kernels, whatever runs in the process that asked for it.
    kernels.cuda.head = true;
  }
  const KernelScope scope(kernels);
  const at::Device device = parse_device(device_name);
  open_device(device);
  const qualify::Finding finding = finding_of(family, device);
  if (!file.empty()) {
    qualify::write_finding(finding, file);
    return 0;
  }
  if (!finding.fault.empty()) {
    log_line("{}: FAILED: {}", family, finding.fault);
    return 1;
  }
  if (finding.checks == 0) {
    log_line("{}: not for {} in this build", family, device.str());
  } else {
    log_line("{}: passed {}", family, count_of(finding.checks, "check", "checks"));
  }
  return 0;
}

}  // namespace espalier
