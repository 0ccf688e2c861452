// SPDX-License-Identifier: Apache-2.0
// Several sources of data in one step, each with its own objective.
//   loss = sum over the sources of weight * (the source's loss, normalised over its own rows of the step)
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "espalier/objective/options.h"
#include "espalier/objective/terms.h"

namespace espalier {

/// A contiguous range of rows of the data, after the rows of the sources before it.
struct MixSource {
  std::string name;
  double weight = 1;  // finite, above 0
  ObjectiveOptions objective{};
  int64_t num_rows = 0;
};

/// Throws InputError naming the source for a name that is empty, duplicate or has characters other than
/// letters, digits, `_`, `-` and `.`; for an invalid weight or objective option; and for router losses, which
/// are computed over all rows.
void check_mix(std::span<const MixSource> sources);

/// The source index of each of the `num_rows` rows; the sources' row counts must add up to it.
std::vector<int64_t> sources_of_rows(std::span<const MixSource> sources, int64_t num_rows);

/// step_terms of each source's rows separately, times its weight. A source without loss in the step adds
/// nothing; throws InputError if no source has any. Targets are shared (`once`) within a source only. `rows`,
/// `sharers`: as of weighted_terms.
Csr<Term> mix_terms(const Trajectories& trajectories, std::span<const int64_t> rows, const Forest& forest,
                    std::span<const MixSource> sources, Csr<int64_t>* sharers = nullptr);

}  // namespace espalier
