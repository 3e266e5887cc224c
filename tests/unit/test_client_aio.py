import asyncio
import contextlib
import gc
import os
import threading

import numpy as np
import pytest
import uvloop
from fake_daemon import PATIENT, SLOT_BYTES, SPEC, answer_within, due
from kvstored_client import AsyncClient, Outcome
from kvstored_client import buffers as memory
from kvstored_proto.v1 import kvstored_pb2 as pb

HASHES = [bytes([i]) * 32 for i in range(1, 9)]
BLOCKS = [bytes([i]) * 1000 for i in range(1, 9)]


async def eventually(condition):
    async with asyncio.timeout(60.0):
        while not condition():  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.001)


async def _round_trip(daemon):
    async with AsyncClient(daemon.address, **PATIENT) as client:
        assert client.connected
        namespace = client.namespace(SPEC)
        assert await client.open(namespace)
        assert len(namespace.chain_seed) == 16
        assert (await client.put(namespace, HASHES[:3], BLOCKS[:3])).stored == 3
        assert (await client.lookup(namespace, HASHES)).prefix_blocks == 3
        costed = await client.lookup(namespace, HASHES, prefill_tokens_per_s=4.0)
        assert (costed.load_s, costed.recompute_s, costed.paying_blocks, costed.pays) == (1.0, 3.0, 1, False)
        coming = await client.lookup(namespace, HASHES, prefetch=True)
        assert coming.queued_blocks == 3
        assert (await client.cancel_prefetch(coming.prefetch_id)).done
        async with client.get(namespace, HASHES) as blocks:
            assert [bytes(b) for b in blocks] == BLOCKS[:3]
        buffers = [bytearray(1000) for _ in range(8)]
        assert await client.get_into(namespace, HASHES, buffers) == 3
        assert bytes(buffers[2]) == BLOCKS[2]
        async with client.stage(namespace, HASHES[3:4], 1000) as staged:
            staged.views[0][:] = BLOCKS[3]
            assert (await staged.commit()).stored == 1
        assert (await client.contains(namespace, HASHES[3:5])) == [Outcome.HIT, Outcome.MISS]
        prefetch = await client.prefetch(namespace, HASHES)
        assert (await prefetch.wait(60.0)).ready_blocks == 3
        assert (await prefetch.cancel()).done
        assert (await client.hint(namespace, HASHES, final=True)).blocks == 0  # which this daemon does not know
        assert (await client.touch(namespace, HASHES), await client.delete(namespace, HASHES)) == (4, 4)
        assert (await client.status()).state == "serving"
        await eventually(lambda: not daemon.leases and not daemon.reservations)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_every_verb_works_in_either_loop(daemon, run):
    run(_round_trip(daemon))


async def test_large_copies_run_in_threads_and_bring_every_byte(daemon):
    data = np.random.default_rng(2).integers(0, 255, 64 * SLOT_BYTES, np.uint8)
    hashes = [i.to_bytes(16, "little") for i in range(64)]
    seen = []
    copy = memory.copy_runs

    def watch(runs):
        seen.append(threading.current_thread() is threading.main_thread())
        copy(runs)

    async with AsyncClient(daemon.address, **PATIENT) as client:
        namespace = client.namespace(SPEC)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory, "copy_runs", watch)
            await client.put(namespace, hashes, data)
            target = np.zeros_like(data)
            assert await client.get_into(namespace, hashes, target) == 64
            assert await client.get_into(namespace, hashes[:1], target[:SLOT_BYTES]) == 1
    assert (target == data).all()
    assert seen == [False, False, True]


async def test_many_tasks_share_one_session(daemon):
    async with AsyncClient(daemon.address, **PATIENT) as client:
        namespace = client.namespace(SPEC)
        await client.put(namespace, HASHES, BLOCKS)

        async def one(i):
            buffer = bytearray(1000)
            found = await client.get_into(namespace, [HASHES[i % 8]], [buffer])
            return found == 1 and bytes(buffer) == BLOCKS[i % 8]

        assert all(await asyncio.gather(*(one(i) for i in range(60))))
        assert client.stats.connects == 1


async def test_tasks_that_start_together_open_one_session(daemon):
    client = AsyncClient(daemon.address, **PATIENT)
    namespace = client.namespace(SPEC)
    await asyncio.gather(*(client.lookup(namespace, HASHES) for _ in range(10)))
    assert daemon.counts[pb.OPERATION_OPEN_SESSION] == 1
    await client.close()


async def test_a_cancelled_get_gives_back_what_its_late_reply_brings(daemon):
    async with AsyncClient(daemon.address, **PATIENT) as client:
        namespace = client.namespace(SPEC)
        await client.put(namespace, HASHES[:1], BLOCKS[:1])
        daemon.silent = {pb.OPERATION_GET}
        task = asyncio.create_task(client.get_into(namespace, HASHES[:1], bytearray(1000)))
        await eventually(lambda: daemon.held)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        daemon.answer_held()
        await eventually(lambda: daemon.counts[pb.OPERATION_RELEASE] == 1 and not daemon.leases)


