"""The sensitivity bench without daemons: parameters, plateau, noise, CSV and page."""

import csv
import io
import json
import re
import sys
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from kvstored_client.ctl.plot import HEIGHT, Line, Point, chart, even_ticks

from bench.common import MIB, BadInput
from bench.sensitivity import CSV, FIGURES, HTML, main, measure_all, write
from bench.sensitivity_cell import METRICS
from bench.sensitivity_plot import PANELS
from bench.sensitivity_settings import BASE, PARAMETERS, QUICK, QUICK_PARAMETERS, Scale, Setting, chosen, settings
from bench.sensitivity_table import TOLERANCE, Metric, Sample, noise, off_plateau, on_plateau, rows, to_csv
from kvstored.config.config import load_config

RATE = Metric("rate", "how fast", "GB/s", "memmove", True)
DELAY = Metric("delay", "how late", "us", "idle", False)
(BATCH,) = chosen(["mover.batch_share"])


def measured(ratios, metric="rate"):
    """Value -> ratios of its repeats, the default's under BASE."""
    return {
        BASE if value == BATCH.default else Setting(BATCH, value): {metric: [Sample(2 * r, 2.0) for r in repeats]}
        for value, repeats in ratios.items()
    }


# --- parameters -----------------------------------------------------------------------


@pytest.mark.parametrize("parameter", PARAMETERS, ids=str)
def test_every_parameter_has_its_default_among_sorted_values(parameter):
    assert parameter.default in parameter.values
    assert list(parameter.values) == sorted(set(parameter.values))


@pytest.mark.parametrize("setting", [s for s in settings(PARAMETERS) if s.options()], ids=str)
def test_the_daemon_takes_every_value(setting):
    (key, text) = next(iter(setting.options().items()))
    section, _, name = key.partition(".")
    taken = load_config(None, {key: text}).config
    assert float(getattr(getattr(taken, section), name)) == setting.value


def test_blocks_divide_what_a_cell_moves():
    for scale in (QUICK, Scale()):
        assert all(scale.chain_bytes % block_bytes == 0 for block_bytes in PARAMETERS[0].values)
        assert 3 * scale.chain_bytes + 16 * max(PARAMETERS[0].values) < 0.9 * scale.dram_bytes


def test_the_defaults_are_measured_once_for_all_parameters():
    cells = settings(PARAMETERS)
    assert cells[0] == BASE
    assert len(cells) == len(set(cells)) == 1 + sum(len(p.values) - 1 for p in PARAMETERS)


def test_a_quick_run_has_the_default_and_the_extremes():
    quick = chosen(QUICK_PARAMETERS, extremes_only=True)
    assert all(len(parameter.values) <= 3 and parameter.default in parameter.values for parameter in quick)
    assert len(settings(quick)) < 16


def test_an_unknown_parameter_is_named_with_those_there_are():
    with pytest.raises(ValueError, match=r"'mover.x' is no parameter; there are block_bytes, .*nvme.io_threads"):
        chosen(["mover.x"])


def test_parameters_of_the_client_are_not_told_to_the_daemon():
    (block,) = chosen(["block_bytes"])
    setting = Setting(block, 2 * MIB)
    assert (setting.options(), setting.of("block_bytes"), BASE.of("block_bytes")) == ({}, 2 * MIB, MIB / 2)
    assert str(setting) == "block_bytes 2 MiB"


# --- plateau ----------------------------------------------------------------------------


def test_the_plateau_is_what_is_near_the_best_on_the_right_side():
    assert on_plateau([0.9, 0.96, 1.0], higher_is_better=True, tolerance=0.05) == [False, True, True]
    assert on_plateau([2.0, 2.09, 2.2], higher_is_better=False, tolerance=0.05) == [True, True, False]
    assert on_plateau([0.0, 0.1], higher_is_better=False, tolerance=0.05) == [True, False]


def test_noise_is_what_repeats_differ_by_in_the_typical_setting():
    ratios = {0.01: [1.0, 1.1], 0.02: [1.0, 1.2, 1.0], 0.05: [5.0, 7.0, 6.0], 0.1: [3.0]}
    assert noise(measured(ratios), "rate") == pytest.approx(0.2)
    assert noise(measured({0.01: [1.0], 0.05: [2.0]}), "rate") == 0.0
    assert noise(measured(ratios), "delay") == 0.0


def test_noise_widens_the_plateau_and_never_narrows_it():
    quiet = rows(measured({0.01: [0.90, 0.90], 0.05: [1.0, 1.0]}), [BATCH], [RATE])
    assert [(row.plateau, row.tolerance) for row in quiet] == [(False, TOLERANCE), (True, TOLERANCE)]
    noisy = rows(measured({0.01: [0.80, 1.0], 0.05: [0.9, 1.1]}), [BATCH], [RATE])
    assert [row.plateau for row in noisy] == [True, True]
    assert noisy[0].tolerance == pytest.approx((0.2 / 0.9 + 0.2) / 2)


def test_one_repeat_out_of_three_decides_nothing():
    table = rows(measured({0.01: [1.0, 1.0, 0.2], 0.05: [1.0, 1.0, 1.0], 0.1: [1.0, 1.0, 1.0]}), [BATCH], [RATE])
    assert [row.plateau for row in table] == [True, True, True]


# --- table, CSV, page ---------------------------------------------------------------------


