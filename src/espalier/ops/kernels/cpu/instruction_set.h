// SPDX-License-Identifier: Apache-2.0
// Which vector instructions the CPU kernels use.
#pragma once

#include <string_view>

namespace espalier {

/// kDefault is what the compiler may assume of every machine of the architecture; every instruction set has
/// what those before it have. The instruction sets above kAvx512 differ from it in how bfloat16 matrices can
/// be multiplied.
enum class InstructionSet { kDefault, kAvx2, kAvx512, kAvx512Bf16, kAmx };

/// The best instruction set of this machine, or the one that the environment variable ESPALIER_CPU names:
/// default, avx2, avx512, avx512_bf16 or amx; read at each call. Throws InputError where the name is unknown
/// or the machine lacks the instruction set.
InstructionSet instruction_set();

/// The instruction set's name, as ESPALIER_CPU takes it.
std::string_view instruction_set_name(InstructionSet instruction_set);

enum class CpuVendor { kIntel, kAmd, kOtherX86, kNotX86 };

/// Who made this machine's processor.
CpuVendor cpu_vendor();

}  // namespace espalier
