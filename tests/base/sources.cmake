# SPDX-License-Identifier: Apache-2.0
list(APPEND core_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/csr_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/error_ratio_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/file_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/folder_lock_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/hash_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/hub_name_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/interrupt_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/json_file_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/log_file_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/manifest_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/mapped_file_guard_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/options_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/median_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/printable_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/rng_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/safetensors_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/temporaries_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/units_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/words_test.cpp)
