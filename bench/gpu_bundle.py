#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Copies what the build needs besides a compiler and torch into one folder, for a machine that cannot install it.

Run it where scripts/setup.sh has installed the packages; take the folder along with the repository. Every package gets a
separate folder with headers, a library (or, for GoogleTest, its sources) and a package file for CMake that knows no
absolute path, so the folder is a list of prefixes:

    python3 bench/gpu_bundle.py                      makes .gpu-bundle (about 10 MB), which git ignores
    cmake ... -DCMAKE_PREFIX_PATH="$(echo "$PWD"/.gpu-bundle/* | tr ' ' ';')"

bench/gpu_suite.sh does both. Static libraries are taken where there are any. They and the shared ones need a C and C++
library at least as new as that of the machine where they were collected.
"""

import argparse
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
PYTHON = "python"  # the folder of what the Python modules need
SOURCE_SUFFIXES = (".h", ".hpp", ".cpp", ".cc", ".cu", ".cuh")


class Failure(Exception):
    """What the user has to know, in one line."""


class Package(NamedTuple):
    name: str  # as CMake's find_package calls it
    version: str  # at least that; what CMake asks for
    header: str  # found by the compiler
    headers: str  # folder or files (a pattern) to copy, beside the first part of `header`
    library: str  # "" for none
    targets: str  # CMake text; ${root} is the package's folder, ${library} the copied library


# -idirafter: where the system's own folder stands, behind all others. LibTorch brings an fmt that must come first.
AFTER = 'target_compile_options({0} INTERFACE "$<$<COMPILE_LANGUAGE:C,CXX>:SHELL:-idirafter \\"${{root}}/include\\">")\n'


def interface(target, more=""):
    return f"add_library({target} INTERFACE IMPORTED)\n" + AFTER.format(target) + more


def linked(target, more=""):
    return interface(target, f"target_link_libraries({target} INTERFACE ${{library}})\n" + more)


GTEST = """\
find_package(Threads REQUIRED)
add_library(bundled_gtest STATIC ${root}/src/gtest-all.cc)
target_include_directories(bundled_gtest SYSTEM PUBLIC ${root}/include PRIVATE ${root})
target_link_libraries(bundled_gtest PUBLIC Threads::Threads)
add_library(GTest::gtest ALIAS bundled_gtest)
add_library(bundled_gtest_main STATIC ${root}/src/gtest_main.cc)
target_link_libraries(bundled_gtest_main PUBLIC bundled_gtest)
add_library(GTest::gtest_main ALIAS bundled_gtest_main)
"""

THREADS = "find_package(Threads REQUIRED)\n"
SIMDJSON = ("target_compile_definitions(simdjson::simdjson INTERFACE SIMDJSON_THREADS_ENABLED=1)\n"
            "target_link_libraries(simdjson::simdjson INTERFACE Threads::Threads)\n")  # fmt: skip

PACKAGES = [
    Package("fmt", "9", "fmt/format.h", "fmt", "fmt", linked("fmt::fmt") + interface(
        "fmt::fmt-header-only", "target_compile_definitions(fmt::fmt-header-only INTERFACE FMT_HEADER_ONLY=1)\n")),
    Package("simdjson", "3", "simdjson.h", "simdjson.h", "simdjson", THREADS + linked("simdjson::simdjson", SIMDJSON)),
    Package("nlohmann_json", "3.11", "nlohmann/json.hpp", "nlohmann", "", interface("nlohmann_json::nlohmann_json")),
    Package("Boost", "1.74", "boost/context/fiber.hpp", "", "boost_context",
            linked("Boost::context") + "set(Boost_CONTEXT_FOUND TRUE)\nset(Boost_context_FOUND TRUE)\n"),
    Package("GTest", "1.12", "gtest/gtest.h", "gtest", "", GTEST),
    # Found by modules of CMake and of cmake/: headers and library are enough.
    Package("ZLIB", "", "zlib.h", "z*conf.h zlib.h", "z", ""),
    Package("Zstd", "", "zstd.h", "zstd*.h", "zstd", ""),
    Package("Xxhash", "", "xxhash.h", "xxh*.h", "xxhash", ""),
]  # fmt: skip


def compiler(*arguments, text=""):
    done = subprocess.run(["g++", "-std=c++20", *map(str, arguments)], input=text, capture_output=True, text=True)
    if done.returncode != 0:
        raise Failure(f"g++ {' '.join(map(str, arguments))}: {done.stderr.strip().splitlines()[0]}")
    return done.stdout


def files_read(headers):
    """Paths of all files that the compiler opens for these headers."""
    text = "".join(f"#include <{header}>\n" for header in headers)
    rule = compiler("-x", "c++", "-M", "-", text=text)
    return [Path(word) for word in rule.replace("\\\n", " ").split()[1:] if word.startswith("/")]


def include_folder(header):
    for path in files_read([header]):
        if path.as_posix().endswith("/" + header):
            return Path(path.as_posix()[: -len(header) - 1])
    raise Failure(f"the compiler finds {header}, but in no folder")


def library_file(name):
    """The static library; the shared one where there is no static one."""
    for suffix in ("a", "so"):
        path = Path(compiler(f"-print-file-name=lib{name}.{suffix}").strip())
        if path.is_absolute():
            return path
    raise Failure(f"the linker finds neither lib{name}.a nor lib{name}.so; scripts/setup.sh installs it")


def copy_library(name, folder):
    """Copies under the name that the linker writes into programs: that of the file it links, or its soname."""
    source = library_file(name)
    folder.mkdir(parents=True)
    if source.suffix == ".a":
        shutil.copy(source, folder)
        return source.name
    real = source.resolve()
    dynamic = subprocess.run(["readelf", "-d", real], capture_output=True, text=True, check=True).stdout
    soname = next(line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "(SONAME)" in line)
    shutil.copy(real, folder / soname)
    return soname


def boost_headers_used():
    """Boost is large: what the repository includes, and what that reads."""
    used = set()
    for folder in ("src", "tests"):
        for path in (REPOSITORY / folder).rglob("*"):
            if path.suffix in SOURCE_SUFFIXES:
                lines = path.read_text().splitlines()
                used |= {line.split("<")[1].split(">")[0] for line in lines if line.startswith("#include <boost/")}
    return sorted(used)


def copy_boost(folder):
    root = include_folder("boost/version.hpp")
    paths = [path for path in files_read([*boost_headers_used(), "boost/version.hpp"]) if root / "boost" in path.parents]
    # Which of these are read depends on compiler and platform.
    paths += [path for part in ("config", "predef") for path in (root / "boost" / part).rglob("*.hpp")]
    for path in paths:
        target = folder / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)


def copy_headers(package, folder):
    if package.name == "Boost":
        return copy_boost(folder)
    root = include_folder(package.header)
    folder.mkdir(parents=True)
    for pattern in package.headers.split():
        for path in root.glob(pattern):
            if path.is_dir():
                shutil.copytree(path, folder / path.name)
            else:
                shutil.copy(path, folder)


def copy_gtest_sources(folder):
    for candidate in (Path("/usr/src/googletest/googletest"), Path("/usr/src/gtest")):
        if (candidate / "src/gtest-all.cc").is_file():
            shutil.copytree(candidate / "src", folder / "src")
            return
    raise Failure("the sources of GoogleTest are not in /usr/src/googletest; package googletest has them")


def write_package_files(package, library, folder):
    folder.mkdir()
    text = ["get_filename_component(root ${CMAKE_CURRENT_LIST_DIR}/.. ABSOLUTE)"]
    if library:
        text.append(f"set(library ${{root}}/lib/{library})")
    guard = package.targets.split("add_library(")[1].split()[0] if package.name != "GTest" else "GTest::gtest"
    text += [f"if(NOT TARGET {guard})", package.targets.rstrip(), "endif()", f"set({package.name}_FOUND TRUE)"]
    (folder / f"{package.name}Config.cmake").write_text("\n".join(text) + "\n")
    # The version asked for is compatible, whatever it is: the build was tested with what was copied.
    (folder / f"{package.name}ConfigVersion.cmake").write_text(
        f"set(PACKAGE_VERSION {package.version})\nset(PACKAGE_VERSION_COMPATIBLE TRUE)\n")  # fmt: skip


def bundle(out):
    for package in PACKAGES:
        folder = out / package.name.lower()
        copy_headers(package, folder / "include")
        library = copy_library(package.library, folder / "lib") if package.library else ""
        if package.name == "GTest":
            copy_gtest_sources(folder)
        if package.targets:
            write_package_files(package, library, folder / "cmake")
    copy_python(out / PYTHON)


def copy_python(folder):
    """nanobind, and the headers of this version of Python, which a machine with an interpreter alone lacks."""
    found = importlib.util.find_spec("nanobind")
    if found is None or not found.origin:
        raise Failure(f"expected the package nanobind for {sys.executable}, found none; use that of scripts/setup.sh --print-python")
    shutil.copytree(Path(found.origin).parent, folder / "packages/nanobind", ignore=shutil.ignore_patterns("__pycache__"))
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copytree(sysconfig.get_path("include"), folder / "include" / version, ignore=shutil.ignore_patterns("__pycache__"))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, default=REPOSITORY / ".gpu-bundle", metavar="FOLDER",
                        help="folder to make; an earlier one is replaced (default: .gpu-bundle of the repository)")  # fmt: skip
    args = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory(dir=args.out.parent) as scratch:
            bundle(Path(scratch) / "bundle")
            shutil.rmtree(args.out, ignore_errors=True)
            (Path(scratch) / "bundle").rename(args.out)
    except (Failure, OSError) as error:
        print(f"gpu_bundle: {error}", file=sys.stderr)
        return 1
    size = sum(path.stat().st_size for path in args.out.rglob("*") if path.is_file())
    print(f"{args.out}: {len(PACKAGES)} packages, {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
