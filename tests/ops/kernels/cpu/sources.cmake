# SPDX-License-Identifier: Apache-2.0
list(APPEND core_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/instruction_set_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/logit_math_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/panel_math_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/product_choice_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/recurrence_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/schedule_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/windowed_schedule_test.cpp)

# What several threads compute together; a program of its own, for the thread sanitizer.
list(APPEND thread_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/blocked_product_threads_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/recurrence_threads_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/tree_attention_threads_test.cpp)
