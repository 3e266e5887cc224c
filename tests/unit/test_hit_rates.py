"""Windows over namespaces that store much for little, and the log line about them."""

import logging

import pytest

from kvstored.catalog.catalog import Space
from kvstored.explain import misses
from kvstored.explain.difference import Difference, differences, fields_differ, told
from kvstored.explain.hit_rates import ASKED_BLOCKS_MAX, ASKED_BLOCKS_MIN, SPACES_MAX, STORED_BLOCKS_MIN, HitRates
from kvstored.explain.misses import LOG_INTERVAL_S, Misses
from kvstored.keys import Namespace
from kvstored.store.outcomes import THROTTLED
from kvstored.store.parts import Limits
from kvstored.testing.node import BLOCK_BYTES, STAGING_BYTES, Node, chain


def space(number=0, **fields):
    return Space(Namespace("alice", number.to_bytes(16, "big"), b"", {"model": "m", **fields}))


def ended(rates, where, *, looked_up=(0, 0), got=(0, 0), stored=STORED_BLOCKS_MIN):
    rates.looked_up(where, *looked_up)
    rates.got(where, *got)
    return rates.stored(where, stored)


@pytest.mark.parametrize(("found", "low"), [(0, True), (0.29, True), (0.31, False), (1, False)])
def test_a_namespace_that_stores_much_and_hits_under_30_percent_is_low(found, low):
    rates, where = HitRates(), space()
    assert ended(rates, where, looked_up=(10_000, int(10_000 * found))) == low
    assert list(rates.low) == [where] * low


def test_gets_of_what_a_lookup_found_do_not_hide_what_it_did_not_find():
    rates, where = HitRates(), space()
    assert ended(rates, where, looked_up=(10_000, 1000), got=(1000, 1000))
    low = rates.low[where]
    assert (low.asked, low.hit, low.stored) == (10_000, 1000, STORED_BLOCKS_MIN)
    assert not ended(rates, where, got=(10_000, 9000), looked_up=(100, 0))


def test_a_window_lasts_until_there_is_enough_to_judge():
    rates, where = HitRates(), space()
    assert not ended(rates, where, looked_up=(ASKED_BLOCKS_MIN - 1, 0))
    assert not ended(rates, where, looked_up=(0, 0), stored=10)
    assert ended(rates, where, looked_up=(1, 0), stored=1)
    assert not ended(rates, where, looked_up=(ASKED_BLOCKS_MIN, 0), stored=STORED_BLOCKS_MIN - 1)
    assert rates.low


@pytest.mark.parametrize("how", ["looked_up", "got"])
def test_a_warning_goes_when_all_hits_and_nothing_is_stored(how):
    rates, where = HitRates(), space()
    assert ended(rates, where, looked_up=(ASKED_BLOCKS_MIN, 0))
    getattr(rates, how)(where, ASKED_BLOCKS_MAX, ASKED_BLOCKS_MAX)
    assert not rates.low


def test_namespaces_without_end_take_no_memory_without_end():
    rates = HitRates()
    spaces = [space(number) for number in range(SPACES_MAX + 10)]
    for each in spaces:
        rates.looked_up(each, 1, 0)
    assert len(rates._windows) == SPACES_MAX
    assert spaces[-1] in rates._windows


async def test_the_log_says_it_once_an_hour_and_names_what_changes_with_each_start(caplog):
    async with Node() as node:
        session = await node.session()
        await node.space(session, extra="seed 1")
        await node.space(session, extra="seed 1", tp_rank=1, tp_size=2)
        where = await node.space(session, extra="seed 2")
        counting = Misses(node.parts)
        hashes = [b"%016d" % number for number in range(ASKED_BLOCKS_MIN)]
        with caplog.at_level(logging.WARNING, "kvstored.explain.misses"):
            for wait_s in (0, 1, LOG_INTERVAL_S, 1):
                node.clock.now += wait_s
                counting.looked_up([where], hashes, 0)
                counting.stored(where, STORED_BLOCKS_MIN)
        assert len(caplog.records) == 2
        assert "differs in extra seed 2 / seed 1" in caplog.records[0].getMessage()
        assert "kvstorectl explain --namespace " in caplog.records[0].getMessage()
        assert misses.warnings(node.parts, "bob", 8) == []


async def test_without_another_namespace_the_hashes_are_suspected():
    async with Node() as node:
        where = await node.space(await node.session())
        counting = Misses(node.parts)
        counting.looked_up([where], [b"%016d" % number for number in range(ASKED_BLOCKS_MIN)], 0)
        counting.stored(where, STORED_BLOCKS_MIN)
        assert "PYTHONHASHSEED" in misses.warning_of(node.parts, where)


def test_differences_name_each_field_with_both_values():
    ours, theirs = space(dtype="bf16", layers="4").namespace, space(dtype="fp16", extra="x").namespace
    assert differences(ours, theirs) == [
        Difference("dtype", "bf16", "fp16"),
        Difference("extra", "unset", "x"),
        Difference("layers", "4", "unset"),
    ]
    assert told(differences(ours, theirs)) == "dtype bf16 / fp16, extra unset / x, layers 4 / unset"
    assert len(told(fields_differ({"extra": "y" * 5000}, {}))) < 200


async def test_a_get_that_is_refused_counts_as_no_miss():
    limits = Limits(STAGING_BYTES, 64, 16, 2 * BLOCK_BYTES, 60.0, 60.0)
    async with Node(limits=limits) as node:
        session = await node.session()
        where = await node.space(session)
        for hash_ in chain("a", 3):
            await node.put(session, where, [hash_])
        held = await node.get(session, where, chain("a", 3))
        assert (held.blocks, held.next) == (2, THROTTLED)
        assert not node.parts.stats["alice"].misses
        node.store.reads.release(session, [lease.lease_id for lease in held.leases])
        await node.get(session, where, chain("b", 1))
        assert node.parts.stats["alice"].misses == {"never_stored": 1}
