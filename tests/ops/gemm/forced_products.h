// SPDX-License-Identifier: Apache-2.0
// How tests have matrices multiplied.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <optional>

#include "espalier/ops/gemm/matrix_product.h"

namespace espalier::testing {

/// Has products follow a choice while it lives, whatever the machine; then the machine's again.
class ForcedProducts {
 public:
  explicit ForcedProducts(const ProductChoice& choice) { set_product_choice(choice); }
  ~ForcedProducts() { set_product_choice(std::nullopt); }
  ForcedProducts(const ForcedProducts&) = delete;
  ForcedProducts& operator=(const ForcedProducts&) = delete;
};

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
    const ForcedProducts forced(choice);
    body();
  }
}

}  // namespace espalier::testing
