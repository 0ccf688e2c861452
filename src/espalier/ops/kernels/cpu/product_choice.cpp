// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernels/cpu/product_choice.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>

#include "espalier/base/check.h"

namespace espalier {
namespace {

template <class Products>
struct Named {
  std::string_view name;
  Products products;
};

constexpr Named<Float32Products> kFloat32Names[] = {{"library", Float32Products::kLibrary},
                                                    {"panels", Float32Products::kPanels}};
constexpr Named<Bfloat16Products> kBfloat16Names[] = {{"upcast", Bfloat16Products::kUpcast},
                                                      {"native", Bfloat16Products::kNative},
                                                      {"library", Bfloat16Products::kLibrary}};

template <class Products, size_t kCount>
std::string_view name_of(const Named<Products> (&names)[kCount], Products products) {
  return std::ranges::find(names, products, &Named<Products>::products)->name;
}

template <class Products, size_t kCount>
std::optional<Products> named(const Named<Products> (&names)[kCount], std::string_view name) {
  const auto found = std::ranges::find(names, name, &Named<Products>::name);
  return found == std::end(names) ? std::nullopt : std::optional(found->products);
}

constexpr std::string_view kFloat32Key = "float32=", kBfloat16Key = ",bfloat16=";

std::string_view environment(const char* variable) {
  const char* value = std::getenv(variable);
  return value == nullptr ? "" : value;
}

// Instruction sets that oneDNN knows by name and that are without AMX; it takes no notice of names that it
// does not know.
bool keeps_from_amx(std::string_view isa) {
  constexpr std::string_view kWithoutAmx[] = {"sse41",
                                              "avx",
                                              "avx2",
                                              "avx2_vnni",
                                              "avx2_vnni_2",
                                              "avx512_core",
                                              "avx512_core_vnni",
                                              "avx512_core_bf16",
                                              "avx512_core_fp16",
                                              "avx10_1_512"};
  std::string lower(isa);
  std::ranges::transform(lower, lower.begin(), [](unsigned char c) { return std::tolower(c); });
  return std::ranges::find(kWithoutAmx, lower) != std::end(kWithoutAmx);
}

}  // namespace

std::string to_string(const ProductChoice& choice) {
  return fmt::format("{}{}{}{}", kFloat32Key, name_of(kFloat32Names, choice.float32), kBfloat16Key,
                     name_of(kBfloat16Names, choice.bfloat16));
}

ProductChoice parse_product_choice(std::string_view text) {
  const size_t comma = text.find(',');
  if (comma != text.npos && text.starts_with(kFloat32Key) && text.substr(comma).starts_with(kBfloat16Key)) {
    const auto float32 = named(kFloat32Names, text.substr(0, comma).substr(kFloat32Key.size()));
    const auto bfloat16 = named(kBfloat16Names, text.substr(comma + kBfloat16Key.size()));
    if (float32 && bfloat16) return {*float32, *bfloat16};
  }
  throw InputError(fmt::format(
      "matrix products: expected float32=library|panels,bfloat16=upcast|native|library, received {}", text));
}

ProductFeatures product_features() {
  std::string_view isa = environment("ONEDNN_MAX_CPU_ISA");
  if (isa.empty()) isa = environment("DNNL_MAX_CPU_ISA");
  return {cpu_vendor(), instruction_set(), !keeps_from_amx(isa)};
}

std::optional<ProductChoice> choose_by_features(const ProductFeatures& features) {
  if (features.vendor == CpuVendor::kNotX86) return std::nullopt;
  ProductChoice choice;
  if (features.level < InstructionSet::kAvx512) return choice;
  if (features.vendor == CpuVendor::kOtherX86) return std::nullopt;
  if (features.vendor == CpuVendor::kAmd) {
    choice.float32 = Float32Products::kPanels;
    if (features.level >= InstructionSet::kAvx512Bf16) choice.bfloat16 = Bfloat16Products::kNative;
  }
  if (features.level >= InstructionSet::kAmx && features.library_amx)
    choice.bfloat16 = Bfloat16Products::kLibrary;
  return choice;
}

std::string describe(const ProductFeatures& features) {
  if (features.vendor == CpuVendor::kNotX86) return "not an x86 processor";
  if (features.level < InstructionSet::kAvx512) return "x86 without AVX-512";
  const std::string vendor = features.vendor == CpuVendor::kAmd     ? "AMD"
                             : features.vendor == CpuVendor::kIntel ? "Intel"
                                                                    : "neither Intel nor AMD";
  if (features.level == InstructionSet::kAvx512) return vendor + " with AVX-512";
  if (features.level == InstructionSet::kAvx512Bf16) return vendor + " with AVX-512 for bfloat16";
  return vendor + (features.library_amx ? " with AMX" : " with AMX, which LibTorch may not use");
}

ProductChoice with_environment(ProductChoice choice) {
  if (const auto name = environment("ESPALIER_FLOAT32_PRODUCTS"); !name.empty()) {
    const auto products = named(kFloat32Names, name);
    ESPALIER_CHECK(products, "ESPALIER_FLOAT32_PRODUCTS: expected library or panels, received {}", name);
    choice.float32 = *products;
  }
  if (const auto name = environment("ESPALIER_BF16_PRODUCTS"); !name.empty()) {
    const auto products = named(kBfloat16Names, name);
    ESPALIER_CHECK(products, "ESPALIER_BF16_PRODUCTS: expected upcast, native or library, received {}", name);
    choice.bfloat16 = *products;
  }
  return choice;
}

}  // namespace espalier
