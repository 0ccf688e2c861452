# SPDX-License-Identifier: Apache-2.0
"""espalier import and export: what is wrong with a file ends in one line, and never in half an output."""

import copy
import gzip
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import zstandard

from espalier.errors import BadRow, InputError
from espalier.io import atif
from espalier.__main__ import run as main
from espalier.io.formats import FORMATS
from espalier.io.parts import Options
from espalier.io.importing import _rows_of
from espalier.io.report import Report
from espalier.io.rules import checked
from espalier.io.sources import records_of
from espalier.rows import lines
from espalier.rows.foreign_files import refuse_folder

PYTHON_FOLDER = Path(__file__).resolve().parents[2] / "python"
ROW = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}
LINE = json.dumps(ROW).encode() + b"\n"


@pytest.fixture
def fails(tmp_path, capsys):
    """Runs `import` on one file; expects status 1, one line with the words, and the old output as it was."""
    def run(data, *words, flags=(), name="data.jsonl"):
        path, output = tmp_path / name, tmp_path / "rows.jsonl"
        path.write_bytes(data)
        output.write_bytes(b"old")
        code = main(["import", str(path), "-o", str(output), *flags])
        error = capsys.readouterr().err
        last = error.splitlines()[-1]
        assert code == 1 and "Traceback" not in error and last.startswith("espalier: error: "), error
        for word in (str(path), "expected", "received", *words):
            assert word in last, error
        assert len(last) < 1000 and output.read_bytes() == b"old"
        assert not list(tmp_path.glob(".*")), "a temporary file was left behind"
        return last
    return run


def test_lines_that_are_no_json(fails):
    fails(LINE + b'{"input_ids": [1, 2\n' + LINE, "data.jsonl:2: field `<line>`: expected one JSON object")
    fails(LINE + LINE[:-5], "data.jsonl:2: ")  # cut
    fails(LINE + b"\xff\n", "data.jsonl:2: field `<line>`: expected UTF-8, received byte 0xff at column 1")
    fails(LINE + b"[1, 2]\n", "data.jsonl:2: ")
    fails(LINE + b'{"input_ids": [1], "input_ids": [2]}\n', "each key once in an object")
    fails(LINE + b'{"input_ids": ' + b"[" * 100_000 + b"\n", "data.jsonl:2: ")
    fails(LINE + b" " * 1000 + LINE,
          "data.jsonl:2: field `<line>`: expected at most 500 bytes (--max-row-bytes), received more",
          flags=["--max-row-bytes", "500"])


def test_documents_of_several_lines(fails, tmp_path):
    text = json.dumps([ROW, ROW | {"reward": 1.0}], indent=1)
    path = tmp_path / "good.json"
    path.write_text(text)
    assert main(["import", str(path), "-o", str(tmp_path / "rows.jsonl")]) == 0
    assert [json.loads(line)
            for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == [ROW, ROW | {"reward": 1.0}]
    fails(text[:-4].encode(),
          "data.json: field `<document>`: expected one JSON object, or a list of them",
          name="data.json")
    twice = text.replace('"loss_mask"', '"input_ids"', 1).encode()
    fails(twice, "data.json: field `input_ids`: expected each key once in an object", name="data.json")
    fails(text.replace("0,", "5,", 1).encode(), "data.json: item 1: field `loss_mask`", name="data.json")
    fails(b"[1, 2]", "data.json:1: ", name="data.json")


def test_bad_rows_can_be_passed_over(tmp_path, capsys):
    path = tmp_path / "data.jsonl"
    path.write_bytes(LINE + b"{\n" + b'{"input_ids": [1], "labels": [5]}\n' + b'{"other": 1}\n' + LINE)
    assert main(["import", str(path), "-o", str(tmp_path / "rows.jsonl"), "--skip-bad-rows"]) == 0
    assert (tmp_path / "rows.jsonl").read_bytes() == (json.dumps(ROW, separators=(",", ":")) + "\n").encode() * 2
    error = capsys.readouterr().err
    assert "3 bad records skipped, the first of them" in error and "data.jsonl:3: field `labels`" in error


def test_bad_rows_at_the_beginning_can_be_passed_over_too(tmp_path, fails):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"{\n" + b'{"other": 1}\n' + LINE)
    assert main(["import", str(path), str(path), "-o", str(tmp_path / "rows.jsonl"), "--skip-bad-rows"]) == 0
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 2  # a file that is named twice is read twice
    fails(b'{"other": 1}\n{"more": 2}\n', "data.jsonl:1: ", "a record with `other`", flags=["--skip-bad-rows"])


