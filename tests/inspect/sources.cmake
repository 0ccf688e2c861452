# SPDX-License-Identifier: Apache-2.0
list(APPEND core_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/examples_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/gains_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/lost_between_groups_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/sharing_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/volatile_text_test.cpp)

# Rows are written with the fields that they have. GCC 12 asks for all of them, and sees an overflow in std::string
# where there is none (its bugs 105329 and 105651).
set(flags -Wno-missing-field-initializers)
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
  list(APPEND flags -Wno-restrict -Wno-stringop-overflow -Wno-array-bounds)
endif()
set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/sharing_test.cpp
                            ${CMAKE_CURRENT_LIST_DIR}/lost_between_groups_test.cpp PROPERTIES COMPILE_OPTIONS "${flags}")
