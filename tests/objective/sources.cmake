# SPDX-License-Identifier: Apache-2.0
list(APPEND torch_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/advantages_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/certain_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/evaluate.cpp
  ${CMAKE_CURRENT_LIST_DIR}/objective_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/opd_topk_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/policy_gradient_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/large_ratios_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/preference_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/random_objective.cpp)
