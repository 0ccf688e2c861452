# SPDX-License-Identifier: Apache-2.0
"""espalier prepare: whatever is wrong with the input, the model or the machine ends in one line, and leaves nothing."""

import builtins
import gzip
import json
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zstandard

from conftest import NO_CALLS, OBJECT_ARGUMENTS, write_model
from espalier.commands.prepare import main
from espalier.rows.lines import lines_of

PYTHON_FOLDER = Path(__file__).resolve().parents[2] / "python"
USER = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}
CHAT = {"messages": [USER, ANSWER]}

# Goes on for ever, in the sandbox of templates too, where a range is bounded.
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"


@pytest.fixture
def fails(tmp_path, capsys):
    """Runs the command in this process; expects status 1, one line with the words as its last, no output file and
    no scratch file. Returns what it printed."""
    def run(model, chats, *words, flags=(), name="rows.jsonl"):
        code = main(["--model", str(model), str(chats), "-o", str(tmp_path / name), *flags])
        error = capsys.readouterr().err
        assert code == 1 and "Traceback" not in error, error
        last = error.splitlines()[-1]
        assert last.startswith("espalier: error: ") and error.count("espalier: error: ") == 1
        for word in words:
            assert word in last, error
        assert [path.name for path in tmp_path.iterdir() if "rows" in path.name] == []
        return error
    return run


def write_chats(folder, rows):
    path = folder / "chats.jsonl"
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows))
    return path


# ---- Compressed files ---------------------------------------------------------------------------------------------


def chats_of_many_blocks():
    """200 chats of 4 kB that hardly compress: a zstd frame has several blocks, and a cut one gives its first rows."""
    rows = [{"id": f"c{k}", "messages": [{"role": "user", "content": os.urandom(2000).hex()}, ANSWER]} for k in range(200)]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def zstd_frames(data, frames):
    size = -(-len(data) // frames)
    return b"".join(zstandard.compress(data[begin:begin + size]) for begin in range(0, len(data), size))


def zstd_flushed(data):
    """As a logger writes: every line can be read as soon as it is written. A cut file then ends with a whole line."""
    compressor = zstandard.ZstdCompressor().compressobj()
    flush = zstandard.COMPRESSOBJ_FLUSH_BLOCK
    lines = data.splitlines(keepends=True)
    return b"".join(compressor.compress(line) + compressor.flush(flush) for line in lines) + compressor.flush()


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress, lambda data: zstd_frames(data, 5), zstd_flushed],
                         ids=["gzip", "zstd", "zstd of 5 frames", "zstd by lines"])
def test_a_compressed_file_that_ends_too_early_is_refused_wherever_it_is_cut(models, tmp_path, fails, compress):
    data = chats_of_many_blocks()
    packed = compress(data)
    path = tmp_path / "chats.bin"
    for cut in (len(packed) // 7, len(packed) // 2, len(packed) - 1, 3):
        path.write_bytes(packed[:cut])
        fails(models["native"], path, "chats.bin" if cut > 3 else "", "expected")
    # Control: the whole file, and its lines.
    path.write_bytes(packed)
    assert b"".join(line + b"\n" for line in lines_of(path, 1 << 20, lambda fraction: None)) == data
    assert main(["--model", str(models["native"]), str(path), "-o", str(tmp_path / "whole.jsonl")]) == 0
    assert len((tmp_path / "whole.jsonl").read_text().splitlines()) == 200


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.ZstdCompressor(write_checksum=True).compress],
                         ids=["gzip", "zstd"])
