# SPDX-License-Identifier: Apache-2.0
list(APPEND torch_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/device_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/tensor_memory_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/cuda_software_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/out_of_memory_test.cpp)
