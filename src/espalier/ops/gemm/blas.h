// SPDX-License-Identifier: Apache-2.0
// Matrix products of the BLAS that LibTorch brings along.
#pragma once

#include "espalier/ops/kernels/cpu/attention/tree_attention.h"

namespace espalier::detail {

/// While it lives, products of the calling thread use that thread alone, so that neither their results nor
/// their speed depend on who else is at work. (BLAS other than MKL does so inside parallel regions only.)
class SerialBlas {
 public:
  SerialBlas();
  ~SerialBlas();
  SerialBlas(const SerialBlas&) = delete;
  SerialBlas& operator=(const SerialBlas&) = delete;

 private:
  int before_ = 0;
};

/// The product, by sgemm or dgemm.
void multiply(const MatrixProduct<float>& product);
void multiply(const MatrixProduct<double>& product);

}  // namespace espalier::detail
