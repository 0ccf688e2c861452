list(APPEND torch_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/outcome.cpp
  ${CMAKE_CURRENT_LIST_DIR}/tiny_models.cpp
  ${CMAKE_CURRENT_LIST_DIR}/exactness_test.cpp)
