# SPDX-License-Identifier: Apache-2.0
list(APPEND torch_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/edge_distribution_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/edge_logprobs_blocks_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/edge_logprobs_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/top_logprobs_test.cpp)
list(APPEND cuda_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/edge_logprobs_cuda_test.cpp)
