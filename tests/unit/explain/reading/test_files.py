"""`explain`: each kind of file, each error, the page and the command."""

from __future__ import annotations

import base64
import json
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from megatron_lossagg.cli.app import app
from megatron_lossagg.explain.explanation import Explanation
from megatron_lossagg.explain.reading.fields import FieldOptions
from megatron_lossagg.explain.reading.files import read_rollouts
from megatron_lossagg.explain.showing.page import page

ROWS = [
    {"prompt_id": 7, "response": "né a", "reward": 1},
    {"prompt_id": 7, "response": "four words are here", "reward": 0.0},
    {"prompt_id": 9, "response": "", "reward": 0},
]


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return path


def read(path, **options):
    found = read_rollouts(path, FieldOptions(**options))
    rewards, groups = found.rewards, found.group_of_seq
    return (
        found.num_tokens.tolist(),
        found.unit,
        None if rewards is None else rewards.tolist(),
        None if groups is None else groups.tolist(),
    )


def explain(*arguments):
    return CliRunner().invoke(app, ["explain", *map(str, arguments)])


@pytest.mark.parametrize(("unit", "lengths"), [("bytes", [5, 19, 0]), ("words", [2, 4, 0])])
def test_text(tmp_path, unit, lengths):
    """UTF-8 bytes or words; blank lines are left out, groups numbered as they come."""
    path = write(tmp_path / "a.jsonl", ROWS)
    path.write_text(path.read_text().replace("\n", "\n\n"))
    assert read(path, text_unit=unit) == (lengths, unit, [1, 0, 0], [0, 0, 1])


@pytest.mark.parametrize(
    "field",
    [
        {"loss_mask": [0, 1, 1, 0, 1]},
        {"response_mask": [True, True, False, True]},
        {"response_length": 3},
        {"completion_ids": [5, 9, 5]},
        {"output": [5, 9, 5]},
    ],
)
def test_tokens_are_found_by_name(tmp_path, field):
    """Masks, lengths and ids win over text; a field that is null is not there."""
    row = {"num_tokens": None, **field, "response": "text", "score": 2, "uid": "x"}
    if "output" in field:
        del row["response"]
    assert read(write(tmp_path / "a.ndjson", [row])) == ([3], "tokens", [2], [0])


def test_named_fields(tmp_path):
    """Options win over names; a prompt of chat messages is a group."""
    messages = [{"role": "user", "content": "?"}]
    rows = [{"n": 4, "response": "text", "r2": k, "reward": 9, "prompt": messages} for k in (1, 3)]
    path = write(tmp_path / "a.jsonl", rows)
    assert read(path, length="n", reward="r2") == ([4, 4], "tokens", [1, 3], [0, 0])
    assert read(path, response="response", group="r2")[:2] == ([4, 4], "bytes")


def test_npz(tmp_path):
    """A mask, or lengths; rewards and groups if they are there."""
    mask = np.array([[0, 1, 1], [0, 0, 0], [1, 1, 1]], dtype=np.int8)
    np.savez(tmp_path / "a.npz", loss_mask=mask)
    assert read(tmp_path / "a.npz") == ([2, 0, 3], "tokens", None, None)
    extra = {"rewards": np.array([1.0, 0.5, 0], np.float32), "group_ids": np.array([4, 4, 2])}
    np.savez(tmp_path / "b.npz", loss_mask=mask.astype(bool), **extra)
    assert read(tmp_path / "b.npz") == ([2, 0, 3], "tokens", [1, 0.5, 0], [0, 0, 1])
    np.savez(tmp_path / "c.npz", n=np.array([2, 0, 3]), who=np.array(["a", "b", "a"]))
    assert read(tmp_path / "c.npz", length="n", group="who")[::3] == ([2, 0, 3], [0, 1, 0])


