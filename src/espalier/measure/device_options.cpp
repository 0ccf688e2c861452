// SPDX-License-Identifier: Apache-2.0
#include "espalier/measure/device_options.h"

#include <ATen/Parallel.h>

#include "espalier/base/messages.h"
#include "espalier/measure/calibrate.h"
#include "espalier/measure/kernel_verdicts.h"
#include "espalier/measure/product_decision.h"
#include "espalier/runtime/cuda_software.h"
#include "espalier/runtime/device.h"

namespace espalier {
namespace {

at::Device chosen_device(const std::string& name) {
  if (name != kAutomaticDevice) return parse_device(name);
  const AutomaticDevice automatic = automatic_device(cuda_driver(), libtorch_cuda());
  log_line("espalier: --device auto: {} ({})", automatic.device.str(), automatic.reason);
  return automatic.device;
}

}  // namespace

Machine DeviceOptions::open(const Group& group) const {
  Machine machine{.device = chosen_device(device)};
  if (machine.device.is_cuda()) {
    machine.kernels.cuda = with_environment(proven_kernels_on(machine.device.index()));
  }
  open_device(machine.device, deterministic);
  if (machine.device.is_cpu()) {
    const auto note = [](const std::string& text) { log_line("espalier: {}", text); };
    const ProductChoice own = decide_products(product_features(), cache_folder(), note).choice;
    machine.kernels.products = parse_product_choice(group.gather(to_string(own)).front());
  }
  return machine;
}

void add_threads(OptionList* list) {
  add_threads(list, [](int threads) { at::set_num_threads(threads); });
}

}  // namespace espalier
