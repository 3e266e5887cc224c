"""A bump puts a model's blocks out of reach, in every tier and whatever is under way, and their room comes back."""

import asyncio
import zlib

import pytest

from kvstored.catalog.catalog import WRITING
from kvstored.errors import CorruptData, DeviceError, LimitExceeded
from kvstored.explain.explain import explain
from kvstored.keys import Namespace
from kvstored.store.outcomes import HIT, MISS, RESERVED
from kvstored.testing.memory_tier import MemoryTier
from kvstored.testing.node import Node, chain
from kvstored.testing.waiting import turns
from kvstored.tiers import epochs
from kvstored.tiers.epochs import About, EpochTable


def namespace(model="m", version="", tenant="t"):
    return Namespace(
        tenant, f"{tenant}{model}{version}".encode().ljust(16, b"."), b"", {"model": model, "model_version": version}
    )


# ---- the table ----


def test_a_namespace_that_was_never_bumped_is_stored_under_its_own_digest():
    table = EpochTable()
    table.bump(About("t", "other"), 1.0)
    assert table.digest_of(namespace()) == namespace().digest


def test_a_bump_is_of_one_tenants_model_or_of_one_version_of_it():
    table = EpochTable()
    table.bump(About("t", "m", "v1"), 1.0)
    changed = [
        n
        for n in (namespace(), namespace(version="v1"), namespace(version="v2"), namespace(tenant="u", version="v1"))
        if table.digest_of(n) != n.digest
    ]
    assert changed == [namespace(version="v1")]
    table.bump(About("t", "m"), 1.0)
    assert {
        n.fields["model_version"] for n in (namespace(), namespace(version="v2")) if table.digest_of(n) != n.digest
    } == {"", "v2"}


def test_no_number_is_given_out_twice_though_the_clock_is_set_back():
    table = EpochTable()
    numbers = [table.bump(About("t", "m"), wall_s) for wall_s in (100.0, 50.0, 50.0, 101.0)]
    assert numbers == sorted(set(numbers))


def test_a_bump_of_the_model_takes_the_place_of_those_of_its_versions_and_goes_on_taking_back_their_room():
    table = EpochTable()
    first = table.bump(About("t", "m", "v1"), 1.0)
    before = table.digest_of(namespace(version="v1"))
    table.bump(About("t", "m"), 2.0)
    assert list(table.rules) == [About("t", "m")]
    assert table.rules[About("t", "m")].past == [0, first]
    assert before in table.past_digests(namespace(version="v1"))
    assert namespace(version="v1").digest in table.past_digests(namespace(version="v1"))


def test_rules_are_bounded_and_the_way_out_is_said(monkeypatch):
    monkeypatch.setattr(epochs, "RULES_PER_TENANT_MAX", 2)
    table = EpochTable()
    table.bump(About("t", "m", "a"), 1.0)
    table.bump(About("t", "m", "b"), 1.0)
    table.bump(About("u", "m", "c"), 1.0)
    with pytest.raises(LimitExceeded, match="without --model-version"):
        table.bump(About("t", "m", "c"), 1.0)
    table.bump(About("t", "m", "a"), 1.0)


def test_what_was_packed_is_unpacked_and_damage_is_noticed():
    table = EpochTable()
    table.bump(About("t", "m", "v"), 1.0)
    table.bump(About("t", "n"), 1.0)
    packed = table.pack()
    assert EpochTable.unpack(packed).rules == table.rules
    for at in range(len(packed)):
        with pytest.raises(CorruptData):
            EpochTable.unpack(packed[:at] + bytes([packed[at] ^ 1]) + packed[at + 1 :])


def test_what_has_a_right_crc_and_makes_no_sense_is_damaged():
    body = epochs._MAGIC + b"\x81\xa1x\x01"
    with pytest.raises(CorruptData, match="make no sense"):
        EpochTable.unpack(body + zlib.crc32(body).to_bytes(4, "little"))