def test_parquet(tmp_path):
    """The same rows as JSONL give the same rollouts; columns that are not needed stay unread."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{**row, "other": [{"a": 1}]} for row in ROWS]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == read(write(tmp_path / "a.jsonl", ROWS))
    for bad, message in (
        ([{"response": "a", "reward": float("nan")}], "a.parquet: row 1: 'reward': expected a"),
        ([{"text": "a"}], "a.parquet: has no field that says"),
    ):
        parquet.write_table(pyarrow.Table.from_pylist(bad), tmp_path / "a.parquet")
        with pytest.raises(ValueError, match="a.parquet") as caught:
            read(tmp_path / "a.parquet")
        assert message in str(caught.value)
    (tmp_path / "a.parquet").write_bytes(b"no parquet at all")
    with pytest.raises(ValueError, match="not a parquet file that can be read"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a.jsonl: has no responses in it"),
        ("\n\n", "a.jsonl: has no responses in it"),
        ('{"response": ""}\n', "none of its 1 responses has a token that counts"),
        ('{"response": "a"}\n\n{"respo\n', "a.jsonl:3: not JSON (Invalid control"),
        ("[1]\n", "a.jsonl:1: expected a JSON object, got [1]"),
        ('{"a": 1, "b": 2}\n', "a.jsonl:1: has no field that says how long a response is; its"),
        ('{"a": 1, "b": 2}\n', "fields are a, b. Expected one of loss_mask"),
        ("{}\n", "its fields are (none)"),
        ('{"response": "a"}\n{"text": "a"}\n', "a.jsonl:2: has no 'response', which earlier rows"),
        ('{"response": "a"}\n{"response": [1]}\n', ":2: 'response': expected text as in the first"),
        ('{"response": [1]}\n{"response": "a"}\n', ":2: 'response': expected text or a list of t"),
        ('{"response": {"a": 1}}\n', "'response': expected text or a list of token ids, got {'a'"),
        ('{"response": [1, "b"]}\n', "expected a list of token ids, got 'b' in it"),
        ('{"response": "a"}\n{"response": null}\n', ":2: 'response': expected text, got None"),
        ('{"response_length": -3}\n', "'response_length': a length must be >= 0, got -3"),
        ('{"response_length": 2.5}\n', "expected a whole number of tokens, got 2.5"),
        ('{"response_length": true}\n', "expected a whole number of tokens, got True"),
        ('{"response_length": "12"}\n', "expected a whole number of tokens, got '12'"),
        ('{"loss_mask": [1, 0.5]}\n', "'loss_mask': a mask may hold only 0 and 1, got 0.5"),
        ('{"loss_mask": 3}\n', "'loss_mask': expected a list of 0 and 1, got 3"),
        ('{"response": "a", "reward": NaN}\n', "'reward': expected a finite number, got nan"),
        ('{"response": "a", "reward": -Infinity}\n', "expected a finite number, got -inf"),
        ('{"response": "a", "reward": "1"}\n', "expected one number per response, got '1'"),
        ('{"response": "a", "reward": [1, 2]}\n', "expected one number per response, got [1, 2]"),
        ('{"response": "a", "group_id": 1.5}\n', "'group_id': expected text or an integer, got 1"),
        (b'{"response": "\xff"}\n', "a.jsonl:1: not UTF-8 text (invalid start byte at byte 14)"),
        ("[" * 100_000, "a.jsonl:1: JSON that is nested too deeply"),
    ],
)
def test_bad_lines(tmp_path, text, message):
    """Exit status 2; the file, the line, what was found and what is expected; nothing written."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    result = explain(path, "--out", tmp_path / "out")
    assert result.exit_code == 2, result.output
    assert result.output.startswith(f"explain: {tmp_path}") and message in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"loss_mask": np.array([[1, 2]])}, "'loss_mask' may hold only 0 and 1, got 1 other val"),
        ({"loss_mask": np.array([[1, np.nan]])}, "may hold only 0 and 1, got 1 other values suc"),
        ({"loss_mask": np.array([1, 1])}, "'loss_mask' must have shape [b, s], one sequence per"),
        ({"loss_mask": np.ones((0, 4))}, "has no responses in it"),
        ({"response_ids": np.array([[1]])}, "'response_ids' holds responses, whose padding cou"),
        ({"mask": np.array([[1]])}, "its fields are mask. Expected one of loss_mask"),
        (
            {"loss_mask": np.array([[1]]), "rewards": np.array([[1.0]])},
            "'rewards' must have one value per sequence, [1], got shape [1, 1]",
        ),
        (
            {"loss_mask": np.array([[1], [1]]), "rewards": np.array([1, np.nan])},
            "'rewards', row 1: expected a finite number, got nan",
        ),
        ({"loss_mask": np.array([[None]])}, "Object arrays cannot be loaded"),
    ],
)
def test_bad_arrays(tmp_path, arrays, message):
    """Exit status 2, the file and the array."""
    np.savez(tmp_path / "a.npz", **arrays)
    result = explain(tmp_path / "a.npz", "--json")
    assert result.exit_code == 2 and "a.npz" in result.output and message in result.output