def test_damaged_compressed_files_are_refused(models, tmp_path, fails, compress):
    packed = bytearray(compress(chats_of_many_blocks()))
    for at in (len(packed) // 3, len(packed) - 3):
        damaged = packed.copy()
        damaged[at] ^= 0x10
        path = tmp_path / "chats.bin"
        path.write_bytes(damaged)
        fails(models["native"], path, "chats.bin", "expected")


def test_skippable_zstd_frames_are_passed_over(tmp_path):
    skippable = b"\x51\x2a\x4d\x18" + struct.pack("<I", 5) + b"hello"
    path = tmp_path / "chats.zst"
    path.write_bytes(skippable + zstandard.compress(b"one\ntw") + skippable + zstandard.compress(b"o\r\nthree"))
    assert list(lines_of(path, 100, lambda fraction: None)) == [b"one", b"two", b"three"]


def test_lines_of_any_length_come_out_whole_or_are_passed_over(tmp_path):
    lines = [b"", b"a" * 10, b"b" * 11, b"c" * 3_000_000, b"d", b"e" * 2_000_000]
    path = tmp_path / "lines"
    path.write_bytes(b"\n".join(lines))
    for most in (10, 11, 2_000_000, 1 << 30):
        assert list(lines_of(path, most, lambda fraction: None)) == [
            line if len(line) <= most else None for line in lines]
    path.write_bytes(b"\r\n".join(lines) + b"\r\n")
    assert list(lines_of(path, 10, lambda fraction: None)) == [b"", b"a" * 10, None, None, b"d", None]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_bomb_takes_little_memory_and_shows_progress(models, tmp_path, suffix):
    """Half a gibibyte in one line; the process may take less than that."""
    path = tmp_path / f"bomb.{suffix}"
    block = bytes(64 << 20)
    with (gzip.open(path, "wb", compresslevel=1) if suffix == "gz" else zstandard.open(path, "wb")) as file:
        file.write(b'{"messages": "')
        for _ in range(8):
            file.write(block)
        file.write(b"\n" + json.dumps(CHAT).encode())
    # VmHWM is of the program alone; ru_maxrss begins with what the process that started it had.
    code = (f"import re, sys; sys.path.insert(0, {str(PYTHON_FOLDER)!r}); from espalier.rows.lines import lines_of\n"
            f"ticks = []\nlines = list(lines_of({str(path)!r}, 1 << 20, ticks.append))\n"
            "print(lines[0], len(lines), len(ticks), max(ticks) <= 1, "
            "int(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1]) // 1024)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, lines, ticks, bounded, mebibytes = done.stdout.split()
    assert (first, lines, bounded) == ("None", "2", "True") and int(ticks) > 500
    assert int(mebibytes) < 300
    out = tmp_path / "rows.jsonl"
    base = ["--model", str(models["native"]), str(path), "-o", str(out), "--max-row-bytes", "1000000"]
    assert main(base) == 1 and not out.exists()
    assert main([*base, "--skip-bad-rows"]) == 0 and len(out.read_text().splitlines()) == 1


# ---- Rows ---------------------------------------------------------------------------------------------------------

DEEP = "[" * 100_000
BIG = b"9" * 5000
OBJECT_CALL = {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": DEEP}}]}]}
BAD_ROWS = {
    "huge reward": (b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}], "reward": 1' + b"0" * 400
                    + b"}", "field `reward`: expected a finite number, received an integer of 401 digits"),
    "huge id": (b'{"id": ' + BIG + b', "messages": [{"role": "assistant"}]}',
                "expected integers of at most 4300 digits, received one of 5000"),
    "huge negative number in a list": (b'{"x": [-' + BIG + b"]}", "expected integers of at most 4300 digits"),
    "surrogate as text": ({"system": 3} | CHAT, "field `system`: expected a text, received 3"),
    "infinite reward": (b'{"messages": [{"role": "assistant"}], "reward": 1e999}', "expected a finite number"),
    "arguments that are deep JSON": (OBJECT_CALL, "the template takes the arguments of a tool call as an object"),
    "terminal codes": ({"messages": [USER, {"role": "\x1b[2J\x9b31m\u202e"}]}, "at least one message with role assistant"),
    "a key with terminal codes": (b'{"\\u001b]0;title\\u0007": 1, "\\u001b]0;title\\u0007": 2}', "\\x1B]0;title\\x07"),
}


@pytest.fixture(scope="module")
def object_arguments(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("faults") / "model", OBJECT_ARGUMENTS)


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows_stop_with_one_line_or_are_counted(object_arguments, tmp_path, fails, capsys, name):
    row, expected = BAD_ROWS[name]
    chats = write_chats(tmp_path, [CHAT, row, CHAT])
    error = fails(object_arguments, chats, "chats.jsonl:2: ", expected)
    assert len(error) < 2000 and not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", error)
    assert main(["--model", str(object_arguments), str(chats), "-o", str(tmp_path / "out.jsonl"), "--skip-bad-rows"]) == 0
    error = capsys.readouterr().err
    assert "1 bad line skipped" in error and expected in error
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("model", ["native", "no_calls"])
def test_deep_arguments_are_text_where_the_template_takes_text(prepare, tokenizer, model):
    code, (row,) = prepare(model, [OBJECT_CALL])
    assert code == 0 and DEEP in tokenizer.decode(row["input_ids"])


def test_what_a_row_breaks_inside_the_program_is_a_bad_row(prepare, monkeypatch, capsys):
    """Such as a panic of the tokenizer, which is written in Rust and reports outside of Exception."""
    from espalier.chats import convert

    class PanicException(BaseException):
        pass

    def panics(template, messages, *others):
        if messages[0]["content"] == "bad":
            raise PanicException("at the disco\nsecond line")
        return render(template, messages, *others)

    render = convert.render
    monkeypatch.setattr(convert, "render", panics)
    rows = [CHAT, {"messages": [USER | {"content": "bad"}, ANSWER]}, CHAT]
    assert prepare("native", rows) == (1, None)
    error = capsys.readouterr().err
    assert "chats.jsonl:2: " in error and error.splitlines()[-1].endswith("PanicException: at the disco second line")
    code, made = prepare("native", rows, "--skip-bad-rows")
    assert code == 0 and len(made) == 2 and "1 bad line skipped" in capsys.readouterr().err


def test_many_rows_of_one_name_take_linear_time(prepare):
    code, rows = prepare("native", [{"id": "x"} | CHAT] * 3000 + [{"id": "x~3"} | CHAT, {"id": "x"} | CHAT])
    names = [row["trajectory_id"] for row in rows]
    assert code == 0 and len(set(names)) == len(names) == 3002
    assert names[:3] == ["x", "x~2", "x~3"] and names[-2:] == ["x~3~2", "x~3001"]


# ---- Models -------------------------------------------------------------------------------------------------------


def write(name, content):
    def change(folder):
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return change


def configured(**values):
    """Changes tokenizer_config.json."""
    def change(folder):
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return change


BAD_MODELS = {
    "tokenizer.json is empty": (write("tokenizer.json", ""), "expected a directory with a tokenizer"),
    "tokenizer.json is a list": (write("tokenizer.json", "[]"), "expected a directory with a tokenizer"),
    "tokenizer.json is another object": (write("tokenizer.json", "{}"), "expected a directory with a tokenizer"),
    "tokenizer.json is not text": (write("tokenizer.json", bytes(range(256))), "expected a directory with a tokenizer"),
    "tokenizer.json is deep": (write("tokenizer.json", DEEP), "expected a directory with a tokenizer"),
    "tokenizer_config.json is a list": (write("tokenizer_config.json", "[1]"), "expected a directory with a tokenizer"),
    "tokenizer_config.json is cut": (write("tokenizer_config.json", '{"a'), "expected a directory with a tokenizer"),
    "a token of another type": (configured(eos_token=[3]), "expected a directory with a tokenizer"),
    "config.json is a list": (write("config.json", "[]"), "expected"),
    "config.json is cut": (write("config.json", '{"vocab'), "expected"),
    "vocab_size is a word": (write("config.json", '{"model_type": "llama", "vocab_size": "many"}'), "'many'"),
    "vocab_size is too small": (write("config.json", '{"model_type": "llama", "vocab_size": 7}'),
                                "expected token ids below the model's vocab_size 7"),
    "a template with wrong syntax": (configured(chat_template="{% for x in %}"),
                                     "expected a chat template in Jinja, received: line 1"),
    "no template": (configured(chat_template=None), "expected a tokenizer with a chat template"),
    "a template that prints terminal codes": (
        configured(chat_template="{{ raise_exception('\x1b]0;x\x07') }}"), "\\x1B]0;x\\x07"),
}


@pytest.mark.parametrize("name", BAD_MODELS)
def test_bad_models_end_in_one_line(models, tmp_path, fails, name):
    change, expected = BAD_MODELS[name]
    folder = tmp_path / "model"
    shutil.copytree(models["native"], folder)
    change(folder)
    error = fails(folder, write_chats(tmp_path, [CHAT]), expected)
    assert "\x1b" not in error and len(error) < 2000


def test_code_that_comes_with_a_model_is_not_run_and_nobody_is_asked(models, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "model"
    shutil.copytree(models["native"], folder)
    configured(tokenizer_class="Evil", auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]})(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": {
        "AutoConfig": "evil.EvilConfig", "AutoTokenizer": ["evil.Evil", None]}, "vocab_size": 300}))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\nclass EvilConfig: pass\n")
    asked = []
    monkeypatch.setattr(builtins, "input", lambda *words: asked.append(words) or "y")
    code = main(["--model", str(folder), str(write_chats(tmp_path, [CHAT])), "-o", str(tmp_path / "rows.jsonl")])
    assert asked == [] and not (tmp_path / "ran").exists()
    # It may do without the code, or refuse.
    assert code in (0, 1) and "Traceback" not in capsys.readouterr().err