def test_two_tables_agree_on_the_newer_of_each_rule_whichever_comes_first():
    one, other = EpochTable(), EpochTable()
    one.bump(About("t", "m"), 1.0)
    other.bump(About("t", "n", "v"), 1.0)
    other.bump(About("t", "m", "v"), 0.5)
    one.bump(About("t", "m"), 3.0)
    merged = one.copy()
    assert merged.merge(other)
    back = other.copy()
    assert back.merge(one)
    assert {about: rule.number for about, rule in merged} == {about: rule.number for about, rule in back}
    assert About("t", "m", "v") not in merged.rules
    assert not merged.merge(other)


def test_where_the_epoch_was_lost_everything_stored_is_of_a_past_one():
    known = epochs.Epochs()
    known.found(known.after_loss(5.0))
    assert known.now.digest_of(namespace()) != namespace().digest


async def test_memory_that_is_kept_knows_of_an_epoch_that_a_device_brings_before_it_counts():
    known, noted = epochs.Epochs(), []

    async def remember(packed):
        assert known.now.digest_of(namespace()) == namespace().digest, "or blocks of it were lost at a kill"
        noted.append(EpochTable.unpack(packed).digest_of(namespace()))

    known.remember = remember
    late = EpochTable()
    late.bump(About("t", "m"), 5.0)
    await known.learn(late)
    assert noted == [known.now.digest_of(namespace())] != [namespace().digest]


# ---- the store ----


async def test_a_bump_puts_dram_and_nvme_out_of_reach_and_puts_after_it_count():
    async with Node(blocks=16, below=MemoryTier()) as node:
        session = await node.session()
        space, other = await node.space(session), await node.space(session, "other")
        await node.put(session, space, chain("a", 4))
        await node.put(session, other, chain("a", 4))
        await node.parts.below.mover.flush(1.0)
        bumped = await node.store.bumps.bump("alice", "m")
        assert (bumped.namespaces, bumped.dram_blocks) == (1, 4)
        assert (await node.get(session, space, chain("a", 4), 0.1)).blocks == 0
        assert (await node.store.reads.contains(space, chain("a", 4)))[0] == bytes(4)
        assert (await node.get(session, other, chain("a", 4))).blocks == 4
        assert await node.put(session, space, chain("a", 2)) == bytes([RESERVED] * 2)
        held = await node.get(session, space, chain("a", 4), 0.1)
        assert (held.blocks, held.next) == (2, MISS)
        for group in [session.group]:
            node.store.reads.release(session, list(group.leases))


async def test_the_room_of_a_past_epoch_comes_back_and_explain_knows_why():
    async with Node(blocks=16, below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 4))
        await node.parts.below.mover.flush(1.0)
        await node.store.bumps.bump("alice", "m")
        asked = (node.parts, [space], space, chain("a", 1)[0])
        assert (await explain(*asked)).verdict == "epoch"
        await node.put(session, space, chain("b", 2))
        removed = await node.store.bumps.take_back()
        assert (removed.dram_blocks, removed.nvme_blocks) == (4, 4)
        assert not node.lower.blocks
        assert node.parts.dram.usage().blocks == 2
        assert node.parts.history.why(space, chain("a", 1)[0]).reason == "epoch"
        assert (await explain(*asked)).verdict == "epoch"
        assert [epoch.taking_back for epoch in node.store.bumps.list("alice")] == [False]


async def test_a_lease_outlives_the_bump_and_nobody_gets_a_new_one():
    async with Node() as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 2))
        held = await node.get(session, space, chain("a", 2))
        await node.store.bumps.bump("alice", "m")
        await node.store.bumps.take_back()
        assert node.parts.dram.usage().blocks == 2
        assert (await node.get(session, space, chain("a", 2))).blocks == 0
        node.store.reads.release(session, [held.leases[0].lease_id])
        assert node.parts.dram.usage().blocks == 0


