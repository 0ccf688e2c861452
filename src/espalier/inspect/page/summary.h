// SPDX-License-Identifier: Apache-2.0
// The head of a page: gains, verdict, totals.
#pragma once

#include <string>

#include "espalier/inspect/report.h"

namespace espalier {

/// HTML: both gains as large figures, the leading one first (gains.h), the verdict and its advice, and behind
/// "Details" every total with a sentence that says what it is.
std::string summary_html(const InspectReport& report);

}  // namespace espalier
