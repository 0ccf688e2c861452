# SPDX-License-Identifier: Apache-2.0
list(APPEND torch_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/judge_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/kernel_choice_test.cpp)
