# SPDX-License-Identifier: Apache-2.0
# Writes a C++ source with what --help of the commands written in Python says, as JSON:
# cmake -DPYTHON=PYTHON -DSOURCE=FOLDER -DOUTPUT=FILE -P WritePythonFlags.cmake
execute_process(
  COMMAND ${CMAKE_COMMAND} -E env PYTHONPATH=${SOURCE}/python PYTHONDONTWRITEBYTECODE=1
          ${PYTHON} -m espalier.commands.flags_json
  OUTPUT_VARIABLE json COMMAND_ERROR_IS_FATAL ANY)
file(WRITE ${OUTPUT}
     "#include \"espalier/cli/print/command_text.h\"\n\nnamespace espalier::cli {\n\n"
     "const char* const kPythonFlags = R\"json(${json})json\";\n\n}\n")
