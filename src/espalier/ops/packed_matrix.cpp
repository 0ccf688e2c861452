#include "espalier/ops/packed_matrix.h"

#include <ATen/ATen.h>
#include <dlfcn.h>

#include <limits>

namespace espalier {
namespace {

// The C interface of MKL with 32-bit integers (its developer reference, cblas_?gemm_pack and
// cblas_?gemm_compute). Looked up at run time: not every LibTorch has it.
constexpr int kRowMajor = 101, kNoTranspose = 111, kTranspose = 112, kPacked = 151, kMatrixB = 162;

struct Mkl {
  size_t (*pack_size)(int identifier, int m, int n, int k);
  void (*pack)(int layout, int identifier, int transpose, int m, int n, int k, float alpha,
               const float* source, int leading, float* packed);
  void (*compute)(int layout, int transpose_a, int transpose_b, int m, int n, int k, const float* a,
                  int leading_a, const float* b, int leading_b, float beta, float* c, int leading_c);

  bool complete() const { return pack_size != nullptr && pack != nullptr && compute != nullptr; }
};

const Mkl& mkl() {
  static const Mkl functions = [] {
    Mkl found{};
    void* library = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY);
    if (library == nullptr) return found;
    const auto look_up = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    };
    look_up(found.pack_size, "cblas_sgemm_pack_get_size");
    look_up(found.pack, "cblas_sgemm_pack");
    look_up(found.compute, "cblas_sgemm_compute");
    return found;
  }();
  return functions;
}

// The layout does not depend on the number of rows that come to be multiplied
// (tests/ops/packed_matrix_test.cpp holds that for many numbers), but the interface asks for one.
constexpr int kTypicalRows = 1024;

int as_int(int64_t value) {
  TORCH_CHECK(value <= std::numeric_limits<int>::max(), "PackedMatrix: expected less than 2^31, received ",
              value);
  return static_cast<int>(value);
}

}  // namespace

bool PackedMatrix::can_pack(at::ScalarType dtype, at::Device device, int64_t rows, int64_t columns) {
  constexpr int64_t kSmallest = 128 * 128;  // below, the calls cost more than the copies
  return dtype == at::kFloat && device.is_cpu() && rows * columns >= kSmallest && mkl().complete();
}

PackedMatrix::PackedMatrix(const at::Tensor& matrix) : rows_(matrix.size(0)), columns_(matrix.size(1)) {
  TORCH_CHECK(can_pack(matrix.scalar_type(), matrix.device(), rows_, columns_),
              "PackedMatrix: a matrix of shape ", matrix.sizes(), " and dtype ", matrix.scalar_type(), " on ",
              matrix.device(), " cannot be packed");
  const bool transposed = !matrix.is_contiguous();
  TORCH_CHECK(!transposed || matrix.t().is_contiguous(),
              "PackedMatrix: expected a contiguous matrix or its transpose, received strides ",
              matrix.strides());
  const int k = as_int(rows_), n = as_int(columns_);
  const size_t bytes = mkl().pack_size(kMatrixB, kTypicalRows, n, k);
  storage_ = at::empty({static_cast<int64_t>(bytes)}, at::kByte);
  mkl().pack(kRowMajor, kMatrixB, transposed ? kTranspose : kNoTranspose, kTypicalRows, n, k, 1,
             matrix.const_data_ptr<float>(), transposed ? k : n,
             static_cast<float*>(storage_.mutable_data_ptr()));
}

at::Tensor PackedMatrix::left_multiplied_by(const at::Tensor& x_in) const {
  TORCH_CHECK(x_in.dim() == 2 && x_in.size(1) == rows_ && x_in.scalar_type() == at::kFloat,
              "PackedMatrix: expected [M, ", rows_, "] float32, received ", x_in.sizes(), " ",
              x_in.scalar_type());
  const at::Tensor x = x_in.contiguous();
  const at::Tensor product = at::empty({x.size(0), columns_}, x.options());
  if (x.size(0) == 0) return product;
  const int m = as_int(x.size(0)), k = as_int(rows_), n = as_int(columns_);
  mkl().compute(kRowMajor, kNoTranspose, kPacked, m, n, k, x.const_data_ptr<float>(), k,
                static_cast<const float*>(storage_.const_data_ptr()), n, 0, product.mutable_data_ptr<float>(),
                n);
  return product;
}

}  // namespace espalier
