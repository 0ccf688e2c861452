// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernels/cpu/products/product_choice.h"

#include <algorithm>
#include <cctype>

#include <fmt/ranges.h>

#include "espalier/base/environment.h"

namespace espalier {
namespace {

constexpr auto kFloat32Words = std::to_array<Word<Float32Products>>(
    {{"library", Float32Products::kLibrary}, {"panels", Float32Products::kPanels}});
constexpr auto kBfloat16Words =
    std::to_array<Word<Bfloat16Products>>({{"upcast", Bfloat16Products::kUpcast},
                                           {"native", Bfloat16Products::kNative},
                                           {"library", Bfloat16Products::kLibrary}});

constexpr std::string_view kFloat32Key = "float32=", kBfloat16Key = ",bfloat16=";

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
  return fmt::format("{}{}{}{}", kFloat32Key, word_of(kFloat32Words, choice.float32), kBfloat16Key,
                     word_of(kBfloat16Words, choice.bfloat16));
}

ProductChoice parse_product_choice(std::string_view text) {
  const size_t comma = text.find(',');
  if (comma != text.npos && text.starts_with(kFloat32Key) && text.substr(comma).starts_with(kBfloat16Key)) {
    const std::string_view float32 = text.substr(0, comma).substr(kFloat32Key.size());
    const std::string_view bfloat16 = text.substr(comma + kBfloat16Key.size());
    if (has_word(kFloat32Words, float32) && has_word(kBfloat16Words, bfloat16)) {
      return {parse_word(kFloat32Words, kFloat32Key, float32),
              parse_word(kBfloat16Words, kBfloat16Key, bfloat16)};
    }
  }
  throw InputError(fmt::format("matrix products: expected {}{}{}{}, received {}", kFloat32Key,
                               fmt::join(all_words(kFloat32Words), "|"), kBfloat16Key,
                               fmt::join(all_words(kBfloat16Words), "|"), text));
}

ProductFeatures product_features() {
  std::string_view isa = environment("ONEDNN_MAX_CPU_ISA");
  if (isa.empty()) isa = environment("DNNL_MAX_CPU_ISA");
  return {cpu_vendor(), instruction_set(), !keeps_from_amx(isa)};
}

std::optional<ProductChoice> choose_by_features(const ProductFeatures& features) {
  if (features.vendor == CpuVendor::kNotX86) return std::nullopt;
  ProductChoice choice;
  if (features.isa < InstructionSet::kAvx512) return choice;
  if (features.vendor == CpuVendor::kOtherX86) return std::nullopt;
  if (features.vendor == CpuVendor::kAmd) {
    choice.float32 = Float32Products::kPanels;
    if (features.isa >= InstructionSet::kAvx512Bf16) choice.bfloat16 = Bfloat16Products::kNative;
  }
  if (features.isa >= InstructionSet::kAmx && features.library_amx)
    choice.bfloat16 = Bfloat16Products::kLibrary;
  return choice;
}

std::string describe(const ProductFeatures& features) {
  if (features.vendor == CpuVendor::kNotX86) return "not an x86 processor";
  if (features.isa < InstructionSet::kAvx512) return "x86 without AVX-512";
  const std::string vendor = features.vendor == CpuVendor::kAmd     ? "AMD"
                             : features.vendor == CpuVendor::kIntel ? "Intel"
                                                                    : "neither Intel nor AMD";
  if (features.isa == InstructionSet::kAvx512) return vendor + " with AVX-512";
  if (features.isa == InstructionSet::kAvx512Bf16) return vendor + " with AVX-512 for bfloat16";
  return vendor + (features.library_amx ? " with AMX" : " with AMX, which LibTorch may not use");
}

ProductChoice with_environment(ProductChoice choice) {
  return {named_by_environment("ESPALIER_FLOAT32_PRODUCTS", kFloat32Words).value_or(choice.float32),
          named_by_environment("ESPALIER_BF16_PRODUCTS", kBfloat16Words).value_or(choice.bfloat16)};
}

}  // namespace espalier