def test_files_without_records(fails):
    fails(b"", "expected at least one row, received none")
    fails(b"\n  \n", "expected at least one row, received none")
    fails(b'{"input_ids": [1, 2], "loss_mask": [0, 0]}\n', "expected tokens with loss, received 1 rows without any")
    fails(b'{"input_ids": []}\n',
          "data.jsonl:1: field `input_ids`: expected at least one token, received none")
    fails(b'{"id": "e", "task": {}, "traces": []}\n', "expected at least one row, received none")


def test_what_has_no_format_is_named_by_its_fields(fails):
    fails(b'{"question": 1, "reply": 2}\n', "data.jsonl:1: expected a record of traces, samples, nemo-rl, verl,",
          "received a record with `question`, `reply`: docs/importing.md lists the fields of each format; rename those of the "
          "file, for example with `jq -c '{prompt: .FIELD, completion: .OTHER}' FILE > chats.jsonl`")
    fails(b'{"question": 1}\n',
          "expected a record of slime (with `tokens` and `response_length`)",
          flags=["--from", "slime"])
    fails(b'{"text": "a"}\n', "text (`text`), which has no turns")
    fails(b'{"input": "a", "output": "b", "gts": "c", "score": 1, "step": 2}\n', "trainer.rollout_data_dir",
          "espalier.io.from_verl")
    fails(LINE + b'{"prompt_token_ids": [1], "response_ids": [2]}\n', "data.jsonl:2: ",
          "a record of rows (with `input_ids`) like the first record")


def test_a_record_of_two_formats_needs_from(fails, tmp_path, capsys, models):
    both = json.dumps({**ROW, "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
                       }).encode() + b"\n"
    fails(both, "received one that fits rows (`input_ids`) and messages (`messages`): choose one with --from rows or "
                "--from messages")
    path = tmp_path / "data.jsonl"
    rows = []
    for name in ("rows", "messages"):
        assert main(
            ["import",
             str(path), "--from", name, "-o",
             str(tmp_path / "rows.jsonl"), "--model",
             str(models["native"])]) == 0
        rows.append(json.loads((tmp_path / "rows.jsonl").read_text())["input_ids"])
    assert rows[0] == [1, 2, 3] and len(rows[1]) > 10


def test_files_of_text_and_of_tokens_do_not_mix(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(LINE)
    (tmp_path / "b.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    assert main(["import",
                 str(tmp_path / "a.jsonl"),
                 str(tmp_path / "b.jsonl"), "-o",
                 str(tmp_path / "rows.jsonl")]) == 1
    assert "expected files of token ids or files of text, received both" in capsys.readouterr().err


