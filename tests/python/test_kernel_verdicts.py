# SPDX-License-Identifier: Apache-2.0
"""Verdicts on kernels: the processes that find them, the file that keeps them, and the compiled trainer, which reads them."""

import json
import os
import signal
import subprocess
import sys
import types
import warnings

import pytest
import torch

from espalier.commands import device
from espalier.kernels import checks, libraries, report, verdicts
from espalier.kernels.verdicts import Finding
from conftest import REPOSITORY


def writing(finding):
    """The code of a process that finds this."""
    return f"open(file, 'w').write({json.dumps(finding._asdict())!r})"


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU of which only the name exists, and processes of Python that say by `code` what a check of a family does."""
    properties = types.SimpleNamespace(name="a GPU", major=9, minor=0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _index: properties.name)
    for variable in ("ESPALIER_ATTENTION", "ESPALIER_HEAD"):
        monkeypatch.delenv(variable, raising=False)
    verdicts.forget()
    started, ended = [], verdicts._ended
    gpu = types.SimpleNamespace(code={}, started=started, properties=properties)

    def run(command, limit):
        started.append(command[-3])
        code = gpu.code.get(command[-3], writing(Finding(7)))
        return ended([sys.executable, "-c", f"import sys; family, device, file = sys.argv[1:]; {code}", *command[-3:]], limit)

    monkeypatch.setattr(verdicts, "_ended", run)
    yield gpu
    verdicts.forget()


def found(families, **options):
    return verdicts.verdicts_on(families, 0, **options)


def test_processes_that_are_wrong_or_crash(gpu):
    gpu.code = {"ampere": writing(Finding(3, 'out: "off"')), "masked": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
                "head": "print('said', file=sys.stderr)", "products": "open(file, 'w').write('{')",
                "gated_delta_rule bfloat16": "print('first\\nlast', file=sys.stderr); sys.exit(3)"}  # fmt: skip
    faults = {family: (finding.fault, finding.is_lasting) for family, finding in found([*gpu.code, "distribution"]).items()}
    assert faults == {
        "ampere": ('out: "off"', True), "masked": ("its check was killed by signal 11 (Segmentation fault): it said nothing", True),
        "head": ("its check ended without a finding", True), "products": ("its check ended without a finding", True),
        "gated_delta_rule bfloat16": ("its check ended with status 3: last", False), "distribution": ("", True)}  # fmt: skip


def test_a_process_that_hangs(gpu, monkeypatch):
    assert verdicts.limit_of("ampere") == 600 and verdicts.limit_of("ssm_scan bfloat16") == 1200
    monkeypatch.setattr(verdicts, "LIMIT_SECONDS", 0.5)
    gpu.code = {"head": "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"}
    assert found(["head"])["head"] == Finding(1, "its check did not end within 0.5 s")


def test_verdicts_are_kept_in_one_file(gpu, monkeypatch, capsys):
    """Until what they are about changes, or the file is damaged; those that do not last, for this process."""
    gpu.code = {"head": "sys.exit(75)"}
    families = ["ampere", "head", "ssm_scan bfloat16"]

    def started(**options):
        gpu.started.clear()
        findings = found(families, **options)
        assert findings["ampere"] == Finding(7) and not findings["head"].is_lasting
        return gpu.started

    assert started() == families and started() == []
    (file,) = verdicts.folder().glob("*.json")
    assert capsys.readouterr().err == f"espalier: checking the kernels on a GPU (once for this build; kept in {file})\n"
    verdicts.forget()
    assert started() == ["head"]
    assert started(again=True) == families
    whole = json.loads(file.read_text())
    assert whole["key"] == {"device": "a GPU", "compute_capability": 90, "driver": verdicts._driver(), "torch": torch.__version__.split("+")[0],
                            "cuda": torch.version.cuda or "", "build": torch.ops.espalier_judge.build()}  # fmt: skip
    assert set(whole["verdicts"]) == set(families) and whole["verdicts"]["head"]["is_lasting"] is False
    for text in ("", "[]", file.read_text()[:40], json.dumps(whole | {"verdicts": 1}), json.dumps(whole | {"verdicts": {"ampere": [1]}}),
                 json.dumps(whole | {"key": 1})):  # fmt: skip
        file.write_text(text)
        verdicts.forget()
        assert started() == families
    monkeypatch.setattr(verdicts, "_sources", lambda: "other")
    verdicts.forget()
    assert started() == families
    gpu.properties.name = "another GPU"
    verdicts.forget()
    assert started() == families and len(list(verdicts.folder().glob("*.json"))) == 2


def test_a_folder_that_cannot_be_written(gpu, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="espalier: the verdicts on kernels cannot be kept in "):
        assert found(["head"])["head"].is_right


def test_without_a_python_nothing_is_checked(gpu, monkeypatch):
    monkeypatch.setattr(sys, "executable", "")
    finding = found(["head"])["head"]
    assert not gpu.started and not finding.is_lasting and finding.fault == "sys.executable names no Python that could check it"


def test_what_is_wrong_is_told_once(gpu, monkeypatch):
    gpu.code = dict.fromkeys(("head", "products"), writing(Finding(3, "off")))
    with pytest.warns(UserWarning, match="^espalier: kernels of `head` are not used on a GPU: off$"):
        verdicts.verdict_on("head", 0)
    with pytest.warns(UserWarning, match="^espalier: `products` cannot be trusted on a GPU, and nothing stands in for it: off$"):
        verdicts.verdict_on("products", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verdicts.verdict_on("head", 0)
        verdicts.forget()
        monkeypatch.setenv("ESPALIER_HEAD", "kernels")  # the verdict decides nothing
        verdicts.verdict_on("head", 0)


def test_what_the_command_device_says(gpu, monkeypatch):
    monkeypatch.setattr(libraries.attention, "installed", lambda: "")
    gpu.code = {"ampere": writing(Finding()), "head": "sys.exit(1)", "products": "import os; os.abort()"}
    said = report.verdicts_of(0)
    assert said == {
        "attention": {"ampere": "not for this device", "masked": "passed"},
        "operators": {"head": "not checked: its check ended with status 1: it said nothing", "distribution": "passed",
                      "products": "FAILED: its check was killed by signal 6 (Aborted): it said nothing"},
        "taken": {"attention": "masked"}}  # fmt: skip
    gpu.code = {}
    assert report.verdicts_of(0, again=True)["taken"] == {"attention": "ampere"}
    monkeypatch.setattr(libraries.attention, "installed", lambda: "a library")
    assert report.verdicts_of(0)["taken"] == {"attention": "library"}
    monkeypatch.setenv("ESPALIER_ATTENTION", "masked")
    assert report.verdicts_of(0)["taken"] == {"attention": "masked"}


def test_the_command_device(gpu, monkeypatch, capsys):
    """It asks the judge for every GPU that can be used."""
    monkeypatch.setattr(libraries.attention, "installed", lambda: "")
    result = lambda fault: {"cpu": {}, "auto": "cuda:0", "cuda": {"fault": fault, "devices": [{"name": "a GPU"}, {"name": "a GPU"}]}}

    def said(fault, *flags):
        gpu.started.clear()
        monkeypatch.setattr(device, "run_native", lambda name, texts, process: (0, result(fault)) if (name, texts) == ("device", []) else 1)
        assert device.work(device.parser().parse(["--json", *flags]), None) == 0
        return json.loads(capsys.readouterr().out)["cuda"]["devices"]

    passed = dict.fromkeys(("head", "distribution", "products"), "passed")
    verdict = {"attention": {"ampere": "passed", "masked": "passed"}, "operators": passed, "taken": {"attention": "ampere"}}
    assert said("no driver") == [{"name": "a GPU"}] * 2 and gpu.started == []
    assert said(None) == [{"name": "a GPU", **verdict}] * 2 and gpu.started == list(verdicts.OWN[1:])
    assert said(None, "--requalify") == [{"name": "a GPU", **verdict}] * 2 and gpu.started == list(verdicts.OWN[1:]) * 2
    with pytest.raises(SystemExit):
        device.parser().parse(["--check", "head", "--device", "tpu"])
    assert "--device: expected cpu, cuda or cuda:N, received `tpu`" in capsys.readouterr().err


def test_the_process_of_a_check(tmp_path, monkeypatch):
    """A real one, with the CPU's own kernels and the operators of this process; what the check raises is an exit status."""
    monkeypatch.setenv("ESPALIER_OPS", "/nowhere")
    assert verdicts._checked("distribution", "cpu").checks > 80
    wrong = verdicts._checked("ampere", "cpu")
    assert not wrong.is_lasting and "status 1: espalier.errors.InputError: expected a family of kernels of cpu" in wrong.fault
    alarms = []
    monkeypatch.setattr(signal, "alarm", alarms.append)
    monkeypatch.setattr(checks, "check", lambda family, device: Finding(3, family + device))
    checks.run_child("ssm_scan bfloat16", "cpu", str(tmp_path / "found"))
    assert verdicts._finding_of(json.loads((tmp_path / "found").read_text())) == Finding(3, "ssm_scan bfloat16cpu") and alarms == [1200]


