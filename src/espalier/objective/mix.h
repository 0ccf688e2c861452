// SPDX-License-Identifier: Apache-2.0
// Several sources of data in one step, each with an objective of its own.
//   loss = sum over the sources of weight * (the source's loss, normalised over its own rows of the step)
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "espalier/objective/options.h"
#include "espalier/objective/terms.h"

namespace espalier {

/// Consecutive rows of the data, which follow those of the sources before.
struct MixSource {
  std::string name;
  double weight = 1;  // finite, above 0
  ObjectiveOptions objective{};
  int64_t num_rows = 0;
};

/// Throws InputError naming the source: names that are empty, twice there or hold other characters than
/// letters, digits, `_`, `-` and `.`; weights; options of objectives; losses of routers, which belong to no
/// source.
void check_mix(std::span<const MixSource> sources);

/// The source of each of `num_rows` rows of the data; the sources have as many rows together.
std::vector<int64_t> sources_of_rows(std::span<const MixSource> sources, int64_t num_rows);

/// step_terms of each source's rows by themselves, times its weight. A source without loss in the step adds
/// nothing; throws InputError where no source has any. Targets are shared (`once`) by rows of one source
/// only. `rows`, `sharers`: as of weighted_terms.
Csr<Term> mix_terms(const Trajectories& trajectories, std::span<const int64_t> rows, const Forest& forest,
                    std::span<const MixSource> sources, Csr<int64_t>* sharers = nullptr);

}  // namespace espalier
