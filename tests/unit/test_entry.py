"""One block in the catalogue: small, for there are millions, and its flags do not touch one another."""

import sys

import pytest

from kvstored.catalog.catalog import PROMOTING, READY, WRITING, Catalog
from kvstored.keys import Namespace

ENTRY_BYTES_MAX = 128  # a million of them, with keys, tables and orders, take 284 MB of the 300 that they may


@pytest.fixture
def enter():
    catalog = Catalog()
    space = catalog.space(Namespace(tenant="t", digest=bytes(16), encoding=b"n", fields={}))
    return lambda state: catalog.reserve(space, bytes([state]) * 32, b"", 1 << 20 | state, 4096, state)


def test_an_entry_is_small(enter):
    assert sys.getsizeof(enter(WRITING)) <= ENTRY_BYTES_MAX


def test_flags_are_set_and_taken_back_one_by_one(enter):
    entry = enter(WRITING)
    assert (entry.below, entry.hint, entry.tied) == (False, False, False)
    entry.hint = True
    assert (entry.below, entry.hint, entry.tied) == (False, True, False)
    entry.below = True
    assert (entry.below, entry.hint, entry.tied) == (True, True, True)
    entry.hint = False
    entry.below = False
    assert (entry.below, entry.hint, entry.tied) == (False, False, False)


def test_what_came_up_stays_tied_to_what_is_below(enter):
    entry = enter(PROMOTING)
    entry.state = READY
    assert (entry.below, entry.tied) == (True, True)
    entry.below = False
    assert (entry.below, entry.tied) == (False, True)
