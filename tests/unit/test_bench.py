"""The parts of the benches that run without a daemon: traces, the simulation, payloads, figures."""

import gzip
import json
import signal
import sys

import pytest

from bench.buffers import Pool
from bench.ceiling import memmove_blocks
from bench.common import Figure, emit, median_ratio
from bench.common import run as common_run
from bench.hitrate import gap_closed
from bench.hitrate import main as hitrate
from bench.payload import Payloads
from bench.replay import first_difference, numbered
from bench.traces import block_hash, find_trace, read_trace


def write_trace(path, rows, *, partial=False):
    lines = [json.dumps({"block_tokens": 512, "partial": partial})]
    lines += [",".join(map(str, row)) for row in rows]
    with gzip.open(path, "wt") as file:
        file.write("\n".join(lines) + "\n")
    return path


# --- traces ---------------------------------------------------------------------------


def test_a_request_reuses_the_leading_ids_of_an_earlier_one(tmp_path):
    rows = [(0, 0, 3 * 512, 1, 0, 0), (0, 1, 4 * 512, 1, 1, 2), (0, 2, 3 * 512, 1, 2, 3)]
    path = write_trace(tmp_path / "t.csv.gz", rows)
    assert list(read_trace(path)) == [[0, 1, 2], [0, 1, 3, 4], [0, 1, 2]]


def test_a_partly_covered_block_counts_only_where_the_header_says_so(tmp_path):
    rows = [(0, 0, 1000, 1, 0, 0)]
    assert list(read_trace(write_trace(tmp_path / "whole.gz", rows))) == [[0]]
    assert list(read_trace(write_trace(tmp_path / "partial.gz", rows, partial=True))) == [[0, 1]]


def test_a_limit_cuts_the_trace(tmp_path):
    path = write_trace(tmp_path / "t.gz", [(0, i, 512, 1, 0, 0) for i in range(5)])
    assert list(read_trace(path, limit=2)) == [[0], [1]]
    assert len(list(read_trace(path, limit=9))) == 5


@pytest.mark.parametrize(
    "row", [(0, 0, 512, 1, 0), (0, 0, 512, 1, 5, 1), (0, 0, 512, 1, 1, 0), (0, 0, 512, 1, 0, 1), (0, 0, "x", 1, 0, 0)]
)
def test_a_line_that_is_not_of_the_format_is_named(tmp_path, row):
    path = write_trace(tmp_path / "t.gz", [(0, 0, 512, 1, 0, 0), row])
    with pytest.raises(ValueError, match="line 3"):
        list(read_trace(path))


def test_sharing_more_than_the_earlier_request_has_is_refused(tmp_path):
    path = write_trace(tmp_path / "t.gz", [(0, 0, 512, 1, 0, 0), (0, 0, 2048, 1, 1, 2)])
    with pytest.raises(ValueError, match="line 3"):
        list(read_trace(path))


