# SPDX-License-Identifier: Apache-2.0
"""What `inspect` says of rows, as text, as JSON and as a page."""

import base64
import html
import json
import re
from html.parser import HTMLParser

import pytest

from conftest import REPOSITORY, seed_of
from espalier.page.messages import Message
from espalier.page.text import html as page_html
from espalier.page.text import messages_html, visible
from espalier.printed.figures import gains_text

CHAT = "<|im_start|>user\nWhere is my parcel? </script><b>&amp;</b><|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory, espalier):
    folder = tmp_path_factory.mktemp("inspect") / "model"
    config = REPOSITORY / "examples/tiny_llama.json"
    espalier("init", "--config", config, "--out", folder, "--seed", seed_of(1), "--tokenizer", "bytes")
    return folder


def encode(text):
    """Ids of the byte-level tokenizer that `init` writes."""
    special = {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258}
    parts = re.split(r"(<\|\w+\|>)", text)
    return [i for part in parts for i in ([special[part]] if part in special else part.encode())]


def row(name, group, *parts):
    """Parts are texts without and with loss by turns."""
    ids = [encode(part) for part in parts]
    mask = [k % 2 for k, part in enumerate(ids) for _ in part]
    return {"trajectory_id": name, "group_id": group, "input_ids": sum(ids, []), "loss_mask": mask}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rows = [
        row("turn-0 </script>", "a", CHAT, "<think>\nHm.\n</think>\n\nIt is in Zürich.<|im_end|>"),
        row("turn-1", "a", CHAT + "It is in Zürich.<|im_end|>\n<|im_start|>user\nThanks<|im_end|>\n", "Bye<|im_end|>"),
        row("other", "a", CHAT, "I do not know.<|im_end|>"),
        row("other", "a", CHAT, "I do not know.<|im_end|>"),
    ]
    path = tmp_path_factory.mktemp("inspect") / "rows <b>.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


class Page(HTMLParser):
    """Checks nesting, and collects scripts and everything that could load something."""

    EMPTY = frozenset({"meta", "br", "link", "img", "input", "base"})

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.loads, self.scripts, self.shown, self.nodes = [], [], [], "", []
        self.feed(text)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attributes):
        if tag not in self.EMPTY:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append((dict(attributes), ""))
        self.nodes += [int(value) for name, value in attributes if name == "data-node"]
        self.loads += [value for name, value in attributes if name in {"src", "href", "srcset", "action", "poster"}]

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> inside {self.open}"
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)
        elif "style" not in self.open:
            self.shown += data

    def data(self):
        found = [text for attributes, text in self.scripts if attributes.get("id") == "data"]
        assert len(found) == 1
        return json.loads(found[0])


def inspect(espalier, tmp_path, *arguments):
    """The report of --json, and the page."""
    out = tmp_path / "page.html"
    report = json.loads(espalier("inspect", *arguments, "--json", "--html", out).stdout)
    return report, out.read_text(encoding="utf-8")


def numbers(text):
    values, value, shift = [], 0, 0
    for byte in base64.b64decode(text, validate=True):
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            values.append(value)
            value, shift = 0, 0
    assert shift == 0
    return values


def nodes_of(rows):
    """Nodes of the prefix trees in preorder, found by comparing rows: (depth, size, multiplicity, ends, trained)."""
    found = []

    def visit(rows, begin, depth):
        # rows share their first `begin` tokens and the next one.
        end = begin + 1
        while all(len(r["input_ids"]) > end for r in rows) and len({r["input_ids"][end] for r in rows}) == 1:
            end += 1
        trained = sum(any(r["loss_mask"][i] for r in rows) for i in range(begin, end))
        ends = sum(len(r["input_ids"]) == end for r in rows)
        found.append((depth, end - begin, len(rows), ends, trained))
        branch([r for r in rows if len(r["input_ids"]) > end], end, depth + 1)

    def branch(rows, begin, depth):
        firsts = dict.fromkeys(r["input_ids"][begin] for r in rows)
        for first in firsts:
            visit([r for r in rows if r["input_ids"][begin] == first], begin, depth)

    branch(rows, 0, 0)
    return found


def tree_of(page):
    tree = page.data()["tree"]
    columns = {name: numbers(text) for name, text in tree["columns"].items()}
    assert {len(column) for column in columns.values()} == {tree["nodes"]}
    depths, depth = [], -1
    for up in columns["up"]:
        depth = depth + 1 - up
        depths.append(depth)
    rows = zip(depths, columns["size"], columns["multiplicity"], columns["ends"], columns["trained"], strict=True)
    return tree, list(rows), columns["hidden"]