async def test_a_get_cancelled_in_its_copy_releases_only_when_the_copy_has_ended(daemon, monkeypatch):
    started, proceed, finished = threading.Event(), threading.Event(), threading.Event()
    copy = memory.copy_runs

    def slow(runs):
        started.set()
        proceed.wait(60.0)
        copy(runs)
        finished.set()

    hashes = [i.to_bytes(16, "little") for i in range(64)]
    async with AsyncClient(daemon.address, **PATIENT) as client:
        namespace = client.namespace(SPEC)
        await client.put(namespace, hashes, bytes(64 * SLOT_BYTES))
        monkeypatch.setattr(memory, "copy_runs", slow)
        task = asyncio.create_task(client.get_into(namespace, hashes, bytearray(64 * SLOT_BYTES)))
        await eventually(started.is_set)
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()
        assert len(daemon.leases) == 1
        proceed.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert finished.is_set()
        await eventually(lambda: not daemon.leases)


async def test_a_cancelled_put_aborts_and_keeps_its_staging_until_the_answer(daemon):
    async with AsyncClient(daemon.address, staging_bytes=8 * SLOT_BYTES, **PATIENT) as client:
        namespace = client.namespace(SPEC)
        daemon.silent = {pb.OPERATION_COMMIT}
        task = asyncio.create_task(client.put(namespace, HASHES, BLOCKS))
        await eventually(lambda: daemon.held)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        ring = client._core.connection.staging
        assert ring.free_bytes < ring.size_bytes
        daemon.silent = set()
        daemon.answer_held()
        await eventually(lambda: ring.free_bytes == ring.size_bytes)
        await eventually(lambda: not daemon.reservations)


async def test_an_unanswered_call_is_a_miss_after_its_timeout(daemon):
    async with AsyncClient(daemon.address, **PATIENT) as client:
        namespace = client.namespace(SPEC)
        await client.lookup(namespace, HASHES)
        daemon.silent = {pb.OPERATION_LOOKUP}
        answer_within(client, 0.05)
        assert (await client.lookup(namespace, HASHES)).outcome == Outcome.MISS
        assert client.stats.timeouts == 1
        await eventually(lambda: daemon.held)
        daemon.answer_held()
        await eventually(lambda: client.stats.late_replies == 1)


async def test_it_connects_again_after_a_restart(daemon):
    async with AsyncClient(daemon.address, **PATIENT) as client:
        namespace = client.namespace(SPEC)
        await client.put(namespace, HASHES[:1], BLOCKS[:1])
        daemon.stop()
        assert (await client.lookup(namespace, HASHES)).prefix_blocks == 0
        daemon.start()
        due(client)
        assert (await client.lookup(namespace, HASHES)).prefix_blocks == 1
        assert (client.stats.reconnects, client.boot_id) == (1, 2)


async def test_without_a_daemon_everything_is_a_miss(tmp_path):
    async with AsyncClient(f"unix:{tmp_path}/nobody") as client:
        namespace = client.namespace(SPEC)
        assert not client.connected
        assert not await client.open(namespace)
        async with client.get(namespace, HASHES) as blocks:
            assert len(blocks) == 0
        async with client.stage(namespace, HASHES, 10) as staged:
            assert (await staged.commit()).refused == 8
        assert await client.status() is None


async def test_blocks_that_nobody_closes_are_released_by_the_collector_of_any_thread(daemon):
    async with AsyncClient(daemon.address, **PATIENT) as client:
        namespace = client.namespace(SPEC)
        await client.put(namespace, HASHES[:1], BLOCKS[:1])
        holder = [await client.get(namespace, HASHES[:1])]
        assert len(daemon.leases) == 1
        await asyncio.to_thread(holder.clear)
        gc.collect()
        await eventually(lambda: not daemon.leases)


async def test_a_daemon_that_reads_slowly_gets_every_request(daemon):
    hashes = [i.to_bytes(64, "little") for i in range(60)]
    async with AsyncClient(daemon.address, **PATIENT) as client:
        namespace = client.namespace(SPEC)
        await client.lookup(namespace, hashes)
        with daemon.lock:  # it stops reading after a few
            calls = [asyncio.create_task(client.lookup(namespace, hashes)) for _ in range(1000)]
            await asyncio.sleep(0.1)
        assert all(result.outcome == Outcome.MISS for result in await asyncio.gather(*calls))
        assert daemon.counts[pb.OPERATION_LOOKUP] == 1001
        assert client.stats.misses_unavailable == 0


def test_a_client_belongs_to_one_loop(daemon):
    client = AsyncClient(daemon.address, **PATIENT)
    namespace = client.namespace(SPEC)
    asyncio.run(client.lookup(namespace, HASHES))
    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(client.lookup(namespace, HASHES))
    asyncio.run(client.close())


def test_a_forked_child_is_told(daemon):
    client = AsyncClient(daemon.address, **PATIENT)
    namespace = client.namespace(SPEC)
    asyncio.run(client.lookup(namespace, HASHES))
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            asyncio.run(client.lookup(namespace, HASHES))
        except RuntimeError as error:
            code = 0 if "fork" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    asyncio.run(client.close())
