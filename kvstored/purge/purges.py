"""Purges as the daemon runs them: whoever asked for one may leave, and a receipt of each is kept.

Those of one tenant run one after the other, for two that hold the same slot would wait for each other; they
make those before them end by their own deadline. So nobody's purge waits for another tenant's leases.

A purge is on file before it is acknowledged; one that is unfinished is begun again by the next daemon, so often
that what remains must be looked at by somebody.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

from kvstored.background import cancel_all
from kvstored.errors import KVStoredError, LimitExceeded
from kvstored.purge.purge import Purge
from kvstored.purge.receipts import DRY_RUN, INCOMPLETE, RESUMES_MAX, RUNNING, Receipt, Receipts, Selection, new_id
from kvstored.store.store import Store

WAITING_MAX: Final = 16  # that one tenant asked for
DEADLINE_DEFAULT_S: Final = 30.0
NOT_ON_FILE: Final = "not on file"
BEGUN_AGAIN: Final = "begun again after a restart"
GIVEN_UP: Final = (
    f"begun again after {RESUMES_MAX} restarts and not again: see to what remains (a path that is off, a device that "
    "does not answer) and ask for the purge anew"
)


class Purges:
    """All purges of the daemon: those that wait, the one that runs, and the receipts of those that have ended."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._parts = store.parts
        self.receipts = Receipts()
        self._saving = asyncio.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._purges: dict[str, Purge] = {}  # of those tasks, in the order in which they have their turn
        self._stopped = False

    async def dry_run(self, selection: Selection, by: str) -> Receipt:
        """What would go."""
        now_s = self._parts.clock.wall()
        receipt = Receipt("", selection.at(now_s), by, now_s, 0.0, state=DRY_RUN)
        await Purge(self._store, receipt).count()
        return receipt

    async def start(self, selection: Selection, by: str, deadline_s: float) -> Receipt:
        """Begin a purge; it is on file when this returns. Raises LimitExceeded where too many wait."""
        if sum(receipt.under_way and receipt.by == by for receipt in self.receipts.all()) >= WAITING_MAX:
            raise LimitExceeded(f"{WAITING_MAX} purges are under way: wait for some")
        now_s = self._parts.clock.wall()
        receipt = Receipt(new_id(), selection.at(now_s), by, now_s, deadline_s or DEADLINE_DEFAULT_S)
        Purge(self._store, receipt).note_tenants()
        self.receipts.add(receipt)
        await self._save(receipt)
        self._begin(receipt)
        return receipt

    def resume(self) -> tuple[list[Receipt], list[Receipt]]:
        """Begin what earlier daemons left unfinished; returns what was begun again, and what never is any more."""
        unfinished = [receipt for receipt in self.receipts.all() if receipt.unfinished]
        given_up = [receipt for receipt in unfinished if self._is_given_up(receipt)]
        for receipt in given_up:
            receipt.state = INCOMPLETE
            if GIVEN_UP not in receipt.notes:
                receipt.notes.append(GIVEN_UP)
        begun = [receipt for receipt in unfinished if receipt not in given_up]
        for receipt in begun:
            receipt.resumed += 1
            receipt.notes = [
                *(note for note in receipt.notes if not note.startswith(BEGUN_AGAIN)),
                _begun_again(receipt),
            ]
            self._begin(receipt)
        return begun, given_up

    def _is_given_up(self, receipt: Receipt) -> bool:
        return receipt.resumed >= RESUMES_MAX and not self._parts.tenants.is_leaving(receipt.selection.tenant)

    def again(self, receipt: Receipt) -> None:
        """Go on with a purge that is unfinished; nothing where it waits or runs."""
        if receipt.purge_id not in self._tasks:
            self._begin(receipt)

    def _begin(self, receipt: Receipt) -> None:
        purge = Purge(self._store, receipt, partial(self._save, receipt))
        purge.note_tenants()
        if self._stopped:  # while it was put on file: the next daemon begins it
            return
        before = [id_ for id_, other in self._purges.items() if other.meets(purge)]
        for id_ in before:
            self._purges[id_].hurry(receipt.deadline_s)
        task = asyncio.create_task(self._run(purge, receipt, [self._tasks[id_] for id_ in before]))
        self._tasks[receipt.purge_id], self._purges[receipt.purge_id] = task, purge
        task.add_done_callback(lambda _: self._over(receipt.purge_id))

    def _over(self, purge_id: str) -> None:
        del self._tasks[purge_id], self._purges[purge_id]

    async def _run(self, purge: Purge, receipt: Receipt, before: list[asyncio.Task[None]]) -> None:
        if before:
            await asyncio.wait(before)
        try:
            await purge.run()
        except KVStoredError as error:
            receipt.state = INCOMPLETE
            receipt.remain(str(error))
        except Exception as error:
            receipt.state = INCOMPLETE
            receipt.remain(f"internal error: {error!r}")
            raise
        finally:
            self._parts.counters["purges_ended"] += 1
            await self._save(receipt)

    async def _save(self, receipt: Receipt) -> None:
        """Put all receipts on file; where that fails the purge goes on, and its receipt says so."""
        if self.receipts.save is None:
            return
        async with self._saving:
            receipt.notes = [note for note in receipt.notes if not note.startswith(NOT_ON_FILE)]
            try:
                await asyncio.to_thread(self.receipts.save, self.receipts.packed())
            except KVStoredError as error:
                receipt.notes.append(f"{NOT_ON_FILE}, so that a restart would forget it: {error}")

    def state_of(self, receipt: Receipt) -> str:
        """Of a purge; it runs until its receipt is on file, or a kill would take back that it was complete."""
        saving = receipt.purge_id in self._tasks and not receipt.under_way
        return RUNNING if saving else receipt.state

    async def ended(self, purge_id: str) -> None:
        """Wait until a purge has ended; at once where none of this id is under way."""
        task = self._tasks.get(purge_id)
        if task is not None:
            await asyncio.wait([task])

    async def stop(self) -> None:
        """The daemon stops: what is under way, or asked for from here on, is unfinished, and on file as such."""
        self._stopped = True
        await cancel_all(self._tasks.values())


def _begun_again(receipt: Receipt) -> str:
    """One line for all times: notes are kept."""
    return BEGUN_AGAIN if receipt.resumed == 1 else f"{BEGUN_AGAIN}, {receipt.resumed} times"
