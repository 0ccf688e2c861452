# SPDX-License-Identifier: Apache-2.0
list(APPEND core_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/attention/schedule_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/attention/windowed_schedule_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/head/logit_math_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/instruction_set_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/products/panel_math_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/products/product_choice_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/recurrence/recurrence_test.cpp)

# What several threads compute together; a separate program, for the thread sanitizer.
list(APPEND thread_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/attention/tree_attention_threads_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/products/blocked_product_threads_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/recurrence/recurrence_threads_test.cpp)
