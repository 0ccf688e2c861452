list(APPEND torch_test_sources
  ${CMAKE_CURRENT_LIST_DIR}/device_flags_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/sharing_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/toml_config_test.cpp)

# Rows are written with the fields that they have; GCC 12 asks for all of them, and sees an overflow in std::string
# where there is none (its bugs 105329 and 105651).
set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/sharing_test.cpp PROPERTIES COMPILE_OPTIONS
                            "-Wno-missing-field-initializers;-Wno-restrict;-Wno-stringop-overflow;-Wno-array-bounds")
