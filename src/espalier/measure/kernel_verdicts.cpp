// SPDX-License-Identifier: Apache-2.0
#include "espalier/measure/kernel_verdicts.h"

#include <torch/version.h>

#include <fmt/ranges.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <mutex>

#include "espalier/base/environment.h"
#include "espalier/base/messages.h"
#include "espalier/measure/calibrate.h"
#include "espalier/ops/attention/library.h"
#include "espalier/ops/judge.h"

namespace espalier {
namespace {

constexpr std::string_view kHead = "head";
// Attention in order of preference, then operators.
constexpr const char* kFamilies[] = {"library", "ampere", "masked", "head", "distribution", "products"};

KernelJudge& kernel_judge() {
  static auto* judge = new KernelJudge;  // never destroyed: it may be a function of a Python that has ended
  return *judge;
}

std::vector<KernelVerdict> verdicts_of(const nlohmann::json& file) {
  std::vector<KernelVerdict> verdicts;
  const nlohmann::json families =
      file.is_object() ? file.value("verdicts", nlohmann::json()) : nlohmann::json();
  for (const auto& [family, verdict] : families.items()) {
    try {
      const auto checks = verdict.at("checks").get<int64_t>();
      const auto fault = verdict.at("fault").get<std::string>();
      verdicts.push_back({.family = family,
                          .is_served = checks > 0 || !fault.empty(),
                          .fault = fault,
                          .is_lasting = verdict.at("is_lasting").get<bool>()});
    } catch (const nlohmann::json::exception&) {  // as if there were none
    }
  }
  return verdicts;
}

// Whether the environment says what runs, whatever the verdict.
bool is_named(const std::string& family) {
  if (attention_kind_named(family)) return !environment(kAttentionVariable).empty();
  return family == kHead && !environment(kHeadVariable).empty();
}

// `what`, why, and the command that shows it.
std::string explained(const std::string& what, const KernelVerdict& verdict, int index) {
  return fmt::format("{}: {} (shown by `espalier device --check {} --device cuda:{}`)", what, verdict.fault,
                     verdict.family, index);
}

std::string fault_text(const KernelVerdict& verdict, const std::string& device_name, int index) {
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

// Of families that could not be checked; the reason of the first.
std::string unchecked_text(const std::vector<KernelVerdict>& verdicts, const std::string& device_name,
                           int index) {
  std::vector<std::string> names;
  for (const KernelVerdict& verdict : verdicts) names.push_back(verdict.family);
  return explained(fmt::format("`{}` could not be checked on {}, and plain forms are used",
                               fmt::join(names, "`, `"), device_name),
                   verdicts.front(), index);
}

// Nothing is said of such a family, nor is it used.
void set_aside(const std::string& family, std::vector<KernelVerdict>* verdicts) {
  std::erase_if(*verdicts, [&](const KernelVerdict& verdict) { return verdict.family == family; });
  verdicts->push_back({.family = family});
}

// Those that are kept. Where some do not last or are missing, and where this process has the library, which
// may be another one since, those of the judge.
std::vector<KernelVerdict> read_verdicts(const CudaDriver& driver, const LibTorchCuda& torch, int index) {
  const std::string library = to_string(AttentionKind::kLibrary);
  const bool has_library = !library::name(index).empty();
  std::vector<KernelVerdict> verdicts =
      kept_verdicts(verdict_key(driver, torch, index), cache_folder() / "kernels");
  if (!has_library) set_aside(library, &verdicts);
  const bool all_last = std::ranges::all_of(verdicts, &KernelVerdict::is_lasting);
  if (kernel_judge() && (has_library || !all_last || !proven_kernels(verdicts, "", index).missing.empty())) {
    verdicts = parse_verdicts(kernel_judge()(index));
    if (!has_library) set_aside(library, &verdicts);
  }
  return verdicts;
}

}  // namespace

std::vector<KernelVerdict> parse_verdicts(const std::string& text) {
  return verdicts_of(nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false));
}

nlohmann::json verdict_key(const CudaDriver& driver, const LibTorchCuda& torch, int index) {
  const CudaDevice& device = driver.devices.at(index);
  return {{"device", device.name},    {"compute_capability", device.compute_capability},
          {"driver", driver.version}, {"torch", TORCH_VERSION},
          {"cuda", torch.version},    {"build", kernel_build()}};
}

std::vector<KernelVerdict> kept_verdicts(const nlohmann::json& key, const std::filesystem::path& folder) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
    if (entry.path().extension() != ".json") continue;
    std::ifstream file(entry.path());
    const nlohmann::json json = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
    if (json.is_object() && json.value("key", nlohmann::json()) == key) return verdicts_of(json);
  }
  return {};
}

void judge_kernels_by(KernelJudge judge) {
  kernel_judge() = std::move(judge);
}

ProvenKernels proven_kernels(const std::vector<KernelVerdict>& verdicts, const std::string& device_name,
                             int index) {
  ProvenKernels proven;
  std::vector<std::string> faults;
  std::vector<KernelVerdict> unchecked;
  bool is_masked_wrong = false;
  for (const std::string family : kFamilies) {
    const auto verdict = std::ranges::find(verdicts, family, &KernelVerdict::family);
    const auto kind = attention_kind_named(family);
    if (verdict == verdicts.end()) {
      proven.missing.push_back(family);
    } else if (!verdict->is_served) {
      continue;
    } else if (!verdict->is_lasting) {
      unchecked.push_back(*verdict);
    } else if (!verdict->fault.empty()) {
      faults.push_back(fault_text(*verdict, device_name, index));
      is_masked_wrong = is_masked_wrong || kind == AttentionKind::kMasked;
    } else {
      if (kind) proven.kernels.attention.push_back(*kind);
      proven.kernels.head = proven.kernels.head || family == kHead;
    }
  }
  if (!unchecked.empty()) faults.push_back(unchecked_text(unchecked, device_name, index));
  if (is_masked_wrong && proven.kernels.attention.empty()) {
    faults.emplace_back("no attention is right, and `masked` is used all the same");
  }
  if (!faults.empty()) proven.warning = fmt::format("warning: {}", fmt::join(faults, "; "));
  return proven;
}

CudaKernels proven_kernels_on(int index) {
  static std::map<int, CudaKernels> proven;
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  if (const auto before = proven.find(index); before != proven.end()) return before->second;
  const CudaDriver driver = cuda_driver();
  const LibTorchCuda torch = libtorch_cuda();
  if (!cuda_fault(driver, torch).empty() || index >= static_cast<int>(driver.devices.size())) return {};
  std::vector<KernelVerdict> verdicts = read_verdicts(driver, torch, index);
  const std::string& name = driver.devices[index].name;
  const CudaKernels kernels = proven_kernels(verdicts, name, index).kernels;
  for (const char* family : kFamilies) {
    if (is_named(family)) set_aside(family, &verdicts);
  }
  const ProvenKernels said = proven_kernels(verdicts, name, index);
  if (!said.warning.empty()) log_line("espalier: {}", said.warning);
  if (!said.missing.empty()) {
    log_line(
        "espalier: no verdict on `{}` is kept for {}, and plain forms are used; `espalier device` makes one",
        fmt::join(said.missing, "`, `"), name);
  }
  return proven[index] = kernels;
}

}  // namespace espalier