# ---- Templates without end ----------------------------------------------------------------------------------------


def test_an_endless_template_is_refused_at_once(tmp_path, fails):
    model = write_model(tmp_path / "model", ENDLESS)
    begun = time.monotonic()
    fails(model, write_chats(tmp_path, [CHAT]), "--model", "within 0.5 s (--template-timeout)",
          flags=["--template-timeout", "0.5"])
    assert time.monotonic() - begun < 30  # one limit, not one for every probe
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


def test_a_row_on_which_the_template_does_not_end_is_a_bad_row(tmp_path, fails, capsys):
    model = write_model(tmp_path / "model", "{% if messages[0]['content'] == 'loop' %}" + ENDLESS + "{% endif %}" + NO_CALLS)
    loops = {"messages": [{"role": "user", "content": "loop"}, ANSWER]}
    chats = write_chats(tmp_path, [CHAT, loops, loops, CHAT])
    flags = ["--template-timeout", "0.3"]
    fails(model, chats, "chats.jsonl:2: ", "received: no result within 0.3 s", flags=flags)
    code = main(["--model", str(model), str(chats), "-o", str(tmp_path / "out.jsonl"), "--skip-bad-rows", *flags])
    assert code == 0 and "2 bad lines skipped" in capsys.readouterr().err
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2


