// SPDX-License-Identifier: Apache-2.0
#include "espalier/measure/gemm_rates.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "espalier/ops/gemm/matrix_product.h"

namespace espalier::testing {
namespace {

TEST(GemmRates, AreThoseOfEveryMapPartAndWay) {
  const std::vector<LinearShape> shapes{{"one", 24, 40, 56}, {"two", 8, 16, 8}};
  const std::vector<ProductWay> ways = product_ways();
  ASSERT_GE(ways.size(), 3u);  // float32; bfloat16 upcast and LibTorch's own
  for (size_t i = 0; i < ways.size(); ++i) {
    for (size_t j = 0; j < i; ++j) EXPECT_NE(ways[i].name(), ways[j].name());
  }
  const KernelScope forced(with_products({Float32Products::kLibrary, Bfloat16Products::kNative}));
  const std::vector<GemmRates> all = measure_gemm_rates(shapes, ways, 2);
  EXPECT_EQ(to_string(product_choice()), "float32=library,bfloat16=native");
  ASSERT_EQ(all.size(), 6u);
  for (const GemmRates& rates : all) {
    ASSERT_EQ(rates.seconds.size(), ways.size());
    for (size_t way = 0; way < ways.size(); ++way) {
      EXPECT_EQ(rates.seconds[way].size(), 2u);
      EXPECT_GT(rates.flops_per_second(way), 0);
      EXPECT_EQ(rates.ratio(way, way), 1);
    }
  }
}

TEST(GemmRates, AreMediansOfTheRounds) {
  GemmRates rates;
  rates.shape = {std::string("map"), 10, 20, 30};
  rates.part = LinearPart::kForward;
  rates.seconds = {{3, 1, 2}, {6, 1, 1}};
  EXPECT_EQ(rates.flops_per_second(0), 2.0 * 10 * 20 * 30 / 2);
  EXPECT_EQ(rates.flops_per_second(1), 2.0 * 10 * 20 * 30 / 1);
  EXPECT_EQ(rates.ratio(0, 1), 1);  // of 1/2, 1 and 2
}

TEST(GemmRates, ShapesAreThoseOfTheModel) {
  const ModelSpec spec{
      .hidden_size = 576,
      .vocab_size = 49'152,
      .layers = {{AttentionSpec{.num_attention_heads = 9, .num_key_value_heads = 3, .head_dim = 64},
                  DenseMlpSpec{.intermediate_size = 1536}}}};
  std::vector<std::string> lines;
  for (const LinearShape& shape : linear_shapes(spec, 100)) {
    lines.push_back(fmt::format("{} {} {} {}", shape.name, shape.rows, shape.in, shape.out));
  }
  EXPECT_EQ(lines,
            (std::vector<std::string>{"queries 100 576 576", "keys, values 100 576 192",
                                      "gate, up 100 576 1536", "down 100 1536 576", "head 100 576 16384"}));
}

}  // namespace
}  // namespace espalier::testing