class Harmful:
    """A pickle of it would make a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_are_never_read(fails, tmp_path, protocol):
    data = pickle.dumps(Harmful(tmp_path / "harm"), protocol)
    for name in ("data.jsonl", "data.pkl", "data.parquet", "data.pt"):
        fails(data, "received a Python pickle", "from_verl", name=name)
    assert not (tmp_path / "harm").exists()
    pickle.loads(data)  # control
    assert (tmp_path / "harm").exists()


def test_archives_of_pytorch_are_never_read(fails, tmp_path):
    import torch

    torch.save({"input_ids": torch.ones(2)}, tmp_path / "made.pt")
    fails((tmp_path / "made.pt").read_bytes(), "received a Python pickle", "espalier.io.write_rows", name="data.pt")
    fails(b"\x92\x01", "token_exports/step_N/rank_R.jsonl", name="rank_0.bin")


CHAT = '{"prompt": "a, x", "completion": "b"}\n'
TABLE = b'prompt,completion\n"a, x",b\n'
FOREIGN = {  # name of a file: what is in it, what the message says, and the text that its command makes
    "chats.csv": (TABLE, "a table (CSV) with the columns `prompt`, `completion`"),
    "chats.txt": (TABLE, "a table (CSV) with the columns `prompt`, `completion`"),
    "bom.csv": (b"\xef\xbb\xbf" + TABLE.replace(b"\n", b"\r\n"), "a table (CSV) with the columns `prompt`, `completion`"),
    "chats.tsv": (b"prompt\tcompletion\na, x\tb\n", "a table (CSV) with the columns `prompt`, `completion`"),
    "semicolons.csv": (b"prompt;completion\na, x;b\n", "a table (CSV) with the columns `prompt`, `completion`"),
    "chats.csv.gz": (gzip.compress(TABLE), "a table (CSV) with the columns `prompt`, `completion`"),
    "a name": (zstandard.compress(TABLE), "a table (CSV) with the columns `prompt`, `completion`"),
    "mark of UTF-16": (CHAT.encode("utf-16"), "UTF-16;"),
    "UTF-16, little": (CHAT.encode("utf-16-le"), "UTF-16LE;"),
    "UTF-16, big": (CHAT.encode("utf-16-be"), "UTF-16BE;"),
    "mark of UTF-32": (CHAT.encode("utf-32"), "UTF-32;"),
    "UTF-32, little": (CHAT.encode("utf-32-le"), "UTF-32LE;"),
    "UTF-32, big": (CHAT.encode("utf-32-be"), "UTF-32BE;"),
    "UTF-16.jsonl.gz": (gzip.compress(CHAT.encode("utf-16")), "UTF-16;"),
    "UTF-16.jsonl.zst": (zstandard.compress(CHAT.encode("utf-16")), "UTF-16;"),
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_tables_and_encodings_are_named_with_a_command_that_works(fails, tmp_path, name):
    pytest.importorskip("pandas")
    data, described = FOREIGN[name]
    message = fails(data, f"received {described}", "try `", name=name)
    command = message.split("try `")[1].removesuffix("`")
    subprocess.run(command.replace("python3", sys.executable, 1), shell=True, check=True, cwd=tmp_path)
    assert json.loads((tmp_path / "chats.jsonl").read_text()) == json.loads(CHAT)


def test_texts_that_are_no_tables(fails):
    for data in (b"Hello, world\nHow, are you\n", b"prompt,completion\n{}\n", b"prompt\na\n", b'"a"\n"b"\n', b"\0a,b\nc,d\n"):
        assert "(CSV)" not in fails(data, "data.txt:1: field `<line>`: expected one JSON object", name="data.txt")
    for name in ("data.csv", "data.csv.jsonl"):  # the content counts
        assert "data.csv" in fails(b'{"a,b": 1}\n', "a record with `a,b`", name=name)


@pytest.mark.parametrize("mode", ["", "gz"])
def test_archives_of_tar_are_named_with_a_command_that_works(fails, tmp_path, mode):
    (tmp_path / "inside.jsonl").write_bytes(LINE)
    with tarfile.open(tmp_path / "made.tar", f"w:{mode}") as archive:
        archive.add(tmp_path / "inside.jsonl", "inside.jsonl")
    (tmp_path / "inside.jsonl").unlink()
    message = fails((tmp_path / "made.tar").read_bytes(), "received a tar archive; unpack it with `tar -xf ", name="data.tar")
    subprocess.run(message.split("`")[1], shell=True, check=True, cwd=tmp_path)
    assert (tmp_path / "inside.jsonl").read_bytes() == LINE


def refused_folder(folder):
    with pytest.raises(InputError) as refused:
        refuse_folder(folder)
    assert str(refused.value).startswith(f"{folder}: expected a file, received a folder")
    return str(refused.value)


def test_folders_of_datasets_are_named_with_a_command_that_works(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([ROW])
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"test": data, "train": data}).save_to_disk(tmp_path / "two splits")
    for folder, splits in (("one", "save_to_disk;"), ("two splits", "save_to_disk with the splits train, test;")):
        message = refused_folder(tmp_path / folder)
        assert splits in message
        command = message.split("`")[1].replace("python3", sys.executable, 1)
        subprocess.run(command, shell=True, check=True, cwd=tmp_path, capture_output=True)
        assert [record for _, record in records_of(tmp_path / "rows.parquet", 1, lambda fraction: None)] == [ROW]
        (tmp_path / "rows.parquet").unlink()


@pytest.mark.parametrize("file, expected", [
    ("a.parquet", "pass its files, as in `espalier import {}/*.parquet -o rows.jsonl`"),
    ("data/a.parquet", "pass its files, as in `espalier import {}/*/*.parquet -o rows.jsonl`"),
    ("a.jsonl.zst", "pass its files, as in `espalier import {}/*.jsonl.zst -o rows.jsonl`"),
    ("a.json", "pass its files, as in `espalier import {}/*.json -o rows.jsonl`"),
    ("config.json", "with a model, which belongs to --model; name files of rows or chats"),
    ("notes.txt", "received a folder without files of rows or chats")])
def test_other_folders_are_named_by_what_is_in_them(tmp_path, file, expected):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    (tmp_path / "README.md").touch()
    assert expected.format(tmp_path) in refused_folder(tmp_path)


def zstd_frame(log):
    """A frame that asks for a window of 2**log bytes (RFC 8878, section 3.1.1), with LINE in it."""
    block = (len(LINE) << 3) | 1
    return b"\x28\xb5\x2f\xfd\0" + bytes([(log - 10) << 3]) + block.to_bytes(3, "little") + LINE


def test_zstd_with_long_windows(tmp_path, fails):
    path, output = tmp_path / "data.jsonl.zst", tmp_path / "rows.jsonl"
    for log in (27, 28, 30):
        path.write_bytes(zstd_frame(10) + zstd_frame(log))
        assert main(["import", str(path), "-o", str(output)]) == 0
        assert len(output.read_bytes().splitlines()) == 2
    parameters = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    with open(path, "wb") as file, zstandard.ZstdCompressor(compression_params=parameters).stream_writer(file) as stream:
        stream.write(LINE)
    assert main(["import", str(path), "-o", str(output)]) == 0
    message = fails(zstd_frame(10) + zstd_frame(31), "of at most 1 GiB (--long=30)", "`zstd -d --long=31 ", name="a b.zst")
    assert "damaged" not in message
    subprocess.run(message.split("`")[1], shell=True, check=True, cwd=tmp_path)
    assert (tmp_path / "a b").read_bytes() == LINE * 2


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_compressed_files_that_end_too_early(fails, compress):
    packed = compress(b"".join(
        json.dumps({**ROW, "trajectory_id": os.urandom(500).hex()}).encode() + b"\n" for _ in range(200)))
    for cut in (len(packed) // 2, len(packed) - 1):
        fails(packed[:cut], "a complete compressed file", name="data.bin2")


def test_damaged_parquet(fails, tmp_path):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist([ROW] * 100), tmp_path / "made.parquet")
    data = (tmp_path / "made.parquet").read_bytes()
    for broken in (data[:-20], data[:100], data[:20] + bytes(60) + data[80:]):
        fails(broken, "a complete Parquet file", name="data.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([ROW, {"input_ids": [1, 2], "loss_mask": [1]}]),
                        tmp_path / "made.parquet")
    fails((tmp_path / "made.parquet").read_bytes(),
          "data.parquet: row 2: field `loss_mask`: expected 2 entries",
          name="data.parquet")


def test_damaged_packed_rows(fails, tmp_path):
    from espalier.io import write_rows

    write_rows([ROW] * 3, tmp_path / "made.safetensors")
    data = (tmp_path / "made.safetensors").read_bytes()
    fails(data[:-3], "packed rows", name="data.safetensors")
    fails(b"abc", "packed rows", name="data.safetensors")
    write_rows([ROW | {"group_id": "ab"}] * 3, tmp_path / "made.safetensors")
    named = (tmp_path / "made.safetensors").read_bytes()
    assert named.count(b"ababab") == 1
    fails(named.replace(b"ababab", b"ab\xffbab"),
          "tensor `group_id`: expected text in UTF-8, received other bytes in row 2", name="data.safetensors")
    shorter = data.replace(b'"shape":[9]', b'"shape":[8]', 1)
    assert shorter != data
    fails(shorter, "data.safetensors", name="data.safetensors")


BAD_ROWS = {
    "both losses": ({**ROW, "loss_weights": [0, 1, 1]}, "expected either loss_mask or loss_weights"),
    "a weight below 0": ({"input_ids": [1, 2], "loss_weights": [0, -1]},
                         "field `loss_weights`: expected finite numbers >= 0, received -1 at index 1"),
    "a mask of twos": ({"input_ids": [1, 2],
                        "loss_mask": [0, 2]}, "field `loss_mask`: expected 0, 1, true or false, received 2 at index 1"),
    "masks that differ": ({**ROW, "response_mask": [0, 1, 0]},
                          "field `response_mask`: expected the same values as the other name of `loss_mask`"),
    "padding between tokens": ({**ROW, "attention_mask": [1, 0, 1]},
                               "field `attention_mask`: expected padding at the ends only, received a 0 at index 1, between "
                               "others"),
    "padding alone": ({**ROW, "attention_mask": [0, 0, 0], "seq_lengths": [2, 1]},
                      "field `input_ids`: expected at least one token, received none"),
    "a mask of other values": ({**ROW, "attention_mask": [1, 1, 2.5]},
                               "field `attention_mask`: expected 0, 1 or numbers of documents, received 2.5 at index 2"),
    "a mask of some tokens": ({**ROW, "attention_mask": [1, 1]}, "field `attention_mask`: expected 3 entries"),
    "documents of other numbers of tokens": ({**ROW, "seq_lengths": [2, 2]},
                                             "field `seq_lengths`: expected the lengths of documents of 3 tokens together, "
                                             "received [2, 2]"),
    "a length below 0": ({**ROW, "seq_lengths": [4, -1]}, "field `seq_lengths`: expected the lengths of documents"),
    "ends that fall": ({**ROW, "cu_seq_lens_q": [0, 2, 1, 3]},
                       "field `cu_seq_lens_q`: expected 0 and the ends of documents of 3 tokens together"),
    "documents that differ": ({**ROW, "seq_lengths": [2, 1], "position_ids": [0, 0, 1]},
                              "field `position_ids`: expected the documents of `seq_lengths`, which begin at [0, 2], received "
                              "others, at [0, 1]"),
    "a document and two": ({**ROW, "seq_lengths": [3], "attention_mask": [1, 2, 2]},
                           "field `seq_lengths`: expected the documents of `attention_mask`"),
    "documents in any order": ({**ROW, "seq_idx": [1, 0, 1]},
                               "field `seq_idx`: expected numbers of documents that rise, received 0 after 1 at index 1"),
    "a reward of two documents": ({**ROW, "seq_lengths": [2, 1], "reward": 1},
                                  "field `reward`: expected rows of one document, since this field cannot be divided: write "
                                  "each document as a row, received 2 documents"),
    "a pair of two documents": ({**ROW, "seq_lengths": [2, 1], "pair_id": 1, "chosen": True},
                                "field `pair_id`: expected rows of one document"),
    "routes of some tokens of documents": ({**ROW, "seq_lengths": [2, 1], "routed_experts": [[1], [2]]},
                                           "field `routed_experts`: expected 3 entries"),
    "a reward that is text": ({**ROW, "reward": "high"}, 'field `reward`: expected a number, received "high"'),
    "an infinite reward": (b'{"input_ids": [1, 2], "reward": Infinity}',
                           "field `reward`: expected a finite number, received inf"),
    "both advantages": ({**ROW, "advantage": 1, "advantages": [1, 1, 1]}, "expected either advantages or advantage"),
    "advantages that are missing": ({**ROW, "advantages": [0, None, 1]},
                                    "field `advantages`: expected numbers (null only for tokens without loss), received null at index 1"),
    "an empty name": ({**ROW, "group_id": ""}, "field `group_id`: expected text that is not empty, received an empty one"),
    "half a surrogate pair": (b'{"input_ids": [1, 2], "group_id": "\\ud800"}', "an unpaired surrogate"),
    "chosen as text": ({**ROW, "chosen": "yes"}, 'field `chosen`: expected true or false, received "yes"'),
    "routes of some tokens": ({**ROW, "routed_experts": [[1], [2]]}, "field `routed_experts`: expected 3 entries"),
    "routes of several widths": ({**ROW, "routed_experts": [[1], [2, 3], [4]]}, "field `routed_experts`: expected 1 experts for every token, received 2 experts at token 1"),
    "ids that are no integers": ({"input_ids": [1, 2.5]},
                                 "field `input_ids`: expected token ids from 0 to 2147483647, received 2.5 at index 1"),
    "ids that are true": ({"input_ids": [1, True]}, "received true at index 1"),
    "ids that are text": ({"input_ids": "12"}, 'field `input_ids`: expected a list, received "12"'),
    "terminal codes": ({"input_ids": ["\x1b[2J"]}, "at index 0"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_rows_that_break_the_rules(fails, name):
    row, expected = BAD_ROWS[name]
    line = row if isinstance(row, bytes) else json.dumps(row).encode()
    last = fails(LINE + line + b"\n", "data.jsonl:2: ", expected)
    assert "\x1b" not in last


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_import_leaves_the_old_output(tmp_path, number, code):
    """The input is a pipe that never ends, so the command is inside of its work when the signal comes."""
    pipe, output = tmp_path / "pipe", tmp_path / "rows.jsonl"
    output.write_bytes(b"old")
    program = ("import pathlib, sys\nfrom espalier.__main__ import run as main\nfrom espalier.io import importing, sources\n"
               "def endless(path, most_bytes, tick):\n"
               "    yield 'first', {'input_ids': [1, 2]}\n"
               "    print('reading', flush=True)\n"
               "    while True:\n        yield 'again', {'input_ids': [1, 2]}\n"
               "importing.records_of = sources.records_of = endless\n"
               "sys.exit(main(['import', sys.argv[1], '-o', sys.argv[2]]))\n")
    pipe.write_bytes(LINE)
    process = subprocess.Popen([sys.executable, "-c", program, pipe, output],
                               stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE,
                               text=True,
                               env=os.environ | {"PYTHONPATH": str(PYTHON_FOLDER)})
    assert process.stdout.readline() == "reading\n"
    process.send_signal(number)
    _, error = process.communicate()
    assert process.returncode == code and error.count("\n") == 1, error
    assert output.read_bytes() == b"old" and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("limit", [10, 1 << 20])
def test_a_file_that_becomes_too_large_is_told_and_leaves_the_old_output(tmp_path, capsys, limit):
    """The second limit is the control."""
    path, output = tmp_path / "data.jsonl", tmp_path / "rows.jsonl"
    path.write_bytes(LINE)
    output.write_bytes(b"old")

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        code = main(["import", str(path), "-o", str(output)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    error = capsys.readouterr().err
    assert code == (limit == 10) and (f"cannot write {output}: File too large" in error) == (limit == 10), error
    assert (output.read_bytes() == b"old") == (limit == 10)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["data.jsonl", "rows.jsonl"]


def test_a_full_disk_is_told_whatever_is_written(small_disk, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"".join(json.dumps({"input_ids": [(7 * row * token) % 9973 for token in range(1000)]}).encode() + b"\n"
                              for row in range(100)))  # fmt: skip
    for name in ("rows.safetensors", "rows.jsonl", "rows.jsonl.gz"):
        command = [sys.executable, "-m", "espalier", "import", path, "-o", tmp_path / "disk" / name]
        failed = subprocess.run([*small_disk, *map(str, command)], capture_output=True, text=True,
                                env=os.environ | {"PYTHONPATH": str(PYTHON_FOLDER)})  # fmt: skip
        last = failed.stderr.splitlines()[-1]
        assert failed.returncode == 1 and last.startswith(f"espalier: error: cannot write {tmp_path / 'disk' / name}: "), failed.stderr
        assert "No space left on device" in last and failed.stdout == "", failed


def test_blank_lines_without_end_are_refused(fails, monkeypatch):
    """A few megabytes of gzip can hold billions of them."""
    assert lines.MOST_BLANK_LINES == 1_000_000
    monkeypatch.setattr(lines, "MOST_BLANK_LINES", 1000)
    for blank in (b"\n", b" \r\n"):
        fails(gzip.compress(LINE + blank * 1001), "data.gz:1002: expected at most 1,000 blank lines in a row", name="data.gz")
    fails(gzip.compress(b"\n" * 1001), "data.gz:1001: ", name="data.gz")


def test_blank_lines_between_rows_are_passed_over(tmp_path):
    path, output = tmp_path / "data.jsonl", tmp_path / "rows.jsonl"
    path.write_bytes(LINE + b"\n" * 1_000_000 + LINE + b"\n" * 10)
    assert main(["import", str(path), "-o", str(output)]) == 0
    assert len(output.read_bytes().splitlines()) == 2


@pytest.mark.parametrize("words, expected", [
    (["import"], "the following arguments are required"),
    (["import", "gone.jsonl", "-o", "rows.jsonl"], "expected a file, received gone.jsonl"),
    (["import", __file__, "-o", "rows.csv"
      ], "expected a name in .jsonl, .jsonl.gz, .jsonl.zst or .safetensors, received rows.csv"),
    (["import", __file__, "-o", "rows.jsonl", "--from", "csv"], "invalid choice: 'csv'"),
    (["import", __file__, "-o", "rows.jsonl", "--form", "verl"
      ], "unknown flag --form of `espalier import`; did you mean --from?"),
    (["import", __file__, "-o", "rows.jsonl", "--model", "org/name"], "hf download org/name"),
    (["export", __file__, "-o", "rows.jsonl", "--to", "parquet"], "expected a name in .parquet, received rows.jsonl"),
    (["export", __file__, "-o", "rows.jsonl"], "the following arguments are required: --to")
])
def test_wrong_arguments(capsys, words, expected):
    with pytest.raises(SystemExit) as raised:
        main(words)
    assert raised.value.code == 2 and expected in capsys.readouterr().err


RECORDS = {
    "traces": {"id": "e", "group": {"id": "g"}, "task": {"type": "T", "data": {}, "hash": "h"}, "ok": True, "traces": [
        {"version": 1, "id": "t", "ok": True, "agent": {"config": {}, "trainable": True}, "info": {"espalier": {}},
         "mm_token_type_id_map": {"9": 1}, "rewards": {"r": {"score": 1.0, "weight": 2.0}}, "nodes": [
            {"token_ids": [1, 2], "mask": [False, False], "semantic_parents": [{"node": 1, "type": "x"}]},
            {"parent": 0, "sampled": True, "token_ids": [3, 4], "mask": [False, True], "logprobs": [-0.5],
             "advantages": [1.0], "reference_logprobs": [-2.0], "loss_weights": {"rl": [0.0, 2.0]}}]}]},
    "samples": {"token_ids": [1, 2], "mask": [False, True], "logprobs": [0.0, -1.0], "temperatures": [1.0, 1.0],
                "advantages": [0.0, 1.0], "rl_weights": [1.0, 0.5], "routed_experts": [[[0, 1]], [[2, 3]]]},
    "nemo-rl": {"token_ids": [[1, 2, 0]], "input_lengths": [2], "token_loss_mask": [[0, 1, 0]], "sample_loss_mask": [0.5],
                "generation_logprobs": [[0.0, -1.0, 0.0]], "advantages": [[0.0, 1.0, 0.0]], "rewards": [1.0], "idx": 0},
    "verl": {"prompts": [[0, 1]], "responses": [[2, 3]], "attention_mask": [[0, 1, 1, 1]], "response_mask": [[1, 1]],
             "rollout_log_probs": [[-1.0, -2.0]], "rm_scores": [[0.0, 1.0]], "uid": ["u"],
             "routed_experts": [[[[0, 0]], [[1, 2]], [[1, 2]], [[0, 0]]]]},
    "skyrl": {"prompt_token_ids": [[1]], "response_ids": [[2]], "loss_masks": [[1]], "rewards": [[1.0]],
              "rollout_logprobs": [[-1.0]], "trajectory_ids": [{"instance_id": "a", "repetition_id": 0}],
              "is_last_step": [True]},
    "areal": {"input_ids": [[1, 2]], "loss_mask": [[0, 1]], "versions": [[0, 0]], "attention_mask": [[1, 1]],
              "logprobs": [[0.0, -1.0]], "rewards": [1.0]},
    "slime": {"tokens": [1, 2], "response_length": 1, "loss_mask": [1], "rollout_log_probs": [-1.0], "reward": 1.0,
              "rollout_routed_experts": [[[0, 1]]]},
    "tinker": {"model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}, "loss_fn_inputs": {
        "target_tokens": {"data": [2, 3]}, "weights": {"data": [0.0, 1.0]}, "logprobs": {"data": [0.0, -1.0]}}},
    "trl": {"prompt_ids": [1], "completion_ids": [2], "completion_mask": [1], "logprobs": [-1.0], "advantages": 1.0},
    "atif": {"schema_version": "ATIF-v1.7", "session_id": "s", "steps": [
        {"source": "agent", "metrics": {"prompt_token_ids": [1], "completion_token_ids": [2], "logprobs": [-1.0]}}]},
    "rows": {**ROW, "logprobs": [None, -1.0, -2.0], "labels": [-100, 2, 3], "reward": 1, "routed_experts": [[0]] * 3,
             "attention_mask": [1, 1, 1], "position_ids": [0, 1, 2], "seq_lengths": [3], "cu_seqlens": [0, 3],
             "seq_idx": [0, 0, 0]}}
JUNK = [None, True, 0, -1, 2**40, 1.5, -0.5, float("nan"), 10**400, "", "a", "\ud800", [], [None], [[1]], {}, {"a": 1}]


def places(value, path=()):
    """The paths to everything in a record."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


