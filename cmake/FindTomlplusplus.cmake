# SPDX-License-Identifier: Apache-2.0
# Finds the headers of toml++, all that is used of it, and defines Tomlplusplus::Tomlplusplus.
find_path(Tomlplusplus_INCLUDE_DIR toml++/toml.h)
mark_as_advanced(Tomlplusplus_INCLUDE_DIR)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Tomlplusplus REQUIRED_VARS Tomlplusplus_INCLUDE_DIR)

if(Tomlplusplus_FOUND AND NOT TARGET Tomlplusplus::Tomlplusplus)
  add_library(Tomlplusplus::Tomlplusplus INTERFACE IMPORTED)
  target_include_directories(Tomlplusplus::Tomlplusplus INTERFACE ${Tomlplusplus_INCLUDE_DIR})
endif()
