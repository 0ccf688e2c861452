# SPDX-License-Identifier: Apache-2.0
"""espalier-torch: its source distribution holds what a build takes, a wheel depends on the PyTorch that it is built against, and
what does not fit is refused before any of it is loaded. The build itself takes long: `make wheels`."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from email import message_from_string
from pathlib import PurePosixPath

import pytest

from conftest import REPOSITORY

FOLDER = REPOSITORY / "packaging/torch"
VERSION = re.search(r"project\(espalier VERSION ([0-9.]+)", (REPOSITORY / "CMakeLists.txt").read_text())[1]


def by_backend(call, folder, **variables):
    """What a function of the backend leaves in `folder`."""
    code = f"from backend import *; print({call})"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], cwd=FOLDER, capture_output=True, text=True,
                          env=os.environ | variables)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Text by path of the files of the source distribution."""
    pytest.importorskip("scikit_build_core")
    archive = by_backend("build_sdist(__import__('sys').argv[1])", tmp_path_factory.mktemp("sdist"))
    with tarfile.open(archive) as tar:
        members = tar.getmembers()
        assert all(member.isfile() for member in members), "links would point outside"
        read = lambda member: tar.extractfile(member).read().decode()
        return {str(PurePosixPath(*PurePosixPath(member.name).parts[1:])): read(member) for member in members}


def test_the_source_distribution_has_all_that_a_build_takes(files):
    sources = {str(path.relative_to(REPOSITORY)) for folder in ("src", "cmake", "python/espalier")
               for path in (REPOSITORY / folder).rglob("*") if path.suffix in {".h", ".cpp", ".cu", ".cuh", ".cmake", ".txt", ".in", ".py"}
               and path.is_file()}  # fmt: skip
    assert len(sources) > 500 and {f"espalier/{name}" for name in [*sources, "CMakeLists.txt"]} <= files.keys()
    assert {"CMakeLists.txt", "LICENSE", "backend.py", "licenses/fmt.txt", "espalier_torch/__init__.py"} <= files.keys()
    assert not [name for name in files if name.endswith((".so", ".pyc"))]


def metadata(tmp_path, **variables):
    folder = by_backend("prepare_metadata_for_build_wheel(__import__('sys').argv[1])", tmp_path, **variables)
    return message_from_string((folder / "METADATA").read_text())


def test_metadata(files, tmp_path):
    torch = pytest.importorskip("torch")
    source = message_from_string(files["PKG-INFO"])
    assert (source["Name"], source["Version"]) == ("espalier-torch", VERSION)
    assert source.get_all("Requires-Dist") == ["torch>=2.9", f"espalier-train=={VERSION}"]
    major, minor = torch.__version__.split(".")[:2]
    (tmp_path / "plain").mkdir()
    (tmp_path / "released").mkdir()
    plain = metadata(tmp_path / "plain")
    assert plain["Version"] == VERSION and plain.get_all("Requires-Dist")[0] == f"torch=={major}.{minor}.*"
    # Of several wheels of one release, an installer takes the newest whose PyTorch it may install.
    released = metadata(tmp_path / "released", ESPALIER_RELEASE="1")
    assert released["Version"] == f"{VERSION}.{int(major) * 100 + int(minor)}"


def test_the_build_finds_the_pytorch_that_is_installed():
    """Also where pip isolates the build: it is looked for beside the interpreter."""
    torch = pytest.importorskip("torch")
    code = "import sys; sys.path = [p for p in sys.path if 'site-packages' not in p]; print(backend.find_torch())"
    alone = "import backend; " + code
    done = subprocess.run([sys.executable, "-c", alone], cwd=FOLDER, capture_output=True, text=True)
    assert done.returncode == 0 and torch.__version__.split("+")[0] in done.stdout, done.stdout + done.stderr


