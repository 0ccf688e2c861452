# SPDX-License-Identifier: Apache-2.0
"""What `inspect` says of times, counters and ids in prompts, of files with hardly anything in them, and of hostile text."""

import html
import json
import math
import re
import shutil
import subprocess

import pytest

from test_inspect import causes, encode, inspect, model, row  # noqa: F401 (model is a fixture)

POLICY = "You are a clerk of a parcel service. Answer in one sentence, and never promise a day. " * 6


def agents(heads, per_group=3, with_groups=True):
    """Three tasks with answers; heads: the text that the system prompt begins with, of row k."""
    rows = []
    for task, words in enumerate(["Where is my parcel?", "The box arrived broken, what now?", "Change my address."]):
        for answer in range(per_group):
            prompt = (f"<|im_start|>system\n{heads(task, answer)}\n{POLICY}<|im_end|>\n<|im_start|>user\n{words}<|im_end|>\n"
                      "<|im_start|>assistant\n")
            made = row(f"{task}/{answer}", f"task-{task}", prompt, f"Answer {'abc'[answer]}<|im_end|>")
            if not with_groups:
                del made["group_id"]
            rows.append(made)
    return rows


def write(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


HEADS = {
    "time": ("timestamp", lambda task, answer: f"The time is 2024-05-1{task} 15:{task}{answer}:07 EST."),
    "counter": ("timestamp", lambda task, answer: f"Call number {1000 + 37 * task + 11 * answer}."),
    "request id": ("identifier", lambda task, answer: f"Request req_{hash_of(task, answer)[:10]}."),
    "uuid": ("identifier", lambda task, answer: "Session {}-{}-{}-{}-{}.".format(
        *[hash_of(task, answer)[b:e] for b, e in [(0, 8), (8, 12), (12, 16), (16, 20), (20, 32)]])),
}


def hash_of(*parts):
    import hashlib

    return hashlib.md5(repr(parts).encode()).hexdigest()


@pytest.mark.parametrize("name", HEADS)
def test_what_changes_in_a_prompt_is_named_whether_there_are_groups_or_not(espalier, model, tmp_path, name):
    cause, head = HEADS[name]
    with_groups = write(tmp_path / "groups.jsonl", agents(head))
    without = write(tmp_path / "plain.jsonl", agents(head, with_groups=False))
    report, _ = inspect(espalier, tmp_path, "--data", with_groups, "--model", model)
    plain, _ = inspect(espalier, tmp_path, "--data", without, "--model", model)
    policy = len(encode(POLICY))
    sharing = report["sharing"]
    assert sharing["lost_tokens"] == plain["sharing"]["lost_tokens"] >= 8 * policy
    assert "other_group" not in causes(report)
    found = causes(report)[cause]
    assert found["lost"] and found["tokens"] >= 6 * policy and found["remedy"]
    # One row of each of two tasks finds its like in another group only; the others in their own.
    assert 2 * policy <= sharing["lost_tokens_between_groups"] <= 2.2 * policy
    assert len(found["values"]) >= 2 and all(any(c.isdigit() for c in value) for value in found["values"])
    advice = report["verdict"]["advice"]
    assert "between groups" in advice and found["values"][0] in advice
    text = espalier("inspect", "--data", with_groups, "--model", model).stdout
    assert f'such as "{found["values"][0]}"' in text and "to share: " in text and "between groups" in text
    # What would be saved is saved: the same rows with one head for all.
    equal = write(tmp_path / "equal.jsonl", agents(lambda task, answer: head(0, 0)))
    better, _ = inspect(espalier, tmp_path, "--data", equal, "--model", model)
    assert better["sharing"]["lost_tokens"] == 0 and causes(better)["other_group"]["divergences"] == 2
    saved = report["tree_tokens"] - better["tree_tokens"]
    assert 0 <= saved - sharing["lost_tokens"] <= 8 * len(head(0, 0)), "the heads themselves are saved, too"
    assert report["cached_token_ratio"] < sharing["cached_token_ratio_without_losses"] <= better["cached_token_ratio"]


def test_one_time_for_a_group_is_lost_between_groups_only(espalier, model, tmp_path):
    data = write(tmp_path / "rows.jsonl", agents(lambda task, answer: f"The time is 15:{task}7."))
    sharing = inspect(espalier, tmp_path, "--data", data, "--model", model)[0]["sharing"]
    assert sharing["lost_tokens_between_groups"] == sharing["lost_tokens"] >= 2 * len(encode(POLICY))


def test_other_tasks_are_not_called_lost(espalier, model, tmp_path):
    rows = [row(f"{a}+{b}/{k}", f"{a}+{b}", f"<|im_start|>user\nWhat is {a} + {b}?<|im_end|>\n<|im_start|>assistant\n",
                f"It is {'xyz'[k]}.<|im_end|>") for a, b in [(12, 7), (35, 9), (48, 3)] for k in range(3)]
    report, _ = inspect(espalier, tmp_path, "--data", write(tmp_path / "rows.jsonl", rows), "--model", model)
    assert report["sharing"]["lost_tokens"] == 0 and causes(report)["other_group"]["divergences"] == 2


# ---- Files with hardly anything in them ---------------------------------------------------------------------------

DEGENERATE = {
    "one token": [{"input_ids": [5]}],
    "two tokens": [{"input_ids": [5, 6]}],
    "one token, many times": [{"input_ids": [5]}] * 7,
    "rows of one token": [{"input_ids": [k]} for k in range(5)],
    "one token and a longer row": [{"input_ids": [5]}, {"input_ids": [5, 6, 7]}],
    "no loss": [{"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}, {"input_ids": [1, 2, 4], "loss_mask": [0, 0, 0]}],
    "loss on a first token only": [{"input_ids": [1, 2, 3], "loss_mask": [1, 0, 0]}],
    "all rows equal": [{"input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1]}] * 6,
    "empty group": [{"input_ids": [1, 2, k], "group_id": ""} for k in range(3)],
    "some rows without a group": [{"input_ids": [1, 2, 3], "group_id": "a"}, {"input_ids": [1, 2, 4]},
                                  {"input_ids": [9]}, {"input_ids": [9], "group_id": "a"}],
}  # fmt: skip


def numbers_of(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for entry in value for number in numbers_of(entry)]
    return [value] if isinstance(value, (int, float)) and not isinstance(value, bool) else []


def nulls_of(value, path=""):
    if isinstance(value, dict):
        return [found for key, entry in value.items() for found in nulls_of(entry, f"{path}.{key}")]
    if isinstance(value, list):
        return [found for entry in value for found in nulls_of(entry, path)]
    return [path] if value is None else []


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def opened(page, tmp_path, width=1200):
    """The document of a page after its scripts have run in a browser."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", "--dump-dom",
               f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.parametrize("with_model", [True, False], ids=["model", "ids"])
@pytest.mark.parametrize("name", DEGENERATE)
def test_files_with_hardly_anything_in_them(espalier, model, tmp_path, name, with_model):
    data = write(tmp_path / "rows.jsonl", DEGENERATE[name])
    flags = ["--data", data, *(["--model", model] if with_model else [])]
    report, _ = inspect(espalier, tmp_path, *flags)
    assert all(math.isfinite(number) for number in numbers_of(report))
    # JSON has null where a number is not finite; a side of an example may have no token.
    assert [path for path in nulls_of(report) if not path.endswith("_token")] == []
    for over in ("sequence_packing", "append_only"):
        assert 1 <= report[f"predicted_speedup_over_{over}"] <= len(DEGENERATE[name])
    text = espalier("inspect", *flags).stdout
    assert "verdict: " in text and not re.search(r"\b(inf|nan)", text, re.IGNORECASE)
    for printed in (text, espalier("plan", *flags).stdout):
        assert "x over append-only merging" in printed


@pytest.mark.skipif(BROWSER is None, reason="no browser on this machine")
@pytest.mark.parametrize("name", ["one token", "all rows equal", "no loss"])
def test_their_pages_open_without_errors(espalier, model, tmp_path, name):
    data = write(tmp_path / "rows.jsonl", DEGENERATE[name])
    inspect(espalier, tmp_path, "--data", data, "--model", model)
    page = tmp_path / "page.html"
    document = opened(page, tmp_path)
    assert "data-ready=" in document and "over sequence packing" in document and "Tree tokens" in document
    # Control: a page whose script fails is seen to.
    broken = page.read_text(encoding="utf-8").replace('"columns":', '"no_columns":', 1)
    page.write_text(broken, encoding="utf-8")
    assert "data-ready=" not in opened(page, tmp_path)


@pytest.mark.skipif(BROWSER is None, reason="no browser on this machine")
def test_the_panel_shows_the_selected_node(espalier, model, tmp_path):
    data = write(tmp_path / "rows.jsonl", agents(HEADS["time"][1]))
    inspect(espalier, tmp_path, "--data", data, "--model", model)
    document = opened(tmp_path / "page.html", tmp_path)
    panel = document[document.index('<aside id="panel"') : document.index("</aside>")]
    assert "9 trajectories pass here" in panel and "There are no other trees." in panel
    assert re.search(r'<b class="role">system</b> The time is 2024-05-1', panel) and "im_start" not in panel
    path = document[document.index('<nav id="path"') : document.index("</nav>")]
    assert path.count("<li>") == 1 and 'class="crumb system"' in path
    assert "encoded again, could be shared" in document, "the legend says so where something is lost"


# Uses the page as a reader does, and leaves what it then shows in the document.
READER = """
<script>
const by = (id) => document.getElementById(id), shown = {};
const crumbs = () => [...by("path").querySelectorAll("button, a, .crumb")].map((each) => each.textContent);
const here = () => by("here").textContent;
const type = (text) => { by("query").value = text; by("query").dispatchEvent(new Event("input")); };
const enter = (shiftKey) => by("query").dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", shiftKey, bubbles: true }));
type("SUGAR  cane");
enter(false);
shown.first = [by("found").textContent, here(), crumbs().length, !!by("panel").querySelector("mark.found")];
enter(false);
shown.second = [by("found").textContent, here()];
enter(false);
shown.third = [by("found").textContent, here()];
[...by("path").querySelectorAll("button")][0].click();
shown.root = [here(), crumbs().length];
type("agent-1");
enter(true);
shown.name = [by("found").textContent, by("ends").textContent];
type("nowhere");
by("next").click();
shown.nothing = [by("found").textContent, by("next").disabled];
const link = by("lost").querySelector("button[data-node]");
link.click();
shown.link = [Number(link.dataset.node), here()];
by("lost").querySelector("button[data-cause]").click();
shown.cause = here();
const pixels = by("icicle").getContext("2d").getImageData(0, 0, by("icicle").width, by("icicle").height).data;
let hatched = 0;
for (let i = 0; i < pixels.length; i += 4) hatched += pixels[i] > 150 && pixels[i + 1] < 60 && pixels[i + 2] < 60;
shown.hatched = hatched;
const result = document.createElement("pre");
result.id = "result";
result.textContent = JSON.stringify(shown);
document.body.append(result);
</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="no browser on this machine")
def test_a_reader_searches_and_follows_links(espalier, model, tmp_path):
    rows = []
    for k, answer in enumerate(["It is made of sugar cane.", "From beets.", "Of sugar\ncane, mostly."]):
        head = f"<|im_start|>system\nThe time is 2024-05-1{k} 10:00. {POLICY}<|im_end|>\n<|im_start|>user\nWhat is it made of?<|im_end|>\n"
        rows.append(row(f"agent-{k}", f"g{k}", head + "<|im_start|>assistant\n", answer + "<|im_end|>"))
    inspect(espalier, tmp_path, "--data", write(tmp_path / "rows.jsonl", rows), "--model", model)
    page = tmp_path / "page.html"
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", READER), encoding="utf-8")
    document = opened(page, tmp_path)
    shown = json.loads(html.unescape(re.search(r'<pre id="result">(.*?)</pre>', document, re.DOTALL)[1]))
    assert shown["first"][0] == "1 of 2 matches" and shown["first"][2:] == [2, True]
    assert shown["second"][0] == "2 of 2 matches" and shown["second"][1] != shown["first"][1]
    assert shown["third"] == shown["first"][:2], "after the last match comes the first"
    assert "level 1," in shown["root"][0] and shown["root"][1] == 1
    assert shown["name"][0] == "1 of 1 match" and "agent-1" in shown["name"][1]
    assert shown["nothing"] == ["Nothing found", True]
    assert shown["link"][1].startswith(f"Node {shown['link'][0]},")
    assert shown["cause"].startswith("Node ")
    assert shown["hatched"] > 50, "tokens that are encoded again are hatched"


# ---- What the figures lead with -----------------------------------------------------------------------------------


def test_the_gain_that_applies_leads_and_both_are_shown(espalier, model, tmp_path):
    answers = [{"input_ids": list(range(100)) + [200 + k, 7], "loss_mask": [0] * 100 + [1, 1]} for k in range(8)]
    turns = [{"input_ids": list(range(20 * k)), "loss_mask": [0] * (20 * k - 5) + [1] * 5} for k in range(1, 11)]
    turns.append({"input_ids": list(range(150)) + [9] * 40, "loss_mask": [0] * 185 + [1] * 5})
    for rows, leader, first, second in [(answers, "sequence_packing", "packing", "merging"),
                                        (turns, "append_only", "merging", "packing")]:
        data = write(tmp_path / "rows.jsonl", rows)
        report, _ = inspect(espalier, tmp_path, "--data", data, "--model", model)
        assert report["verdict"]["leads_with"] == leader
        over = {"packing": report["predicted_speedup_over_sequence_packing"],
                "merging": report["predicted_speedup_over_append_only"]}  # fmt: skip
        verdict = report["verdict"]["text"]
        for text in (verdict, espalier("inspect", "--data", data, "--model", model).stdout,
                     espalier("plan", "--data", data, "--model", model, "--token-budget", 4096).stdout,
                     espalier("train", "--data", data, "--model", model, "--out", tmp_path / "run", "--dry-run",
                              "--token-budget", 4096).stdout):  # fmt: skip
            places = {kind: text.find(f"{over[kind]:.2f}x over {words}")
                      for kind, words in [("packing", "sequence packing"), ("merging", "append-only merging")]}
            assert 0 <= places[first] < places[second], text
        plan = json.loads(espalier("plan", "--data", data, "--model", model, "--token-budget", 4096, "--json").stdout)
        assert plan["predicted_speedup_over_sequence_packing"] == pytest.approx(over["packing"])
        assert plan["predicted_speedup_over_append_only"] == pytest.approx(over["merging"])
    assert over["packing"] > 2 * over["merging"] > 2


# ---- Hostile text -------------------------------------------------------------------------------------------------


def test_control_characters_do_not_reach_the_terminal(espalier, model, tmp_path):
    evil = "\x1b]0;x\x07\x9b2J\u202e\x7f"
    rows = [row(f"{evil}{k}", evil, f"<|im_start|>system\n{evil} {k}7 {POLICY}<|im_end|>\n<|im_start|>assistant\n",
                f"{evil}{'abc'[k]}<|im_end|>") for k in range(3)]
    data = write(tmp_path / f"rows{evil[:3]}.jsonl", rows)
    done = espalier("inspect", "--data", data, "--model", model, "--html", tmp_path / f"page{evil[:3]}.html")
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", done.stdout + done.stderr)
    assert "\\x1B]0;x" in done.stdout
