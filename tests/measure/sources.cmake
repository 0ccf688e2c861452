# SPDX-License-Identifier: Apache-2.0
list(APPEND torch_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/benchmark_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/calibrate_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/device_options_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/gemm_rates_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/kernel_verdicts_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/product_decision_test.cpp)
