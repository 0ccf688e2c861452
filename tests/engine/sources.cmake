# SPDX-License-Identifier: Apache-2.0
list(APPEND torch_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/batch_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/cost_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/evaluate_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/exactness_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/lora_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/meta_device_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/mix_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/negative_controls_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/outcome.cpp
  ${CMAKE_CURRENT_LIST_DIR}/partition_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/random_steps.cpp
  ${CMAKE_CURRENT_LIST_DIR}/recurrent_controls_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/routers_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/tiny_models.cpp
  ${CMAKE_CURRENT_LIST_DIR}/unit_loss_test.cpp)
