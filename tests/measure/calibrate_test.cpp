// SPDX-License-Identifier: Apache-2.0
#include "espalier/measure/calibrate.h"

#include <gtest/gtest.h>

#include <regex>

#include "espalier/base/file.h"
#include "tests/base/scratch_folder.h"

namespace espalier::testing {
namespace {

// Two layers of 100 weights, one of them with attention; a head of 8 x 16 weights.
ModelCost small_cost() {
  ModelCost cost{.hidden_size = 8, .vocab_size = 16};
  cost.layers.resize(2);
  for (LayerCost& layer : cost.layers) layer.weights = 100;
  cost.layers[1].pair_elements = 32;
  return cost;
}

nlohmann::ordered_json calibration(const char* dtype) {
  nlohmann::ordered_json json{{"key",
                               {{"version", 5},
                                {"cpu", "A CPU"},
                                {"threads", 2},
                                {"dtype", dtype},
                                {"hidden_size", 8},
                                {"vocab_size", 16}}},
                              {"seconds", {0, 0, 1, 1, 1, 1}}};
  json.update(rates_to_keep({small_cost(), {0, 0, 6e-8, 1e-9, 0, 0}, true}));
  return json;
}

TEST(KeptRates, AreFlopsOverSecondsAndNothingWithoutSeconds) {
  const FlopRates rates = flop_rates({small_cost(), {0, 0, 6e-8, 1e-9, 0, 0}, true});
  EXPECT_DOUBLE_EQ(rates.layers.value(), 6 * 100 / 6e-8);
  // 4 forward and 10 backward for what one pair multiplies.
  EXPECT_DOUBLE_EQ(rates.attention.value(), 14 * 32 / 1e-9);
  EXPECT_FALSE(rates.head);
  EXPECT_DOUBLE_EQ(flop_rates({small_cost(), {0, 0, 0, 0, 0, 2e-9}, true}).head.value(), 8 * 8 * 16 / 2e-9);
}

TEST(KeptRates, AreReadFromTheFolderWithoutWhatIsDamagedOrOlder) {
  const ScratchFolder folder;
  EXPECT_TRUE(kept_rates(folder / "absent").empty());
  nlohmann::ordered_json older = calibration("bfloat16");
  older.erase("flops_per_second");
  write_text(folder / "calibration-1.json", calibration("float32").dump());
  write_text(folder / "calibration-2.json", calibration("bfloat16").dump());
  write_text(folder / "calibration-3.json", older.dump());
  write_text(folder / "calibration-4.json", "{\"key\": ");
  write_text(folder / "calibration-5.json", "[]");
  write_text(folder / "products-6.json", calibration("float64").dump());
  const std::vector<KeptRates> all = kept_rates(folder.path());
  ASSERT_EQ(all.size(), 2U);
  EXPECT_EQ(all[0].dtype, "bfloat16");
  EXPECT_EQ(all[1].dtype, "float32");
  EXPECT_TRUE(all[0].is_cpu && all[0].device == "A CPU" && all[0].threads == 2);
  EXPECT_TRUE(std::regex_match(all[0].measured, std::regex(R"(20\d\d-\d\d-\d\d)"))) << all[0].measured;
  EXPECT_DOUBLE_EQ(to_json(all[1])["flops_per_second"]["layers"].get<double>(), 1e10);
  EXPECT_TRUE(to_json(all[1])["flops_per_second"]["head"].is_null());
}

}  // namespace
}  // namespace espalier::testing
