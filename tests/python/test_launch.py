# SPDX-License-Identifier: Apache-2.0
"""`espalier launch`: programs of other trainers, whose models train on trees in every process that they start."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from conftest import REPOSITORY
from espalier import hf, launch
from espalier.launch import hooks, notes
from espalier.launch.command import environment_of, is_installed_package
from espalier.launch.arguments import parse_launch
from hf_models import make_model

LINE = "espalier: Trainer trains Qwen3Model on trees of tokens"
TRAINING = """
import json, os, sys
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Trainer, TrainingArguments

torch.set_num_threads(1)
CONFIG = Qwen3Config(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, head_dim=8, attention_dropout=float(os.environ.get("DROPOUT", "0")))
ROWS = [[*range(20), 40 + answer, 41, 50 + answer] for answer in range(8)]


def make():
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(CONFIG).double()


def collate(rows):
    ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids}


def trainer(output, **more):
    settings = TrainingArguments(output_dir=output, per_device_train_batch_size=4, max_steps=3, logging_steps=1, report_to=[],
                                 use_cpu=True, save_strategy="no", disable_tqdm=True, lr_scheduler_type="constant")
    more = more or {"model": make()}
    return Trainer(args=settings, train_dataset=[{"input_ids": row} for row in ROWS], data_collator=collate, **more)


def train(output, **more):
    made = trainer(output, **more)
    made.train()
    lines = [{name: line[name] for name in line if name in ("loss", "grad_norm", "espalier/ratio")}
             for line in made.state.log_history if "loss" in line]
    with open(f"{output}.{os.environ.get('RANK', '0')}.json", "w") as file:
        json.dump(lines, file)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        sys.stderr.flush()
        os._exit(0)  # Gloo may abort or hang where a group ends
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "training.py").write_text(TRAINING)
    return tmp_path


def start(folder, *words, **variables):
    python = os.pathsep.join([str(folder), str(REPOSITORY / "python")])
    environment = {**os.environ, "PYTHONPATH": python, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables}
    for name in ("RANK", "WORLD_SIZE", notes.VARIABLE):
        environment.pop(name, None)
    return subprocess.Popen([sys.executable, *map(str, words)], cwd=folder, env=environment, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)  # fmt: skip


def run(folder, *words, status=0, **variables):
    """What a Python of the folder prints to stderr."""
    process = start(folder, *words, **variables)
    _, said = process.communicate(timeout=300)
    assert process.returncode == status, said
    return said


def launched(folder, *words, **more):
    return run(folder, "-m", "espalier", "launch", *words, **more)


def program(folder, text, name="program.py"):
    (folder / name).write_text(textwrap.dedent(text))
    return folder / name


def ours(said):
    return [line for line in said.splitlines() if line.startswith("espalier")]


def lines_of(folder, name):
    return json.loads((folder / name).read_text())


def same(mine, theirs):
    assert len(mine) == len(theirs) == 3
    for line, other in zip(mine, theirs):
        for name in ("loss", "grad_norm"):
            # Transformers logs losses with few digits, and its RMSNorm rounds to float32.
            assert line[name] == pytest.approx(other[name], rel=1e-5), name
        assert line["espalier/ratio"] > 2 and "espalier/ratio" not in other


def test_a_program_and_processes_that_it_starts(folder):
    """One program; the child of a child; a process that is spawned; and the program that nothing was done to."""
    path = program(folder, """
        import multiprocessing, subprocess, sys
        from training import train

        if __name__ == "__main__":
            train("alone")
            if "--more" in sys.argv:
                subprocess.run([sys.executable, "-c", "import training; training.train('child')"], check=True)
                process = multiprocessing.get_context("spawn").Process(target=train, args=("spawned",))
                process.start()
                process.join()
                sys.exit(process.exitcode)
        """)  # fmt: skip
    assert ours(run(folder, path)) == []
    theirs = lines_of(folder, "alone.0.json")
    said = launched(folder, "--", sys.executable, path, "--more")
    assert ours(said) == 3 * [LINE, "espalier: 3 batches, 276 tokens, 96 encoded: 2.88x"]
    for name in ("alone", "child", "spawned"):
        same(lines_of(folder, f"{name}.0.json"), theirs)


def test_workers_of_torchrun(folder):
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
             "--rdzv-endpoint", "localhost:0", program(folder, "import training\ntraining.train('ranks')\n")]  # fmt: skip
    run(folder, *words)
    theirs = [lines_of(folder, f"ranks.{rank}.json") for rank in range(2)]
    said = launched(folder, "--", sys.executable, *words)
    assert [line for line in ours(said) if "trains" in line] == [LINE], said
    same(lines_of(folder, "ranks.0.json"), theirs[0])


def test_a_model_that_the_trainer_makes(folder):
    path = program(folder, "import training\ntraining.train('made', model_init=training.make)\n")
    run(folder, path)
    theirs = lines_of(folder, "made.0.json")
    assert ours(launched(folder, "--check", "--", sys.executable, path))[0] == LINE
    same(lines_of(folder, "made.0.json"), theirs)


