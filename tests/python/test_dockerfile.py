# SPDX-License-Identifier: Apache-2.0
"""What can be said of the Dockerfile without an engine that builds it: its files, stages, packages and user."""

import fnmatch
import importlib.metadata
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from conftest import REPOSITORY

PREFIX = "/opt/espalier/"


def instructions(text):
    """(word, rest) of each instruction, continued lines joined."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def dockerfile():
    return instructions((REPOSITORY / "Dockerfile").read_text())


@pytest.fixture(scope="module")
def tracked():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git repository")
    return listed.stdout.split("\0")[:-1]


def is_ignored(path):
    """Whether .dockerignore keeps a file out: a pattern names it or a folder above it."""
    patterns = [line for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    anywhere = [pattern.removeprefix("**/") for pattern in patterns if pattern.startswith("**/")]
    above = [part for part in [Path(path), *Path(path).parents] if part != Path(".")]
    return any(str(part) in patterns or any(fnmatch.fnmatchcase(part.name, pattern) for pattern in anywhere) for part in above)


def copied(dockerfile):
    """(stage or None, sources, target) of each COPY."""
    for word, rest in dockerfile:
        if word == "COPY":
            flags = [part for part in shlex.split(rest) if part.startswith("--")]
            paths = [part for part in shlex.split(rest) if not part.startswith("--")]
            stage = re.fullmatch("--from=(.*)", flags[0])[1] if flags else None
            yield stage, paths[:-1], paths[-1]


def test_bases_are_pinned_and_stages_have_names(dockerfile):
    images = [rest.split()[0] for word, rest in dockerfile if word == "FROM"]
    assert images and all(re.fullmatch(r"debian:12\.\d+-slim", image) for image in images)
    stages = re.findall(r"^FROM \S+ AS (\w+)$", (REPOSITORY / "Dockerfile").read_text(), re.MULTILINE)
    assert {stage for stage, _, _ in copied(dockerfile)} == {None, *stages}


def test_what_is_copied_exists(dockerfile, tracked):
    sources = [source for stage, paths, _ in copied(dockerfile) if stage is None for source in paths]
    assert {"requirements.txt", "scripts/setup.sh", "."} <= set(sources)
    for source in sources:
        assert source == "." or source in tracked, source
        assert not is_ignored(source), source
    # Before `COPY . .` the set-up finds itself where it expects to be, one folder below requirements.txt.
    assert (None, ["scripts/setup.sh"], "scripts/") in copied(dockerfile)


def test_what_is_copied_from_the_build_is_made_there(dockerfile):
    made = " ".join(rest for word, rest in dockerfile if word == "RUN")
    installed = {PREFIX + name for name in ["bin", "share", "lib/libespalier_ops.so"]}
    assert f"cmake --install build/release --prefix {PREFIX.rstrip('/')} --strip" in made
    for stage, paths, target in copied(dockerfile):
        if stage is None:
            continue
        for path in paths:
            assert path in installed or re.search(rf"(venv|mkdir -p)[^&]*{path}\b", made), path
            assert target in (path, str(Path(path).parent) + "/")


def test_the_context_has_what_git_tracks_and_nothing_that_it_ignores(tracked):
    assert [path for path in tracked if is_ignored(path)] == []
    for line in (REPOSITORY / ".gitignore").read_text().splitlines():
        path = line.strip("/").replace("*", "x")
        assert is_ignored(path) and is_ignored(f"{path}/file"), line
        assert is_ignored(f"deep/below/{path}") or line.startswith("/"), line


def test_it_runs_the_program_without_rights(dockerfile):
    last = dict(dockerfile)
    assert last["ENTRYPOINT"] == '["espalier"]'
    user = last["USER"]
    made = " ".join(rest for word, rest in dockerfile if word == "RUN")
    assert user not in ("root", "0") and re.search(rf"useradd [^&]*--uid {user}\b", made)
    assert [word for word, _ in dockerfile].index("USER") > max(i for i, (word, _) in enumerate(dockerfile) if word == "RUN")


def test_every_library_of_the_program_has_its_package(dockerfile):
    release = Path("/etc/os-release").read_text()
    if shutil.which("dpkg-query") is None or 'VERSION_ID="12"' not in release:
        pytest.skip("packages have other names outside of Debian 12")
    (program,) = (REPOSITORY / "python/espalier").glob("_engine*.so")
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", subprocess.run(["readelf", "--dynamic", program], check=True,
                                                               capture_output=True, text=True).stdout)  # fmt: skip
    installs = re.search(r"apt-get install --yes --no-install-recommends ([\w+. -]+?) +&&", dict(dockerfile)["RUN"])
    listed = set(installs[1].split()) | {"libc6", "libgcc-s1"}  # those of every Debian
    ours = {"libespalier_ops.so", "libtorch_cpu.so", "libc10.so", "libgomp.so.1"}  # /opt/espalier has them
    found = {library: subprocess.run(["dpkg-query", "--search", f"*/{library}"], capture_output=True, text=True).stdout
             for library in needed if library not in ours}  # fmt: skip
    assert len(found) >= 8 and ours <= set(needed) | {"libgomp.so.1"}
    for library, owners in found.items():
        packages = {line.split(":")[0] for line in owners.splitlines()}
        assert packages & listed, (library, packages)


def test_packages_are_those_of_requirements(dockerfile):
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)", (REPOSITORY / "requirements.txt").read_text(), re.MULTILINE))
    [packages] = [rest.split("--constraint requirements.txt")[1].split() for _, rest in dockerfile if "--constraint" in rest]
    assert "transformers" in packages and set(packages) <= set(pinned)


def test_the_cuda_compiler_is_of_the_release_that_torch_was_built_with(dockerfile):
    releases = {tuple(found) for _, rest in dockerfile for found in re.findall(r"nvidia-[\w-]+==(\d+)\.(\d+)", rest)}
    pinned = re.search(r"^torch==([\d.]+)", (REPOSITORY / "requirements.txt").read_text(), re.MULTILINE)[1]
    if importlib.metadata.version("torch").split("+")[0] != pinned:
        pytest.skip(f"the image has torch {pinned}")
    try:
        runtime = importlib.metadata.version("nvidia-cuda-runtime")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("this torch has no CUDA packages")
    assert releases == {tuple(runtime.split(".")[:2])}
