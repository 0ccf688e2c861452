# SPDX-License-Identifier: Apache-2.0
# Writes a C++ source that tells the git commit of a source folder: cmake -DSOURCE=FOLDER -DOUTPUT=FILE -P WriteCommit.cmake
# The file is rewritten only when its text changes, so that a build recompiles one small file after a commit and
# nothing otherwise. Run at build time, since commits do not make CMake run again.
# The text is "unknown" outside of git, and where the folder is merely inside some other repository.
function(run_git result)
  # A git hook that builds would hand its own repository to git by these variables.
  execute_process(
    COMMAND ${CMAKE_COMMAND} -E env --unset=GIT_DIR --unset=GIT_WORK_TREE --unset=GIT_INDEX_FILE git ${ARGN}
    WORKING_DIRECTORY ${SOURCE}
    OUTPUT_VARIABLE output OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    set(output "")
  endif()
  set(${result} "${output}" PARENT_SCOPE)
endfunction()

set(commit unknown)
run_git(top_level rev-parse --show-toplevel)
if(top_level)
  file(REAL_PATH "${top_level}" top_level)
  file(REAL_PATH "${SOURCE}" source)
  if(top_level STREQUAL source)
    # --exclude '*': never the name of a tag.
    run_git(described describe --always --dirty --abbrev=12 --exclude *)
    if(described)
      set(commit "${described}")
    endif()
  endif()
endif()

set(text "namespace espalier {\n\nextern const char* const kCommit;\nconst char* const kCommit = \"${commit}\";\n\n}\n")
set(before "")
if(EXISTS ${OUTPUT})
  file(READ ${OUTPUT} before)
endif()
if(NOT before STREQUAL text)
  file(WRITE ${OUTPUT} "${text}")
endif()
