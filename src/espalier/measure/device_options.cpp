// SPDX-License-Identifier: Apache-2.0
#include "espalier/measure/device_options.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <memory>
#include <thread>

#include "espalier/base/output.h"
#include "espalier/measure/calibrate.h"
#include "espalier/measure/kernel_check.h"
#include "espalier/measure/product_decision.h"
#include "espalier/runtime/cuda_software.h"
#include "espalier/runtime/device.h"

namespace espalier {
namespace {

constexpr const char* kAutomatic = "auto";

void known_device(const std::string& name) {
  if (name == kAutomatic) return;
  try {
    parse_device(name);
  } catch (const InputError&) {
    throw InputError(fmt::format("device: expected auto, cpu, cuda or cuda:N, received `{}`", name));
  }
}

at::Device chosen_device(const std::string& name) {
  if (name != kAutomatic) return parse_device(name);
  const AutomaticDevice automatic = automatic_device(cuda_driver(), libtorch_cuda());
  log_line("espalier: --device auto: {} ({})", automatic.device.str(), automatic.reason);
  return automatic.device;
}

// Enough to try what more threads than cores do; a number that is a slip would start a million of them.
int most_threads() {
  return std::max(64, 4 * static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace

void DeviceOptions::add(OptionList* list, bool trains) {
  list->group(kMachineGroup);
  list->add("device", &device,
            "Where the model runs: cpu, cuda (the first visible GPU), cuda:N, or auto (the first GPU "
            "that can be used, else the CPU; `espalier device` says why). CUDA needs a LibTorch and a "
            "build with CUDA",
            {.shown = "cpu|cuda|cuda:N|auto", .check = known_device});
  if (!trains) return;
  list->add("deterministic", &deterministic,
            "CUDA: make every run on the same GPU bitwise identical, by slower ways of accumulating "
            "gradients (sorted instead of atomic). Without it, gradients may differ in their last "
            "bits from run to run. The CPU is always deterministic");
}

Machine DeviceOptions::open() const {
  Machine machine{.device = chosen_device(device)};
  if (machine.device.is_cuda()) {
    machine.kernels.cuda = with_environment(prove_kernels(machine.device.index()));
  }
  open_device(machine.device, deterministic);
  if (machine.device.is_cpu()) {
    const auto note = [](const std::string& text) { fmt::print(stderr, "espalier: {}\n", text); };
    machine.kernels.products = decide_products(product_features(), cache_folder(), note).choice;
  }
  return machine;
}

void add_threads(OptionList* list) {
  const auto threads = std::make_shared<int>(0);
  list->add(
      "threads", threads.get(), "CPU threads (0: all cores)",
      {.least = 0, .most = static_cast<double>(most_threads()), .group = kMachineGroup, .then = [threads] {
         if (*threads > 0) at::set_num_threads(*threads);
       }});
}

}  // namespace espalier
