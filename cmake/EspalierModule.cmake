# SPDX-License-Identifier: Apache-2.0
# espalier_module(NAME SOURCES a.cpp ... LINKS lib ... [SHARED] [TORCH])
# One library per module of docs/architecture.md. A module sees only the libraries that it links, so a
# forbidden dependency fails at link time (and tests/check_layers.py says so before).
# TORCH links LibTorch and reuses one precompiled header. What needs no LibTorch is installed, and so is ops; the
# other modules are parts of the program.
function(espalier_module name)
  cmake_parse_arguments(arg "SHARED;TORCH" "" "SOURCES;LINKS" ${ARGN})
  set(target espalier_${name})
  if(arg_SHARED)
    add_library(${target} SHARED ${arg_SOURCES})
  else()
    add_library(${target} STATIC ${arg_SOURCES})
  endif()
  target_include_directories(${target} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/src>
                                              $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_link_libraries(${target} PUBLIC ${arg_LINKS})
  if(arg_TORCH)
    target_link_libraries(${target} PUBLIC LibTorch::LibTorch)
    espalier_use_torch_pch(${target})
  endif()
  espalier_flags(${target})
  if(NOT arg_TORCH)
    espalier_install_library(${target} ${name})
  elseif(arg_SHARED)
    espalier_install_library(${target} ${name} OPS)
  endif()
endfunction()

function(espalier_flags target)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra $<$<BOOL:${ESPALIER_WERROR}>:-Werror>>)
  if(ESPALIER_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${ESPALIER_SANITIZE} -fno-sanitize-recover=all
                                             -fno-omit-frame-pointer)
    target_link_options(${target} PUBLIC -fsanitize=${ESPALIER_SANITIZE})
  endif()
  if(ESPALIER_FUZZ)  # counts which code an input reaches
    target_compile_options(${target} PRIVATE -fsanitize=fuzzer-no-link)
  endif()
endfunction()

# The precompiled LibTorch header is built once, in target espalier_torch_pch, and reused by the rest.
function(espalier_use_torch_pch target)
  if(NOT TARGET espalier_torch_pch)
    file(WRITE ${CMAKE_BINARY_DIR}/torch_pch.cpp "")
    add_library(espalier_torch_pch STATIC ${CMAKE_BINARY_DIR}/torch_pch.cpp)
    target_link_libraries(espalier_torch_pch PUBLIC LibTorch::LibTorch)
    target_compile_options(espalier_torch_pch PRIVATE -Wall -Wextra $<$<BOOL:${ESPALIER_WERROR}>:-Werror>)
    target_precompile_headers(espalier_torch_pch PRIVATE ${PROJECT_SOURCE_DIR}/src/espalier/ops/torch_headers.h)
  endif()
  # Programs would get -fPIE, for which the header was not compiled.
  get_target_property(type ${target} TYPE)
  if(type STREQUAL EXECUTABLE)
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${target} PRIVATE -fPIC)
  endif()
  target_precompile_headers(${target} REUSE_FROM espalier_torch_pch)
endfunction()
