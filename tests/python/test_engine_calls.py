# SPDX-License-Identifier: Apache-2.0
"""espalier.Engine as an object of Python: interrupts, threads, bad input, imports, examples, stubs."""

import functools
import os
import shutil
import signal
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
import torch

import espalier as package
from conftest import REPOSITORY
from engines import engine_of, files_of, init_model
from small_models import random_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory, espalier):
    return init_model(espalier, tmp_path_factory.mktemp("qwen3"))


def losses(engine, rows, count=2):
    result = []
    for _ in range(count):
        result.append(engine.forward_backward(rows)["loss"])
        result.append(engine.optim_step()["grad_norm"])
    return result


def test_progress_is_told_of_every_micro_batch(folder):
    rows = random_rows(41, "sft")
    engine = engine_of(folder, strategy="sequence-packing", token_budget=18)
    for work in (engine.forward_backward, engine.logprobs):
        told = []
        work(rows, progress=lambda done, total: told.append((done, total)))
        total = told[-1][1]
        assert total > 2 and [done for done, _ in told] == list(range(1, total + 1))
        assert {each for _, each in told} == {total}


@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError])
def test_an_exception_of_progress_stops_after_the_micro_batch(folder, kind):
    rows = random_rows(42, "sft")
    engine = engine_of(folder, strategy="sequence-packing", token_budget=18)
    expected = losses(engine_of(folder, strategy="sequence-packing", token_budget=18), rows)
    told = []

    def stop(done, total):
        told.append(done)
        if done == 2:
            raise kind

    for work in (engine.forward_backward, engine.logprobs):
        told.clear()
        with pytest.raises(kind):
            work(rows, progress=stop)
        assert told == [1, 2]
        assert engine.gradients() == {}
    with pytest.raises(package.InputError, match="optim_step: expected gradients"):
        engine.optim_step()
    assert losses(engine, rows) == expected


class Waiting(threading.Thread):
    """Calls a function once the main thread has released the GIL, which it holds without a break from `go` on."""

    def __init__(self, function):
        super().__init__(daemon=True)
        self._lock = threading.Lock()
        self._lock.acquire()
        self._function = function
        self.has_run = False

    def run(self):
        with self._lock:
            self.has_run = True
            self._function()

    def go(self):
        self._lock.release()


