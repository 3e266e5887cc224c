"""Ending tasks that run beside serving."""

import asyncio

from kvstored.background import cancel_all


async def test_a_task_that_misses_its_cancellation_is_told_again(monkeypatch):
    monkeypatch.setattr("kvstored.background.AGAIN_S", 0.01)
    told = []

    async def deaf():
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                told.append("cancelled")
                if len(told) == 2:
                    raise

    task = asyncio.create_task(deaf())
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await cancel_all([task])
    assert told == ["cancelled"] * 2
    assert task.cancelled()


async def test_nothing_to_end_is_no_wait():
    await cancel_all([])
