list(APPEND torch_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/outcome.cpp
  ${CMAKE_CURRENT_LIST_DIR}/tiny_models.cpp
  ${CMAKE_CURRENT_LIST_DIR}/batch_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/benchmark_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/cost_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/exactness_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/memory_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/meta_device_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/metrics_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/negative_controls_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/objective_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/optimizer_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/partition_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/trainer_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/verify_test.cpp)

# Rows and options are written with the fields that they have; GCC 12 asks for all of them.
set_source_files_properties(${torch_test_sources} PROPERTIES COMPILE_OPTIONS -Wno-missing-field-initializers)
