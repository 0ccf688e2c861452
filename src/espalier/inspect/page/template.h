// SPDX-License-Identifier: Apache-2.0
// The page of `inspect --html` without its data: page.html, page.css and the scripts of this folder, joined
// by CMake.
#pragma once

#include <string_view>

namespace espalier {

extern const std::string_view kInspectPage;  // inspect_page fills its slots, such as {{data}}

}  // namespace espalier
