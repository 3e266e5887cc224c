"""Virtual time."""

import asyncio
import hashlib
import os
import random
import secrets
import uuid

import pytest

from kvstored.testing.virtual import (
    Crash,
    Delays,
    GoesRound,
    NothingToDo,
    VirtualClock,
    VirtualLoop,
    abandon,
    drawn_bytes,
)


def run(work, seed=0, **delays):
    loop = VirtualLoop(Delays(seed, **delays))
    try:
        return loop.run_until_complete(work(loop))
    finally:
        loop.close()


async def busy_world(loop):
    """Tasks that sleep, time out and call threads; what happened, in its order."""
    rng, log, pool = random.Random(5), [], loop.pool(2)

    async def client(number):
        for turn in range(20):
            await asyncio.sleep(rng.random())
            log.append((number, turn, loop.time()))
            log.append(await loop.run_in_executor(pool, lambda: (number, "thread", loop.time())))
            try:
                await asyncio.wait_for(asyncio.sleep(rng.random()), 0.5)
            except TimeoutError:
                log.append((number, "late"))

    await asyncio.gather(*map(client, range(10)))
    return hashlib.sha256(repr(log).encode()).hexdigest()


def test_the_same_seed_gives_the_same_trace():
    assert run(busy_world, 1) == run(busy_world, 1)
    assert run(busy_world, 1) != run(busy_world, 2)


def test_sets_of_tasks_and_futures_have_the_same_order_wherever_those_lie():
    async def work(loop):
        futures = {loop.create_future(): number for number in range(50)}
        tasks = {loop.create_task(asyncio.sleep(1)): number for number in range(50)}
        done, _ = await asyncio.wait(tasks)
        return [futures[each] for each in set(futures)], [tasks[each] for each in done]

    memory, orders = [], []
    for size in (10, 1000, 3000):
        orders.append(run(work))
        memory += [bytearray(size) for _ in range(500)]
        del memory[::3]
    assert orders[0] == orders[1] == orders[2]


def test_what_is_abandoned_ends_in_the_order_in_which_it_began():
    ended = []

    async def work(number):
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(number)

    loop = VirtualLoop()
    tasks = []
    for number in range(50):
        tasks.append(loop.create_task(work(number)))
        for _ in range(1023):  # numbers that stand at the same place of a set
            loop.create_future()
    loop.run_until_complete(loop.create_task(asyncio.sleep(1)))
    abandon(loop)
    assert ended == list(range(len(tasks)))


def test_random_bytes_are_drawn_from_the_seed_and_from_nothing_afterwards():
    def some():
        return os.urandom(20), secrets.token_bytes(20), secrets.token_hex(6), secrets.randbits(63), uuid.uuid4()

    with drawn_bytes(1):
        first, more = some(), some()
    with drawn_bytes(1):
        assert some() == first
    with drawn_bytes(2):
        other = some()
    assert not {*first} & {*more, *other, *some()}


def test_an_hour_passes_at_once_and_the_clock_agrees_with_the_loop():
    async def sleep(loop):
        clock = VirtualClock(loop)
        before, wall = clock.monotonic(), clock.wall()
        await asyncio.sleep(3600)
        return clock.monotonic() - before, clock.wall() - wall, clock.monotonic() == loop.time()

    assert run(sleep) == (pytest.approx(3600), pytest.approx(3600), True)


def test_threads_run_later_and_never_two_of_a_pool_of_one():
    async def work(loop):
        order, pool = [], loop.pool(1)
        calls = [loop.run_in_executor(pool, order.append, i) for i in range(20)]
        assert order == []
        await asyncio.gather(*calls)
        return order

    assert run(work) == list(range(20))


def test_the_calls_of_a_larger_pool_overtake_each_other():
    async def work(loop):
        order = []
        await asyncio.gather(*(loop.run_in_executor(loop.pool(8), order.append, i) for i in range(20)))
        return order

    assert run(work) != list(range(20))


def test_a_call_that_runs_goes_on_when_its_caller_is_cancelled():
    async def work(loop):
        done, pool = [], loop.pool(1)
        running = loop.run_in_executor(pool, done.append, "runs")
        queued = loop.run_in_executor(pool, done.append, "waits")
        running.cancel()
        queued.cancel()
        await loop.run_in_executor(pool, done.append, "next")
        return done

    assert run(work) == ["runs", "next"]


def test_what_a_thread_raises_comes_to_the_caller():
    async def work(loop):
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            await asyncio.wrap_future(loop.pool(1).submit(lambda: 1 // 0))
        return await asyncio.wrap_future(loop.pool(1).submit(pow, 2, 3))

    assert run(work) == 8


def test_a_deadlock_is_found():
    async def work(loop):
        await loop.create_future()

    with pytest.raises(NothingToDo):
        run(work)


def test_what_goes_round_without_a_pause_is_found(monkeypatch):
    monkeypatch.setattr("kvstored.testing.virtual.TURNS_MAX", 50)

    async def work(loop, pause_s):
        for _ in range(100):
            await asyncio.sleep(pause_s)

    run(lambda loop: work(loop, 0.001))
    with pytest.raises(GoesRound):
        run(lambda loop: work(loop, 0))


def test_a_crash_ends_everything_at_once():
    passed = []

    async def work(loop):
        async def other():
            await asyncio.sleep(2)
            passed.append("other")

        task = asyncio.ensure_future(other())  # noqa: F841, RUF006
        await asyncio.sleep(1)
        await asyncio.to_thread(crash)
        passed.append("after")

    def crash():
        raise Crash

    loop = VirtualLoop()
    with pytest.raises(Crash):
        loop.run_until_complete(work(loop))
    abandon(loop)
    assert passed == []