def test_a_program_that_patches_itself(folder):
    path = program(folder, """
        import espalier, training

        training.train("itself", model=espalier.hf.patch(training.make(), backend="sdpa"))
        """)  # fmt: skip
    assert ours(launched(folder, sys.executable, path)) == [
        "espalier: Trainer trains a Qwen3Model that the program has patched itself"]  # fmt: skip


def test_a_refusal_ends_the_run(folder):
    """Even of a program that survives errors."""
    path = program(folder, """
        import training

        try:
            training.train("refused")
        except Exception:
            pass
        """)  # fmt: skip
    said = launched(folder, "--", sys.executable, path, status=1, DROPOUT="0.1")
    assert len(ours(said)) == 1 and ours(said)[0].startswith("espalier: dropout: expected none in training"), said
    assert "Traceback" not in said and not (folder / "refused.0.json").exists()


def test_a_refusal_while_training_ends_the_run(folder):
    path = program(folder, """
        import training

        made = training.trainer("refused")
        made.data_collator = lambda rows: (batch := training.collate(rows)) | {"token_type_ids": batch["input_ids"] * 0}
        try:
            made.train()
        except Exception:
            pass
        """)  # fmt: skip
    said = launched(folder, "--", sys.executable, path, status=1)
    lines = ours(said)
    assert len(lines) == 2 and lines[0] == LINE and lines[1].startswith("espalier: token_type_ids: expected none"), said
    assert "Traceback" not in said


LOOP = """
import torch, transformers, training

training.make().save_pretrained("model")
model, info = transformers.AutoModelForCausalLM.from_pretrained("model", dtype=torch.float64, output_loading_info=True)
transformers.AutoModel.from_pretrained("model")                     # has no head, and stays as it is
batch = torch.tensor(training.ROWS)
loss = model(input_ids=batch, labels=batch).loss
loss.backward()
gradient = torch.stack([each.grad.norm() for each in model.parameters()]).norm()
with open("loop.json", "w") as file:
    file.write(repr([float(loss), float(gradient)]))
"""


def test_a_loop_without_a_trainer(folder):
    path = program(folder, LOOP)
    run(folder, path)
    theirs = lines_of(folder, "loop.json")
    said = launched(folder, "--patch-on", "load", "--", sys.executable, path)
    assert ours(said) == ["espalier: Qwen3ForCausalLM runs on trees of tokens", "espalier: 1 batch, 184 tokens, 44 encoded: 4.18x"]
    assert lines_of(folder, "loop.json") == pytest.approx(theirs, rel=1e-6)


WARNING = "espalier launch: warning: nothing was patched: "
LOAD = "--patch-on load patches models of a loop without a Trainer"


@pytest.mark.parametrize("options, command, expected", [
    ([], ["true"], "no Python of the command has loaded Espalier's hook"),
    ([], [sys.executable, "-I", "-c", ""], "no Python of the command has loaded Espalier's hook"),
    ([], [sys.executable, "-c", ""], "no process of the command has imported Transformers' Trainer; " + LOAD),
    ([], [sys.executable, "-c", "from transformers import Trainer"], "Transformers' Trainer was imported, but train() of no Trainer"),
    (["--patch-on", "load"], [sys.executable, "-c", ""], "no process of the command has imported models of Transformers"),
    (["--patch-on", "load"], [sys.executable, "-c", "import transformers.modeling_utils"], "from_pretrained has returned no"),
])  # fmt: skip
def test_a_warning_where_nothing_was_patched(folder, options, command, expected):
    (line,) = ours(launched(folder, *options, "--", *command))
    assert line.startswith(WARNING + expected)


def test_a_python_without_the_package(folder):
    """The hook is loaded by its path, in whatever Python it is."""
    site = REPOSITORY / "python/espalier/launch/site"
    settings = json.dumps(notes.DEFAULTS | {"folder": str(folder)})
    done = subprocess.run([sys.executable, "-c", "print('runs')"], cwd=folder, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(site), notes.VARIABLE: settings})  # fmt: skip
    assert (done.stdout, done.stderr) == ("runs\n", "")
    assert notes.read_note(folder, "fault").startswith(f"{sys.executable}, which the command runs, has no package espalier: ")


def test_a_sitecustomize_that_was_there(folder):
    (folder / "sitecustomize.py").write_text("import os\nWHERE = __file__\nos.environ['THERE'] = 'yes'\n")
    code = "import os, sitecustomize as s; print(os.environ['THERE'], s.WHERE == s.__file__, flush=True); os._exit(3)"
    process = start(folder, "-m", "espalier", "launch", "--", sys.executable, "-c", code)
    printed, said = process.communicate()
    assert (printed, process.returncode) == ("yes True\n", 3), said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_reach_the_command(folder, number):
    code = ("import signal, sys, time; signal.signal(int(sys.argv[1]), lambda *_: sys.exit(7)); print('ready', flush=True); "
            "time.sleep(600)")  # fmt: skip
    process = start(folder, "-m", "espalier", "launch", "--", sys.executable, "-c", code, str(int(number)))
    process.stdout.readline()
    process.send_signal(number)
    assert process.wait(60) == 7


