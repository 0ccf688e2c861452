// SPDX-License-Identifier: Apache-2.0
#include "espalier/train/optimizer/optimizer_kind.h"

#include <array>

namespace espalier {
namespace {

constexpr auto kOptimizers =
    std::to_array<Word<OptimizerKind>>({{"adamw", OptimizerKind::kAdamW}, {"sgd", OptimizerKind::kSgd}});

}  // namespace

void add_optimizer(OptimizerKind* optimizer, OptionList* list, const std::string& help) {
  list->add("optimizer", optimizer, kOptimizers, help);
}

std::string to_string(OptimizerKind optimizer) {
  return word_of(kOptimizers, optimizer);
}

}  // namespace espalier
