"""The shortest part of a purge: a tenant's data keys are destroyed, and what they encrypted with them."""

from __future__ import annotations

from kvstored.errors import DeviceError
from kvstored.purge.receipts import Receipt
from kvstored.store.parts import Parts


async def destroy_keys(parts: Parts, receipt: Receipt, *, resumed: bool = False) -> set[str]:
    """Destroy the keys of a tenant that is purged whole; returns whose encrypted bytes need no zeros any more.

    Where an earlier daemon began it, what was put since needs its keys, and the rest becomes zeros instead; but
    what is encrypted with a key that nobody has cannot be told apart, and goes.
    """
    selection = receipt.selection
    keys = parts.below.keys if parts.below is not None else None
    if keys is None or not selection.whole_tenant or not keys.has(selection.tenant):
        return set()
    if resumed and (receipt.keys_destroyed or selection.tenant not in keys.locked()):
        return set()
    try:
        destroyed = await keys.destroy(selection.tenant)
    except DeviceError as error:
        receipt.remain(str(error))
        return set()
    receipt.keys_destroyed = True
    receipt.notes.append(f"key destroyed: {destroyed} data keys of {selection.tenant} on NVMe, in every copy")
    return {selection.tenant}
