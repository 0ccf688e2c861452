list(APPEND torch_test_sources ${CMAKE_CURRENT_LIST_DIR}/toml_config_test.cpp)
