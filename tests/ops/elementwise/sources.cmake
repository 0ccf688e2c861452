# SPDX-License-Identifier: Apache-2.0
list(APPEND torch_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/activations_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/elementwise_composed_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/elementwise_test.cpp)
list(APPEND cuda_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/elementwise_cuda_test.cpp)
