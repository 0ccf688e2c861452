# SPDX-License-Identifier: Apache-2.0
list(APPEND torch_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/adapter_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/decoder_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/gradient_accumulation_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/init_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/node_structure_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/weights/adapter_folder_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/weights/weights_test.cpp)
list(APPEND cuda_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/gradient_accumulation_cuda_test.cpp)