def test_exit_codes(folder):
    launched(folder, sys.executable, "-c", "raise SystemExit(5)", status=5)
    launched(folder, sys.executable, "-c", "import os; os.kill(os.getpid(), 9)", status=137)
    said = launched(folder, "--", "./nothing-of-that-name", status=1)
    assert ours(said) == ["espalier: error: cannot start ./nothing-of-that-name: No such file or directory"]


@pytest.mark.parametrize("words, expected", [
    ([], "expected a command after --, received none"),
    (["--check", "--"], "expected a command after --, received none"),
    (["--", "--check", "python"], "expected a command after --, received --check"),
    (["--chek", "--", "python"], "unknown flag --chek of `espalier launch`; did you mean --check?"),
    (["--patch-on", "step", "--", "python"], "invalid choice: 'step'"),
])  # fmt: skip
def test_wrong_arguments(words, expected, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_launch(words)
    assert ended.value.code == 2 and expected in capsys.readouterr().err


def test_arguments_of_the_command_stay_its_own(monkeypatch):
    given = parse_launch(["--backend", "sdpa", "torchrun", "--check", "x.py", "--", "--help"])
    assert given.command == ["torchrun", "--check", "x.py", "--", "--help"] and given.backend == "sdpa" and not given.check
    assert parse_launch(["--", "a", "--no-keep-groups"]).keep_groups and not parse_launch(["--no-keep-groups", "a"]).keep_groups
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", "/mine", os.path.dirname(os.path.dirname(torch.__file__))]))
    found = environment_of(given, "/notes")
    site = os.path.join(os.path.dirname(launch.__file__), "site")
    assert found["PYTHONPATH"] == f"{site}:/mine" and is_installed_package(os.path.dirname(os.path.dirname(torch.__file__)))
    assert json.loads(found[notes.VARIABLE]) == notes.DEFAULTS | {"backend": "sdpa", "folder": "/notes"}


def test_settings_reach_the_patch(tmp_path, monkeypatch):
    """Of each flag, and of the trainers of TRL."""
    from transformers import Trainer, TrainingArguments

    from espalier.launch import training

    given, patch = [], training.trl.patch
    monkeypatch.setattr(training.trl, "patch", lambda trainer, **settings: given.append(settings) or patch(trainer, **settings))
    trainer = Trainer(make_model("qwen3"), TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True))
    settings = notes.settings_of(backend="sdpa", check=True, skip_logits=True, keep_groups=False)
    for _ in range(2):
        training.begin(trainer, settings)
    assert given == [{"backend": "sdpa", "check": True, "skip_logits": True, "keep_groups": False}]
    batch = {"input_ids": torch.tensor([[1, 2, 3], [1, 2, 4]])}
    assert trainer.model(**batch, labels=batch["input_ids"]).logits is None and hf.sharing(trainer.model).batches > 1


def test_a_module_is_watched_however_it_is_loaded(tmp_path, monkeypatch):
    (tmp_path / "watched_module.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    seen = []
    hooks.when_imported("watched_module", lambda module: seen.append(module.VALUE))
    hooks.when_imported("watched_module", lambda module: seen.append(-module.VALUE))
    import importlib.util

    assert importlib.util.find_spec("watched_module") and seen == []  # looked for, not loaded
    import watched_module

    assert seen == [1, -1] and watched_module.__loader__.get_source("watched_module") == "VALUE = 1\n"
    hooks.when_imported("watched_module", lambda module: seen.append("at once"))
    assert seen == [1, -1, "at once"]
    (tmp_path / "watched_module.py").write_text("VALUE = 22\n")
    time.sleep(0)
    importlib.reload(watched_module)
    assert seen == [1, -1, "at once", 22, -22]


def test_processes_that_do_not_train_load_little(folder):
    code = "import sys; print([name for name in ('torch', 'numpy', 'inspect', 'transformers') if name in sys.modules])"
    process = start(folder, "-m", "espalier", "launch", sys.executable, "-c", code)
    printed, said = process.communicate()
    assert printed == "[]\n", said


def test_the_program_has_the_command(espalier):
    text = espalier("launch", "--help").stdout
    assert text.startswith("usage: espalier launch [flags] -- COMMAND ...") and re.search(r"^  --patch-on", text, re.MULTILINE)
    assert espalier("launch", "true").stderr.startswith(WARNING)


def test_backends_are_those_of_patch():
    """The command line is parsed without PyTorch, so it has its own list."""
    from espalier.hf.attention import BACKENDS
    from espalier.launch.arguments import launch_parser

    (backend,) = [action for action in launch_parser()._actions if action.dest == "backend"]
    assert tuple(backend.choices) == tuple(BACKENDS)
