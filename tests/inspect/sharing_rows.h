// SPDX-License-Identifier: Apache-2.0
// Rows of readable tokens for the analysis of lost sharing.
#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "espalier/data/builder.h"
#include "espalier/inspect/sharing.h"
#include "tests/data/vocabulary.h"

namespace espalier::testing {

/// Text written as tokens, with ~ between them; and whether they carry loss.
struct Part {
  std::string text;
  bool trained = false;
};
struct Row {
  std::vector<Part> parts;
  std::string group = {};
};

/// Rows of readable tokens, and the vocabulary that goes with them.
class ReadableRows {
 public:
  explicit ReadableRows(const std::vector<Row>& rows) {
    for (const Row& row : rows) add(row);
    trajectories_ = builder_.finish();
    TokenSequences sequences;
    sequences.offsets = trajectories_.offsets.span();
    sequences.tokens = trajectories_.input_ids.span();
    keys_ = route_keys(trajectories_);
    sequences.merge_keys = keys_;
    forest_ = build_forest(sequences);
    std::vector<std::string> texts(ids_.size());
    for (const auto& [text, id] : ids_) texts[id] = text;
    vocabulary_ = vocabulary_of(texts);
  }

  SharingReport analyse(bool with_text = true) const {
    SharingOptions options;
    if (with_text) options.vocabulary = &vocabulary_;
    return analyse_sharing(trajectories_, forest_, options);
  }
  const Forest& forest() const { return forest_; }
  const Trajectories& trajectories() const { return trajectories_; }
  std::string text(const std::vector<int32_t>& ids) const { return vocabulary_.text(ids); }

 private:
  void add(const Row& row) {
    TrajectoryRow built;
    built.group_id = row.group;
    for (const Part& part : row.parts) {
      for (size_t begin = 0; begin <= part.text.size();) {
        const size_t end = std::min(part.text.find('~', begin), part.text.size());
        const std::string piece = part.text.substr(begin, end - begin);
        built.input_ids.push_back(ids_.emplace(piece, static_cast<int32_t>(ids_.size())).first->second);
        built.loss_mask.push_back(part.trained);
        begin = end + 1;
      }
    }
    builder_.append(built);
  }

  std::map<std::string, int32_t> ids_;
  TrajectoriesBuilder builder_;
  Trajectories trajectories_;
  std::vector<uint64_t> keys_;
  Forest forest_;
  Vocabulary vocabulary_ = vocabulary_of({});
};

}  // namespace espalier::testing