@pytest.mark.parametrize("name", RECORDS)
def test_whatever_stands_in_a_field_gives_sound_rows_or_a_bad_row(name):
    """Every field, and every entry of every list, is replaced by everything that may stand in JSON, and taken away."""
    kind, refused = FORMATS[name], 0

    def attempt(record):
        report = Report()
        rows = _rows_of("here", record, kind, Options(), True, report)
        assert bool(rows) != bool(report.bad_records) or not rows
        assert all(checked(copy.deepcopy(row)) == row for row in rows)
        return report.bad_records

    assert attempt(RECORDS[name]) == 0
    for path in list(places(RECORDS[name])):
        for junk in [*JUNK, KeyError]:
            record = copy.deepcopy(RECORDS[name])
            holder = record
            for key in path[:-1]:
                holder = holder[key]
            if junk is KeyError:
                del holder[path[-1]]
            else:
                holder[path[-1]] = junk
            refused += attempt(record)
    assert refused > 20


TRAJECTORY = {
    "schema_version": "ATIF-v1.7", "session_id": "s", "agent": {"tool_definitions": [{"type": "function"}]}, "steps": [
        {"source": "user", "message": [{"type": "text", "text": "a"}]},
        {"source": "agent", "message": "b", "reasoning_content": "c", "is_copied_context": False, "llm_call_count": 1,
         "tool_calls": [{"tool_call_id": "i", "function_name": "f", "arguments": {}}],
         "observation": {"results": [{"source_call_id": "i", "content": "d"}]}}]}  # fmt: skip


