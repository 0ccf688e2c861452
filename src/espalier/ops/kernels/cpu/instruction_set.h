// SPDX-License-Identifier: Apache-2.0
// The instruction set of the CPU kernels.
#pragma once

#include <string_view>

namespace espalier {

/// kDefault is the compiler's baseline for the architecture; each instruction set includes those before it.
/// Those above kAvx512 only add instructions for bfloat16 matrix products.
enum class InstructionSet { kDefault, kAvx2, kAvx512, kAvx512Bf16, kAmx };

/// The best instruction set of this machine, or the one that the environment variable ESPALIER_CPU names:
/// default, avx2, avx512, avx512_bf16 or amx; read at each call. Throws InputError if the name is unknown or
/// the machine lacks the instruction set.
InstructionSet instruction_set();

/// The name of the instruction set for ESPALIER_CPU.
std::string_view instruction_set_name(InstructionSet instruction_set);

enum class CpuVendor { kIntel, kAmd, kOtherX86, kNotX86 };

/// The vendor of this machine's processor.
CpuVendor cpu_vendor();

}  // namespace espalier
