// SPDX-License-Identifier: Apache-2.0
#include "espalier/measure/product_decision.h"

#include <gtest/gtest.h>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/plan/time_model.h"
#include "tests/base/message_of.h"
#include "tests/base/scratch_folder.h"
#include "tests/plan/small_decoder.h"

namespace espalier::testing {
namespace {

TEST(KeptProducts, ReadBackBesideTheRates) {
  const ScratchFolder folder;
  const auto file = folder / kCostModelFile;
  const TimeModel rates = assumed_time_model(kSmallDecoder);
  nlohmann::ordered_json json = cost_model_json(rates);
  write_text(file, json.dump(2));
  EXPECT_EQ(read_products(file), std::nullopt);
  const ProductChoice choice{Float32Products::kPanels, Bfloat16Products::kNative};
  add_products(choice, &json);
  write_text(file, json.dump(2));
  EXPECT_EQ(read_products(file), choice);
  EXPECT_EQ(read_cost_model(file, kSmallDecoder).seconds, rates.seconds);
}

TEST(KeptProducts, WhatIsNoneIsRefusedByName) {
  const ScratchFolder folder;
  const auto file = folder / kCostModelFile;
  for (const char* bad : {R"({"matrix_products": 3})", R"({"matrix_products": "float32=fast"})", "{"}) {
    write_text(file, bad);
    const std::string error = message_of<InputError>([&] { read_products(file); });
    EXPECT_TRUE(error.starts_with(file.string())) << error;
  }
}

}  // namespace
}  // namespace espalier::testing
