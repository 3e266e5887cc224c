"""The file of purges and their receipts in the state directory, as the daemon goes through it at start."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from kvstored.device.state_directory import StateDirectory
from kvstored.errors import KVStoredError
from kvstored.purge.purges import Purges
from kvstored.reporting.logs import get_logger

FILE_NAME: Final = "purges.json"
DAMAGED_NAME: Final = "purges.json.damaged"

log = get_logger("purges")


async def resume(purges: Purges, state: StateDirectory, warnings: list[str]) -> None:
    """Take over what is on file, begin anew what is unfinished, and keep what comes on file from here on.

    A damaged file is put aside and said in the warnings, since a purge in it may be unfinished.
    """
    data: bytes | None = None
    try:
        data = await asyncio.to_thread(state.read, FILE_NAME)
        if data is not None:
            purges.receipts.restore(data)
    except KVStoredError as error:
        warnings.append(f"{state.path / FILE_NAME}: {error}: a purge that was unfinished is not begun again")
        if data is not None:
            with suppress(KVStoredError):  # a full disk, say: that must not stop the start
                await asyncio.to_thread(state.replace, DAMAGED_NAME, data)
    purges.receipts.save = lambda packed: state.replace(FILE_NAME, packed)
    begun, given_up = purges.resume()
    for receipt in begun:
        log.warning("an unfinished purge is begun again", purge=receipt.purge_id)
    hint = "is incomplete and is not begun again: `kvstorectl purge status` says what remains"
    warnings += [f"purge {receipt.purge_id} {hint}" for receipt in given_up]