def test_a_trace_is_found_by_path_or_in_the_directory_of_the_environment(tmp_path, monkeypatch):
    path = write_trace(tmp_path / "t.gz", [])
    monkeypatch.delenv("KVSTORED_TRACES", raising=False)
    assert find_trace(str(path)) == path
    with pytest.raises(FileNotFoundError, match="KVSTORED_TRACES"):
        find_trace("t.gz")
    monkeypatch.setenv("KVSTORED_TRACES", str(tmp_path))
    assert find_trace("elsewhere/t.gz") == path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"hash_ids": [1]}\n{\n', "line 2 is no request"),
        (b"", "it is empty"),
        (gzip.compress(b'{"hash_ids": [1]}\n' * 1000)[:-20], "end-of-stream"),
    ],
)
def test_a_bad_trace_is_one_line_with_file_and_line(tmp_path, monkeypatch, capsys, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    monkeypatch.setattr(sys, "argv", ["hitrate", "--trace", str(path)])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as stopped:
        common_run(hitrate)
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(f"bench: reading trace {path}: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("option", [("--capacities", "0"), ("--capacities", "3,x"), ("--limit", "-1")])
def test_a_number_that_is_none_is_named_by_its_option(tmp_path, monkeypatch, capsys, option):
    monkeypatch.setattr(sys, "argv", ["hitrate", "--trace", "t", *option])
    with pytest.raises(SystemExit):
        hitrate()
    assert f"argument {option[0]}: " in capsys.readouterr().err


def test_different_ids_have_different_hashes():
    assert len({block_hash(i) for i in range(1000)}) == 1000
    assert {len(block_hash(i)) for i in range(10)} == {32}


# --- replay and hit rates ---------------------------------------------------------


def test_the_first_difference_is_found():
    assert first_difference([1, 2, 3], [1, 2, 3]) == -1
    assert first_difference([1, 2, 3], [1, 5, 4]) == 1


def test_blocks_of_a_replay_get_numbers_by_their_ids():
    assert numbered([["a", "b"], ["a", 7]]) == [[0, 1], [0, 2]]


def test_the_share_of_the_gap_is_between_lru_and_the_ideal():
    rates = {"lru": {"10": 0.2, "20": 0.5}, "opt": {"10": 0.6, "20": 0.5}, "heat": {"10": 0.3, "20": 0.5}}
    assert gap_closed(rates) == {"heat": {"10": pytest.approx(0.25)}}
    assert gap_closed({"heat": {"10": 0.3}}) == {}


def test_hit_rates_come_as_one_json_object(tmp_path, monkeypatch, capsys):
    path = write_trace(tmp_path / "t.gz", [(0, 0, 1024, 1, 0, 0), (0, 1, 1024, 1, 1, 2)])
    monkeypatch.setattr(sys, "argv", ["hitrate", "--trace", str(path), "--capacities", "1,2", "--json", "-"])
    assert hitrate() == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hit_rate"]["lru"] == {"1": 0.25, "2": 0.5}
    assert found["hit_rate"]["opt"] == {"1": 0.25, "2": 0.5}
    assert set(found["references_per_s"]) == {"shelf_life", "lru", "lfu", "heat", "s3fifo", "opt"}


# --- payloads and buffers -------------------------------------------------------------


def test_every_wrong_byte_of_a_block_is_counted():
    payloads = Payloads(4096)
    block = bytearray(payloads.make([7])[0].tobytes())
    assert payloads.wrong_bytes(7, block) == 0
    block[0] ^= 1
    block[-1] ^= 255
    assert payloads.wrong_bytes(7, block) == 2
    assert payloads.wrong_bytes(7, block[:-8]) == 4096


def test_blocks_of_different_numbers_differ_in_every_word():
    rows = Payloads(1024).make([0, 61, 122, 1]).copy()
    for other in rows[1:]:
        assert (rows[0] != other).all()


def test_payloads_do_not_depend_on_the_order_of_making():
    first, second = Payloads(512), Payloads(512)
    assert first.make([1, 2, 3])[2].tobytes() == second.make([3])[0].tobytes()


def test_a_size_that_is_no_whole_number_of_words_is_refused():
    with pytest.raises(ValueError, match="multiple of 8"):
        Payloads(1001)


def test_memmove_fills_shuffled_slots_and_a_changed_byte_is_seen():
    source, destination = Pool(8, 8192, seed=1), Pool(8, 8192, seed=2)
    source.fill(seed=3)
    assert destination.wrong_blocks(source) == 8
    memmove_blocks(destination.addresses, source.addresses, 8192)
    assert destination.wrong_blocks(source) == 0
    destination.views[5][8191] ^= 1
    assert destination.wrong_blocks(source) == 1


# --- figures --------------------------------------------------------------------------


FIGURES = (Figure("speed", "how fast", ">= 2"), Figure("slowness", "how slow", "<= 1"), Figure("wrong", "w", "== 0"))


def test_figures_are_one_json_object_with_null_for_what_was_not_measured(capsys):
    emit({"speed": 2.34567, "wrong": 0}, FIGURES, "-")
    assert json.loads(capsys.readouterr().out) == {"speed": 2.346, "slowness": None, "wrong": 0}


def test_figures_can_go_to_a_file_or_a_table(tmp_path, capsys):
    emit({"speed": 1}, FIGURES, str(tmp_path / "f.json"))
    assert json.loads((tmp_path / "f.json").read_text())["speed"] == 1
    emit({"speed": 1}, FIGURES, None)
    assert "how fast" in capsys.readouterr().out


def test_a_figure_without_a_documented_meaning_is_refused():
    with pytest.raises(AssertionError, match="other"):
        emit({"other": 1}, FIGURES, "-")


def test_a_target_says_which_side_is_right():
    speed, slowness, wrong = FIGURES
    assert [speed.met(2), speed.met(1.9)] == [True, False]
    assert [slowness.met(1), slowness.met(1.1)] == [True, False]
    assert [wrong.met(0), wrong.met(-1)] == [True, False]
    assert speed.met(None) is None


def test_ratios_are_taken_pair_by_pair():
    assert median_ratio([2.0, 20.0, 3.0], [1.0, 10.0, 1.0]) == 2.0
