# SPDX-License-Identifier: Apache-2.0
list(APPEND torch_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/attention_context_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/random_forests_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/sliding_window_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/softcap_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/tree_attention_fused_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/tree_attention_kernels_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/tree_attention_masked_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/tree_attention_test.cpp)
list(APPEND cuda_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/random_forests_cuda_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/tree_attention_cuda_test.cpp)
