// SPDX-License-Identifier: Apache-2.0
// Which matrix products a process starts with, and why.
#pragma once

#include <filesystem>
#include <functional>
#include <string>

#include "espalier/ops/kernels/cpu/products/product_choice.h"

namespace espalier {

struct ProductDecision {
  ProductChoice choice;
  std::string reason;
};

/// By the features of the processor where they tell (always the same, then: nothing is measured); else by a
/// measurement, once per processor, number of threads and level: all ways in turn, some rounds, by the
/// medians of the rounds' ratios. It is kept in `folder`, and `note` is told. The environment may name
/// products instead (with_environment). Where the folder cannot be written, the measurement is not kept and
/// `note` is told.
ProductDecision decide_products(const ProductFeatures& features, const std::filesystem::path& folder,
                                const std::function<void(const std::string&)>& note);

/// The measurement: for each dtype the way that is fastest, LibTorch's (and upcast) unless another one takes
/// less than 0.95 of its time.
ProductChoice measure_products();

}  // namespace espalier
