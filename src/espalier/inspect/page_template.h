// SPDX-License-Identifier: Apache-2.0
// The page of `inspect --html` without its data: page.{html,css,js}, joined by CMake, the scripts from
// page_*.js.
#pragma once

#include <string_view>

namespace espalier {

extern const std::string_view kInspectPage;  // its slots, such as {{data}}, are filled by inspect_page

}  // namespace espalier