def test_the_page_holds_the_report_and_the_trees(espalier, model, data, tmp_path):
    report, text = inspect(espalier, tmp_path, "--data", data, "--model", model)
    page = Page(text)
    assert page.data()["report"] == report and page.data()["file"] == data.name
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    tree, nodes, hidden = tree_of(page)
    assert nodes == nodes_of(rows) and set(hidden) == {0} and tree["of"] == len(nodes) == report["nodes"]
    assert ["turn-0 </script>"] in tree["names"] and ["other", "other"] in tree["names"]
    # Control: other rows give other nodes.
    rows[0]["input_ids"][-1] += 1
    rows[3]["input_ids"][-1] += 1
    assert nodes != nodes_of(rows)


def test_the_page_loads_nothing_and_escapes_all_text(espalier, model, data, tmp_path):
    _, text = inspect(espalier, tmp_path, "--data", data, "--model", model)
    page = Page(text)
    assert page.loads == [] and len(page.scripts) == 2
    assert not re.search(r"https?://|@import|url\(|<link|\bfetch\(|XMLHttpRequest|WebSocket|innerHTML", text)
    assert "default-src 'none'" in text
    # The data has a script end tag; the page has those of its two scripts.
    assert "</script>" in json.dumps(page.data()) and text.count("</script") == 2
    assert "prefers-color-scheme" in text and "{{" not in text.split('id="data"')[0]
    # Control: without escaping the page would not hold together.
    broken = text.replace("\\u003c", "<")
    with pytest.raises((AssertionError, ValueError)):
        Page(broken).data()


def messages_of(tree, node):
    """(role, text, whether it ends) of each message of a node."""
    parts = tree["texts"][node]
    return [(tree["roles"][role], text, bool(ends)) for role, text, ends in zip(parts[::3], parts[1::3], parts[2::3], strict=True)]


def test_texts_are_whole_and_have_roles_instead_of_markers(espalier, model, data, tmp_path):
    _, text = inspect(espalier, tmp_path, "--data", data, "--model", model)
    page = Page(text)
    tree, _nodes, _ = tree_of(page)
    columns = {name: numbers(column) for name, column in tree["columns"].items()}
    assert columns["shown"] == columns["size"]
    assert messages_of(tree, 0) == [("user", "Where is my parcel? </script><b>&amp;</b>", True), ("assistant", "", False)]
    said = [message for node in range(tree["nodes"]) for message in messages_of(tree, node)]
    assert ("user", "Thanks", True) in said and not any("<|" in text for _, text, _ in said)
    # Who speaks each token: the spans of a node add up to it.
    roles, sizes = (numbers(tree["span_columns"][name]) for name in ("role", "size"))
    assert sum(columns["spans"]) == len(roles) == len(sizes) == tree["num_spans"]
    at = 0
    for spans, size in zip(columns["spans"], columns["size"], strict=True):
        assert sum(sizes[at : at + spans]) == size
        at += spans
    opening = len(encode("<|im_start|>assistant\n"))
    assert [tree["roles"][role] for role in roles[:2]] == ["user", "assistant"] and sizes[1] == opening
    # Control: without a tokenizer there is neither.
    tree = Page(inspect(espalier, tmp_path, "--data", data)[1]).data()["tree"]
    assert tree["num_spans"] == 0 and not any(tree["texts"])


def test_lost_tokens_are_marked_and_linked(espalier, model, data, tmp_path):
    report, text = inspect(espalier, tmp_path, "--data", data, "--model", model)
    page = Page(text)
    tree, nodes, _ = tree_of(page)
    columns = {name: numbers(column) for name, column in tree["columns"].items()}
    assert sum(columns["lost"]) == report["sharing"]["lost_tokens"] > 0
    parted = [node for node, cause in enumerate(columns["cause"]) if cause]
    assert len(parted) == 1 and tree["causes"][columns["cause"][parted[0]] - 1] == "stripped_thinking"
    branches = {parted[0], columns["other"][parted[0]] - 1}
    # Both stand below the prompt, and the example has a link to each.
    assert len(branches) == 2 and all(nodes[node][0] == nodes[0][0] + 1 for node in branches)
    assert branches <= set(page.nodes)
    begin, size = columns["lost_begin"][parted[0]], columns["lost"][parted[0]]
    assert 0 <= begin < begin + size <= nodes[parted[0]][1]


