# SPDX-License-Identifier: Apache-2.0
"""scripts/versions.py: tests that did not run are none that passed."""

import runpy

import pytest

from conftest import REPOSITORY

FILES = {
    "passes": "def test_it(): pass\n",
    "fails": "def test_it(): assert False\n",
    "imports": "import pytest\npytest.importorskip('no_package_of_this_name')\ndef test_it(): pass\n",
    "skips": "import pytest\n@pytest.mark.skip(reason='older')\ndef test_it(): pass\n",
    "skips_all": "import pytest\npytest.skip('older', allow_module_level=True)\n",
}


@pytest.mark.parametrize("files, fault", [
    (["passes"], ""), (["passes", "skips"], ""), (["passes", "skips_all"], ""),
    (["passes", "fails"], "fails.py failed"),
    (["passes", "imports"], "imports.py: expected its imports, received SKIPPED [1] imports.py:2: could not import"),
    (["skips"], "expected tests that pass, received none"), (["skips_all"], "expected tests that pass, received none"),
])  # fmt: skip
def test_what_counts_as_passed(files, fault, tmp_path, monkeypatch, capsys):
    run = runpy.run_path(str(REPOSITORY / "scripts/versions.py"))["run"]
    monkeypatch.setitem(run.__globals__, "overlay", lambda _requirement: tmp_path)
    monkeypatch.setitem(run.__globals__, "ROOT", tmp_path)
    for name in files:
        (tmp_path / f"{name}.py").write_text(FILES[name])
    assert run("package==1", [f"{name}.py" for name in files]) == (not fault)
    said = capsys.readouterr().out
    assert f"FAILED with package==1: {fault}" in said.replace(" ".join(f"{name}.py" for name in files) + ": ", "") if fault else "FAILED with" not in said
