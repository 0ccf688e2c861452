# SPDX-License-Identifier: Apache-2.0
list(APPEND core_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/builder_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/concatenate_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/content_hash_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/field_names_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/file_patterns_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/jsonl_reader_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/large_numbers_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/line_reader_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/packed_memory_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/packed_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/round_trip_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/row_checks_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/row_index_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/row_writer_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/slice_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/vocabulary_test.cpp)
