// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernels/cpu/products/panel_math.h"

#include "espalier/ops/kernels/cpu/isa_dispatch.h"

namespace espalier {

ESPALIER_DECLARE_ISAS(template <class Word> const PanelMath<Word>& panel_math())
#ifdef ESPALIER_X86
namespace cpu_avx512_bf16 {
template <class Word>
const PanelMath<Word>& panel_math();
}
#endif

template <class Word>
const PanelMath<Word>& panel_math(InstructionSet isa) {
#ifdef ESPALIER_X86
  if (isa >= InstructionSet::kAvx512Bf16) return cpu_avx512_bf16::panel_math<Word>();
#endif
  return ESPALIER_OF_ISA(isa, panel_math<Word>());
}

template const PanelMath<float>& panel_math<float>(InstructionSet);
template const PanelMath<BFloat16Pair>& panel_math<BFloat16Pair>(InstructionSet);

}  // namespace espalier
