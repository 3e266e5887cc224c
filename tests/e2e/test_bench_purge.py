"""The purge bench with small tiers: it finds the pattern before, none after, and every block of the other tenant."""

import pytest

from bench.common import MIB
from bench.purge import FIGURES, measure, occurrences


@pytest.mark.timeout(400)
def test_a_tenant_among_others_leaves_no_byte(tmp_path):
    values = measure(8 * MIB, tmp_path)
    assert set(values) == {figure.key for figure in FIGURES}
    assert min(values["memory_before"], values["files_before"]) >= 8 * MIB // 64
    assert (values["memory_after"], values["files_after"], values["complete"]) == (0, 0, 1)
    assert values["other_blocks_share"] == 1.0
    assert all(figure.met(values[figure.key]) is not False for figure in FIGURES)
    assert not list(tmp_path.iterdir())


def test_what_lies_across_two_pieces_is_found_once(tmp_path, monkeypatch):
    monkeypatch.setattr("bench.purge.READ_BYTES", 10)
    file = tmp_path / "file"
    file.write_bytes(b"." * 7 + b"pattern" + b"." * 3 + b"pattern")
    assert occurrences([file], b"pattern") == 2
