// Matrices in the GEMM library's own layout.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace espalier {

/// A float32 matrix [K, N] on the CPU that is multiplied from the left several times. Every ordinary product
/// first copies it into the layout that the library's kernels read, which for few rows is a good part of the
/// work; here that is done once. The layout is that of MKL (cblas_sgemm_pack), which LibTorch brings along
/// on x86; elsewhere nothing can be packed.
class PackedMatrix {
 public:
  /// Is it possible here and worth it: float32 on the CPU, MKL there, and not tiny?
  static bool can_pack(at::ScalarType dtype, at::Device device, int64_t rows, int64_t columns);

  /// Takes a copy. `matrix` is contiguous or the transpose of a contiguous matrix, and can be packed.
  explicit PackedMatrix(const at::Tensor& matrix);

  /// x [M, K] float32 times the matrix: [M, N].
  at::Tensor left_multiplied_by(const at::Tensor& x) const;

  /// About how many bytes the copy of a matrix takes.
  static int64_t num_bytes(int64_t rows, int64_t columns) { return rows * columns * 4; }

 private:
  int64_t rows_, columns_;
  at::Tensor storage_;  // stays where it is: the layout knows its own address
};

}  // namespace espalier
