# SPDX-License-Identifier: Apache-2.0
list(APPEND torch_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/attention_family_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/child_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/operator_family_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/qualify_test.cpp)