@pytest.mark.parametrize("taken_back", [False, True])
async def test_what_was_reserved_before_a_bump_is_no_hit_after_it(taken_back):
    async with Node() as node:
        session = await node.session()
        space = await node.space(session)
        reserved = await node.reserve(session, space, chain("a", 2))
        await node.store.bumps.bump("alice", "m")
        if taken_back:
            await node.store.bumps.take_back()
        await node.commit(session, reserved, chain("a", 2))
        assert (await node.get(session, space, chain("a", 2))).blocks == 0
        assert await node.put(session, space, chain("a", 2)) == bytes([RESERVED] * 2)
        await node.store.bumps.take_back()
        held = await node.get(session, space, chain("a", 2))
        assert held.blocks == 2
        node.store.reads.release(session, [held.leases[0].lease_id])


class SlowToAnswer(MemoryTier):
    """Its index has been read when the answer is still on its way."""

    def __init__(self):
        super().__init__()
        self.answers, self.asked = asyncio.Event(), asyncio.Event()
        self.answers.set()

    async def find(self, tenant, digest, hashes, *, prefix):
        records = await super().find(tenant, digest, hashes, prefix=prefix)
        self.asked.set()
        await self.answers.wait()
        return records


async def only_below(node, session, space, hashes):
    await node.put(session, space, hashes)
    await node.parts.below.mover.flush(1.0)
    for hash_ in hashes:
        node.parts.room.forget(space.entries[hash_])


async def test_what_the_index_said_before_a_bump_brings_nothing_up_after_it():
    async with Node(below=SlowToAnswer()) as node:
        session = await node.session()
        space = await node.space(session)
        await only_below(node, session, space, chain("a", 4))
        node.lower.answers.clear()
        node.lower.asked.clear()
        getting = asyncio.create_task(node.get(session, space, chain("a", 4), wait_s=0.01))
        reserving = asyncio.create_task(node.reserve(session, space, chain("a", 4)))
        await node.lower.asked.wait()
        await asyncio.sleep(0)
        await node.store.bumps.bump("alice", "m")
        node.lower.answers.set()
        assert (await getting).blocks == 0
        assert HIT not in (await reserving).outcomes
        assert {entry.state for entry in space.entries.values()} == {WRITING}


async def test_what_is_on_its_way_up_does_not_arrive_in_the_next_epoch():
    async with Node(below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        await only_below(node, session, space, chain("a", 4))
        node.lower.gate.clear()
        getting = asyncio.create_task(node.get(session, space, chain("a", 4), wait_s=60))
        await turns()
        await node.store.bumps.bump("alice", "m")
        node.lower.gate.set()
        assert (await getting).blocks == 0
        assert not space.entries
        await node.store.bumps.take_back()
        assert node.parts.dram.usage().blocks == 0


async def test_a_bump_that_a_device_does_not_know_of_counts_and_is_not_acknowledged(monkeypatch):
    async with Node(below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 2))

        async def off():
            raise DeviceError("drive0 is off")

        monkeypatch.setattr(node.lower, "remember_epochs", off)
        with pytest.raises(DeviceError, match="drive0 is off"):
            await node.store.bumps.bump("alice", "m")
        assert (await node.get(session, space, chain("a", 2))).blocks == 0
        for _ in range(2):  # however often it fails, and though the room is back since the first time
            with pytest.raises(DeviceError, match="drive0 is off"):
                await node.store.bumps.take_back()
        monkeypatch.undo()
        await node.store.bumps.take_back()
        assert node.lower.calls["remember_epochs"] == 1, "or a restart would end an epoch that has durable blocks"
        await node.store.bumps.take_back()
        assert node.lower.calls["remember_epochs"] == 1


async def test_a_bump_is_written_down_before_anybody_sees_it():
    async with Node(below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 2))
        seen = []

        async def remember():
            seen.append(
                (space.digest == space.namespace.digest, node.parts.epochs.wanted.number_of(space.namespace) > 0)
            )

        node.lower.remember_epochs = remember
        await node.store.bumps.bump("alice", "m")
        assert seen == [(True, True)]
