# SPDX-License-Identifier: Apache-2.0
"""Proofs and float64 where flash-linear-attention, causal-conv1d and mamba-ssm are installed, which Transformers' layers then
call: packages of these names whose functions fail, as theirs do without a GPU."""

import subprocess
import sys
import textwrap

from conftest import REPOSITORY

FAILING = "def __getattr__(name):\n    def fail(*args, **kwargs):\n        raise RuntimeError(f'{name} was called')\n    return fail\n"
MODULES = ["fla", "fla.modules", "fla.ops", "fla.ops.gated_delta_rule", "fla.ops.kda", "causal_conv1d", "mamba_ssm", "mamba_ssm.ops",
           "mamba_ssm.ops.triton", "mamba_ssm.ops.triton.ssd_combined", "mamba_ssm.ops.triton.selective_state_update"]  # fmt: skip
PROGRAM = """
    import importlib.metadata, importlib.util, sys
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: {"causal_conv1d": "1.6.0", "causal-conv1d": "1.6.0", "mamba_ssm": "2.3.0", "mamba-ssm": "2.3.0",
        "flash-linear-attention": "0.6.0", "fla": "0.6.0"}.get(name) or version(name)
    import torch
    import espalier.kernels.verdicts as kernels
    kernels.version_of = lambda name: ""
    from espalier.hf import patch, proof
    from espalier.hf.plain_layers import by_torch
    from hf_models import alone, branching_rows, make_model, padded, sums_of, worst_error
    from espalier.hf.float64 import InFloat64

    proof.is_known = lambda backbone: False
    for kind in ("qwen3_5", "granitemoehybrid-dense"):
        with by_torch():
            model = make_model(kind)
        expected = alone(model, branching_rows())
        try:
            model(torch.tensor([[1, 2, 3]]))
        except RuntimeError as error:
            print(error)
        patch(model)
        with InFloat64():
            print(worst_error(sums_of(model, [padded(branching_rows())]), expected) < 1e-12)
"""


def test_models_are_proven_where_libraries_know_no_float64(tmp_path):
    for name in MODULES:
        folder = tmp_path / "packages" / name.replace(".", "/")
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(FAILING)
    path = [tmp_path / "packages", REPOSITORY / "python", REPOSITORY / "tests/python"]
    code = f"import sys; sys.path[:0] = {list(map(str, path))}\n" + textwrap.dedent(PROGRAM)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 4 and said[0].endswith("was called") and said[2].endswith("was called") and said[1] == said[3] == "True", said
