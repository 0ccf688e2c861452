# SPDX-License-Identifier: Apache-2.0
list(APPEND torch_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/evaluation_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/grad_norms_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/lora_run_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/metrics_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/optimizer_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/resume_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/run_errors_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/trainer_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/epochs_test.cpp)
