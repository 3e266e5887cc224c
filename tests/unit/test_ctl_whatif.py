"""`kvstorectl whatif`: what it prints, plots and refuses."""

import gzip
import json
from xml.etree import ElementTree

import pytest
from kvstored_client import ctl
from kvstored_client.ctl.plot import hit_rate_page

LINE = '{{"timestamp": 0, "input_length": 1000, "output_length": 9, "hash_ids": {}}}\n'


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(LINE.format(ids) for ids in ([1, 2, 3], [4, 5], [1, 2, 3], [1, 2])))
    return path


def run(*arguments):
    with pytest.raises(SystemExit) as stopped:
        ctl.main([str(argument) for argument in arguments])
    return int(stopped.value.code or 0)


def test_it_needs_no_daemon_and_prints_a_table_with_the_ideal(trace, capsys):
    assert run("whatif", trace) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "4 requests, 10 blocks, 5 distinct" in out
    (opt,) = [line for line in out.splitlines() if line.startswith("opt")]
    assert opt.split()[-2:] == ["50.00", "%"]
    assert all(name in out for name in ("shelf_life", "lru", "lfu", "heat", "s3fifo"))


def test_json_has_the_share_by_policy_and_capacity(trace, capsys):
    assert run("whatif", trace, "--capacities", "5,2", "--policies", "lru,opt", "-o", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hit_rate"]["lru"] == {"2": 0.2, "5": 0.5}
    assert found["hit_rate"]["opt"] == {"2": 0.4, "5": 0.5}
    assert (found["requests"], found["blocks"], found["distinct_blocks"]) == (4, 10, 5)


def test_gzipped_and_compact_traces_are_read_too(tmp_path, capsys):
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(b'{"block_tokens": 512, "partial": false}\n0,0,1024,1,0,0\n0,1,1024,1,1,2\n'))
    assert run("whatif", path, "--policies", "lru", "-o", "json", "--capacities", "2") == 0
    assert json.loads(capsys.readouterr().out)["hit_rate"] == {"lru": {"2": 0.5}}


@pytest.mark.parametrize("suffix", [".svg", ".html"])
def test_a_plot_stands_by_itself_and_has_a_line_a_policy(trace, tmp_path, suffix):
    path = tmp_path / f"plot{suffix}"
    assert run("whatif", trace, "--plot", path) == 0
    text = path.read_text()
    assert text.count("<polyline") == 6
    assert "opt (ideal)" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_a_plot_is_well_formed_whatever_the_trace_is_called():
    for rates in ({"lru": {10: 0.0}}, {"a<b": {1: 1.0, 8: 1.0}, "opt": {1: 0.3, 8: 1.0}}):
        root = ElementTree.fromstring(hit_rate_page('<&">', rates, page=False))
        assert root.tag.endswith("svg")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policies", "lru,mru"), "--policies: 'mru' is none of shelf_life, lru"),
        (("--capacities", "10,x"), "--capacities 10,x: give numbers of blocks"),
        (("--capacities", "0"), "--capacities: 0 blocks are no tier"),
        (("--plot", "x.png"), "--plot x.png: the name must end in .html or .svg"),
    ],
)
def test_a_wrong_option_is_one_line_that_names_it(trace, capsys, arguments, message):
    assert run("whatif", trace, *arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"kvstorectl: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"hello\n", "line 1 is neither"),
        (b"", "line 1 is neither"),
        (LINE.format([1]).encode() + b"{}\n", "line 2 is no request with hash_ids"),
        (LINE.format([]).encode(), "no request asks for a whole block"),
        (b"\xff\xfe\x00", "utf-8"),
        (gzip.compress(LINE.format([1]).encode() * 1000)[:-20], "end-of-stream"),
    ],
)
def test_a_bad_file_is_one_line_that_says_what_is_wrong(tmp_path, capsys, content, message):
    path = tmp_path / "bad"
    path.write_bytes(content)
    assert run("whatif", path) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"kvstorectl: reading trace {path}: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_file_that_is_not_there_is_named(tmp_path, capsys):
    assert run("whatif", tmp_path / "none") == 2
    assert f"reading trace {tmp_path / 'none'}: No such file" in capsys.readouterr().err
