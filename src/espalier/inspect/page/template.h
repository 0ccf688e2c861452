// SPDX-License-Identifier: Apache-2.0
// The page of `inspect --html` without its data: page.html, page.css and the scripts of this folder, joined
// by CMake.
#pragma once

#include <string_view>

namespace espalier {

extern const std::string_view kInspectPage;  // its slots, such as {{data}}, are filled by inspect_page

}  // namespace espalier
