"""Two tenants on one daemon: memory changes hands, and no bytes do."""

import hashlib
import json
import mmap
import multiprocessing
import os

import pytest

from kvstored.testing.daemon_process import DaemonProcess
from tests.e2e.checks import BLOCK_BYTES, NOBODY, check_balance, count_hits, fill, in_fork, tier
from tests.e2e.raw_client import HIT, RawClient, Refused, blocks_of, eventually, hashes_of, payload

MIB = 1 << 20
DRAM_BYTES = 32 * MIB
SEGMENT_BYTES = 4 * MIB
STAGING_BYTES = 2 * MIB
TOKENS = ("token-a", "token-b", "token-admin")


def settings(**more):
    tenants = [
        {"name": name, "tokens_sha256": [hashlib.sha256(token.encode()).hexdigest()], "role": role}
        for name, token, role in zip("abc", TOKENS, ("tenant", "tenant", "admin"), strict=True)
    ]
    tenants[2]["uids"] = [os.getuid()]  # the daemon runner's own status calls
    return {
        "dram.capacity_bytes": str(DRAM_BYTES),
        "dram.segment_bytes": str(SEGMENT_BYTES),
        "nvme.capacity_bytes": str(256 * MIB),
        "nvme.extent_bytes": str(32 * MIB),
        "tenants": json.dumps(tenants),
        **more,
    }


@pytest.fixture(params=[False, True], ids=["dram", "dram-nvme"])
def daemon(request, tmp_path):
    with DaemonProcess(settings(), nvme=request.param, parent_directory=tmp_path) as running:
        yield running


def client_of(daemon, token):
    return RawClient(daemon.session_socket, token=token, staging_bytes=STAGING_BYTES)


def dram_bytes(daemon, tenant):
    with RawClient(daemon.session_socket, token="token-admin") as admin:
        return next((t.dram_bytes for t in admin.status().tenants if t.name == tenant), 0)


def resident(client, namespace, chains):
    """Blocks of these chains that are read back with the right bytes."""
    right = 0
    for hashes, _ in chains:
        found = client.read(namespace, hashes)
        assert found == [payload(h, BLOCK_BYTES) for h in hashes[: len(found)]]
        right += len(found)
    return right


def lease_everything(client, namespace, chains):
    """Take the descriptors of every segment that holds these chains; the leases are given back."""
    for hashes, _ in chains:
        reply = client.get(namespace, hashes)
        client.release([lease.lease_id for lease in reply.leases])


def put_until_it_has(daemon, client, namespace, tenant, wanted_bytes=DRAM_BYTES // 2 + MIB, holder=None):
    """Put until the tenant's blocks fill so much of DRAM: the room must come, whoever had it before.

    More than was free, and not all: with a lower tier the mover empties DRAM again at its watermarks. The holder
    answers meanwhile: who does not let go of a segment in time is ended.
    """
    rounds = iter(range(10_000))

    def grown():
        if holder is not None:
            assert holder.drain_quietly()
        fill(client, namespace, f"grow {next(rounds)}", 16 * BLOCK_BYTES, wait_s=0.5)
        return dram_bytes(daemon, tenant) >= wanted_bytes

    eventually(grown, f"tenant {tenant} has {wanted_bytes} bytes")


def watch_mappings(descriptors, own_hashes, pipe):
    """A fork that outlives its session: maps all, and on each question tells what foreign bytes it sees."""
    maps = [mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ) for fd, size in descriptors]
    own = {hashlib.sha256(h + bytes([0])).digest() for h in own_hashes}
    pipe.send(sum(_foreign(m, own) for m in maps))
    pipe.recv()
    pipe.send((sum(_foreign(m, own) for m in maps), sum(_foreign_by_read(fd, size, own) for fd, size in descriptors)))


def _foreign(mapping, own):
    return sum(
        mapping[at : at + 32] not in own and any(mapping[at : at + 32]) for at in range(0, len(mapping), mmap.PAGESIZE)
    )


def _foreign_by_read(fd, size_bytes, own):
    pages = (os.pread(fd, 32, at) for at in range(0, size_bytes, mmap.PAGESIZE))
    return sum(page not in own and any(page) for page in pages)


