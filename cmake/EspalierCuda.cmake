# SPDX-License-Identifier: Apache-2.0
# Enables CUDA as ESPALIER_CUDA says: ON, OFF, or AUTO for where nvcc is found, which becomes one of the former.
if(ESPALIER_CUDA STREQUAL AUTO AND ESPALIER_WHEEL AND ESPALIER_TORCH_FOLDER AND NOT EXISTS ${ESPALIER_TORCH_FOLDER}/lib/libtorch_cuda.so)
  set(ESPALIER_CUDA OFF)  # no kernels for a PyTorch that has none
endif()
if(ESPALIER_CUDA STREQUAL AUTO)
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(ESPALIER_CUDA ON)
  else()
    set(ESPALIER_CUDA OFF)
  endif()
endif()
if(ESPALIER_CUDA)
  # Machine code for Ampere; every other GPU compiles its intermediate code when it is loaded.
  set(CMAKE_CUDA_ARCHITECTURES 80 CACHE STRING "GPUs to build for")
  enable_language(CUDA)
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake before 3.26 does not know that nvcc has it
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  endif()
  # Named again, /usr/include would come before the compiler's own headers.
  list(APPEND CMAKE_CUDA_IMPLICIT_INCLUDE_DIRECTORIES ${CMAKE_CXX_IMPLICIT_INCLUDE_DIRECTORIES})
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_EXTENSIONS OFF)
endif()
