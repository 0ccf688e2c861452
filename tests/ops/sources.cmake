list(APPEND core_test_sources)
list(APPEND torch_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/attention_context_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/device_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/edge_logprobs_blocks_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/edge_logprobs_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/elementwise_composed_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/elementwise_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/matrix_product_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/pieces_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/random_forests_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/tree_attention_fused_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/tree_attention_kernels_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/tree_attention_masked_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/tree_attention_pieces_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/tree_attention_test.cpp)
list(APPEND cuda_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/edge_logprobs_cuda_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/elementwise_cuda_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/matrix_product_cuda_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/random_forests_cuda_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/tree_attention_cuda_test.cpp)
