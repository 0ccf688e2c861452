# SPDX-License-Identifier: Apache-2.0
"""Shared fixtures: a byte-level ChatML tokenizer with a choice of chat templates, made without any download."""

import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = Path(os.environ.get("ESPALIER_PROGRAM", REPOSITORY / "bin/espalier"))  # as another preset builds it, too
sys.path.insert(0, str(REPOSITORY / "python"))

# The workers of pytest share the cores: with a thread for each core every one of them waits for the others. A run that is
# compared bit for bit with another needs the same number of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_sessionstart(session):
    """Under nohup, or in the background of a script, signals are ignored, and every process that a test starts would
    inherit that."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


class Failures:
    """Prints each failure when it happens: a suite of half an hour may be stopped before pytest's own summary."""

    def __init__(self, config):
        self.config = config

    def pytest_runtest_logreport(self, report):
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")  # may come after this file
        if report.failed and terminal is not None:
            terminal.ensure_newline()
            terminal.write_line(f"{report.nodeid} failed ({report.when}):\n{report.longreprtext[-4000:]}")


def pytest_configure(config):
    config.addinivalue_line("markers", "nightly: takes minutes, for what changes rarely; run with ESPALIER_NIGHTLY_TESTS=1")
    if not hasattr(config, "workerinput"):  # the process that the workers of xdist report to
        config.pluginmanager.register(Failures(config))


# Files of few tests that take long: they build, or start many processes.
LONG = ["test_wheel.py", "test_launch.py", "test_distributed.py", "test_context_parallel.py", "test_tensor_parallel.py",
        "test_rank_failures.py", "test_hf_head_ranks.py", "test_torch_distribution.py", "test_faults.py", "test_trl_trainers.py",
        "test_sampling_bench.py", "test_deepspeed.py", "test_deepspeed_trainers.py", "test_liger.py"]  # fmt: skip


def pytest_collection_modifyitems(config, items):
    """Leaves out what runs every night. Long files come first, and the others by their numbers of tests, so that no worker is
    left alone with one at the end."""
    if os.environ.get("ESPALIER_NIGHTLY_TESTS", "0") == "0":
        nightly = [item for item in items if item.get_closest_marker("nightly")]
        items[:] = [item for item in items if item not in nightly]
        config.hook.pytest_deselected(items=nightly)
    counts = Counter(item.path for item in items)
    items.sort(key=lambda item: (LONG.index(item.path.name) if item.path.name in LONG else len(LONG), -counts[item.path], item.path))


def number_of_seeds():
    given = os.environ.get("ESPALIER_TEST_SEED") or "0"
    if not (given.isascii() and given.isdigit() and int(given) < 2**32):
        raise pytest.UsageError(f"ESPALIER_TEST_SEED: expected a whole number below 2^32, received {given}")
    return int(given)


def seed_of(seed):
    """`seed`, or another one for each value of ESPALIER_TEST_SEED: tests take the seeds of all random numbers through here, as
    those in C++ do (tests/test_seed.h)."""
    return seed + 1_000_003 * number_of_seeds()


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"ESPALIER_TEST_SEED={number_of_seeds()}")


# Renders calls (arguments as the string of the file) and every role.
NATIVE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] or '' }}
{%- for call in message.get('tool_calls', []) %}
<call>{{ call.function.name }} {{ call.function.arguments }}</call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""

# As SmolLM2's: content is joined to strings, so null fails, and calls are not looked at.
NO_CALLS = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Knows two roles only, and takes calls as objects: with strings the loop over their items fails.
TWO_ROLES = """\
{% for message in messages %}\
{% if message['role'] not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role') }}{% endif %}\
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

OBJECT_ARGUMENTS = NATIVE.replace(
    "{{ call.function.arguments }}",
    "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }};{% endfor %}")

# Fails at null content, but renders calls once the content is empty.
NULL_FAILS = NATIVE.replace("{{ message['content'] or '' }}", "{{ '' + message['content'] }}")

# Removes the thinking of assistant messages before the last user message, as reasoning models do.
REWRITES = """\
{%- set last = namespace(user=0) -%}
{%- for message in messages -%}{%- if message['role'] == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['role'] == 'assistant' and loop.index0 < last.user -%}
{{ message['content'].split('</think>')[-1] }}
{%- else -%}
{{ message['content'] }}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""

