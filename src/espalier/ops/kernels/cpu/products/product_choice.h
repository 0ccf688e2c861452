// SPDX-License-Identifier: Apache-2.0
// The choice of matrix products on the CPU: LibTorch's or our own (panel_math.h), bfloat16 upcast to float32
// or native. Speed depends on the machine, and the last bits of results depend on the choice, so training
// runs save it and resume with it.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "espalier/ops/kernels/cpu/instruction_set.h"

namespace espalier {

enum class Float32Products {
  kLibrary,  // LibTorch's BLAS
  kPanels,   // our own
};

enum class Bfloat16Products {
  kUpcast,   // upcast operands to float32, multiplied by Float32Products
  kNative,   // our own, with bfloat16 instructions if available; float32 sums, rounded once
  kLibrary,  // LibTorch's, with bfloat16 results; with AMX if available
};

struct ProductChoice {
  Float32Products float32 = Float32Products::kLibrary;
  Bfloat16Products bfloat16 = Bfloat16Products::kUpcast;

  bool operator==(const ProductChoice&) const = default;
};

/// "float32=library,bfloat16=upcast": of library and panels; of upcast, native and library.
std::string to_string(const ProductChoice& choice);

/// The inverse of to_string. Throws InputError.
ProductChoice parse_product_choice(std::string_view text);

/// The features of a machine that decide the choice.
struct ProductFeatures {
  CpuVendor vendor = CpuVendor::kOtherX86;
  InstructionSet isa = InstructionSet::kDefault;  // best of this machine, as limited by ESPALIER_CPU
  bool library_amx = true;                        // whether LibTorch may use AMX if available
};

/// The features of this machine and its environment; ONEDNN_MAX_CPU_ISA (or DNNL_MAX_CPU_ISA) may disable AMX
/// in LibTorch.
ProductFeatures product_features();

/// The choice for Intel and AMD processors and all x86 without AVX-512, where features determine the fastest
/// products (rates in docs/architecture/cpu-kernels.md). nullopt for others, which need a measurement
/// (measure/product_decision.h).
std::optional<ProductChoice> choose_by_features(const ProductFeatures& features);

/// The features as text.
std::string describe(const ProductFeatures& features);

/// Overrides the choice by the environment variables ESPALIER_FLOAT32_PRODUCTS (library or panels) and
/// ESPALIER_BF16_PRODUCTS (upcast, native or library) which are read at each call. Throws InputError on other
/// values.
ProductChoice with_environment(ProductChoice choice);

}  // namespace espalier
