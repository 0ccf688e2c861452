// SPDX-License-Identifier: Apache-2.0
// What a run begins with: how much there is to train on, by which fields, and what is left aside.
#pragma once

#include <string>
#include <vector>

#include "espalier/cli/flags/data_flags.h"

namespace espalier::cli {

/// Lines fit for a terminal. The first:
///   rows.jsonl: 1,163 trajectories, 427,668 tokens, 98,120 with loss (loss_mask, group_id); not used by sft:
///   logprobs; ignored: timestamp
/// Then warnings: of unknown fields with an entry for each token, of rows without what others have, of ids
/// that are numbers in some rows and text in others, of trajectories that are longer than the model's
/// positions.
std::vector<std::string> data_summary(const std::string& name, const ReadReport& report,
                                      const Trajectories& trajectories, const DataUse& use);

}  // namespace espalier::cli