# A driver that knows one device by name, of which nothing can be used.
DRIVER = """
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int* version) { *version = 99000; return 0; }
int cuDeviceGetCount(int* count) { *count = 1; return 0; }
int cuDeviceGet(int* device, int index) { *device = index; return 0; }
int cuDeviceGetName(char* name, int size, int device) { name[0] = 'G'; name[1] = 0; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) { *value = attribute == 75 ? 9 : 0; return 0; }
"""

ENGINE = """
import sys, espalier.ops, espalier.native
JUDGE
for _ in range(2):
    try:
        native.Engine(sys.argv[1], [("device", "cuda")], "", False)
    except Exception as error:
        assert "cuda" in str(error), error
"""


WITHOUT_JUDGE = """
import espalier._engine as native
native.listen(lambda text: print(text, file=sys.stderr), lambda *_: None, lambda: None)
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    if torch.version.cuda is None:
        pytest.skip("LibTorch without CUDA asks no driver")
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", folder / "libcuda.so.1", folder / "driver.c"], check=True)
    return folder


def said_by_engines(driver, folder, cache, judge=WITHOUT_JUDGE):
    """What two in one process say beside PyTorch, before they find that the device cannot be opened."""
    code = ENGINE.replace("JUDGE", judge)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(driver), "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(REPOSITORY / "python")}
    done = subprocess.run([sys.executable, "-c", code, folder], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return "".join(line for line in done.stderr.splitlines(keepends=True) if not line.startswith("[W"))


def test_an_engine_without_a_verdict_says_so_once(driver, tmp_path):
    assert said_by_engines(driver, tmp_path, tmp_path / "cache") == (
        "espalier: no verdict on `ampere`, `masked`, `head`, `distribution`, `products` is kept for G, and plain forms are used; "
        "`espalier device` makes one\n")  # fmt: skip


def test_an_engine_reads_the_verdicts_that_are_kept(driver, tmp_path):
    key = {"device": "G", "compute_capability": 90, "driver": verdicts._driver(), "torch": torch.__version__.partition("+")[0],
           "cuda": torch.version.cuda, "build": torch.ops.espalier_judge.build()}  # fmt: skip
    findings = {family: Finding(5, "off" if family == "head" else "") for family in verdicts.OWN}
    path = tmp_path / "cache/espalier/kernels/any.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"key": key, "verdicts": {family: finding._asdict() for family, finding in findings.items()}}))
    told = ("espalier: warning: kernels of `head` are not used on G, operators of LibTorch are: off (shown by `espalier device --check "
            "head --device cuda:0`)\n")  # fmt: skip
    assert said_by_engines(driver, tmp_path, tmp_path / "cache") == told
    path.write_text(path.read_text().replace(key["build"], "0" * 40))
    assert "no verdict on `ampere`" in said_by_engines(driver, tmp_path, tmp_path / "cache")


def test_an_engine_of_python_asks_the_judge(driver, tmp_path):
    """Once for a device. What it raises ends the call."""
    judge = """
from espalier.kernels.verdicts import Finding
asked = []
def verdicts_on(families, index):
    print("asked", index, file=sys.stderr)
    return {family: Finding(5, "off" if family == "masked" else "", None, family != "products") for family in families}
from espalier.kernels import libraries
libraries.verdicts_on = verdicts_on
from espalier.native_engine import native
"""
    said = said_by_engines(driver, tmp_path, tmp_path / "cache", judge).splitlines()
    assert said[0] == "asked 0" and len(said) == 2
    assert said[1].startswith("espalier: warning: attention `masked` is not used on G: off (shown by `espalier device --check masked")
    assert "`products` could not be checked on G, and plain forms are used" in said[1]
    failing = judge.replace('print("asked"', 'raise KeyboardInterrupt("cuda"); print("asked"')
    with pytest.raises(AssertionError, match="KeyboardInterrupt: cuda"):
        said_by_engines(driver, tmp_path, tmp_path / "cache", failing)