@pytest.fixture
def unbroken():
    """No thread is made to give the GIL away while it runs code of Python."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("call", ["forward_backward", "logprobs", "sample", "optim_step", "save"])
def test_other_threads_run_meanwhile(folder, tmp_path, unbroken, call):
    rows = package.trajectories(random_rows(43, "sft"))
    engine = engine_of(folder, strategy="sequence-packing", token_budget=18)
    calls = {"forward_backward": lambda _: engine.forward_backward(rows), "logprobs": lambda _: engine.logprobs(rows),
             "sample": lambda _: engine.sample(rows, max_new_tokens=9),
             "optim_step": lambda _: engine.optim_step(), "save": lambda k: engine.save(tmp_path / f"saved{k}")}  # fmt: skip
    for k in range(200):  # a busy machine may not run the thread in time
        if call == "optim_step":
            engine.forward_backward(rows)
        thread = Waiting(lambda: None)
        thread.start()
        thread.go()
        assert not thread.has_run
        calls[call](k)
        has_run = thread.has_run
        thread.join()
        if has_run:
            return
    raise AssertionError("the GIL was never released")


def test_a_thread_does_not_run_while_the_main_one_computes_in_python(unbroken):
    """Negative control of the test before: without a release nothing else runs."""
    thread = Waiting(lambda: None)
    thread.start()
    thread.go()
    assert sum(k * k for k in range(300_000)) > 0 and not thread.has_run
    thread.join()


@pytest.mark.parametrize("call", ["forward_backward", "sample"])
def test_ctrl_c_stops_the_engine_while_it_works(folder, unbroken, call):
    """The signal comes while the main thread is inside of the engine, which has released the GIL, and no function of
    Python is called on the way."""
    rows = package.trajectories(random_rows(44, "sft") * 100)
    engine = engine_of(folder, strategy="sequence-packing", token_budget=18)
    expected = losses(engine_of(folder), random_rows(44, "sft"))
    thread = Waiting(functools.partial(os.kill, os.getpid(), signal.SIGINT))
    thread.start()
    with pytest.raises(KeyboardInterrupt) as caught:
        thread.go()
        engine.forward_backward(rows) if call == "forward_backward" else engine.sample(rows, samples=100)
    assert caught.traceback[-1].path.name == "engine.py"
    thread.join()
    assert engine.gradients() == {}
    engine = engine_of(folder)
    assert losses(engine, random_rows(44, "sft")) == expected


def test_one_call_at_a_time(folder):
    rows = random_rows(45, "sft")
    engine = engine_of(folder)
    with pytest.raises(package.InputError, match="expected one call at a time, received one during another"):
        engine.forward_backward(rows, progress=lambda done, total: engine.logprobs(rows))
    assert engine.gradients() == {}
    # From another thread, likewise; the call that was first goes on.
    faults = []

    def other():
        try:
            engine.forward_backward(rows)
        except package.InputError as error:
            faults.append(str(error))

    def progress(done, total):
        if done == 1:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

    engine.forward_backward(rows, progress=progress)
    assert len(faults) == 1 and "one call at a time" in faults[0]
    assert engine.optim_step()["step"] == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_two_engines_in_two_threads_have_the_bits_of_each_alone(folder, dtype):
    rows = [random_rows(46, "sft"), random_rows(47, "sft")]
    engine = lambda: engine_of(folder, dtype=dtype, token_budget=9)
    alone = [losses(engine(), of_engine) for of_engine in rows]
    together = threading.Barrier(2)
    found = [None, None]

    def train(which):
        try:
            train_beside_the_other(which)
        except BaseException:
            together.abort()
            raise

    def train_beside_the_other(which):
        own = engine()
        together.wait(timeout=60)
        # Each micro-batch of one waits for one of the other, so that both steps are under way at once.
        own.forward_backward(rows[which], progress=lambda done, total: done < 3 and together.wait(timeout=60))
        own.zero_gradients()
        found[which] = losses(own, rows[which])

    threads = [threading.Thread(target=train, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone


def test_two_engines_keep_the_products_that_each_began_with(folder, monkeypatch):
    """Whatever the environment says later, and in turns: bits are those of an engine that is alone in its process."""
    rows = random_rows(48, "sft")

    def engine(products):
        monkeypatch.setenv("ESPALIER_BF16_PRODUCTS", products)
        return engine_of(folder, dtype="bfloat16")

    def gradients(engine):
        engine.forward_backward(rows)
        found = b"".join(gradient.tobytes() for gradient in engine.gradients().values())
        engine.zero_gradients()
        return found

    choices = ("upcast", "native", "library")
    alone = [gradients(engine(products)) for products in choices]
    assert len(set(alone)) > 1  # the choice is to be seen
    engines = [engine(products) for products in choices]
    assert [gradients(each) for each in engines] == alone
    assert [gradients(each) for each in reversed(engines)] == alone[::-1]


def continued(engine, rows, count):
    for k in range(count):
        engine.forward_backward(rows, indices=[k % 3, 3 + k % 4])
        engine.optim_step()


@pytest.mark.parametrize("options", [
    {"dtype": "float64"}, {"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "float64", "optimizer": "sgd"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("saved_dtype", [None, "bfloat16"])
def test_a_loaded_checkpoint_goes_on_bit_for_bit(folder, tmp_path, options, saved_dtype):
    rows = random_rows(46, "sft")
    options = {"learning_rate": 0.01, **options}
    engine = engine_of(folder, **options)
    engine.save(tmp_path / "step 0", dtype=saved_dtype)
    continued(engine, rows, 2)
    engine.forward_backward(rows)  # gradients are no part of it
    engine.save(tmp_path / "some/where/else/", dtype=saved_dtype)
    engine.zero_gradients()
    continued(engine, rows, 3)
    engine.save(tmp_path / "end")
    other = engine_of(folder, **options)
    other.forward_backward(rows)
    other.load(tmp_path / "some/where/else")
    assert other.step == 2 and other.gradients() == {}
    continued(other, rows, 3)
    other.save(tmp_path / "other end")
    assert files_of(tmp_path / "end") == files_of(tmp_path / "other end") and other.step == 5
    # Back to the start, and under another name.
    (tmp_path / "step 0").rename(tmp_path / "moved")
    other.load(tmp_path / "moved")
    assert other.step == 0
    continued(other, rows, 2)
    continued(other, rows, 3)
    other.save(tmp_path / "third end")
    assert files_of(tmp_path / "end") == files_of(tmp_path / "third end")
    # Negative control: without the optimiser's state, from the saved weights alone.
    if options.get("optimizer") != "sgd":
        fresh = engine_of(tmp_path / "some/where/else", **options)
        continued(fresh, rows, 3)
        fresh.save(tmp_path / "fresh end")
        assert files_of(tmp_path / "end") != files_of(tmp_path / "fresh end")


def test_checkpoints_of_the_command_and_of_the_engine_are_alike(espalier, folder, tmp_path):
    rows = random_rows(47, "sft")
    data = tmp_path / "rows.jsonl"
    package.write(data, rows)
    flags = ["--model", folder, "--data", data, "--dtype", "float64", "--token-budget", 24, "--learning-rate", 0.01,
             "--batch-size", 3, "--no-calibration", "--threads", torch.get_num_threads()]  # fmt: skip
    espalier("train", *flags, "--out", tmp_path / "run", "--save-every", 1)
    engine = engine_of(folder, learning_rate=0.01)
    engine.load(tmp_path / "run/checkpoints/step_2")
    engine.forward_backward(data, indices=[6, 7, 8])
    engine.optim_step()
    engine.save(tmp_path / "saved")
    assert engine.step == 3 and files_of(tmp_path / "saved") == files_of(tmp_path / "run/checkpoints/step_3")
    names = lambda folder: {path.name for path in folder.iterdir()}
    assert names(tmp_path / "saved") == names(tmp_path / "run/checkpoints/step_3")
    # Both open it as a model, and so does Transformers.
    espalier("logprobs", "--model", tmp_path / "saved", "--data", data, "-o", tmp_path / "out.jsonl", "--dtype", "float64")
    import transformers_reference as reference

    model = reference.load_model(tmp_path / "saved", torch.float64)
    with reference.norms_in_model_dtype(torch.float64), torch.no_grad():
        theirs = reference.token_logprobs(model, rows[0]["input_ids"])
    ours = engine_of(tmp_path / "saved").logprobs(rows)[0][1:]
    assert np.abs(ours - theirs.numpy()).max() <= 1e-12


def test_checkpoints_that_cannot_be_loaded_change_nothing(espalier, folder, tmp_path):
    rows = random_rows(48, "sft")
    engine = engine_of(folder)
    continued(engine, rows, 1)
    engine.save(tmp_path / "good")
    expected = engine.logprobs(rows)
    with pytest.raises(package.InputError, match="expected no such folder, it exists already"):
        engine.save(tmp_path / "good")
    other_model = init_model(espalier, tmp_path / "llama", "llama")
    engine_of(other_model).save(tmp_path / "llama/saved")
    engine_of(folder, dtype="float32").save(tmp_path / "float32")
    engine_of(folder, optimizer="sgd").save(tmp_path / "sgd")
    for damage in ("model", "optimizer"):
        shutil.copytree(tmp_path / "good", tmp_path / damage)
        file = tmp_path / damage / f"{damage}.safetensors"
        data = bytearray(file.read_bytes())
        data[-9] ^= 1
        file.write_bytes(data)
    faults = {"model": "model.safetensors", "optimizer": "optimizer.safetensors", "llama/saved": "model of another|same model",
              "float32": "dtype float64", "sgd": "optimizer adamw", "nowhere": "trainer_state.json",
              "llama/model": "trainer_state.json"}  # fmt: skip
    for name, fault in faults.items():
        with pytest.raises(package.InputError, match=fault):
            engine.load(tmp_path / name)
        assert all(map(np.array_equal, engine.logprobs(rows), expected)) and engine.step == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.load(tmp_path / "good")
    (tmp_path / "good/notes.txt").write_text("of somebody")
    with pytest.warns(UserWarning, match="notes.txt, which is not part of the checkpoint"):
        engine.load(tmp_path / "good")


def test_after_a_load_that_failed_half_way_only_another_load_is_possible(folder, tmp_path):
    rows = random_rows(51, "sft")
    engine = engine_of(folder)
    continued(engine, rows, 1)
    engine.save(tmp_path / "good")
    expected = engine.logprobs(rows)
    shutil.copytree(tmp_path / "good", tmp_path / "old")  # as an older Espalier would have left it
    (tmp_path / "old/manifest.json").unlink()
    state = tmp_path / "old/optimizer.safetensors"
    state.write_bytes(state.read_bytes()[:-100])
    with pytest.raises(package.InputError, match="optimizer.safetensors"):
        engine.load(tmp_path / "old")
    for call in (lambda: engine.logprobs(rows), lambda: engine.forward_backward(rows), engine.optim_step,
                 engine.gradients, lambda: engine.save(tmp_path / "half")):  # fmt: skip
        with pytest.raises(package.InputError, match="the last load failed half-way: load again"):
            call()
    engine.load(tmp_path / "good")
    assert all(map(np.array_equal, engine.logprobs(rows), expected)) and engine.step == 1


def test_a_save_that_fails_leaves_nothing(folder, tmp_path):
    engine = engine_of(folder)
    (tmp_path / "file").write_text("")
    with pytest.raises((package.InputError, RuntimeError)):
        engine.save(tmp_path / "file/folder")
    with pytest.raises(package.InputError, match="dtype"):
        engine.save(tmp_path / "saved", dtype="float8")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("options, fault", [
    ({"learning_rat": 1}, "learning_rat: there is no such option; expected one of dtype, optimizer, learning_rate"),
    ({"steps": 3}, "steps: there is no such option"),
    ({"learning_rate": -1}, "learning_rate.*received -1"),
    ({"learning_rate": float("nan")}, "learning_rate"),
    ({"dtype": "float8"}, "dtype"),
    ({"strategy": "forest"}, "strategy"),
    ({"memory_budget": "8"}, "memory_budget"),
    ({"device": "tpu"}, "device"),
    ({"optimizer": ["adamw"]}, "optimizer: expected a number, a text or a boolean, received list"),
])  # fmt: skip
def test_options_that_cannot_be_used(folder, options, fault):
    with pytest.raises(package.InputError, match=fault):
        package.Engine(folder, **options)


def test_models_that_cannot_be_used(folder, tmp_path):
    with pytest.raises(package.InputError, match="config.json"):
        package.Engine(tmp_path)
    shutil.copytree(folder, tmp_path / "part")
    (tmp_path / "part/model.safetensors").unlink()
    with pytest.raises(package.InputError, match="model.safetensors"):
        package.Engine(tmp_path / "part")


@pytest.mark.parametrize("rows, call, fault", [
    ([], {}, "expected at least one"),
    ([[1, 2, 61]], {}, "row 0: field `input_ids`: expected token ids below 61, the model's vocab_size, received 61"),
    ([[1, 2]], {"objective": "dpu"}, "objective"),
    ([[1, 2]], {"clip_lo": 1}, "clip_lo: there is no such option; expected one of objective"),
    ([[1, 2]], {"normalize": "tokens"}, "normalize"),
    ([[1, 2]], {"normalize": -3}, "normalize"),
    ([[1, 2]], {"objective": "grpo"}, "expects `advantages`, `advantage`, or `reward`"),
    ([[1, 2]], {"router_aux_loss_coef": 0.1}, "expected a model with experts, received qwen3"),
    ([[1, 2]], {"indices": [1]}, "indices: expected rows from 0 to 0, received 1"),
    ([[1, 2]], {"indices": []}, "indices: expected at least one row"),
    ([[1, 2]], {"indices": ["0"]}, "indices: expected numbers of rows, received '0'"),
    ([{"input_ids": [1, 2], "loss_mask": [1, 0]}], {}, "no token carries loss"),
    ([{"input_ids": [1, 2], "advantag": 1}], {}, "field `advantag`"),
    ("nowhere.jsonl", {}, "nowhere.jsonl"),
])  # fmt: skip
def test_rows_that_cannot_be_used_change_nothing(folder, rows, call, fault):
    good = random_rows(49, "sft")
    engine = engine_of(folder)
    engine.forward_backward(good)
    before = engine.gradients()
    with pytest.raises(package.InputError, match=fault):
        engine.forward_backward(rows, **call)
    assert all(np.array_equal(before[name], gradient) for name, gradient in engine.gradients().items()) and before
    assert engine.optim_step()["step"] == 1


def test_numbers_that_are_not_finite_are_told_of(folder):
    engine = engine_of(folder, dtype="float32")
    rows = [{"input_ids": [1, 2, 3], "advantage": -1e30, "logprobs": [0, -500, -1], "trajectory_id": "the one"}]
    with pytest.raises(package.InputError, match="forward_backward: loss .* expected finite numbers.*`the one`"):
        engine.forward_backward(rows, "grpo")
    assert engine.gradients() == {}
    before = engine.logprobs([[1, 2, 3]])[0]
    engine.forward_backward([[1, 2, 3]])
    with pytest.raises(package.InputError, match="learning_rate: expected a number from 0 to 1e.06, received 10000000"):
        engine.optim_step(1e7)
    assert np.array_equal(engine.logprobs([[1, 2, 3]])[0], before) and engine.optim_step(0)["step"] == 1


def python(code, folder):
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd="/", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_it_is_loaded_when_it_is_used():
    code = """