def test_a_row_has_medians_the_ceiling_and_whether_it_is_the_default():
    table = rows(measured({0.02: [0.5, 0.7, 0.6], 0.05: [0.3, 0.3, 0.3]}), [BATCH], [RATE, DELAY])
    assert [(row.value, row.default, row.metric) for row in table] == [("0.02", False, "rate"), ("0.05", True, "rate")]
    first = table[0]
    assert (first.median, first.ceiling, first.ratio) == pytest.approx((1.2, 2.0, 0.6))
    assert (first.ratio_min, first.ratio_max, first.repeats) == (0.5, 0.7, 3)
    assert off_plateau(table) == ["mover.batch_share: rate"]


def test_csv_reads_back_as_the_table():
    table = rows(measured({0.02: [123.456], 0.05: [100.0]}), [BATCH], [RATE])
    found = list(csv.DictReader(io.StringIO(to_csv(table))))
    assert [(row["parameter"], row["value"], row["default"], row["plateau"]) for row in found] == [
        ("mover.batch_share", "0.02", "0", "1"),
        ("mover.batch_share", "0.05", "1", "0"),
    ]
    assert (found[0]["median"], found[0]["ratio"], found[0]["repeats"]) == ("246.9", "123.5", "1")


def fake(setting, scale, directory):
    """Everything is as good everywhere, but for one value that is half as good."""
    good = 1.0 if setting.value != 0.01 else 0.5
    return {m.key: Sample(good if m.higher_is_better else 1 / good) for m in METRICS}


def test_files_are_written_for_all_parameters_and_a_ring_marks_what_is_off_the_plateau(tmp_path):
    found = measure_all(PARAMETERS, QUICK, repeats=2, base_repeats=3, directory=None, measure=fake)
    assert {len(samples["put"]) for samples in found.values()} == {2, 3}
    table = rows(found, PARAMETERS, METRICS)
    assert len(table) == len(METRICS) * sum(len(p.values) for p in PARAMETERS)
    write(tmp_path / "out", table, PARAMETERS)
    assert len((tmp_path / "out" / CSV).read_text().splitlines()) == len(table) + 1
    page = (tmp_path / "out" / HTML).read_text()
    plots = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(plots) == len(PANELS) * len(PARAMETERS)
    assert all(ElementTree.fromstring(plot).tag.endswith("svg") for plot in plots)
    drawn = [metric for metrics in PANELS.values() for metric in metrics]
    assert page.count('fill="#fff"') == len(drawn)
    assert page.count("<polyline") == len(drawn) * len(PARAMETERS)
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def run_main(monkeypatch, *arguments):
    monkeypatch.setattr("bench.sensitivity.measure", fake)
    monkeypatch.setattr(sys, "argv", ["sensitivity", *map(str, arguments)])
    return main()


def test_the_command_writes_both_files_and_one_json_object(tmp_path, monkeypatch, capsys):
    options = ("--parameters", "mover.batch_share,nvme.io_threads", "--repeats", 2, "--output", tmp_path, "--json", "-")
    assert run_main(monkeypatch, *options) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert set(found) == {figure.key for figure in FIGURES}
    assert (found["off_plateau"], found["cells"]) == ([], 2 * 9)
    assert len(found["rows"]) == len(METRICS) * 10
    assert {row["plateau"] for row in found["rows"] if row["value"] == "0.01" and row["unit"] == "GB/s"} == {False}
    assert {path.name for path in tmp_path.iterdir()} == {CSV, HTML}
    assert err.count("cell ") == 2 * 9


def test_a_quick_run_repeats_only_the_defaults_and_shows_a_table(tmp_path, monkeypatch, capsys):
    assert run_main(monkeypatch, "--quick", "--output", tmp_path, "--parameters", "mover.batch_share") == 0
    out, err = capsys.readouterr()
    assert [line.rpartition(": ")[2] for line in err.splitlines() if line.startswith("cell ")] == [
        "defaults",
        "mover.batch_share 0.01",
        "mover.batch_share 0.2",
        "defaults",
    ]
    (row,) = [line for line in out.splitlines() if line.startswith("│ get_dram ")]
    assert [cell.strip() for cell in row.split("│")[2:-1]] == ["0.5", "1 =", "1 ="]


def test_a_wrong_parameter_ends_the_command_with_a_line(monkeypatch):
    with pytest.raises(SystemExit, match=r"bench\.sensitivity: --parameters: 'x' is no parameter"):
        run_main(monkeypatch, "--parameters", "x")


def test_a_place_that_cannot_be_written_is_said_before_anything_is_measured(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match=r"--output .*file/x: Not a directory"):
        run_main(monkeypatch, "--quick", "--output", tmp_path / "file" / "x")


def test_every_metric_is_drawn_or_zero_unless_something_is_wrong():
    drawn = {metric for metrics in PANELS.values() for metric in metrics}
    assert {metric.key for metric in METRICS} - drawn == {"refused"}
    assert drawn <= {metric.key for metric in METRICS}


def test_names_of_lines_that_end_together_stand_apart_and_inside():
    lines = [Line(f"line {n}", [Point(0, n, ""), Point(1, 0, "")]) for n in range(8)]
    svg = ElementTree.fromstring(chart("t", lines, [(0, "a"), (1, "b")], even_ticks(8)))
    ends = [float(text.get("y")) for text in svg.iter() if (text.text or "").startswith("line ")]
    assert all(lower - upper == 16 for upper, lower in pairwise(ends))
    assert max(ends) <= HEIGHT


@pytest.mark.parametrize(("top", "last", "step"), [(1.0, 1.0, 0.2), (0.93, 1.0, 0.2), (7.0, 8.0, 2.0), (0.0, 1.0, 0.2)])
def test_ticks_are_even_and_reach_the_top(top, last, step):
    ticks = even_ticks(top)
    assert ticks[-1][0] == pytest.approx(last)
    assert ticks[1][0] == pytest.approx(step)
    assert ticks[-1][0] >= top
