# SPDX-License-Identifier: Apache-2.0
list(APPEND torch_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/data_summary_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/signals_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/suggest_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/arguments_test.cpp)