# Its generation prompt opens a thought that a rendered turn without one does not have.
UNLOCATABLE = NO_CALLS.replace("'<|im_start|>assistant\n' }}{% endif", "'<|im_start|>assistant\n<think>' }}{% endif")

# Its prompt has none of the messages as the rendered turn writes them.
PROMPT_APART = "{% if add_generation_prompt %}{{ messages|length }} messages: go on<|im_start|>{% else %}" + NO_CALLS + "{% endif %}"

TEMPLATES = {"native": NATIVE, "no_calls": NO_CALLS, "two_roles": TWO_ROLES, "null_fails": NULL_FAILS,
             "object_arguments": OBJECT_ARGUMENTS, "rewrites": REWRITES, "unlocatable": UNLOCATABLE, "prompt_apart": PROMPT_APART}


CHATML = ("<|im_start|>", "<|im_end|>")


def write_model(folder, template, specials=CHATML):
    """A directory with a byte-level tokenizer (256 bytes, one merge, special tokens: the first begins a text, the last ends it) and
    a template, or several by their names."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    newline = "\u010a"  # how ByteLevel writes "\n"
    vocabulary[newline * 2] = 256
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[(newline, newline)]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": specials[-1], "bos_token": specials[0],
        "chat_template": [{"name": name, "template": text} for name, text in template.items()] if isinstance(template, dict) else template,
        "clean_up_tokenization_spaces": False}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 257 + len(specials)}))
    return folder


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", default=os.environ.get("ESPALIER_LONG_TESTS", "0") != "0",
                     help="kill and fault tests in their long form (hours); also ESPALIER_LONG_TESTS=1")  # fmt: skip


@pytest.fixture(scope="session")
def long_tests(request):
    return request.config.getoption("--long")


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Directories of models by the name of their template."""
    root = tmp_path_factory.mktemp("models")
    return {name: write_model(root / name, template) for name, template in TEMPLATES.items()}


@pytest.fixture(scope="session")
def model_of(tmp_path_factory):
    """Returns the directory of a model with another template and special tokens; those of one call are written once."""
    root, folders = tmp_path_factory.mktemp("models-of-templates"), {}

    def folder(template, specials=CHATML):
        key = (json.dumps(template), specials)
        if key not in folders:
            folders[key] = write_model(root / str(len(folders)), template, specials)
        return folders[key]

    return folder


@pytest.fixture(scope="session")
def tokenizer(models):
    from espalier.commands.model import load_tokenizer

    return load_tokenizer(models["native"])


@pytest.fixture
def prepare(models, tmp_path):
    """Runs `prepare` in this process on rows (or raw lines); returns (exit code, rows of the output). A model is a name of TEMPLATES,
    or a directory."""
    from espalier.commands.prepare import main

    def run(model, rows, *flags, name="rows.jsonl"):
        chats = tmp_path / "chats.jsonl"
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        chats.write_bytes(b"".join(line + b"\n" for line in lines))
        out = tmp_path / name
        out.unlink(missing_ok=True)
        code = main(["--model", str(models.get(model, model)), str(chats), "-o", str(out), *flags])
        if not out.exists():
            return code, None
        return code, [json.loads(line) for line in out.read_text().splitlines()] if name.endswith("jsonl") else out
    return run