def test_what_needs_no_script_stands_in_the_html(espalier, model, data, tmp_path):
    report, text = inspect(espalier, tmp_path, "--data", data, "--model", model)
    shown = Page(text).shown
    packing, merging = (f"{report[f'predicted_speedup_over_{over}']:.2f}\u00d7" for over in ("sequence_packing", "append_only"))
    assert 0 <= shown.find(packing) < shown.find(f"{report['tree_tokens']:,}") and merging in shown
    verdict = report["verdict"]["text"]
    assert verdict[1:] in shown and report["verdict"]["advice"] in shown
    for words in ["Cached-token ratio", "Flat tokens over tree tokens", "stripped thinking", "It is in Zürich.", "<think>"]:
        assert words in shown, words
    # Control: these are not words of the data element.
    assert '"verdict"' not in shown


@pytest.mark.parametrize("mark", list("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c\u200b"))
def test_what_cannot_be_seen_is_written_out(espalier, model, tmp_path, mark):
    prompt = CHAT.replace("parcel", f"par{mark}cel")
    rows = [row(f"a{mark}b", "g", prompt, "<think>\nHm\n</think>\n\nIt is here, as you see.<|im_end|>"),
            row("c", "g", prompt + "It is here, as you see.<|im_end|>\n<|im_start|>user\n", f"Bye{mark}<|im_end|>")]  # fmt: skip
    path = tmp_path / f"rows{mark}.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    page = Page(inspect(espalier, tmp_path, "--data", path, "--model", model)[1])
    written = f"\\u{ord(mark):04X}"
    assert mark not in page.shown and f"a{written}b" in page.shown and f"rows{written}.jsonl" in page.shown
    tree = page.data()["tree"]
    assert mark not in json.dumps([tree["texts"], tree["names"]], ensure_ascii=False)
    assert any(f"par{written}cel" in text for _, text, _ in messages_of(tree, 0))


@pytest.mark.parametrize("lost, words", [(1, "1 equal token follows"), (4, "4 equal tokens follow")])
def test_one_thing_is_said_in_the_singular(espalier, model, tmp_path, lost, words):
    answer = "abcd"[:lost]
    rows = [row("a", "g", CHAT, "<think>\nHm\n</think>\n\n" + answer), row("b", "g", CHAT + answer, "<|im_end|>")]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    report, text = inspect(espalier, tmp_path, "--data", path, "--model", model)
    assert report["sharing"]["lost_tokens"] == lost
    for output in (Page(text).shown, espalier("inspect", "--data", path, "--model", model).stdout):
        assert words in output and not re.search(r"\b1 (equal )?(tokens|places|trajectories|nodes|trees)\b", output)


def test_long_names_are_cut_between_characters(espalier, tmp_path):
    names = ["a" * 120, "a" * 119 + "é", "é" * 60 + "x", "a\u202e" * 100]
    rows = [{"input_ids": [1, 2], "trajectory_id": name} for name in names]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = [names[0], "a" * 119 + "…", "é" * 60 + "…", "a\\u202E" * 30 + "…"]
    assert Page(inspect(espalier, tmp_path, "--data", path)[1]).data()["tree"]["names"] == [shown]


def test_text_of_pages_is_escaped():
    for mark in "\u202a\u202e\u2066\u2069\u200e\u200f\u061c\u200b\u00ad\u3164\u2028\ufeff\x1b\x7f\x9b\U000e0041":
        assert visible(f"a{mark}b") in {f"a\\x{ord(mark):02X}b", f"a\\u{ord(mark):04X}b", f"a\\U{ord(mark):08X}b"}
    assert visible("a\tb\nc\r\x01") == "a\tb\nc\\r\\x01" and visible("\t") == "\t"
    assert visible("\u05e9\u05dc \u0645 café \u200d\u200c") == "\u05e9\u05dc \u0645 café \u200d\u200c", "letters and joiners stay"
    assert html.unescape(escaped := page_html("<a href='x' b=\"y\">&\u202e")) == "<a href='x' b=\"y\">&\\u202E"
    assert not set("<>\"'") & set(escaped)
    said = messages_html([Message("user", "<script>", begins=True), Message("user", "on", ends=True),
                          Message("unknown", "x", begins=True)])  # fmt: skip
    assert "<script" not in said and said.count('<b class="role">user</b>') == 1, "a label stands where a message begins"
    assert said.count('class="end"') == 1 and "unknown</b>" not in said


def causes(report):
    return {cause["cause"]: cause for cause in report["sharing"]["causes"]}


