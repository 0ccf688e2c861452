// SPDX-License-Identifier: Apache-2.0
// Summary of the data that a command has read: amounts, fields used, fields ignored.
#pragma once

#include <string>
#include <vector>

#include "espalier/commands/data_flags.h"
#include "espalier/data/fields.h"
#include "espalier/data/trajectories.h"

namespace espalier::commands {

/// Lines that are safe to print on a terminal. The first:
///   rows.jsonl: 1,163 trajectories, 427,668 tokens, 98,120 with loss (loss_mask, group_id); not used by sft:
///   logprobs; ignored: timestamp
/// Then warnings about unknown fields with an entry for each token, rows that lack fields which others have,
/// ids that are numbers in some rows and text in others, and trajectories longer than
/// max_position_embeddings.
std::vector<std::string> data_summary(const std::string& name, const ReadReport& report,
                                      const Trajectories& trajectories, const DataUse& use);

}  // namespace espalier::commands
