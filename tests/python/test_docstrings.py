# SPDX-License-Identifier: Apache-2.0
"""Docstrings of what is public: in the format of Google, with every parameter, and with examples that run."""

import dataclasses
import doctest
import importlib
import inspect
import re
import socket
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import espalier as package
from conftest import REPOSITORY, seed_of

MODEL = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2)  # fmt: skip


def public_objects(module):
    """(name, object) of public functions and classes, of classes' own public methods, and of modules below. Properties are
    left out."""
    for name in module.__all__:
        value, path = getattr(module, name), f"{module.__name__}.{name}"
        if inspect.ismodule(value):
            yield from public_objects(value)
            continue
        yield path, value
        if inspect.isclass(value):
            for base in reversed([base for base in value.__mro__ if base.__module__.startswith("espalier")]):
                for member, found in vars(base).items():
                    if not member.startswith("_") and callable(getattr(value, member)) and not inspect.isclass(found):
                        yield f"{path}.{member}", getattr(value, member)


def is_compiled(value):
    """Of nanobind, whose classes have no signature that Python knows."""
    return type(value).__module__.startswith("nanobind") or type(value).__name__.startswith("nb_")


def parameters(value):
    """Names of what the caller gives, and whether something is returned."""
    if is_compiled(value):
        signature = value.__nb_signature__[0][0] if hasattr(value, "__nb_signature__") else ""
        return re.findall(r"(\w+): ", signature.partition("->")[0]), False
    if inspect.isclass(value):
        if "__init__" not in vars(value) or dataclasses.is_dataclass(value):
            return [], False
        return list(inspect.signature(value).parameters), False
    known = [name for name in inspect.signature(value).parameters if name not in ("self", "cls", "_")]
    return known, inspect.signature(value).return_annotation is not None


def entries(text, section):
    """The first words of the lines of a section."""
    found = re.search(rf"^{section}:\n((?:    .*\n|\n)+)", text + "\n", re.MULTILINE)
    return set(re.findall(r"^    \**(\w+):", found[1], re.MULTILINE)) if found else set()


def faults(name, value):
    """What a docstring lacks."""
    text = inspect.getdoc(value) or ""
    if not text:
        yield f"{name}: no docstring"
        return
    lines = text.splitlines()
    if lines[1:2] not in ([], [""]) and not is_compiled(value):
        yield f"{name}: more than one line before the first empty one"
    attributes = entries(text, "Attributes")
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.name not in attributes:
                yield f"{name}: no attribute {field.name}"
    names, returns = parameters(value)
    described = entries(text, "Args")
    for parameter in names:
        if parameter not in described and not attributes:
            yield f"{name}: no argument {parameter}"
    for parameter in sorted(described - set(names)):
        yield f"{name}: argument {parameter}, which there is not"
    if returns and "Returns:" not in lines:
        yield f"{name}: not what it returns"
    if (inspect.isclass(value) or not is_compiled(value)) and (">>>" not in text or "Examples:" not in lines):
        yield f"{name}: no example"


NAMES = dict(public_objects(package))
SKIPPED = {"espalier.distributed.Ranks.close", "espalier.hf.Report.check", "espalier.hf.SharingMeter.count",
           "espalier.hf.log_sharing", "espalier.megatron.PackedTrees.params",
           "espalier.titan.PackedTrees.attention_masks", "espalier.trl.patch",
           *(f"espalier.{place}.SharingCallback.{method}" for place in ("hf", "trl")
             for method in ("on_train_begin", "on_log", "on_train_end"))}  # fmt: skip


def test_every_docstring_is_complete():
    assert {"espalier.Engine.sample", "espalier.Step.backward", "espalier.Layout.path", "espalier.hf.patch",
            "espalier.io.from_verl", "espalier.ops.moe", "espalier.EngineConfig.to_json"} <= set(NAMES)  # fmt: skip
    assert [fault for name, value in NAMES.items() for fault in faults(name, value)] == []


def test_what_a_docstring_lacks_is_found():
    """Negative control."""

    def bare(rows: int, *others: int) -> int:
        return rows

    def wrong(rows: int) -> None:
        """A line
        and another one.

        Args:
            row: A number.

        Examples:
            >>> 1
            1
        """

    @dataclasses.dataclass
    class Fields:
        """Fields.

        Attributes:
            other: A number.

        Examples:
            >>> 1
            1
        """

        field: int

    assert list(faults("bare", bare)) == ["bare: no docstring"]
    bare.__doc__ = "A function."
    assert list(faults("bare", bare)) == ["bare: no argument rows", "bare: no argument others", "bare: not what it returns",
                                          "bare: no example"]  # fmt: skip
    assert list(faults("wrong", wrong)) == ["wrong: more than one line before the first empty one", "wrong: no argument rows",
                                            "wrong: argument row, which there is not"]  # fmt: skip
    assert list(faults("Fields", Fields)) == ["Fields: no attribute field"]
    module = SimpleNamespace(__name__="m", __all__=["Fields", "bare"], Fields=Fields, bare=bare)
    assert [name for name, _ in public_objects(module)] == ["m.Fields", "m.bare"]


@pytest.fixture(scope="module")
def names_in_examples(tmp_path_factory):
    """What examples of methods use: a model, a step, an engine, and the ranks of a job of one process."""
    import transformers

    torch.manual_seed(seed_of(70))
    folder = tmp_path_factory.mktemp("model")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**MODEL))
    model.save_pretrained(folder)
    batch = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 6]])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    ranks = package.distributed.Ranks(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1)))
    step = package.Step(transformers.LlamaForCausalLM(model.config), package.plan(package.build(batch.tolist()), token_budget=8))
    yield {"espalier": package, "engine": package.Engine(folder), "ranks": ranks, "model": model.train(), "batch": batch,
           "step": step, "torch": torch}  # fmt: skip
    ranks.close()
    dist.destroy_process_group()


@pytest.mark.parametrize("name", [name for name, value in NAMES.items() if ">>>" in (inspect.getdoc(value) or "")])
def test_examples_run(names_in_examples, name):
    printed = []
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(NAMES[name]), dict(names_in_examples), name, None, 0)
    result = doctest.DocTestRunner(verbose=False).run(test, out=printed.append)
    assert result.failed == 0, "".join(printed)
    assert result.attempted > 0 or name in SKIPPED


def test_public_functions_have_types():
    for name, value in NAMES.items():
        if not is_compiled(value) and not inspect.isclass(value):
            signature = inspect.signature(value)
            assert signature.return_annotation is not signature.empty, name
            for parameter in signature.parameters.values():
                assert parameter.annotation is not parameter.empty or parameter.name in ("self", "cls"), (name, parameter)


def test_the_reference_on_the_site_has_all_that_is_public(monkeypatch):
    files = ModuleType("mkdocs.structure.files")
    files.File = None
    monkeypatch.setitem(sys.modules, files.__name__, files)
    monkeypatch.syspath_prepend(REPOSITORY / "scripts")
    found = [re.fullmatch(r"\n::: (\S+)\.(\w+)\n.*\n +heading: (\S+)\n.*\n", text)
             for text in importlib.import_module("mkdocs_hooks").python_names() if ":::" in text]  # fmt: skip
    shown = {heading: getattr(importlib.import_module(module), name) for module, name, heading in (each.groups() for each in found)}
    public = dict(public_objects(package))
    assert {name: public[name] for name in shown} == shown
    assert {name for name in public if name.rpartition(".")[0] not in public} == shown.keys()
