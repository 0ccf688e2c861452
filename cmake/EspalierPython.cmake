# SPDX-License-Identifier: Apache-2.0
# Extension modules of the Python package, by nanobind. A wheel has them beside the package's Python files. Other builds put
# them into python/espalier, so that PYTHONPATH=python finds them.

# Sets ESPALIER_HAS_NANOBIND where Python's headers and nanobind are found, once. Fails where ESPALIER_BINDINGS is ON and they
# are not.
macro(espalier_find_nanobind)
  if(NOT Python_EXECUTABLE)  # which the build of a wheel gives
    if(NOT ESPALIER_PYTHON)
      find_program(ESPALIER_PYTHON NAMES python3 python PATHS ${PROJECT_SOURCE_DIR}/.venv/bin NO_DEFAULT_PATH)
      find_program(ESPALIER_PYTHON NAMES python3 python)
    endif()
    set(Python_EXECUTABLE ${ESPALIER_PYTHON})
  endif()
  execute_process(COMMAND ${Python_EXECUTABLE} -m nanobind --cmake_dir
                  OUTPUT_VARIABLE nanobind_DIR OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  find_package(Python 3.11 QUIET COMPONENTS Interpreter Development.Module OPTIONAL_COMPONENTS ${SKBUILD_SABI_COMPONENT})
  if(nanobind_DIR AND Python_FOUND)
    set(ESPALIER_HAS_NANOBIND ON)
    find_package(nanobind CONFIG REQUIRED)
  else()
    set(ESPALIER_HAS_NANOBIND OFF)
    set(missing "no Python module: expected nanobind and the headers of Python (python3-dev) for ${Python_EXECUTABLE}")
    if(ESPALIER_BINDINGS STREQUAL AUTO)
      message(STATUS "${missing}")
    else()
      message(FATAL_ERROR "${missing}")
    endif()
  endif()
  if(SKBUILD_SABI_COMPONENT AND NOT TARGET Python::SABIModule)  # the wheel would be called what it is not
    message(FATAL_ERROR "a wheel for the stable ABI: expected CMake 3.26 or later, received ${CMAKE_VERSION}")
  endif()
endmacro()

# espalier_python_module(TARGET NAME SOURCES a.cpp ... LINKS lib ...): the extension espalier.NAME.
function(espalier_python_module target name)
  cmake_parse_arguments(arg "" "" "SOURCES;LINKS" ${ARGN})
  nanobind_add_module(${target} STABLE_ABI NB_SUPPRESS_WARNINGS ${arg_SOURCES})
  # The libraries' symbols stay inside, so that they meet no others in the process. This also lets static libraries that
  # were compiled for programs be a part of a shared one.
  target_link_options(${target} PRIVATE -Wl,--exclude-libs,ALL)
  target_link_libraries(${target} PRIVATE ${arg_LINKS})
  target_compile_features(${target} PRIVATE cxx_std_20)
  target_compile_definitions(${target} PRIVATE ESPALIER_VERSION="${PROJECT_VERSION}")
  espalier_flags(${target})
  set_target_properties(${target} PROPERTIES OUTPUT_NAME ${name})
  if(NOT ESPALIER_WHEEL)
    set_target_properties(${target} PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${PROJECT_SOURCE_DIR}/python/espalier)
  endif()
endfunction()
