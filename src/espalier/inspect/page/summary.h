// SPDX-License-Identifier: Apache-2.0
// The head of a page: gains, verdict, totals.
#pragma once

#include <string>

#include "espalier/inspect/report.h"

namespace espalier {

/// HTML: both gains as large figures, the leading one first (gains.h), the verdict and its advice, and under
/// "Details" every total with an explanation.
std::string summary_html(const InspectReport& report);

}  // namespace espalier
