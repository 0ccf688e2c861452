// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/time_model.h"

#include <gtest/gtest.h>

#include <limits>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "tests/base/message_of.h"
#include "tests/base/scratch_folder.h"
#include "tests/plan/small_decoder.h"

namespace espalier::testing {
namespace {

TimeModel awkward_rates() {
  TimeModel model = assumed_time_model(kSmallDecoder);
  model.seconds = {0.1, 1.0 / 3, std::numeric_limits<double>::denorm_min(), 0, 1e-300, 12345.678901234567};
  model.calibrated = true;
  return model;
}

class CostModelFile : public ::testing::Test {
 protected:
  std::string error_of(const nlohmann::json& json) {
    return message_of<InputError>([&] { parse_cost_model(json, kSmallDecoder, "some/cost_model.json"); });
  }

  ScratchFolder folder_;
};

TEST_F(CostModelFile, RatesReadBackBitwiseIdentical) {
  for (const TimeModel& model : {awkward_rates(), assumed_time_model(kSmallDecoder)}) {
    const auto file = folder_ / kCostModelFile;
    write_text(file, cost_model_json(model).dump(2));
    const TimeModel again = read_cost_model(file, kSmallDecoder);
    EXPECT_EQ(again.seconds, model.seconds);
    EXPECT_EQ(again.calibrated, model.calibrated);
    EXPECT_EQ(again.cost.hidden_size, kSmallDecoder.hidden_size);
  }
}

TEST_F(CostModelFile, WhatIsNoCostModelIsRefusedByName) {
  const nlohmann::json good = cost_model_json(awkward_rates());
  EXPECT_EQ(error_of(good), "");
  EXPECT_NE(error_of(nlohmann::json::array()).find("some/cost_model.json: expected a JSON object"),
            std::string::npos);
  nlohmann::json bad = good;
  bad["format_version"] = 2;
  EXPECT_NE(error_of(bad).find("format_version: expected 1, received 2"), std::string::npos);
  bad = good;
  bad["origin"] = 3;
  EXPECT_NE(error_of(bad).find("origin: expected `built-in` or `measured`, received 3"), std::string::npos);
  bad = good;
  bad.erase("seconds_per");
  EXPECT_NE(error_of(bad).find("seconds_per: expected an object, received null"), std::string::npos);
  for (const auto& [rate, unused] : good["seconds_per"].items()) {
    for (const nlohmann::json& value :
         {nlohmann::json(), nlohmann::json("1"), nlohmann::json(-1e-9), nlohmann::json(2e9),
          nlohmann::json(1e308), nlohmann::json(std::numeric_limits<double>::infinity())}) {
      bad = good;
      bad["seconds_per"][rate] = value;
      EXPECT_NE(error_of(bad).find("seconds_per." + rate + ": expected"), std::string::npos) << bad;
    }
  }
}

TEST_F(CostModelFile, FilesThatAreNotJsonAreRefusedByName) {
  const auto file = folder_ / kCostModelFile;
  write_text(file, "{\"format_version\": 1");
  const std::string error = message_of<InputError>([&] { read_cost_model(file, kSmallDecoder); });
  EXPECT_NE(error.find(file.string() + ": expected JSON"), std::string::npos) << error;
}

}  // namespace
}  // namespace espalier::testing