def test_a_fork_that_keeps_its_mappings_sees_nothing_of_the_next_tenant(daemon):
    with client_of(daemon, "token-a") as first:
        namespace = first.namespace()
        chains = fill(first, namespace, "a", DRAM_BYTES // 2)
        assert count_hits(chains) == DRAM_BYTES // 2 // BLOCK_BYTES
        lease_everything(first, namespace, chains)
        assert len(first.segments) >= DRAM_BYTES // 2 // SEGMENT_BYTES
        here, there = multiprocessing.Pipe()
        mine = [h for hashes, _ in chains for h in hashes]
        descriptors = [(fd, first.sizes[i]) for i, fd in first.segments.items()]
        context = multiprocessing.get_context("fork")
        spy = context.Process(target=watch_mappings, args=(descriptors, mine, there), daemon=True)
        spy.start()
        assert here.recv() == 0, "before anything happens there are own bytes only"
    try:
        with client_of(daemon, "token-b") as second:
            put_until_it_has(daemon, second, second.namespace(), "b")
            here.send("look")
            assert here.recv() == (0, 0)
            put_until_it_has(daemon, second, second.namespace(), "b")
    finally:
        spy.kill()
        spy.join()
    check_balance(daemon.session_socket, "token-admin")


def test_the_spy_would_see_foreign_bytes_in_memory_that_is_reused():
    # The test above proves nothing if its scanner is blind.
    fd = os.memfd_create("reused")
    os.ftruncate(fd, 4 * mmap.PAGESIZE)
    mine, theirs = (hashes_of(name, 1)[0] for name in "ab")
    here, there = multiprocessing.Pipe()
    os.pwrite(fd, payload(mine, mmap.PAGESIZE), 0)
    args = ([(fd, 4 * mmap.PAGESIZE)], [mine], there)
    spy = multiprocessing.get_context("fork").Process(target=watch_mappings, args=args, daemon=True)
    spy.start()
    assert here.recv() == 0
    os.pwrite(fd, payload(theirs, mmap.PAGESIZE), mmap.PAGESIZE)
    here.send("look")
    assert here.recv() == (1, 1)
    spy.join()
    os.close(fd)


def test_memory_that_a_tenant_emptied_serves_the_next(daemon):
    with client_of(daemon, "token-a") as first:
        namespace = first.namespace()
        for hashes, _ in fill(first, namespace, "a", DRAM_BYTES):
            first.delete(namespace, hashes)
        eventually(lambda: dram_bytes(daemon, "a") == 0, "nothing is left of the deleted blocks")
    with client_of(daemon, "token-b") as second:
        put_until_it_has(daemon, second, second.namespace(), "b")
    check_balance(daemon.session_socket, "token-admin")


def test_a_session_that_does_not_give_up_a_segment_only_delays(daemon):
    with client_of(daemon, "token-a") as keeper, client_of(daemon, "token-b") as second:
        keeper.keep_retired = True
        namespace = keeper.namespace()
        lease_everything(keeper, namespace, fill(keeper, namespace, "a", DRAM_BYTES))
        theirs = second.namespace()

        names = iter(range(10_000))

        def asked():
            fill(second, theirs, f"press {next(names)}", 16 * BLOCK_BYTES, wait_s=0.2)
            keeper.drain_quietly()
            return keeper.retired

        eventually(asked, "the keeper is asked for a segment")
        with RawClient(daemon.session_socket, token="token-admin") as admin:
            assert tier(admin.status(), "dram").retired_bytes == SEGMENT_BYTES
            keeper.drop(keeper.retired)
            eventually(lambda: tier(admin.status(), "dram").retired_bytes == 0, "its memory is made anew")
        keeper.retired.clear()
        eventually(asked, "the keeper is asked for the next")
        keeper.close()  # as good as an answer
        put_until_it_has(daemon, second, theirs, "b")
    check_balance(daemon.session_socket, "token-admin")


def test_leases_on_the_oldest_segment_do_not_keep_the_next_tenant_out(daemon):
    with client_of(daemon, "token-a") as holder, client_of(daemon, "token-b") as second:
        namespace = holder.namespace()
        chains = fill(holder, namespace, "a", DRAM_BYTES // 2)
        fill(holder, namespace, "later", DRAM_BYTES // 2)
        held = holder.get(namespace, chains[0][0][:1], wait_s=60)
        put_until_it_has(daemon, second, second.namespace(), "b", holder=holder)
        block = blocks_of(held.leases[0])[0]
        assert holder.bytes_of(block) == payload(chains[0][0][0], BLOCK_BYTES)


def test_a_tenant_at_its_limit_does_not_cost_another_its_blocks(tmp_path):
    limited = json.loads(settings()["tenants"])
    limited[1]["dram_limit_bytes"] = 8 * MIB
    with (
        DaemonProcess(settings(tenants=json.dumps(limited)), parent_directory=tmp_path) as daemon,
        client_of(daemon, "token-a") as first,
        client_of(daemon, "token-b") as second,
    ):
        namespace = first.namespace()
        chains = fill(first, namespace, "a", 24 * MIB)
        assert count_hits(chains) == 24 * MIB // BLOCK_BYTES
        fill(second, second.namespace(), "b", 64 * MIB, wait_s=0)
        assert dram_bytes(daemon, "b") == 8 * MIB
        assert resident(first, namespace, chains) == 24 * MIB // BLOCK_BYTES


def test_a_block_larger_than_a_segment_is_refused_and_costs_nothing(tmp_path):
    with (
        DaemonProcess(settings(), parent_directory=tmp_path) as daemon,
        client_of(daemon, "token-a") as client,
        client_of(daemon, "token-b") as other,
    ):
        namespace = client.namespace()
        chains = fill(client, namespace, "a", DRAM_BYTES)
        theirs = other.namespace()
        for who, space in ((client, namespace), (other, theirs)):
            reserved = who.reserve(space, hashes_of("huge", 2), 2 * SEGMENT_BYTES)
            assert not reserved.reservation_id
        assert resident(client, namespace, chains) == DRAM_BYTES // BLOCK_BYTES


def test_one_tenant_learns_nothing_of_anothers_keys_and_handles(daemon):
    with (
        client_of(daemon, "token-a") as first,
        client_of(daemon, "token-b") as second,
        RawClient(daemon.session_socket, token="token-a", create_group=True) as leader,
    ):
        mine, theirs = first.namespace("same"), second.namespace("same")
        hashes = hashes_of("secret", 4)
        assert set(first.put(mine, hashes, [payload(h, BLOCK_BYTES) for h in hashes])) == {HIT}
        lease = first.get(mine, hashes).leases[0].lease_id
        assert second.lookup(theirs, hashes).prefix_blocks == 0
        assert second.contains(theirs, hashes) == [0] * 4
        assert not second.get(theirs, hashes).leases
        assert second.release([lease]) == 0
        assert second.delete(theirs, hashes) == 0
        assert [t.name for t in second.status().tenants] == ["b"]
        assert {s.tenant for s in second.status().sessions} == {"b"}
        assert second.list_blocks() == []
        with pytest.raises(Refused, match="no such group"):
            RawClient(daemon.session_socket, token="token-b", join_group=leader.opened.group_id)
        other = [payload(h, BLOCK_BYTES, version=1) for h in hashes]
        assert set(second.put(theirs, hashes, other)) == {HIT}
        assert second.read(theirs, hashes) == other
        assert first.read(mine, hashes) == [payload(h, BLOCK_BYTES) for h in hashes]


def test_an_unknown_token_and_an_unknown_uid_are_nobody(daemon):
    with pytest.raises(Refused, match="16: "):
        RawClient(daemon.session_socket, token="guess")


@pytest.mark.skipif(os.getuid() != 0, reason="needs another uid")
def test_a_uid_that_no_tenant_names_is_turned_away():
    daemon = DaemonProcess(settings(**{"server.socket_mode": "0666"}))
    daemon.directory.chmod(0o711)
    with daemon:

        def refused():
            with pytest.raises(Refused, match="16: "):
                RawClient(daemon.session_socket)
            return True

        assert in_fork(refused, uid=NOBODY)
