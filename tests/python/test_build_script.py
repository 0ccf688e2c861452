# SPDX-License-Identifier: Apache-2.0
"""scripts/build.sh says how far it is, also where no terminal shows it."""

import os
import re
import shutil
import subprocess

import pytest

from conftest import REPOSITORY

PROJECT = """cmake_minimum_required(VERSION 3.25)
project(three NONE)
foreach(number 1 2 3)
  add_custom_command(OUTPUT ${number} COMMAND ${CMAKE_COMMAND} -E touch ${number} COMMENT "Making ${number}")
  list(APPEND made ${number})
endforeach()
add_custom_target(everything ALL DEPENDS ${made})
"""
PRESETS = """{"version": 6, "configurePresets": [{"name": "core", "generator": "Ninja",
                                                   "binaryDir": "${sourceDir}/build/${presetName}"}]}"""


@pytest.mark.skipif(shutil.which("ninja") is None or shutil.which("cmake") is None, reason="needs CMake and ninja")
def test_a_build_counts_its_steps(tmp_path):
    (tmp_path / "scripts").mkdir()
    shutil.copy(REPOSITORY / "scripts/build.sh", tmp_path / "scripts")
    (tmp_path / "CMakeLists.txt").write_text(PROJECT)
    (tmp_path / "CMakePresets.json").write_text(PRESETS)
    environment = {**os.environ, "ESPALIER_JOBS": "1"}
    environment.pop("NINJA_STATUS", None)

    def build(*targets):
        done = subprocess.run([tmp_path / "scripts/build.sh", "core", *targets], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    lines = build().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("build: 3 steps, 1 at a time"))
    assert [bool(re.fullmatch(rf"\[{step}/3, [\d.]+ s\] Making \d", lines[first + step])) for step in (1, 2, 3)] == [True] * 3
    assert "steps" not in build("everything")  # all is done
