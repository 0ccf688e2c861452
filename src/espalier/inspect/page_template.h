// SPDX-License-Identifier: Apache-2.0
// The page of `inspect --html` without its data: page.{html,css,js}, joined by CMake.
#pragma once

#include <string_view>

namespace espalier {

extern const std::string_view kInspectPage;  // the data stands where it says {{data}}

}  // namespace espalier