def with_marks(row, tokenizer):
    """The text of a row. What carries loss stands between \u00ab and \u00bb."""
    loss = row.get("loss_mask") or row["loss_weights"]
    stretches = itertools.groupby(zip(row["input_ids"], loss, strict=True), lambda pair: pair[1] > 0)
    texts = [(has_loss, tokenizer.decode([token for token, _ in pairs])) for has_loss, pairs in stretches]
    return "".join(f"\u00ab{text}\u00bb" if has_loss else text for has_loss, text in texts)


@pytest.fixture
def marked(prepare, models):
    """Runs `prepare` as the fixture of that name, which has to succeed; returns the text of each row with marks of loss."""
    from espalier.commands.model import load_tokenizer

    def run(model, rows, *flags):
        code, result = prepare(model, rows, *flags)
        assert code == 0
        tokenizer = load_tokenizer(models.get(model, model))
        return [with_marks(row, tokenizer) for row in result]
    return run


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Verdicts and rates that tests leave are not those of the user. Workers share them."""
    folder = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str((folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "cache"))
        yield


def run_here(arguments, cache):
    """A command in Python that computes with a model, in this process, which has imported PyTorch already."""
    from espalier.commands.registry import COMMANDS

    streams = (sys.stdout, sys.stderr)
    # A command ends at these, and leaves that to the process, which goes on to other tests.
    handlers = {number: signal.getsignal(number) for number in ENDING}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, mock.patch.dict(os.environ, XDG_CACHE_HOME=str(cache)):
        kept = [os.dup(number) for number in (1, 2)]
        for number, file in ((1, out), (2, err)):
            os.dup2(file.fileno(), number)
        sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
        try:
            status = COMMANDS[arguments[0]].main(list(map(str, arguments[1:])))
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            sys.stdout, sys.stderr = streams
            for number, handler in handlers.items():
                signal.signal(number, handler)
            for number, copy in zip((1, 2), kept):
                os.dup2(copy, number)
                os.close(copy)
        texts = [(file.seek(0), file.read().decode())[1] for file in (out, err)]
    return subprocess.CompletedProcess(["espalier", *map(str, arguments)], status, *texts)


ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ)
RUN_HERE = ("init", "logprobs", "sample")


@pytest.fixture(scope="session")
def espalier(tmp_path_factory):
    """Runs PROGRAM with the given arguments and a cache of the tests' own; a failure shows what it printed. Commands of RUN_HERE run
    in this process, which saves the import of PyTorch, unless they are to fail or have `variables`."""
    common = tmp_path_factory.mktemp("cache")

    def run(*arguments, check=True, cache=common, variables=None):
        starts = not check or variables is not None or "ESPALIER_PROGRAM" in os.environ or "--help" in arguments
        if arguments[0] in RUN_HERE and not starts:
            done = run_here(arguments, cache)
            assert done.returncode == 0, f"{' '.join(done.args)}\n{done.stdout}{done.stderr}"
            return done
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache), **(variables or {})}
        command = [str(PROGRAM), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if check and done.returncode != 0:
            raise AssertionError(f"{' '.join(command)}\nexit status {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    return run


@pytest.fixture
def small_disk(tmp_path):
    """The start of a command line whose command sees the folder tmp_path/"disk" as a disk of 64 KiB; what is left on it is
    listed on standard output."""
    (tmp_path / "disk").mkdir()
    unshared = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mount = shlex.join(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(tmp_path / "disk")])
    if subprocess.run([*unshared, mount], capture_output=True).returncode != 0:
        pytest.skip("no right to mount in a private namespace")
    left = f"find {shlex.quote(str(tmp_path / 'disk'))} -mindepth 1"
    return [*unshared, f'{mount} && {{ "$@"; code=$?; {left}; exit $code; }}', "sh"]


@pytest.fixture(scope="module")
def model(tmp_path_factory, espalier):
    """A small random model of family qwen3."""
    from small_models import MODELS  # it takes its seeds from this file

    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODELS["qwen3"]))
    espalier("init", "--config", folder / "config.json", "--out", folder / "model", "--seed", seed_of(5))
    return folder / "model"
