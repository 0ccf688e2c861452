// SPDX-License-Identifier: Apache-2.0
// espalier device: the CPU and GPUs of this machine and the kernels that run on them.
#include <ATen/Parallel.h>
#include <torch/version.h>

#include <memory>
#include <string_view>

#include <nlohmann/json.hpp>

#include "espalier/base/output.h"
#include "espalier/base/units.h"
#include "espalier/cli/commands/commands.h"
#include "espalier/cli/commands/device_kernels.h"
#include "espalier/measure/calibrate.h"
#include "espalier/measure/device_options.h"
#include "espalier/measure/kernel_check.h"
#include "espalier/measure/product_decision.h"
#include "espalier/ops/kernel_choice.h"
#include "espalier/runtime/cuda_software.h"
#include "espalier/runtime/device.h"

namespace espalier::cli {
namespace {

using Json = nlohmann::ordered_json;

/// The stored calibrations of a device of this name.
std::vector<KeptRates> rates_of(const std::string& name, bool is_cpu) {
  std::vector<KeptRates> rates = kept_rates(cache_folder());
  std::erase_if(rates, [&](const KeptRates& kept) { return kept.device != name || kept.is_cpu != is_cpu; });
  return rates;
}

Json rates_json(const std::string& name, bool is_cpu) {
  Json json = Json::array();
  for (const KeptRates& kept : rates_of(name, is_cpu)) json.push_back(to_json(kept));
  return json;
}

Json cpu_json() {
  const ProductFeatures features = product_features();
  const ProductDecision products = decide_products(
      features, cache_folder(), [](const std::string& text) { log_line("espalier: {}", text); });
  return {{"name", device_name(at::kCPU)},    {"instruction_set", instruction_set_name(instruction_set())},
          {"threads", at::get_num_threads()}, {"matrix_products", to_string(products.choice)},
          {"chosen_by", products.reason},     {"rates", rates_json(device_name(at::kCPU), /*is_cpu=*/true)}};
}

/// Results of the kernel checks by family: those of attention, or all others.
Json verdict_json(const std::vector<qualify::Verdict>& verdicts, bool is_attention) {
  Json json = Json::object();
  for (const qualify::Verdict& verdict : verdicts) {
    if (attention_kind_named(verdict.family).has_value() != is_attention) continue;
    json[verdict.family] = !verdict.served         ? "not for this device"
                           : verdict.fault.empty() ? "passed"
                           : verdict.lasting       ? "FAILED: " + verdict.fault
                                                   : "not checked: " + verdict.fault;
  }
  return json;
}

Json device_json(const CudaDevice& device, int index) {
  return {{"device", fmt::format("cuda:{}", index)},
          {"name", device.name},
          {"compute_capability",
           fmt::format("{}.{}", device.compute_capability / 10, device.compute_capability % 10)},
          {"memory_bytes", device.memory_bytes},
          {"kernels", {{"ampere", to_string(ampere_code(device.compute_capability, kCudaArchitectures))}}},
          {"rates", rates_json(device.name, /*is_cpu=*/false)}};
}

Json or_null(const std::string& text) {
  return text.empty() ? Json() : Json(text);
}

Json cuda_json(const CudaDriver& driver, const LibTorchCuda& torch, bool again) {
  const std::string fault = cuda_fault(driver, torch);
  Json devices = Json::array();
  for (size_t i = 0; i < driver.devices.size(); ++i) {
    devices.push_back(device_json(driver.devices[i], static_cast<int>(i)));
    if (!fault.empty()) continue;
    const std::vector<qualify::Verdict> verdicts = kernel_verdicts(driver, torch, static_cast<int>(i), again);
    devices.back()["attention"] = verdict_json(verdicts, /*is_attention=*/true);
    devices.back()["operators"] = verdict_json(verdicts, /*is_attention=*/false);
    CudaKernels kernels = with_environment(proven_kernels(verdicts, "", 0).kernels);
    kernels.attention.push_back(AttentionKind::kMasked);
    devices.back()["taken"] = {
        {"attention", to_string(kernels.named_attention.value_or(kernels.attention.front()))}};
  }
  return {{"libtorch", TORCH_VERSION},
          {"libtorch_cuda", torch.found ? Json(torch.version.empty() ? "unknown" : torch.version) : Json()},
          {"driver", driver.found ? Json(driver.version.empty() ? "unknown" : driver.version) : Json()},
          {"driver_cuda", driver.found ? Json(cuda_version_text(driver.cuda)) : Json()},
          {"nvcc", or_null(kNvcc)},
          {"architectures", or_null(kCudaArchitectures)},
          {"fault", or_null(fault)},
          {"devices", std::move(devices)}};
}

template <typename... Args>
void row(std::string_view name, fmt::format_string<Args...> format, Args&&... args) {
  print_output("{:<24}  {}\n", name, fmt::format(format, std::forward<Args>(args)...));
}

std::string text_of(const Json& value) {
  return value.is_string() ? value.get<std::string>() : "none";
}

/// `device`: its name for --device.
void print_rates(std::string_view title, const std::string& device_name, std::string_view device) {
  const std::vector<KeptRates> rates = rates_of(device_name, device == "cpu");
  if (rates.empty()) {
    row(title, "none stored; `espalier plan --model DIR --data FILE --device {}` measures them", device);
  }
  for (const KeptRates& kept : rates) row(title, "{}", to_string(kept));
}

void print(const Json& report) {
  const Json &cpu = report["cpu"], &cuda = report["cuda"];
  row("CPU", "{}", text_of(cpu["name"]));
  row("instruction set", "{}", text_of(cpu["instruction_set"]));
  row("threads", "{}", cpu["threads"].get<int>());
  row("matrix products", "{} ({})", text_of(cpu["matrix_products"]), text_of(cpu["chosen_by"]));
  print_rates("measured rates", text_of(cpu["name"]), "cpu");
  row("LibTorch", "{}, CUDA {}", text_of(cuda["libtorch"]), text_of(cuda["libtorch_cuda"]));
  if (cuda["driver"].is_null()) {
    row("NVIDIA driver", "none");
  } else {
    row("NVIDIA driver", "{}, CUDA up to {}", text_of(cuda["driver"]), text_of(cuda["driver_cuda"]));
  }
  if (cuda["nvcc"].is_null()) {
    row("GPU kernels", "none: this build had no nvcc; operators of LibTorch are used instead");
  } else {
    row("GPU kernels", "built with nvcc {} for {}", text_of(cuda["nvcc"]), text_of(cuda["architectures"]));
  }
  for (const Json& device : cuda["devices"]) {
    const std::string name = text_of(device["device"]);
    row(name, "{}, compute capability {}, {}", text_of(device["name"]), text_of(device["compute_capability"]),
        human_bytes(device["memory_bytes"].get<double>()));
    for (const auto& [kernels, code] : device["kernels"].items()) {
      row("  " + kernels, "{}", text_of(code));
    }
    for (const char* kind : {"attention", "operators", "taken"}) {
      const Json verdicts = device.value(kind, Json::object());
      for (const auto& [family, verdict] : verdicts.items()) {
        row(fmt::format("  {} {}", kind, family), "{}", text_of(verdict));
      }
    }
    print_rates("  measured rates", text_of(device["name"]), name);
  }
  if (!cuda["fault"].is_null()) row("CUDA", "cannot be used: {}", text_of(cuda["fault"]));
  row("--device auto", "{}", text_of(report["auto"]));
}

struct DeviceArguments {
  bool json = false, requalify = false;
  std::string check, device = "cuda", finding;
};

int run_device(const DeviceArguments& flags) {
  if (!flags.check.empty()) return run_check(flags.check, flags.device, flags.finding);
  const CudaDriver driver = cuda_driver();
  const LibTorchCuda torch = libtorch_cuda();
  const Json report{{"cpu", cpu_json()},
                    {"cuda", cuda_json(driver, torch, flags.requalify)},
                    {"auto", automatic_device(driver, torch).device.str()}};
  if (flags.json) {
    print_output("{}\n", report.dump(2));
  } else {
    print(report);
  }
  return 0;
}

}  // namespace

Command device_command() {
  const auto flags = std::make_shared<DeviceArguments>();
  Command command{
      .name = "device",
      .summary = kSummaryOfDevice,
      .closing =
          "Prints which implementation multiplies matrices on the CPU and why, or why no GPU can be used. "
          "Espalier's own kernels run on every GPU of compute capability 8.0 or later: as machine code on "
          "the architectures they were built for, on others as PTX, which the driver compiles.\n\n"
          "When a GPU is first used, its kernels are checked against float64. Each family runs in a separate "
          "process with a time limit: attention on a dozen difficult forests, the LM "
          "head (head; distribution: with temperatures, softcap, scale and bias) and matrix products. For "
          "attention, the first of library and ampere that passed is used, otherwise masked. Libraries run "
          "in Python only; `python -m espalier.kernels` prints which of them are taken there and why. Where "
          "kernels of head failed, operators of LibTorch are used. Distribution and products "
          "have no alternative; a warning is printed if they failed. The results are stored for the GPU, "
          "driver, LibTorch and build. ESPALIER_ATTENTION selects an implementation regardless of the "
          "results; so does ESPALIER_HEAD (kernels or composed).\n\n"
          "Measured rates are FLOP/s of forward and backward, for each model size that plan and train were "
          "calibrated for on this machine.",
      .run = [flags](const OptionList&) { return run_device(*flags); },
      .has_config = false};
  OptionList& list = command.options;
  list.group("Checks");
  list.add("requalify", &flags->requalify, "Check the kernels again, even if results are stored");
  list.add("check", &flags->check,
           "Check one family of kernels in this process and print its faults: for attention library, ampere "
           "or masked (cpu with --device cpu), or head, distribution or products",
           {.shown = "NAME"});
  list.add("device", &flags->device, "Device for --check: cpu, cuda or cuda:N",
           {.shown = "cpu|cuda|cuda:N", .check = parse_device});
  list.add("finding", &flags->finding, "File for the result of --check", {.hidden = true});
  add_threads(&list);
  list.group(kOutputGroup);
  list.add("json", &flags->json, "Print JSON");
  return command;
}

}  // namespace espalier::cli
