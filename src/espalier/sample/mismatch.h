// SPDX-License-Identifier: Apache-2.0
// Differences between the sampler's and the trainer's log-probabilities.
#pragma once

#include <cstdint>

#include "espalier/data/trajectories.h"
#include "espalier/engine/engine.h"
#include "espalier/model/decoder.h"

namespace espalier {

/// A decoder whose log-probabilities are log softmax(logits / temperature).
class AtTemperature : public Model {
 public:
  /// `decoder` must outlive this object.
  AtTemperature(const Decoder& decoder, double temperature) : decoder_(decoder), temperature_(temperature) {}

  int64_t num_layers() const override { return decoder_.num_layers(); }
  int64_t vocab_size() const override { return decoder_.vocab_size(); }
  RouterShape routers() const override { return decoder_.routers(); }
  std::vector<int64_t> sliding_windows() const override { return decoder_.sliding_windows(); }
  at::Tensor embed(const at::Tensor& input_ids) const override { return decoder_.embed(input_ids); }
  PositionTables position_tables(const at::Tensor& position_ids) const override {
    return decoder_.position_tables(position_ids);
  }
  LayerOutput layer(int64_t index, const at::Tensor& hidden, const PositionTables& tables,
                    const SequenceOps& sequence, const at::Tensor& rows) const override {
    return decoder_.layer(index, hidden, tables, sequence, rows);
  }
  at::Tensor logprobs(const at::Tensor& hidden, const Edges& edges) const override;
  EdgeDistribution distribution(const at::Tensor& hidden, const Edges& edges) const override;
  const std::vector<Parameter>& parameters() const override { return decoder_.parameters(); }
  at::Device device() const override { return decoder_.device(); }

 private:
  const Decoder& decoder_;
  double temperature_;
};

/// Differences |sampler - training| of log-probabilities, in nats.
struct Mismatch {
  int64_t rows = 0, tokens = 0;
  double largest = 0, mean = 0;
};

/// Recomputes the log-probabilities of the tokens with loss by the forward pass of training on the trees of
/// all rows, and compares them with those in `rows`. `temperature`: the one the rows were sampled with; 0
/// means 1, as in TokenChoice.
Mismatch mismatch_of(const Decoder& decoder, const Trajectories& rows, double temperature,
                     const MicroBatchProgress& progress = {});

}  // namespace espalier
