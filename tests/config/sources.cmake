# SPDX-License-Identifier: Apache-2.0
list(APPEND core_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/config_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/deepseek_v3_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/families_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/gpt_oss_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/granitemoehybrid_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/layer_spec_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/lora_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/mamba2_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/nemotron_h_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/qwen3_5_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/stop_ids_test.cpp)
