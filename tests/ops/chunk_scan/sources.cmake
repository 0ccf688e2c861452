# SPDX-License-Identifier: Apache-2.0
list(APPEND torch_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/chunk_tree_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/scan_test.cpp)