def test_lost_sharing_is_named_with_its_text(espalier, model, data, tmp_path):
    report, _ = inspect(espalier, tmp_path, "--data", data, "--model", model)
    thought = causes(report)["stripped_thinking"]
    assert thought["lost"] and thought["places"] == 1
    assert thought["tokens"] == len(encode("It is in Zürich.<|im_end|>")) == report["sharing"]["lost_tokens"]
    example = thought["examples"][0]
    assert {example["left"], example["right"]} == {"", "<think>\nHm.\n</think>\n\n"}
    assert example["role"] == "assistant" and example["position"] == len(encode(CHAT))
    assert CHAT.endswith(example["before"]) and example["left_after"].startswith("It is")
    assert {example["left_token"]["id"], example["right_token"]["id"]} == {ord("<"), ord("I")}
    assert "thoughts" in report["verdict"]["advice"]
    text = espalier("inspect", "--data", data, "--model", model).stdout
    for words in ["verdict: ", "over sequence packing", "over append-only merging", "positions", "stripped thinking",
                  "<think>", report["verdict"]["advice"]]:  # fmt: skip
        assert words in text, words
    # Control: without the tokenizer there is no such cause.
    assert "stripped_thinking" not in causes(inspect(espalier, tmp_path, "--data", data)[0])


def test_sharing_by_depth_adds_up(espalier, data, tmp_path):
    report, _ = inspect(espalier, tmp_path, "--data", data)
    buckets = report["sharing_by_depth"]
    assert sum(b["tree_tokens"] for b in buckets) == report["tree_tokens"]
    assert sum(b["flat_tokens"] for b in buckets) == report["flat_tokens"]
    assert buckets[0]["reused"] == pytest.approx(0.75) and buckets[0]["mean_multiplicity"] == 4
    assert buckets[-1]["end"] == report["depth_tokens"]


@pytest.mark.parametrize("ids, words", [
    ([[1, 2, 3], [4, 5, 6]], "trees do not help"),
    ([[1, 2, 3], [1, 2, 3, 4, 5, 6], [1, 2]], "trees help only if"),
    ([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]], "train on trees"),
])  # fmt: skip
def test_verdicts(espalier, tmp_path, ids, words):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in ids))
    report, _ = inspect(espalier, tmp_path, "--data", data)
    assert report["verdict"]["text"].startswith(words)
    assert report["verdict"]["worth_it"] == (words == "train on trees")


def test_large_forests_keep_the_largest_subtrees(espalier, tmp_path):
    data = tmp_path / "rows.safetensors"
    espalier("synth", "-o", data, "--trees", 60, "--depth", 5, "--branching", 8, "--node-length", 3, "--seed", seed_of(2))
    report, text = inspect(espalier, tmp_path, "--data", data)
    tree, nodes, hidden = tree_of(Page(text))
    assert tree["of"] == report["nodes"] > tree["nodes"] == 200_000
    assert sum(size for _, size, *_ in nodes) + sum(hidden) == report["tree_tokens"]
    assert sum(multiplicity for depth, _, multiplicity, *_ in nodes if depth == 0) == report["trajectories"]


def test_the_text_names_the_unit_of_the_gains(espalier, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"input_ids": [1, 2]}\n{"input_ids": [1, 3]}\n')
    assert "at most (in tokens; --model gives FLOPs)\n" in espalier("inspect", "--data", data).stdout
    report = {"predicted_speedup_over_sequence_packing": 10.5, "predicted_speedup_over_append_only": 1.21}
    for counts, has_model, unit in [("FLOPs", True, "FLOPs"), ("tokens", True, "tokens")]:
        title, leading, other = gains_text(report | {"prediction_counts": counts}, has_model=has_model).splitlines()
        assert title == f"predicted speed-up, at most (in {unit})"
        assert leading.startswith("      1.21x over append-only") and other.startswith("     10.50x over sequence packing")


def test_a_failing_run_leaves_the_page_that_was_there(espalier, tmp_path):
    out, data = tmp_path / "page.html", tmp_path / "rows.jsonl"
    out.write_text("precious")
    data.write_text("not json\n")
    assert espalier("inspect", "--data", data, "--html", out, check=False).returncode == 1
    assert out.read_text() == "precious"
    data.write_text('{"input_ids": [1, 2]}\n')
    failed = espalier("inspect", "--data", data, "--html", tmp_path / "no/such/page.html", check=False)
    read, error = failed.stderr.splitlines()
    assert failed.returncode == 1 and read.startswith(f"{data}: 1 trajectory") and "no/such" in error
