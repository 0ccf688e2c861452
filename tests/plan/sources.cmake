# SPDX-License-Identifier: Apache-2.0
list(APPEND core_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/adapter_cost_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/bin_packing_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/choosing_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/comparison_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/context_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/cost_model_file_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/cost_model_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/division_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/interrupt_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/key_reads_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/largest_differencing_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/layer_cost_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/leaf_parts_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/loss_work_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/multi_path_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/partition_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/planner_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/range_minimum_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/ranks_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/single_path_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/tree_heuristic_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/tree_packing_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/tree_shapes.cpp
  ${CMAKE_CURRENT_LIST_DIR}/visible_intervals_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/window_pairs_test.cpp)
