// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernels/cpu/instruction_set.h"

#ifdef __x86_64__
#include <cpuid.h>
#endif

#include "espalier/base/environment.h"

namespace espalier {
namespace {

bool has_avx2() {
#ifdef __x86_64__
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

bool has_avx512() {
#ifdef __x86_64__
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
#else
  return false;
#endif
}

bool has_avx512_bf16() {
#ifdef __x86_64__
  return has_avx512() && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

// clang's __builtin_cpu_supports does not know AMX. Checks that the processor has it (CPUID, leaf 7) and the
// OS saves its registers (XCR0).
bool has_amx() {
#ifdef __x86_64__
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24, kTileState = 3u << 17;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!has_avx512_bf16() || __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  unsigned state = 0, upper = 0;
  asm("xgetbv" : "=a"(state), "=d"(upper) : "c"(0));
  return (edx & kAmxBf16) != 0 && (edx & kAmxTile) != 0 && (state & kTileState) == kTileState;
#else
  return false;
#endif
}

InstructionSet best_instruction_set() {
  if (has_amx()) return InstructionSet::kAmx;
  if (has_avx512_bf16()) return InstructionSet::kAvx512Bf16;
  if (has_avx512()) return InstructionSet::kAvx512;
  return has_avx2() ? InstructionSet::kAvx2 : InstructionSet::kDefault;
}

constexpr auto kNames = std::to_array<Word<InstructionSet>>({{"default", InstructionSet::kDefault},
                                                             {"avx2", InstructionSet::kAvx2},
                                                             {"avx512", InstructionSet::kAvx512},
                                                             {"avx512_bf16", InstructionSet::kAvx512Bf16},
                                                             {"amx", InstructionSet::kAmx}});

}  // namespace

InstructionSet instruction_set() {
  static const InstructionSet best = best_instruction_set();
  const InstructionSet chosen = named_by_environment("ESPALIER_CPU", kNames).value_or(best);
  ESPALIER_CHECK(chosen <= best,
                 "ESPALIER_CPU: expected an instruction set that this machine has, received {}",
                 instruction_set_name(chosen));
  return chosen;
}

std::string_view instruction_set_name(InstructionSet instruction_set) {
  return word_of(kNames, instruction_set);
}

CpuVendor cpu_vendor() {
#ifdef __x86_64__
  if (__builtin_cpu_is("intel")) return CpuVendor::kIntel;
  return __builtin_cpu_is("amd") ? CpuVendor::kAmd : CpuVendor::kOtherX86;
#else
  return CpuVendor::kNotX86;
#endif
}

}  // namespace espalier
