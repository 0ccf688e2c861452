# SPDX-License-Identifier: Apache-2.0
# Extension modules of the Python package, by nanobind. A wheel has them beside the package's Python files. Other builds put
# them into python/espalier, so that PYTHONPATH=python finds them.

# Sets ESPALIER_PYTHON, unless it is set: that of a wheel's build, .venv's, or that of PATH.
macro(espalier_find_python)
  if(NOT ESPALIER_PYTHON AND Python_EXECUTABLE)  # which the build of a wheel gives
    set(ESPALIER_PYTHON ${Python_EXECUTABLE})
  elseif(NOT ESPALIER_PYTHON)
    find_program(ESPALIER_PYTHON NAMES python3 python PATHS ${PROJECT_SOURCE_DIR}/.venv/bin NO_DEFAULT_PATH)
    find_program(ESPALIER_PYTHON NAMES python3 python)
  endif()
endmacro()

# Sets ESPALIER_HAS_NANOBIND where Python's headers and nanobind are found, once. Fails where ESPALIER_BINDINGS is ON and they
# are not.
macro(espalier_find_nanobind)
  set(Python_EXECUTABLE ${ESPALIER_PYTHON})
  # scripts/setup.sh puts into the folder what an active environment lacks.
  execute_process(COMMAND ${CMAKE_COMMAND} -E env PYTHONPATH=${PROJECT_SOURCE_DIR}/build/python-tools:$ENV{PYTHONPATH}
                          ${Python_EXECUTABLE} -m nanobind --cmake_dir
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

# Where the modules come to lie: beside the sources of the package, or, for the sanitizers, beside links to them.
set(ESPALIER_PYTHON_FOLDER ${PROJECT_SOURCE_DIR}/python)
if(ESPALIER_SANITIZE)
  set(ESPALIER_PYTHON_FOLDER ${PROJECT_BINARY_DIR}/python)
  file(MAKE_DIRECTORY ${ESPALIER_PYTHON_FOLDER}/espalier)
  file(GLOB sources ${PROJECT_SOURCE_DIR}/python/espalier/*)
  list(FILTER sources EXCLUDE REGEX "\\.so$|/built\\.json$|/__pycache__$")
  foreach(source ${sources})
    get_filename_component(name ${source} NAME)
    file(CREATE_LINK ${source} ${ESPALIER_PYTHON_FOLDER}/espalier/${name} SYMBOLIC)
  endforeach()
endif()

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
  if(ESPALIER_WHEEL)
    espalier_install_in_wheel(${target})
    return()
  endif()
  set_target_properties(${target} PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${ESPALIER_PYTHON_FOLDER}/espalier)
  set(folder ${CMAKE_INSTALL_DATADIR}/espalier/python/espalier)
  espalier_install_rpath(${target} ${folder})
  install(TARGETS ${target} LIBRARY DESTINATION ${folder})
endfunction()

# What a wheel has of its own: the package espalier of the half without LibTorch, espalier_torch of the other.
set(ESPALIER_PACKAGE espalier)
if(ESPALIER_TORCH)
  set(ESPALIER_PACKAGE espalier_torch)
endif()

# espalier_install_in_wheel(TARGET [FOLDER]): into the wheel's package, or a folder of it. Libraries that come along are found in the
# package, those of LibTorch in the package torch beside it.
function(espalier_install_in_wheel target)
  set(to_package $ORIGIN)
  if(ARGN)
    set(to_package $ORIGIN/..)
  endif()
  set(rpath ${to_package})
  if(ESPALIER_TORCH)
    list(APPEND rpath ${to_package}/../torch/lib)
  endif()
  set_target_properties(${target} PROPERTIES INSTALL_RPATH "${rpath}")
  install(TARGETS ${target} DESTINATION ${ESPALIER_PACKAGE}/${ARGN} COMPONENT python)
endfunction()

# Libraries of which there is no static form come along.
function(espalier_finish_wheel)
  foreach(library fmt::fmt simdjson::simdjson)
    get_target_property(type ${library} TYPE)
    if(type STREQUAL SHARED_LIBRARY)
      install(FILES $<TARGET_FILE:${library}> DESTINATION ${ESPALIER_PACKAGE} COMPONENT python
              RENAME $<TARGET_SONAME_FILE_NAME:${library}>)
    endif()
  endforeach()
endfunction()
