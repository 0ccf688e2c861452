# SPDX-License-Identifier: Apache-2.0
# Installs a build into a scratch prefix, moves the prefix, and builds and runs the project of this folder against it.
#   cmake -DBUILD=FOLDER -DSCRATCH=FOLDER -DCXX=COMPILER -P check_install.cmake
function(run)
  execute_process(COMMAND ${ARGN} OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "${command}\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${SCRATCH})
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${SCRATCH}/first)
set(prefix ${SCRATCH}/moved)
file(RENAME ${SCRATCH}/first ${prefix})

# Nothing that is installed needs the build tree, or the place where it was installed at first.
execute_process(COMMAND grep --recursive --files-with-matches --fixed-strings -e ${BUILD} -e ${SCRATCH}/first ${prefix}
                OUTPUT_VARIABLE found RESULT_VARIABLE status)
if(NOT status EQUAL 1)
  message(FATAL_ERROR "expected no installed file to name ${BUILD} or the first prefix, found:\n${found}")
endif()

# Every header of ours that an installed header includes is installed too.
file(GLOB_RECURSE headers ${prefix}/include/*.h)
list(LENGTH headers count)
if(count LESS 50)
  message(FATAL_ERROR "expected the headers in ${prefix}/include, found ${count}")
endif()
foreach(header IN LISTS headers)
  file(STRINGS ${header} includes REGEX "^#include \"espalier/")
  foreach(line IN LISTS includes)
    string(REGEX REPLACE "^#include \"([^\"]*)\".*" "\\1" included "${line}")
    if(NOT EXISTS ${prefix}/include/${included})
      message(FATAL_ERROR "${header} includes ${included}, which is not installed")
    endif()
  endforeach()
endforeach()

run(${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR} -B ${SCRATCH}/build -DCMAKE_PREFIX_PATH=${prefix}
    -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_FIND_USE_PACKAGE_REGISTRY=OFF)
run(${CMAKE_COMMAND} --build ${SCRATCH}/build)
run(${SCRATCH}/build/consumer)
if(NOT output STREQUAL "6 of 9 tokens\n")
  message(FATAL_ERROR "expected \"6 of 9 tokens\", received \"${output}\"")
endif()
file(REMOVE_RECURSE ${SCRATCH})
