list(APPEND torch_test_sources)
