// SPDX-License-Identifier: Apache-2.0
// How matrices are multiplied on the CPU: with LibTorch's products or our own (panel_math.h), bfloat16 upcast
// to float32 or as it is. Speed depends on the machine, and the last bits of results depend on the choice. So
// the choice is one value, which a run writes down and resumes with.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "espalier/ops/kernels/cpu/instruction_set.h"

namespace espalier {

enum class Float32Products {
  kLibrary,  // those of LibTorch's BLAS
  kPanels,   // our own
};

enum class Bfloat16Products {
  kUpcast,   // operands become float32, which is multiplied as Float32Products says
  kNative,   // our own, by the instructions for bfloat16 where there are any; sums in float32, rounded once
  kLibrary,  // LibTorch's, whose results are bfloat16: by AMX, where there is any
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
  InstructionSet isa = InstructionSet::kDefault;  // the best that this machine has and ESPALIER_CPU allows
  bool library_amx = true;  // whether LibTorch may use AMX where the instruction set has it
};

/// Of this machine and its environment; ONEDNN_MAX_CPU_ISA (or DNNL_MAX_CPU_ISA) may keep LibTorch from AMX.
ProductFeatures product_features();

/// Where features tell which products are fastest (docs/architecture/cpu-kernels.md has the rates): machines
/// of Intel and AMD, and all x86 without AVX-512. Nothing elsewhere: there a measurement has to tell
/// (measure/gemm_rates.h).
std::optional<ProductChoice> choose_by_features(const ProductFeatures& features);

/// The features that decide, in a few words.
std::string describe(const ProductFeatures& features);

/// The choice with what the environment variables ESPALIER_FLOAT32_PRODUCTS (library or panels) and
/// ESPALIER_BF16_PRODUCTS (upcast, native or library) name instead, read at each call. Throws InputError
/// where they name something else.
ProductChoice with_environment(ProductChoice choice);

}  // namespace espalier
