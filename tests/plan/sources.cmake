list(APPEND core_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/cost_model_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/planner_test.cpp)
