list(APPEND core_test_sources ${CMAKE_CURRENT_LIST_DIR}/cpu_level_test.cpp ${CMAKE_CURRENT_LIST_DIR}/logit_math_test.cpp ${CMAKE_CURRENT_LIST_DIR}/schedule_test.cpp)
