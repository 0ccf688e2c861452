// SPDX-License-Identifier: Apache-2.0
// How tests have matrices multiplied.
#pragma once

#include <gtest/gtest.h>

#include <array>

#include "espalier/ops/gemm/matrix_product.h"

namespace espalier::testing {

/// Every way in which float32 is multiplied and every one of bfloat16.
inline constexpr std::array<ProductChoice, 4> kProductChoices{{
    {Float32Products::kLibrary, Bfloat16Products::kUpcast},
    {Float32Products::kPanels, Bfloat16Products::kUpcast},
    {Float32Products::kPanels, Bfloat16Products::kNative},
    {Float32Products::kLibrary, Bfloat16Products::kLibrary},
}};

/// Calls body() under each of them, with a trace.
template <class Body>
void for_each_product_choice(const Body& body) {
  for (const ProductChoice& choice : kProductChoices) {
    SCOPED_TRACE(to_string(choice));
    const KernelScope forced(with_products(choice));
    body();
  }
}

}  // namespace espalier::testing
