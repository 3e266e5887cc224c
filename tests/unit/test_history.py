"""The memory of why blocks are gone: bounded, per tenant, newest first."""

from collections.abc import Sequence

import pytest

from kvstored.catalog.history import AT_LIMIT, CAUSES_MAX, REFUSED_PER_NOTE_MAX, STEPS_MAX, Gone, History, Reason, Ring
from kvstored.catalog.spaces import Space
from kvstored.keys import Namespace
from kvstored.policy.quota import Quota
from kvstored.testing.node import BLOCK_BYTES, ManualClock, Node, chain

SPACE = Space(Namespace("alice", b"a" * 16, b"", {}))
OTHER_SPACE = Space(Namespace("alice", b"b" * 16, b"", {}))
BOB = Space(Namespace("bob", b"c" * 16, b"", {}))


def hashes(name: str, count: int) -> list[bytes]:
    return [f"{name}{index:08}".encode() for index in range(count)]


def known(history: History, space: Space, asked: Sequence[bytes]) -> int:
    return sum(history.why(space, hash_) is not None for hash_ in asked)


def test_what_was_noted_is_told_with_reason_rule_and_time():
    clock = ManualClock()
    history = History(clock, 64, 64)
    history.note(SPACE, hashes("x", 3), Reason.EVICTED, "room for new blocks")
    assert history.why(SPACE, hashes("x", 3)[2]) == Gone(Reason.EVICTED, "room for new blocks", clock.wall())
    assert history.why(SPACE, b"something else") is None
    assert history.why(OTHER_SPACE, hashes("x", 1)[0]) is None
    assert history.why(BOB, hashes("x", 1)[0]) is None


@pytest.mark.parametrize("reasons", [(Reason.EVICTED, Reason.DELETED), (Reason.PUT_REFUSED, Reason.EVICTED)])
@pytest.mark.parametrize("turned", [False, True])
def test_the_last_reason_counts(reasons, turned):
    clock = ManualClock()
    history = History(clock, 64, 64)
    for reason in reversed(reasons) if turned else reasons:
        history.note(SPACE, [b"x" * 8], reason, "")
        clock.now += 1
    assert history.why(SPACE, b"x" * 8).reason == reasons[0 if turned else 1]


def test_the_oldest_are_overwritten_and_the_last_are_all_known():
    history = History(ManualClock(), 64, 64)
    everything = hashes("x", 1000)
    for start in range(0, 1000, 7):
        history.note(SPACE, everything[start : start + 7], Reason.EVICTED, "room")
    assert known(history, SPACE, everything[-64:]) == 64
    assert known(history, SPACE, everything[:-64]) == 0


def test_one_tenant_does_not_push_out_what_is_remembered_of_another():
    history = History(ManualClock(), 64, 64)
    history.note(BOB, hashes("b", 64), Reason.EXPIRED, "its TTL")
    history.note(SPACE, hashes("x", 10_000), Reason.EVICTED, "room")
    assert known(history, BOB, hashes("b", 64)) == 64


def test_refusals_do_not_push_out_what_was_evicted_and_are_noted_in_part():
    history = History(ManualClock(), 64, 1024)
    history.note(SPACE, hashes("x", 64), Reason.EVICTED, "room")
    history.note(SPACE, hashes("r", 8192), Reason.PUT_REFUSED, "no room")
    assert known(history, SPACE, hashes("x", 64)) == 64
    assert known(history, SPACE, hashes("r", 8192)) == REFUSED_PER_NOTE_MAX


def test_rules_without_end_become_one_without_a_name():
    history = History(ManualClock(), 1024, 64)
    everything = hashes("x", 3 * CAUSES_MAX)
    for number, hash_ in enumerate(everything):
        history.note(SPACE, [hash_], Reason.EVICTED, f"rule {number}")
    for reason in Reason:
        history.note(SPACE, [reason.encode().ljust(8)], reason, "another")
    assert history.why(SPACE, everything[0]).rule == "rule 0"
    assert history.why(SPACE, everything[-1]) == Gone(Reason.EVICTED, "", ManualClock().wall())
    assert [history.why(SPACE, reason.encode().ljust(8)).reason for reason in Reason] == list(Reason)


def test_a_tenant_that_is_no_more_is_forgotten():
    history = History(ManualClock(), 64, 64)
    history.note(SPACE, hashes("x", 1), Reason.EVICTED, "room")
    history.forget("alice")
    history.forget("nobody")
    assert known(history, SPACE, hashes("x", 1)) == 0


def test_a_look_ends_where_one_key_was_noted_again_and_again():
    ring = Ring(64)
    ring.add([64], 1)
    ring.add([128] * STEPS_MAX, 2)  # the same list, and all newer
    assert ring.find(128) == 2
    assert ring.find(64) is None


def test_numbers_may_wrap():
    ring = Ring(64)
    ring._next = (1 << 32) - 100
    for key in range(300):
        ring.add([key], key)
        assert ring.find(key) == key
        assert ring.find(key - 63) == (key - 63 if key >= 63 else None)
    assert [ring.find(key) for key in range(300 - 64)] == [None] * (300 - 64)


async def test_a_tenant_at_its_limit_pays_with_its_own_blocks_and_is_told_so():
    async with Node(blocks=8, quotas={"alice": Quota(limit_bytes=2 * BLOCK_BYTES)}) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 2))
        await node.put(session, space, chain("b", 1))
        gone = node.parts.history.why(space, chain("a", 2)[1])
        assert (gone.reason, gone.rule) == (Reason.QUOTA, AT_LIMIT)
