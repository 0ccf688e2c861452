list(APPEND torch_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/config_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/decoder_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/init_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/parameter_ops_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/vocabulary_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/weights_test.cpp)
list(APPEND cuda_test_sources ${CMAKE_CURRENT_LIST_DIR}/parameter_ops_cuda_test.cpp)
