# SPDX-License-Identifier: Apache-2.0
list(APPEND core_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/forest_release_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/forest_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/layout_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/naive.cpp
  ${CMAKE_CURRENT_LIST_DIR}/statistics_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/synth_test.cpp)
