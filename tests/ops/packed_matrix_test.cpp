#include "espalier/ops/packed_matrix.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace espalier {
namespace {

// max |a - b| over the error bound of a float32 sum of K products.
double error(const at::Tensor& product, const at::Tensor& x, const at::Tensor& matrix) {
  const at::Tensor exact = x.to(at::kDouble).mm(matrix.to(at::kDouble));
  const at::Tensor bound = x.to(at::kDouble).abs().mm(matrix.to(at::kDouble).abs()) * 0x1p-24;
  return ((product.to(at::kDouble) - exact).abs() / bound).max().item<double>() /
         static_cast<double>(matrix.size(0));
}

class PackedMatrixTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!PackedMatrix::can_pack(at::kFloat, at::kCPU, 512, 512)) GTEST_SKIP() << "LibTorch without MKL";
    at::manual_seed(3);
  }
};

// One layout for every number of rows.
TEST_F(PackedMatrixTest, MultipliesAnyNumberOfRows) {
  struct Shape {
    int64_t rows, columns;
  };
  for (const auto [rows, columns] : {Shape{128, 128},
                                     {512, 1408},
                                     {1408, 512},
                                     {576, 192},
                                     {576, 6144},
                                     {1, 20000},
                                     {20000, 1},
                                     {999, 101}}) {
    for (const bool transposed : {false, true}) {
      const at::Tensor stored = at::randn({transposed ? columns : rows, transposed ? rows : columns});
      const at::Tensor matrix = transposed ? stored.t() : stored;
      const PackedMatrix packed(matrix);
      for (const int64_t m : {0, 1, 2, 7, 16, 63, 64, 65, 255, 318, 1023, 1024, 1025, 3000}) {
        SCOPED_TRACE(testing::Message()
                     << m << " x " << rows << " x " << columns << (transposed ? " t" : ""));
        const at::Tensor x = at::randn({m, rows});
        const at::Tensor product = packed.left_multiplied_by(x);
        ASSERT_EQ(product.sizes(), (std::vector<int64_t>{m, columns}));
        if (m > 0) {
          ASSERT_LT(error(product, x, matrix), 1);
        }
      }
    }
  }
}

TEST_F(PackedMatrixTest, KeepsWhatTheMatrixWas) {
  at::Tensor matrix = at::randn({256, 256});
  const at::Tensor x = at::randn({40, 256});
  const PackedMatrix packed(matrix);
  const at::Tensor before = packed.left_multiplied_by(x);
  matrix.zero_();
  EXPECT_TRUE(packed.left_multiplied_by(x).equal(before));
}

TEST_F(PackedMatrixTest, RefusesWhatItCannotDo) {
  EXPECT_FALSE(PackedMatrix::can_pack(at::kDouble, at::kCPU, 512, 512));
  EXPECT_FALSE(PackedMatrix::can_pack(at::kBFloat16, at::kCPU, 512, 512));
  EXPECT_FALSE(PackedMatrix::can_pack(at::kFloat, at::kCPU, 8, 8));
  EXPECT_THROW(PackedMatrix(at::randn({512, 512}, at::kDouble)), c10::Error);
  EXPECT_THROW(PackedMatrix(at::randn({512, 1024}).slice(1, 0, 512)), c10::Error);
  const PackedMatrix packed(at::randn({256, 128}));
  EXPECT_THROW(packed.left_multiplied_by(at::randn({4, 128})), c10::Error);
  EXPECT_THROW(packed.left_multiplied_by(at::randn({4, 256}, at::kDouble)), c10::Error);
}

}  // namespace
}  // namespace espalier
