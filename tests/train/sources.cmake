# SPDX-License-Identifier: Apache-2.0
list(APPEND torch_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/optimizer/context_parallel_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/optimizer/grad_norms_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/optimizer/optimizer_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/optimizer/parts_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/optimizer/ranks_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/run/background_save_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/run/bad_steps_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/run/checkpoints_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/run/epochs_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/run/evaluation_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/run/follow_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/run/lora_run_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/run/metrics_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/run/publish_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/run/rank_checkpoints_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/run/rescue_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/run/resume_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/run/run_errors_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/run/trainer_test.cpp)
