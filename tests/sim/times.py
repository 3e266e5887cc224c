"""Worlds in which blocks end and epochs pass: what puts ask for, bumps, and what must hold of them.

A third of the worlds have them; drawn apart, so that all others stay what they were. Only some chains have blocks
that end, so that what others owe is owed for good. Epochs change the digest under which blocks are stored: the
model knows namespaces by their own, `Names` tells which one a stored digest belongs to.
"""

import asyncio
from contextlib import contextmanager

from kvstored.errors import KVStoredError
from kvstored.lifetime import Lifetime
from kvstored.tiers import epochs
from kvstored.tiers.end_sweep import end_s
from tests.sim import checks

TTLS_S = (0.25, 1.0, 4.0, 15.0)
SLIDING_S = (1.0, 4.0, 15.0)
BUMP_SHARE = 0.01  # of the operations of a world that has them


class Names:
    """Which namespace a digest belongs to under which blocks are stored, in whatever epoch."""

    def __init__(self):
        self._first = {}
        self.of_namespace = {}  # digest -> Namespace

    def add(self, namespace):
        self.of_namespace[namespace.digest] = namespace

    def first(self, digest):
        """The namespace's own digest."""
        return self._first.get(digest, digest)

    @contextmanager
    def noted(self):
        """All digests that are derived meanwhile are known afterwards."""
        derive = epochs.stored_digest

        def derived(digest, number):
            made = derive(digest, number)
            self._first[made] = digest
            return made

        epochs.stored_digest = derived
        try:
            yield
        finally:
            epochs.stored_digest = derive


def stored_as(world, digest):
    """Under which digest the blocks of a namespace are stored at present."""
    namespace = world.names.of_namespace.get(digest)
    return digest if namespace is None else world.node.parts.epochs.now.digest_of(namespace)


def is_past(world, stored):
    """Whether a digest is known to be one of an epoch that has passed."""
    space = world.node.parts.catalog.spaces.get(world.names.first(stored))
    return space is not None and space.digest != stored


def may_be_forgotten(world, key, record):
    """A record that is good and need not be kept: it has ended, or is of a past epoch."""
    return is_past(world, key[:16]) or 0 < end_s(record, 0.0) <= world.node.clock.wall()


def lifetime(world, hashes):
    """What a put of this chain asks for, or None."""
    if not world.plan.times or not int(hashes[0][6:8]) % 2:
        return None
    dice = world.times_dice
    kind = dice.random()
    if kind < 0.2:
        return None
    return Lifetime(dice.choice(TTLS_S)) if kind < 0.7 else Lifetime(dice.choice(SLIDING_S), sliding=True)


async def bump(world, client):
    """The next epoch of one of the client's models; the daemon goes on with it if the client leaves."""
    if not client.spaces:
        return None
    space = world.times_dice.choice(client.spaces)
    about = (client.tenant, space.namespace.digest)
    forbidden = world.model.bump_begins(*about)
    bumping = world.node.store.bumps.bump(client.tenant, space.namespace.fields["model"])
    task = world.loop.create_task(bumping)
    task.add_done_callback(lambda done: _bumped(world, about, forbidden, done))
    bumped = await asyncio.shield(task)
    world.counts["bumped_blocks"] += bumped.dram_blocks
    return bumped.namespaces, bumped.dram_blocks


def _bumped(world, about, forbidden, done):
    if done.cancelled() or isinstance(done.exception(), KVStoredError):
        return  # in doubt until the process ends: nothing of the new epoch is owed either
    if done.exception() is None:
        world.model.bump_ends(*about)
        world.model.deleted(forbidden)


def note_lost(world):
    """Where a device has lost which epoch it is, all that is stored is out of reach, for good."""
    floor = world.node.parts.epochs.now.floor
    if floor > world.floor:
        world.floor = floor
        checks.require(world.device.fired, "which epochs count is lost, and no fault fell")
        world.model.all_gone()
