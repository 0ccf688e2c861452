# SPDX-License-Identifier: Apache-2.0
list(APPEND core_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/attention/key_parts_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/attention/tile_schedule_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/attention/tree_attention_backward_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/attention/tree_attention_forward_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/emulator.cpp
  ${CMAKE_CURRENT_LIST_DIR}/head/logit_math_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/simt_test.cpp)
