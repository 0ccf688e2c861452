# SPDX-License-Identifier: Apache-2.0
# Finds LibTorch inside the Python package `torch` and defines LibTorch::LibTorch (and LibTorch::CUDA when the
# package has CUDA libraries). The package's own TorchConfig.cmake is not used: it refuses to configure
# without a CUDA toolkit, and with one unless the architecture list is set.
#
# Input:  ESPALIER_PYTHON, a Python interpreter that has torch >= 2.9 (default: .venv, then python3), or
#         ESPALIER_TORCH_FOLDER, the folder of that package.
# Output: LibTorch_FOUND, LibTorch_VERSION, LibTorch_ROOT.
if(NOT ESPALIER_PYTHON)
  find_program(ESPALIER_PYTHON NAMES python3 python PATHS ${PROJECT_SOURCE_DIR}/.venv/bin NO_DEFAULT_PATH)
  find_program(ESPALIER_PYTHON NAMES python3 python)
endif()
if(ESPALIER_TORCH_FOLDER)
  set(LibTorch_ROOT ${ESPALIER_TORCH_FOLDER})
else()
  execute_process(
    COMMAND ${ESPALIER_PYTHON} -c
            "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
    OUTPUT_VARIABLE LibTorch_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
if(LibTorch_ROOT AND EXISTS ${LibTorch_ROOT}/version.py)
  file(STRINGS ${LibTorch_ROOT}/version.py version_line REGEX "^__version__ = ")
  string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" LibTorch_VERSION "${version_line}")
endif()
find_library(LibTorch_CPU_LIBRARY torch_cpu PATHS ${LibTorch_ROOT}/lib NO_DEFAULT_PATH NO_CACHE)
find_library(LibTorch_C10_LIBRARY c10 PATHS ${LibTorch_ROOT}/lib NO_DEFAULT_PATH NO_CACHE)
find_library(LibTorch_LIBRARY torch PATHS ${LibTorch_ROOT}/lib NO_DEFAULT_PATH NO_CACHE)
find_library(LibTorch_CUDA_LIBRARY torch_cuda PATHS ${LibTorch_ROOT}/lib NO_DEFAULT_PATH NO_CACHE)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  LibTorch REQUIRED_VARS LibTorch_ROOT LibTorch_CPU_LIBRARY LibTorch_C10_LIBRARY LibTorch_LIBRARY
  VERSION_VAR LibTorch_VERSION
  REASON_FAILURE_MESSAGE "no package torch in ${ESPALIER_PYTHON}: run make setup or set ESPALIER_PYTHON")
if(LibTorch_FOUND AND LibTorch_VERSION VERSION_LESS 2.9)
  message(FATAL_ERROR "torch >= 2.9 expected, ${LibTorch_VERSION} found in ${LibTorch_ROOT}")
endif()

if(NOT TARGET LibTorch::LibTorch)
  add_library(LibTorch::LibTorch INTERFACE IMPORTED)
  target_include_directories(LibTorch::LibTorch SYSTEM INTERFACE
    ${LibTorch_ROOT}/include ${LibTorch_ROOT}/include/torch/csrc/api/include)
  # libtorch_cuda registers the CUDA kernels when it is loaded; nothing refers to its symbols, so it is only
  # kept (and only needed) by targets that ask for LibTorch::CUDA.
  # libstdc++ comes first: LibTorch exports its own copies of std::filesystem, which crash when they are mixed
  # with the system's.
  target_link_libraries(LibTorch::LibTorch INTERFACE
    stdc++ ${LibTorch_LIBRARY} ${LibTorch_CPU_LIBRARY} ${LibTorch_C10_LIBRARY})
endif()
