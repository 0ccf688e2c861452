// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/gemm/blas.h"

#include <ATen/Parallel.h>

// The Fortran interface (Dongarra et al., "A set of level 3 basic linear algebra subprograms", 1990), which
// libtorch_cpu exports; ATen's own declarations of it are not public.
extern "C" {
void sgemm_(const char* trans_a, const char* trans_b, const int* m, const int* n, const int* k,
            const float* alpha, const float* a, const int* lda, const float* b, const int* ldb,
            const float* beta, float* c, const int* ldc);
void dgemm_(const char* trans_a, const char* trans_b, const int* m, const int* n, const int* k,
            const double* alpha, const double* a, const int* lda, const double* b, const int* ldb,
            const double* beta, double* c, const int* ldc);
// Of MKL: the calling thread's own number of threads, 0 for the common one; returns the former.
[[gnu::weak]] int MKL_Set_Num_Threads_Local(int num_threads);
}

namespace espalier::detail {
namespace {

// BLAS stores by columns: what it takes for C is the transpose of ours, so B comes first.
template <class Scalar, class Gemm>
void multiply_by_columns(const MatrixProduct<Scalar>& p, Gemm gemm) {
  const auto m = static_cast<int>(p.n), n = static_cast<int>(p.m), k = static_cast<int>(p.k);
  const auto lda = static_cast<int>(p.ldb), ldb = static_cast<int>(p.lda), ldc = static_cast<int>(p.ldc);
  const char* trans_b = p.transpose_a ? "T" : "N";
  const Scalar alpha = 1, beta = p.add ? 1 : 0;
  gemm("N", trans_b, &m, &n, &k, &alpha, p.b, &lda, p.a, &ldb, &beta, p.c, &ldc);
}

}  // namespace

void multiply(const MatrixProduct<float>& product) {
  multiply_by_columns(product, sgemm_);
}

void multiply(const MatrixProduct<double>& product) {
  multiply_by_columns(product, dgemm_);
}

SerialBlas::SerialBlas() {
  // ATen sets a thread's number at its first parallel operator there, or here.
  at::get_num_threads();
  if (MKL_Set_Num_Threads_Local) before_ = MKL_Set_Num_Threads_Local(1);
}

SerialBlas::~SerialBlas() {
  if (MKL_Set_Num_Threads_Local) MKL_Set_Num_Threads_Local(before_);
}

}  // namespace espalier::detail
