list(APPEND core_test_sources)