def test_whatever_stands_in_a_trajectory_of_text_gives_a_chat_or_a_bad_row():
    refused = 0
    for path in list(places(TRAJECTORY)):
        for junk in JUNK:
            record = copy.deepcopy(TRAJECTORY)
            holder = record
            for key in path[:-1]:
                holder = holder[key]
            holder[path[-1]] = junk
            atif.has_token_ids(record)
            try:
                assert isinstance(atif.chat_of(record)["messages"], list)
            except BadRow:
                refused += 1
    assert refused > 100


@pytest.mark.parametrize("step, expected", [
    ("text", 'field `steps[0]`: expected an object, received "text"'),
    ({"source": "judge"}, 'field `steps[0].source`: expected system, user or agent, received "judge"'),
    ({"source": "agent", "message": 5}, "field `steps[0].message`: expected a text, null or a list of parts, received 5"),
    ({"source": "agent", "tool_calls": "x"}, 'field `steps[0].tool_calls`: expected a list of objects, received "x"'),
    ({"source": "agent", "tool_calls": [{"function_name": "f", "arguments": 1}]},
     "field `steps[0].tool_calls[0].arguments`: expected an object, received 1"),
    ({"source": "agent", "observation": []}, "field `steps[0].observation`: expected an object, received []"),
    ({"source": "agent", "observation": {"results": ["x"]}},
     'field `steps[0].observation.results[0]`: expected an object, received "x"'),
    ({"source": "agent", "observation": {"results": [{"content": {}}]}},
     "field `steps[0].observation.results[0].content`: expected a text, null or a list of parts, received {}"),
    ({"source": "agent", "is_copied_context": "no"},
     'field `steps[0].is_copied_context`: expected true or false, received "no"')])
def test_what_is_wrong_with_a_trajectory_of_text_is_named(fails, models, tmp_path, step, expected):
    record = json.dumps({**TRAJECTORY, "steps": [step]}).encode() + b"\n"
    fails(record, f"data.jsonl:1: {expected}", flags=["--model", str(models["native"])])
    path = tmp_path / "both.jsonl"
    path.write_bytes(json.dumps(TRAJECTORY).encode() + b"\n" + record)
    flags = ["--model", str(models["native"]), "--skip-bad-rows"]
    assert main(["import", str(path), "-o", str(tmp_path / "rows.jsonl"), *flags]) == 0
