// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/own_kernels.h"

#include <c10/util/Exception.h>

#include <array>
#include <cstdlib>
#include <string_view>
#include <utility>

namespace espalier {
namespace {

bool& is_used(OwnKernels kernels) {
  static std::array<bool, 2> used{true, true};
  return used.at(static_cast<size_t>(kernels));
}

}  // namespace

bool uses_own_kernels(OwnKernels kernels) {
  const char* given = std::getenv(variable_of(kernels));
  const std::string_view word = given == nullptr ? "" : given;
  if (word.empty()) return is_used(kernels);
  TORCH_CHECK(word == "kernels" || word == "composed", variable_of(kernels),
              ": expected kernels or composed, received ", word);
  return word == "kernels";
}

bool set_own_kernels(OwnKernels kernels, bool used) {
  return std::exchange(is_used(kernels), used);
}

const char* variable_of(OwnKernels kernels) {
  return kernels == OwnKernels::kHead ? "ESPALIER_HEAD" : "ESPALIER_ELEMENTWISE";
}

}  // namespace espalier
