// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernels/cpu/products/product_choice.h"

#include <gtest/gtest.h>

#include <string>

#include "espalier/base/check.h"
#include "tests/base/message_of.h"
#include "tests/environment_variable.h"
#include "tests/ops/kernels/cpu/forced_instruction_set.h"

namespace espalier::testing {
namespace {

using enum CpuVendor;
using enum InstructionSet;

struct Machine {
  const char* name;
  ProductFeatures features;
  const char* choice;  // null: features do not tell
};

constexpr Machine kMachines[] = {
    {"Intel Sapphire Rapids", {kIntel, kAmx, true}, "float32=library,bfloat16=library"},
    {"the same, LibTorch kept from AMX", {kIntel, kAmx, false}, "float32=library,bfloat16=upcast"},
    {"Intel Cooper Lake", {kIntel, kAvx512Bf16, true}, "float32=library,bfloat16=upcast"},
    {"Intel Skylake-SP", {kIntel, kAvx512, true}, "float32=library,bfloat16=upcast"},
    {"Intel Haswell", {kIntel, kAvx2, true}, "float32=library,bfloat16=upcast"},
    {"AMD Zen 4 and 5", {kAmd, kAvx512Bf16, true}, "float32=panels,bfloat16=native"},
    {"the same, kept from the instructions for bfloat16",
     {kAmd, kAvx512, true},
     "float32=panels,bfloat16=upcast"},
    {"AMD Zen 3, or Zen 5 kept to AVX2", {kAmd, kAvx2, true}, "float32=library,bfloat16=upcast"},
    {"AMD with AMX", {kAmd, kAmx, true}, "float32=panels,bfloat16=library"},
    {"AMD with AMX, LibTorch kept from it", {kAmd, kAmx, false}, "float32=panels,bfloat16=native"},
    {"x86 of old", {kOtherX86, kDefault, true}, "float32=library,bfloat16=upcast"},
    {"another x86 with AVX-512", {kOtherX86, kAvx512Bf16, true}, nullptr},
    {"Arm", {kNotX86, kDefault, true}, nullptr}};

TEST(ProductChoice, FollowsFromTheFeaturesOfTheMachine) {
  for (const Machine& machine : kMachines) {
    const auto choice = choose_by_features(machine.features);
    ASSERT_EQ(choice.has_value(), machine.choice != nullptr) << machine.name;
    if (choice) {
      EXPECT_EQ(to_string(*choice), machine.choice) << machine.name;
    }
    EXPECT_FALSE(describe(machine.features).empty());
  }
}

// What ESPALIER_CPU and oneDNN's own variable allow.
TEST(ProductChoice, FeaturesAreThoseThatAreAllowed) {
  const ForcedVariable no_older_name("DNNL_MAX_CPU_ISA", "");
  {
    const ForcedVariable any("ONEDNN_MAX_CPU_ISA", "");
    EXPECT_TRUE(product_features().library_amx);
  }
  for (const char* isa : {"AVX2", "avx512_core", "AVX512_CORE_BF16", "avx10_1_512"}) {
    const ForcedVariable cap("ONEDNN_MAX_CPU_ISA", isa);
    EXPECT_FALSE(product_features().library_amx) << isa;
  }
  for (const char* isa : {"ALL", "AVX512_CORE_AMX", "avx10_1_512_amx", "no such set"}) {
    const ForcedVariable cap("ONEDNN_MAX_CPU_ISA", isa);
    EXPECT_TRUE(product_features().library_amx) << isa;
  }
  {
    const ForcedVariable none("ONEDNN_MAX_CPU_ISA", "");
    const ForcedVariable cap("DNNL_MAX_CPU_ISA", "AVX2");
    EXPECT_FALSE(product_features().library_amx);
  }
  const ForcedInstructionSet isa("default");
  EXPECT_EQ(product_features().isa, kDefault);
}

TEST(ProductChoice, IsReadAsItIsWritten) {
  for (const auto float32 : {Float32Products::kLibrary, Float32Products::kPanels}) {
    for (const auto bfloat16 :
         {Bfloat16Products::kUpcast, Bfloat16Products::kNative, Bfloat16Products::kLibrary}) {
      const ProductChoice choice{float32, bfloat16};
      EXPECT_EQ(parse_product_choice(to_string(choice)), choice);
    }
  }
  for (const char* text : {"", "float32=panels", "bfloat16=native", "float32=panels,bfloat16=fast",
                           "float32=native,bfloat16=native", "float32=panels,bfloat16=native,",
                           ",bfloat16=native", "float32=panels bfloat16=native"}) {
    EXPECT_EQ(message_of<InputError>([&] { parse_product_choice(text); }),
              "matrix products: expected float32=library|panels,bfloat16=upcast|native|library, received " +
                  std::string(text));
  }
}

TEST(ProductChoice, IsWhatTheEnvironmentNames) {
  const ForcedVariable none("ESPALIER_BF16_PRODUCTS", ""), no_other("ESPALIER_FLOAT32_PRODUCTS", "");
  const ProductChoice given{Float32Products::kPanels, Bfloat16Products::kUpcast};
  EXPECT_EQ(with_environment(given), given);
  {
    const ForcedVariable native("ESPALIER_BF16_PRODUCTS", "native");
    EXPECT_EQ(to_string(with_environment(given)), "float32=panels,bfloat16=native");
    const ForcedVariable library("ESPALIER_FLOAT32_PRODUCTS", "library");
    EXPECT_EQ(to_string(with_environment(given)), "float32=library,bfloat16=native");
  }
  {
    const ForcedVariable wrong("ESPALIER_BF16_PRODUCTS", "panels");
    EXPECT_EQ(message_of<InputError>([&] { with_environment(given); }),
              "ESPALIER_BF16_PRODUCTS: expected upcast, native or library, received `panels`");
  }
  const ForcedVariable wrong("ESPALIER_FLOAT32_PRODUCTS", "mkl");
  EXPECT_EQ(message_of<InputError>([&] { with_environment(given); }),
            "ESPALIER_FLOAT32_PRODUCTS: expected library or panels, received `mkl`");
}

}  // namespace
}  // namespace espalier::testing
