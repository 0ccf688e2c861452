# SPDX-License-Identifier: Apache-2.0
# espalier_module(NAME SOURCES a.cpp ... LINKS lib ... [SHARED] [TORCH [CORE b.cpp ...]] [COLD] [ALONE | PARTS n] [INTERNAL])
# One library per module of docs/architecture.md. A module sees only the libraries that it links, so a
# forbidden dependency fails at link time (and tests/check_layers.py says so before).
# TORCH links LibTorch and uses its precompiled header. CORE names its sources that need no LibTorch: a build without it has
# these alone, for espalier-core. COLD is for what takes no time when it runs: it is compiled faster, with -O1. Sources of a
# module that is not ALONE are compiled together, n (40) at a time (espalier_join). INTERNAL: it is not installed, because it is
# part of the program or of the Python package.
function(espalier_module name)
  cmake_parse_arguments(arg "SHARED;TORCH;COLD;ALONE;INTERNAL" "PARTS" "SOURCES;CORE;LINKS" ${ARGN})
  if(NOT arg_PARTS)
    set(arg_PARTS 40)
  endif()
  set(is_part OFF)
  if(arg_TORCH AND NOT ESPALIER_TORCH)
    set(is_part ON)
    set(arg_TORCH OFF)
    set(arg_SOURCES "")
    foreach(library ${arg_LINKS})
      if(NOT TARGET ${library})
        list(REMOVE_ITEM arg_LINKS ${library})
      endif()
    endforeach()
  endif()
  if(arg_CORE)
    list(APPEND arg_SOURCES ${arg_CORE})
    list(SORT arg_SOURCES)  # the same are compiled together whatever CORE names
  endif()
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
  if(arg_COLD)
    target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)
    # With -O1, GCC does not see that an optional value was tested before it is read.
    target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
  endif()
  if(NOT arg_ALONE)
    espalier_join(${target} PARTS ${arg_PARTS} SOURCES ${arg_SOURCES})
  endif()
  if(arg_INTERNAL OR is_part)
    return()
  elseif(arg_TORCH)
    espalier_install_library(${target} ${name} TORCH)
  else()
    espalier_install_library(${target} ${name})
  endif()
endfunction()

# The headers that most sources of the LibTorch half include, by themselves or through others.
set(ESPALIER_TORCH_HEADERS ${PROJECT_SOURCE_DIR}/src/espalier/ops/torch_headers.h <fmt/format.h> <fmt/ranges.h> <nlohmann/json.hpp>)

# LibTorch's include folder has an fmt of its own without its library, which would be compiled again in every source
# file. espalier_fmt puts the system's before it.
function(espalier_prefer_system_fmt)
  get_target_property(folders fmt::fmt INTERFACE_INCLUDE_DIRECTORIES)
  find_path(ESPALIER_FMT_INCLUDE fmt/core.h HINTS ${folders})
  set(first ${CMAKE_BINARY_DIR}/include_first)
  file(MAKE_DIRECTORY ${first})
  file(CREATE_LINK ${ESPALIER_FMT_INCLUDE}/fmt ${first}/fmt SYMBOLIC)
  add_library(espalier_fmt INTERFACE)
  target_include_directories(espalier_fmt INTERFACE ${first})
  target_link_libraries(espalier_fmt INTERFACE fmt::fmt)
endfunction()

set(ESPALIER_WARNINGS -Wall -Wextra $<$<BOOL:${ESPALIER_WERROR}>:-Werror>)

function(espalier_flags target)
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:${ESPALIER_WARNINGS}>")
  if(ESPALIER_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${ESPALIER_SANITIZE} -fno-sanitize-recover=all
                                             -fno-omit-frame-pointer)
    target_link_options(${target} PUBLIC -fsanitize=${ESPALIER_SANITIZE})
  endif()
endfunction()

# espalier_use_torch_pch(TARGET): a target that uses LibTorch. The precompiled header is built once, in target
# espalier_torch_pch, with -O3: targets with -O1 may use it, but GCC 12 crashes where one for -O1 is used with more. To read it
# takes four seconds, so sources that need no LibTorch do without.
function(espalier_use_torch_pch target)
  target_link_libraries(${target} PRIVATE $<BUILD_INTERFACE:espalier_fmt>)
  if(NOT TARGET espalier_torch_pch)
    file(WRITE ${CMAKE_BINARY_DIR}/torch_pch.cpp "")
    add_library(espalier_torch_pch STATIC ${CMAKE_BINARY_DIR}/torch_pch.cpp)
    target_link_libraries(espalier_torch_pch PUBLIC LibTorch::LibTorch espalier_fmt)
    if(TARGET nlohmann_json::nlohmann_json)
      target_link_libraries(espalier_torch_pch PUBLIC nlohmann_json::nlohmann_json)
    endif()
    target_compile_features(espalier_torch_pch PUBLIC cxx_std_20)
    target_compile_options(espalier_torch_pch PRIVATE ${ESPALIER_WARNINGS})
    target_precompile_headers(espalier_torch_pch PRIVATE ${ESPALIER_TORCH_HEADERS})
  endif()
  # Programs would get -fPIE, for which the header was not compiled.
  get_target_property(type ${target} TYPE)
  if(type STREQUAL EXECUTABLE)
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${target} PRIVATE -fPIC)
  endif()
  target_precompile_headers(${target} REUSE_FROM espalier_torch_pch)
endfunction()

# espalier_join(TARGET PARTS N [BY_FOLDER] [ALONE REGEX] SOURCES SOURCE...): compiles sources together, N at a time; BY_FOLDER, those
# of one folder and the folders below it. GCC instantiates the templates that the headers of LibTorch name at the end of each
# compilation, which takes five seconds even with the precompiled header. Sources that are large themselves stay alone: those of
# folders that match REGEX. With ESPALIER_JOIN=OFF each is compiled by itself, which tells where an include is missing.
function(espalier_join target)
  cmake_parse_arguments(arg "BY_FOLDER" "PARTS;ALONE" "SOURCES" ${ARGN})
  if(NOT ESPALIER_JOIN)
    return()
  endif()
  foreach(source ${arg_SOURCES})
    cmake_path(ABSOLUTE_PATH source BASE_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR})
    cmake_path(GET source PARENT_PATH folder)
    cmake_path(RELATIVE_PATH folder BASE_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR})
    if(NOT arg_ALONE OR NOT folder MATCHES "${arg_ALONE}")
      set(group all)
      if(arg_BY_FOLDER)
        string(REGEX REPLACE "/.*" "" group ${folder})
      endif()
      list(APPEND ${group}_sources ${source})
      list(LENGTH ${group}_sources count)
      math(EXPR part "(${count} - 1) / ${arg_PARTS}")
      set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${group}_${part})
    endif()
  endforeach()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  # GCC warns of a class of one source with members from its anonymous namespace, where that source is included by another.
  target_compile_options(${target} PRIVATE "$<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:-Wno-subobject-linkage>")
endfunction()
