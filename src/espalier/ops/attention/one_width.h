// SPDX-License-Identifier: Apache-2.0
// Keys and values of one width, for kernels that know only one: zeros behind the narrower change no result.
#pragma once

#include "espalier/ops/attention/arguments.h"

namespace espalier::detail {

/// Whether values are as wide as keys.
bool has_one_width(const TreeAttentionArguments& arguments);

/// The arguments with queries and keys, or values, as wide as the wider of both. Of backward, out and its
/// gradient too.
TreeAttentionArguments in_one_width(TreeAttentionArguments arguments);
TreeAttentionBackward in_one_width(TreeAttentionBackward backward);

/// The results of such arguments without what zeros have added, as the operator gives them for `arguments`.
TreeAttentionResults narrowed(const TreeAttentionArguments& arguments, const TreeAttentionResults& results);
TreeAttentionGradients narrowed(const TreeAttentionArguments& arguments,
                                const TreeAttentionGradients& gradients);

}  // namespace espalier::detail
