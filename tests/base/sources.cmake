list(APPEND core_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/file_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/rng_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/safetensors_test.cpp)
