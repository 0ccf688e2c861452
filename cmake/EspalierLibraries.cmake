# SPDX-License-Identifier: Apache-2.0
# The libraries of the half without LibTorch: those of the system, or fetched by hash and linked statically. An archive is looked
# for in the folder ESPALIER_ARCHIVES first; FETCHCONTENT_SOURCE_DIR_NAME names sources that are there already. What is
# fetched is of the versions that docs/dependencies.md lists, and its licences lie in packaging/licenses.
set(ESPALIER_FETCH AUTO CACHE STRING "Fetch libraries: ON (all), OFF, or AUTO for those that the system lacks")
set(ESPALIER_ARCHIVES "" CACHE PATH "Folder with archives of libraries, which are not downloaded then")
set(ESPALIER_FETCHED "")  # names of those that were
include(FetchContent)

# espalier_library(NAME PACKAGE ARCHIVE SHA256 URL...): finds the package, or fetches it and calls espalier_build_NAME.
macro(espalier_library name package archive hash)
  if(NOT ESPALIER_FETCH STREQUAL ON)
    find_package(${package} QUIET)
  endif()
  if(NOT ${package}_FOUND)
    if(NOT ESPALIER_FETCH)
      message(FATAL_ERROR "${package}: expected the library and its headers in the system, found none; install them, or let "
                          "ESPALIER_FETCH be AUTO")
    endif()
    set(urls ${ARGN})
    if(ESPALIER_ARCHIVES AND EXISTS ${ESPALIER_ARCHIVES}/${archive})
      set(urls ${ESPALIER_ARCHIVES}/${archive})
    endif()
    # Its CMakeLists.txt is not read: there is no such folder.
    FetchContent_Declare(${name} URL ${urls} URL_HASH SHA256=${hash} DOWNLOAD_EXTRACT_TIMESTAMP OFF SOURCE_SUBDIR none)
    FetchContent_MakeAvailable(${name})
    cmake_language(CALL espalier_build_${name} ${${name}_SOURCE_DIR})
    list(APPEND ESPALIER_FETCHED ${package})
  endif()
endmacro()

# A static library of the sources that match, or of headers alone where none are named.
function(espalier_static_library target alias include)
  if(ARGN)
    file(GLOB sources ${ARGN})
    add_library(${target} STATIC ${sources})
    target_include_directories(${target} SYSTEM PUBLIC ${include})
    target_compile_options(${target} PRIVATE -w)
  else()
    add_library(${target} INTERFACE)
    target_include_directories(${target} SYSTEM INTERFACE ${include})
  endif()
  add_library(${alias} ALIAS ${target})
endfunction()

function(espalier_build_fmt source)
  espalier_static_library(fmt fmt::fmt ${source}/include ${source}/src/format.cc ${source}/src/os.cc)
endfunction()

function(espalier_build_simdjson source)
  find_package(Threads REQUIRED)
  espalier_static_library(simdjson simdjson::simdjson ${source}/singleheader ${source}/singleheader/simdjson.cpp)
  target_compile_definitions(simdjson PUBLIC SIMDJSON_THREADS_ENABLED=1)
  target_link_libraries(simdjson PUBLIC Threads::Threads)
endfunction()

function(espalier_build_json source)
  espalier_static_library(nlohmann_json nlohmann_json::nlohmann_json ${source}/include)
endfunction()

function(espalier_build_zlib source)
  espalier_static_library(zlib ZLIB::ZLIB ${source} ${source}/*.c)
  target_compile_definitions(zlib PRIVATE HAVE_UNISTD_H)
endfunction()

function(espalier_build_zstd source)
  espalier_static_library(zstd Zstd::Zstd ${source}/lib ${source}/lib/common/*.c ${source}/lib/compress/*.c ${source}/lib/decompress/*.c)
  target_compile_definitions(zstd PRIVATE ZSTD_DISABLE_ASM)
endfunction()

function(espalier_build_xxhash source)
  espalier_static_library(xxhash Xxhash::Xxhash ${source} ${source}/xxhash.c)
endfunction()

set(github https://github.com)
espalier_library(fmt fmt fmt-9.1.0.zip cceb4cb9366e18a5742128cb3524ce5f50e88b476f1e54737a47ffdf4df4c996
  ${github}/fmtlib/fmt/releases/download/9.1.0/fmt-9.1.0.zip)
espalier_library(simdjson simdjson simdjson-3.0.1.tar.gz 156b1bc5eb0561b2bd166b46d191fd3d95a3e709cc63761477d3b7aec2b6e9ed
  ${github}/simdjson/simdjson/archive/v3.0.1.tar.gz)
espalier_library(json nlohmann_json json-3.11.2.tar.gz d69f9deb6a75e2580465c6c4c5111b89c4dc2fa94e3a85fcd2ffcd9a143d9273
  ${github}/nlohmann/json/archive/v3.11.2.tar.gz)
espalier_library(zlib ZLIB zlib-1.3.1.tar.gz 9a93b2b7dfdac77ceba5a558a580e74667dd6fede4585b91eefb60f03b72df23
  ${github}/madler/zlib/releases/download/v1.3.1/zlib-1.3.1.tar.gz https://zlib.net/fossils/zlib-1.3.1.tar.gz)
espalier_library(zstd Zstd zstd-1.5.5.tar.gz 9c4396cc829cfae319a6e2615202e82aad41372073482fce286fac78646d3ee4
  ${github}/facebook/zstd/releases/download/v1.5.5/zstd-1.5.5.tar.gz)
espalier_library(xxhash Xxhash xxHash-0.8.1.tar.gz 3bb6b7d6f30c591dd65aaaff1c8b7a5b94d81687998ca9400082c739a690436c
  ${github}/Cyan4973/xxHash/archive/v0.8.1.tar.gz)
if(ESPALIER_FETCHED)
  list(JOIN ESPALIER_FETCHED ", " names)
  message(STATUS "Libraries that were fetched: ${names}")
endif()