def test_bad_files(tmp_path):
    """No such file, a folder, an unknown kind, and files that are not what their name says."""
    (tmp_path / "d.jsonl").mkdir()
    (tmp_path / "e.npz").write_bytes(b"PK nothing")
    np.save(tmp_path / "f.npy", np.ones(3))
    (tmp_path / "f.npy").rename(tmp_path / "f.npz")
    for name, message in {
        "a.jsonl": "cannot be read: No such file",
        "d.jsonl": "cannot be read: Is a directory",
        "c.csv": "expected a file that ends in .jsonl, .ndjson, .parquet, .npz",
        "e.npz": "e.npz: ",
        "f.npz": "holds one array without a name",
    }.items():
        result = explain(tmp_path / name)
        assert result.exit_code == 2 and message in result.output, result.output
        assert name in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modes", "token-mean,mean"], "unknown mode 'mean'; expected some of token-mean"),
        (["--modes", ","], "names none"),
        (["--modes", "unit-mean-token-mean"], "the file has no group field; name it with"),
        (["--loss-scale-factor", "0"], "loss_scale_factor=0.0 cannot divide a loss"),
        (["--loss-scale-factor", "nan"], "cannot divide a loss"),
        (["--unit", "lines"], "--unit 'lines' does not exist; expected bytes or words"),
        (["--reward-field", "r"], "has no field 'r'; its fields are response"),
        (["--length-field", "a", "--mask-field", "b"], "name one of --mask-field, --length-field"),
        (["--buckets", "0"], "Invalid value for '--buckets'"),
    ],
)
def test_bad_options(tmp_path, arguments, message):
    """Exit status 2 and what is possible."""
    path = write(tmp_path / "a.jsonl", [{"response": "a"}])
    result = explain(path, "--no-picture", "--out", tmp_path / "out", *arguments)
    assert result.exit_code == 2 and message in result.output, result.output


@pytest.mark.parametrize(
    ("package", "name", "command"),
    [
        ("matplotlib", "a.jsonl", "pip install matplotlib, or pass --no-picture"),
        ("pyarrow", "a.parquet", "pip install pyarrow"),
        ("numpy", "a.npz", "pip install numpy"),
    ],
)
def test_a_missing_package_names_the_command(tmp_path, monkeypatch, package, name, command):
    """Exit status 2, no traceback."""
    write(tmp_path / name, ROWS)
    monkeypatch.setitem(sys.modules, package, None)
    result = explain(tmp_path / name, "--out", tmp_path / "out")
    assert result.exit_code == 2 and command in result.output


class Page(HTMLParser):
    """Checks that tags nest, and collects attributes and tables."""

    def __init__(self, text):
        super().__init__()
        self.open, self.attributes, self.rows = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def test_page_is_one_file(tmp_path):
    """Nothing is loaded: no script, no link, one picture inside; names from outside are escaped."""
    found = read_rollouts(write(tmp_path / "a.jsonl", ROWS), FieldOptions())
    text = page(Explanation.of("<b>&.jsonl", found), b"\x89PNG")
    parsed = Page(text)
    addresses = [value for name, value in parsed.attributes if name in ("src", "href")]
    assert addresses == ["data:image/png;base64," + base64.b64encode(b"\x89PNG").decode()]
    assert not any(part in text for part in ("http:", "https:", "<script", "<link", "url(", "@im"))
    assert "&lt;b&gt;&amp;.jsonl" in text and "<b>" not in text
    assert ["token-mean", "20.8%", "79.2%"] in [row[:3] for row in parsed.rows]  # 5 and 19 of 24
    assert ["token-mean", "79.2%", "20.8%", "1.00"] in parsed.rows  # reward 0, reward 1
    assert "data:" not in page(Explanation.of("a", found), None)


def test_command_writes_picture_and_page(tmp_path, monkeypatch):
    """By default into explain/, whose paths it prints; the page holds the picture."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", ROWS)
    result = explain("a.jsonl")
    assert result.exit_code == 0, result.output
    for text in ("seq-mean-token-sum-norm/seq-mean", "79.2%", "explain/a.png", "explain/a.html"):
        assert text in result.output, text
    png = Path("explain/a.png").read_bytes()
    assert png.startswith(b"\x89PNG") and int.from_bytes(png[16:20], "big") >= 1200
    assert base64.b64encode(png).decode() in Path("explain/a.html").read_text(encoding="utf-8")


def test_command_as_json(tmp_path, monkeypatch):
    """All numbers, for the chosen modes; files only if a folder is named."""
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "a.jsonl", ROWS)
    shown = json.loads(explain(path, "--json", "--modes", "token-mean, token-sum").stdout)
    assert list(shown["modes"]) == ["token-mean", "token-sum"] and shown["files"] == {}
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]
    mode = shown["modes"]["token-sum"]
    assert mode["sum_of_weights"] == 24 and mode["push"] == {"up": 2.5, "down": 9.5}
    assert mode["longest"]["token_weight"] == 1 and mode["longest"]["sequence_weight"] == 19
    assert [b["share_of_weight"] for b in mode["by_reward"]] == pytest.approx([19 / 24, 5 / 24])
    result = explain(path, "--json", "--out", tmp_path / "out", "--no-picture")
    assert json.loads(result.stdout)["files"] == {"page": str(tmp_path / "out" / "a.html")}
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["a.html"]
