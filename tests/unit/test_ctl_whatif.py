"""`kvstorectl whatif`: what it prints, plots and refuses."""

import gzip
import json
from contextlib import contextmanager
from xml.etree import ElementTree

import pytest
from kvstored_client import ctl
from kvstored_client.ctl import whatif as whatif_module
from kvstored_client.ctl.plot import hit_rate_page
from kvstored_client.ctl.whatif import references_per_s
from kvstored_client.ctl.whatif_runs import Cell, Result, Workload

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
    assert set(found["references_per_s"]) == {"lru", "opt"}


def test_the_speed_of_a_policy_is_over_all_of_its_cells():
    work = Workload([], 1, asked_blocks=100, span_s=0.0)
    results = {Cell("lru", "", 1, 0): Result(0, seconds=1.0), Cell("lru", "", 2, 0): Result(0, seconds=3.0)}
    assert references_per_s(work, results) == {"lru": 50.0}


def test_the_slowest_policy_is_told(trace, monkeypatch, capsys):
    monkeypatch.setattr("kvstored_client.ctl.whatif.references_per_s", lambda *_: {"opt": 2e6, "heat": 345678.9})
    assert run("whatif", trace) == 0
    assert "simulated 345,679 references to blocks a second or more (heat)" in capsys.readouterr().out


def test_two_tiers_have_bytes_moved_and_the_life_of_the_drive(tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 1000 * n, "hash_ids": [100 * (n % 10) + i for i in range(8)]} for n in range(101)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--capacities", "32", "--nvme", "40,1MiB", "--block-bytes", "4096", "--tbw", "1MB", "-o", "json"]
    assert run("whatif", path, *options, "--policies", "lru,opt", "--admissions", "admit_all,second_hit") == 0
    found = json.loads(capsys.readouterr().out)
    runs = {(r["policy"], r["admission"], r["nvme_blocks"]): r for r in found["runs"]}
    assert len(runs) == 6
    large, ideal = runs["lru", "admit_all", 256], runs["opt", None, 256]
    assert large["hits"] == ideal["hits"] == 8 * 91  # all but the first time
    assert large["nvme_written_bytes"] == 80 * 4096
    assert large["dram_written_bytes"] == large["nvme_read_bytes"] + 80 * 4096
    assert large["dram_read_bytes"] == large["nvme_written_bytes"] + large["hits"] * 4096
    assert large["drive_life_years"] == pytest.approx(1e6 / (80 * 4096 / 100) / (365.25 * 86400))
    assert ideal["nvme_written_bytes"] is None
    small = runs["lru", "admit_all", 40]
    assert small["hits"] < runs["opt", None, 40]["hits"] < ideal["hits"]
    assert small["nvme_written_bytes"] > large["nvme_written_bytes"]  # what was recycled is written again
    assert runs["lru", "second_hit", 256]["hits"] < large["hits"]
    assert set(found["hit_rate"]["lru second_hit"]) == {"40", "256"}


def test_two_tiers_print_a_row_for_each_and_plot_over_the_tier_that_varies(trace, tmp_path, capsys):
    path = tmp_path / "plot.svg"
    assert run("whatif", trace, "--capacities", "2,4", "--nvme", "16", "--policies", "lru,opt", "--plot", path) == 0
    out = capsys.readouterr().out
    assert [line.split()[:4] for line in out.splitlines() if line.startswith(("lru", "opt"))] == [
        ["lru", "admit_all", "2", "16"],
        ["lru", "admit_all", "4", "16"],
        ["opt", "-", "2", "16"],
        ["opt", "-", "4", "16"],
    ]
    text = path.read_text()
    assert text.count("<polyline") == 2
    assert "hit rate over DRAM size" in text


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
        (("--nvme", "1"), "--nvme: 1 blocks are no tier; give 2 or more"),
        (("--capacities", "4XB"), "--capacities 4XB: give a size"),
        (("--admissions", "some"), "--admissions: 'some' is none of admit_all, second_hit, hinted"),
        (("--tbw", "x"), "--tbw x: give a size"),
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
        (b"", "it is empty"),
        (LINE.format([1]).encode() + b"{}\n", "line 2 is no request with hash_ids"),
        (LINE.format([]).encode(), "no request asks for a whole block"),
        (LINE.format([1]).encode() + b"\xff\xfe\x00", "line 2 is no text in UTF-8"),
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


@pytest.mark.parametrize("zipped", [False, True])
def test_how_far_it_is_read_is_told_to_the_end(tmp_path, monkeypatch, zipped):
    told, path = {}, tmp_path / "trace"
    text = "".join(LINE.format([place]) for place in range(5000)).encode()
    path.write_bytes(gzip.compress(text) if zipped else text)

    @contextmanager
    def progress(what, total):
        yield lambda more: told.setdefault((what, total), []).append(more)

    monkeypatch.setattr(whatif_module, "_progress", progress)
    assert len(whatif_module.read_calls(path)) == 5000
    ((what, total),) = told
    assert (what, total) == ("reading", path.stat().st_size)
    assert sum(told[what, total]) > total / 2
    assert min(told[what, total]) >= 0


def test_a_file_that_is_not_there_is_named(tmp_path, capsys):
    assert run("whatif", tmp_path / "none") == 2
    assert f"reading trace {tmp_path / 'none'}: No such file" in capsys.readouterr().err


def test_what_a_prediction_would_read_ahead_is_told_where_it_is_asked_for(tmp_path, capsys):
    path, rows = tmp_path / "talk.jsonl", []
    for turn in range(8):
        rows.append({"timestamp": 100_000 * turn, "hash_ids": list(range(4 * turn + 4))})
        rows.append({"timestamp": 100_000 * turn + 40_000, "hash_ids": [1000 * turn + i for i in range(1000, 1090)]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = [path, "--capacities", "100", "--nvme", "10000", "--block-bytes", "4096", "--policies", "lru"]
    assert run("whatif", *options, "-o", "json", "--predict") == 0
    (ahead,) = json.loads(capsys.readouterr().out)["runs"]
    assert 0 < ahead["nvme_read_ahead_used_bytes"] <= ahead["nvme_read_ahead_bytes"] <= ahead["nvme_read_bytes"]
    assert run("whatif", *options, "-o", "json") == 0
    (plain,) = json.loads(capsys.readouterr().out)["runs"]
    assert (plain["nvme_read_ahead_bytes"], plain["hits"]) == (0, ahead["hits"])
    assert run("whatif", *options, "--predict") == 0
    assert "of it in time" in capsys.readouterr().out
    assert run("whatif", *options) == 0
    assert "of it in time" not in capsys.readouterr().out