import sys
import espalier
espalier.build([[1, 2]])
print([name for name in ("torch", "espalier._engine", "espalier.engine") if name in sys.modules])
espalier.Engine
print([name for name in ("torch", "espalier._engine", "transformers") if name in sys.modules])
"""
    assert python(code, REPOSITORY / "python") == ["[]", "['torch', 'espalier._engine']"]


def test_where_it_is_not_built_the_error_says_how_to(tmp_path):
    plain = shutil.ignore_patterns("_engine*.so", "__pycache__")
    shutil.copytree(REPOSITORY / "python/espalier", tmp_path / "espalier", ignore=plain)
    code = """
import os
os.environ["ESPALIER_OPS"] = LIBRARY
import espalier
print(len(espalier.build([[1, 2]]).tokens))
try:
    espalier.Engine
except ImportError as error:
    print(error)
""".replace("LIBRARY", repr(str(REPOSITORY / "build/release/src/espalier/ops/libespalier_ops.so")))
    built, said = python(code, tmp_path)
    assert built == "2" and "expected the compiled trainer (espalier._engine)" in said and "make build" in said


def test_stubs_are_those_of_the_module(tmp_path):
    nanobind = pytest.importorskip("nanobind")
    requirements = (REPOSITORY / "requirements.txt").read_text()
    if f"nanobind=={nanobind.__version__} " not in requirements:
        pytest.skip(f"nanobind {nanobind.__version__} writes other stubs than the pinned one")
    # stubgen imports the module by itself, for which PyTorch and the operators have to be there.
    code = ("import sys, espalier.native_engine, runpy; sys.argv = ['stubgen', '-q', '-m', 'espalier._engine', '-o', "
            f"{str(tmp_path / '_engine.pyi')!r}]; runpy.run_module('nanobind.stubgen', run_name='__main__')")  # fmt: skip
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY / "python")})
    stubs = REPOSITORY / "python/espalier/_engine.pyi"
    assert (tmp_path / "_engine.pyi").read_text() == stubs.read_text(), f"write {stubs} again, as this test does"
