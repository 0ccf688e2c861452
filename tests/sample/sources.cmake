# SPDX-License-Identifier: Apache-2.0
list(APPEND torch_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/clients_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/distributions_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/prefix_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/prompts_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/ranks_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/sampler_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/token_choice_test.cpp)
