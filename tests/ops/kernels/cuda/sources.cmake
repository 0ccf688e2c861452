list(APPEND core_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/emulator.cpp ${CMAKE_CURRENT_LIST_DIR}/simt_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/tile_schedule_test.cpp)
