"""The invariant of quotas in a running daemon: what exceeds a limit is said, and what only comes down to one is not."""

from kvstored.config.schema import Tenant
from kvstored.policy.quota import Quota
from kvstored.store.quota_audit import STORES_LAST_S
from kvstored.store.trimming import Trimming
from kvstored.tenancy.merge import Change, Changes
from kvstored.testing.memory_tier import MemoryTier
from kvstored.testing.node import BLOCK_BYTES, Node, chain


def limited(dram_blocks=4, nvme_blocks=4):
    return Tenant(
        name="alice", uids=[1], dram_limit_bytes=dram_blocks * BLOCK_BYTES, nvme_limit_bytes=nvme_blocks * BLOCK_BYTES
    )


async def filled(node, blocks):
    session = await node.session("alice")
    space = await node.space(session)
    await node.put(session, space, chain("a", blocks))
    return session, space


async def test_within_its_limit_nothing_is_said_and_a_byte_more_is():
    async with Node(16, segment_blocks=4, tenants=[limited()], below=MemoryTier()) as node:
        check = node.store.quota_audit.check
        assert check() == []
        session, space = await filled(node, 4)
        await node.parts.below.mover.flush(1.0)
        assert check() == []
        await node.put(session, space, chain("b", 1))  # its quota in the store is another than it should be
        assert check() == [f"alice has {5 * BLOCK_BYTES} bytes of DRAM: its limit is {4 * BLOCK_BYTES}"]
        await node.parts.below.mover.flush(1.0)
        assert len(check()) == 2
        assert node.counters["quota_violations"] == 3


async def test_an_account_that_is_not_what_segments_say_is_said():
    async with Node(16, segment_blocks=4, tenants=[limited(16, 16)]) as node:
        await filled(node, 4)
        used, blocks = node.parts.dram._tenants["alice"]
        node.parts.dram._tenants["alice"] = (used - 1, blocks)
        (line,) = node.store.quota_audit.check()
        assert line == f"alice has {used} bytes of DRAM, its account is {used - 1}"
        node.parts.dram._tenants["alice"] = (used, blocks)
        assert node.store.quota_audit.check() == []


async def test_what_comes_down_to_a_lowered_limit_is_no_violation_and_what_grows_over_it_is():
    async with Node(16, segment_blocks=4, tenants=[limited(8, 8)], quotas={"alice": Quota()}) as node:
        audit = node.store.quota_audit
        session, space = await filled(node, 8)
        assert audit.check() == []
        node.parts.tenants.become(Changes({"alice": Change("alice", fields={"dram_limit_bytes": 8192})}, {}, []))
        node.clock.now += STORES_LAST_S + 1
        assert audit.check() == []
        await node.store.writes.delete(session, space, chain("a", 8)[6:])
        assert audit.check() == []
        await node.put(session, space, chain("b", 1))
        assert len(audit.check()) == 1, "it fell to six, and must not rise again"
        node.parts.room.allotments.change({"alice": Quota(2 * BLOCK_BYTES)})
        trimming = Trimming(node.parts)
        while await trimming.step():
            assert len(audit.check()) <= 1
        assert audit.check() == []


async def test_what_was_there_at_the_start_is_no_violation():
    async with Node(16, segment_blocks=4, tenants=[limited(2, 2)], below=MemoryTier()) as node:
        session, space = await filled(node, 4)
        await node.parts.below.mover.flush(1.0)
        check = node.store.quota_audit.check
        assert check() == []
        await node.put(session, space, chain("b", 1))
        assert len(check()) == 1