def test_without_pytorch_the_build_says_what_helps(tmp_path):
    done = subprocess.run(["cmake", "-S", FOLDER, "-B", tmp_path / "build"], capture_output=True, text=True)
    said = " ".join(done.stderr.split())
    assert done.returncode != 0 and "expected PyTorch, against which it is built, found none: pip install torch" in said


STAND_IN = """
class StopRequest:
    step = -1


def prepare_process(*_):
    pass


guard_files = judge_kernels_by = listen = remove_temporaries = prepare_process


def run_command(name, options, *_):
    print(__file__, name, options, flush=True)
    return 0, "null"
"""


@pytest.fixture
def package(tmp_path):
    """Espalier as wheels install it: espalier_torch with the operators of the build, and a trainer that says which it is."""
    from torch import __version__ as torch

    shutil.copytree(REPOSITORY / "python/espalier", tmp_path / "espalier", ignore=shutil.ignore_patterns("_engine*.so", "built.json", "__pycache__"))
    folder = tmp_path / "espalier_torch"
    folder.mkdir()
    (folder / "__init__.py").write_text((FOLDER / "espalier_torch/__init__.py").read_text())
    (folder / "libespalier_ops.so").symlink_to(REPOSITORY / "build/release/src/espalier/ops/libespalier_ops.so")
    (folder / "_engine.py").write_text(STAND_IN)
    built = {"version": VERSION, "torch": torch}
    (folder / "built.json").write_text(json.dumps(built))
    return folder, built


def python(folder, *arguments):
    environment = {name: value for name, value in os.environ.items() if name != "ESPALIER_OPS"}
    return subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True,
                          env=environment | {"PYTHONPATH": str(folder)})  # fmt: skip


OPS = "from espalier import ops; print(ops._library())"
ENGINE = "import espalier.native_engine"
BOTH = """
for name in ("ops", "native_engine"):
    try:
        __import__(f"espalier.{name}")
    except ImportError as error:
        print(error)
"""


def test_what_fits_is_taken(package, tmp_path):
    folder, _ = package
    done = python(tmp_path, "-m", "espalier", "train", "--steps", "1")
    assert done.returncode == 0 and done.stdout == f"{folder}/_engine.py train [('steps', b'1')]\n", done
    done = python(tmp_path, "-c", OPS)
    assert done.returncode == 0 and done.stdout.strip() == str(folder / "libespalier_ops.so"), done.stderr


@pytest.mark.parametrize(("changed", "expected"), [
    ({"version": "0.1.0"}, f"expected version {VERSION}, that of espalier-train, received 0.1.0"),
    ({"torch": "2.8.1"}, "expected PyTorch 2.8, against which"),
    (None, f"expected version {VERSION}, that of espalier-train, received none"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_by_name_before_it_is_loaded(package, tmp_path, changed, expected):
    folder, built = package
    (folder / "libespalier_ops.so").unlink()
    (folder / "libespalier_ops.so").write_text("loading this fails otherwise")
    (folder / "_engine.py").write_text("raise AssertionError('loaded')")
    if changed:
        (folder / "built.json").write_text(json.dumps(built | changed))
    else:
        (folder / "built.json").unlink()
    said = python(tmp_path, "-c", BOTH)
    assert said.stdout.count(f"espalier-torch: {expected}") == 2, said
    # The command still does what needs no LibTorch, and knows why it does not do the rest.
    done = python(tmp_path, "-m", "espalier", "train")
    assert done.returncode == 1 and done.stderr.startswith(f"espalier: error: train needs LibTorch: espalier-torch: {expected}"), done
    assert python(tmp_path, "-m", "espalier", "synth", "-o", "rows.jsonl").returncode == 0


def test_without_espalier_torch_the_package_says_how_to_get_it(package, tmp_path):
    folder, _ = package
    folder.rename(tmp_path / "elsewhere")
    done = python(tmp_path, "-c", ENGINE)
    assert done.returncode != 0 and "pip install 'espalier-train[torch]'" in done.stderr, done
    assert python(tmp_path, "-m", "espalier", "synth", "-o", "rows.jsonl").returncode == 0