# ---- Nothing to train on ------------------------------------------------------------------------------------------


def test_rows_without_any_loss_are_refused(tmp_path, fails, capsys):
    """A template that writes what the assistant says, and nothing to end it."""
    model = write_model(tmp_path / "model", (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"))
    silent = {"messages": [USER, ANSWER | {"content": ""}]}
    fails(model, write_chats(tmp_path, [silent, silent]), "expected tokens with loss, received 2 trajectories without any")
    # Control: one word anywhere is enough.
    chats = write_chats(tmp_path, [silent, CHAT])
    assert main(["--model", str(model), str(chats), "-o", str(tmp_path / "out.jsonl")]) == 0
    assert "2 trajectories" in capsys.readouterr().err


# ---- Interrupts, and what they leave ------------------------------------------------------------------------------


def start(models, tmp_path, *flags, **options):
    """A process that renders chats for ever, once it has begun to write."""
    model = tmp_path / "endless"
    if not model.exists():
        write_model(model, "{% if messages[0]['content'] == 'loop' %}" + ENDLESS + "{% endif %}" + NO_CALLS)
    chats = write_chats(tmp_path, [CHAT, {"messages": [{"role": "user", "content": "loop"}, ANSWER]}])
    command = [sys.executable, "-m", "espalier", "prepare", "--model", model, chats, "-o", tmp_path / "rows.jsonl",
               "--template-timeout", "0", *flags]
    process = subprocess.Popen(list(map(str, command)), env=os.environ | {"PYTHONPATH": str(PYTHON_FOLDER)},
                               stderr=subprocess.PIPE, text=True, **options)
    while not list(tmp_path.glob(".espalier-*.tmp")) and process.poll() is None:
        time.sleep(0.02)
    return process


@pytest.mark.parametrize("milliseconds", [60, 100, 150, 250, 400])
def test_an_early_interrupt_leaves_no_traceback(tmp_path, milliseconds):
    chats = write_chats(tmp_path, [CHAT])
    command = [sys.executable, "-m", "espalier", "prepare", "--model", tmp_path, chats, "-o", tmp_path / "rows.jsonl"]
    process = subprocess.Popen(list(map(str, command)), env=os.environ | {"PYTHONPATH": str(PYTHON_FOLDER)},
                               stderr=subprocess.PIPE, text=True)  # fmt: skip
    time.sleep(milliseconds / 1000)
    process.send_signal(signal.SIGINT)
    assert "espalier/prepare.py" not in process.communicate()[1]


@pytest.mark.parametrize("number, status, words", [
    (signal.SIGINT, 130, "espalier: error: interrupted"),
    (signal.SIGTERM, 143, "espalier: error: stopped by SIGTERM"),
    (signal.SIGHUP, 129, "espalier: error: stopped by SIGHUP")])
def test_signals_end_in_one_line_and_leave_nothing(models, tmp_path, number, status, words):
    process = start(models, tmp_path)
    process.send_signal(number)
    try:
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == status
    assert error.splitlines()[-1] == words and "Traceback" not in error
    assert not list(tmp_path.glob("*rows*")) and not list(tmp_path.glob(".espalier*"))


def test_what_a_killed_run_left_is_removed_by_the_next_once_its_process_has_ended(models, tmp_path):
    running = start(models, tmp_path)
    (left,) = tmp_path.glob(".espalier-*.tmp")
    assert run(models, tmp_path, [CHAT]).returncode == 0
    assert left.exists(), "its process writes it"
    running.kill()
    running.communicate()
    other = tmp_path / ".espalier-notes.tmp"
    other.write_text("mine")
    assert run(models, tmp_path, [CHAT]).returncode == 0
    assert not left.exists() and other.exists()


# ---- Messages -----------------------------------------------------------------------------------------------------


def test_an_error_of_the_program_is_one_line_and_a_traceback_where_asked_for(prepare, monkeypatch, capsys):
    from espalier.chats import prepare as chats

    def broken(*arguments):
        raise TypeError("\x1b[31mwhat\nis this")

    monkeypatch.setattr(chats, "_refuse_useless", broken)
    monkeypatch.delenv("ESPALIER_TRACEBACK", raising=False)
    assert prepare("native", [CHAT]) == (1, None)
    error = capsys.readouterr().err
    assert error.splitlines()[-1] == ("espalier: error: internal error: TypeError: \\x1B[31mwhat is this "
                                      "(ESPALIER_TRACEBACK=1 shows where)")
    assert "Traceback" not in error and "\x1b" not in error
    monkeypatch.setenv("ESPALIER_TRACEBACK", "1")
    assert prepare("native", [CHAT]) == (1, None)
    assert "in broken" in capsys.readouterr().err


def test_names_of_files_do_not_reach_the_terminal_raw(models, tmp_path, capsys):
    chats = tmp_path / "a\x1b[2J\nb.jsonl"
    chats.write_text("{}\n")
    assert main(["--model", str(models["native"]), str(chats), "-o", str(tmp_path / "r.jsonl")]) == 1
    error = capsys.readouterr().err
    assert "\x1b" not in error and "a\\x1B[2J b.jsonl:1: " in error
    with pytest.raises(SystemExit):
        main(["--model", str(models["native"]), str(chats) + "\x1b]0;x\x07", "-o", str(tmp_path / "r.jsonl")])
    error = capsys.readouterr().err
    assert "\x1b" not in error and "\\x1B]0;x\\x07" in error


def test_bytes_of_file_names_that_are_no_text_do_not_reach_the_rows(models, tmp_path):
    chats = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jsonl")
    Path(chats).write_text(json.dumps(CHAT) + "\n")
    out = tmp_path / "rows.jsonl"
    assert main(["--model", str(models["native"]), chats, "-o", str(out)]) == 0
    assert json.loads(out.read_text(encoding="utf-8"))["trajectory_id"] == "\ufffd.jsonl:1"


def run(models, tmp_path, rows, **options):
    chats = write_chats(tmp_path, rows)
    command = [sys.executable, "-m", "espalier", "prepare", "--model", models["native"], chats, "-o", tmp_path / "rows.jsonl"]
    return subprocess.run(list(map(str, command)), env=os.environ | {"PYTHONPATH": str(PYTHON_FOLDER)}, text=True, **options)


def test_a_full_device_behind_stderr_does_not_stop_the_work(models, tmp_path):
    with open("/dev/full", "w") as full:
        assert run(models, tmp_path, [CHAT], stderr=full).returncode == 0
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 1


def test_blank_lines_without_end_are_refused(models, tmp_path, capsys):
    """A few megabytes of gzip can hold billions of them."""
    chats = tmp_path / "chats.jsonl.gz"
    chats.write_bytes(gzip.compress(json.dumps(CHAT).encode() + b"\n" * 1_000_002))
    assert main(["--model", str(models["native"]), str(chats), "-o", str(tmp_path / "rows.jsonl")]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"espalier: error: {chats}:1000002: expected at most 1,000,000 blank lines in a row, received more"
    assert not list(tmp_path.glob("*rows*"))


def test_output_that_cannot_be_written_is_an_error(models, tmp_path):
    done = run(models, tmp_path, [CHAT] * 50, stderr=subprocess.PIPE,
               preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    reason = "File too large (the limit of this process, ulimit -f, is 1000 bytes)"
    assert done.stderr.splitlines()[-1] == f"espalier: error: cannot write {tmp_path / 'rows.jsonl'}: {reason}"
    assert not list(tmp_path.glob("*rows*")) and not list(tmp_path.glob(".espalier*"))


@pytest.mark.parametrize("flags, words", [
    (["--template-args", DEEP], "expected a JSON object"),
    (["--template-timeout", "nan"], "expected seconds from 0 to 1000000, received 'nan'"),
    (["--pre-turn"], "unknown flag --pre-turn of `espalier prepare`; did you mean --per-turn?"),
    (["--model", "some-org/some-model"], "which `hf download some-org/some-model --local-dir some-model` downloads"),
    (["--max-row-bytes", "0"], "expected a size such as 8GiB or 500MB"),
    (["--limit", "9" * 5000], "--limit"),
])  # fmt: skip
def test_wrong_arguments(models, tmp_path, capsys, flags, words):
    with pytest.raises(SystemExit) as stopped:
        main(["--model", str(models["native"]), str(write_chats(tmp_path, [CHAT])), "-o", str(tmp_path / "r.jsonl"), *flags])
    assert stopped.value.code == 2 and words in capsys.readouterr().err
