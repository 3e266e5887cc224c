"""Hints in some worlds, drawn apart so that every other choice of a seed stays what it was; and what must hold."""

from kvstored.errors import InvalidArgument, NotFound
from kvstored.policy.hinted import Hinted
from kvstored.store.hints import Wish
from tests.sim.model import Violation

HINT_S = 1.0  # no hint takes as long
SHARE = 0.25  # so many hints for an operation, in a world that has them
WISHES = (
    Wish(hard_pin_s=2.0),
    Wish(hard_pin_s=0.2),
    Wish(soft_pin_s=1.0),
    Wish(continues=True, priority=1),
    Wish(final=True),
    Wish(unpin=True),
    Wish(priority=-3),
    Wish(priority=3),
    Wish(ttl_s=100.0),
)


def start(world):
    """At each boot: what may be pinned, and a complaint wherever a pinned block is evicted."""
    node, quotas = world.node, world.plan.node.quotas
    guarded = any(quota.guaranteed_bytes for quota in quotas.values())

    def limit_of(tenant):
        quota = quotas.get(tenant)
        if guarded:
            return quota.guaranteed_bytes if quota is not None else 0
        return node.config.dram.capacity_bytes // 8

    node.store.hints.hard_limit_of = limit_of
    room = node.parts.room
    evict = room.evict

    def watched(entries, *arguments):
        pinned = [entry for entry in entries if _pinned(entry)]
        evict(entries, *arguments)
        for entry in pinned:
            if entry.pool.space.entries.get(entry.hash) is not entry:
                world.complain(f"{entry.hash} was evicted, though it is pinned")

    room.evict = watched


def _pinned(entry):
    order = entry.pool.order
    hint = order.known.get(entry) if isinstance(order, Hinted) else None
    return hint is not None and hint.hard_until_s > 0


def check(world):
    """After each operation."""
    hints = world.node.store.hints
    for tenant in world.plan.tenants:
        if (pinned := hints.hinting.hard_bytes(tenant)) > hints.hard_limit_of(tenant):
            raise Violation(f"{tenant} has pinned {pinned} bytes, its limit is {hints.hard_limit_of(tenant)}")
    for _, _, hinted in hints.hinting:
        places = [hint.place for hint in hinted.known.values()]
        if hinted.counts != [places.count(place) for place in range(4)]:
            raise Violation(f"hinted blocks are miscounted: {hinted.counts}")


def act(world, hash_of):
    """Perhaps a hint of some client about some chain."""
    rng = world.hint_dice
    if not world.plan.hints or rng.random() > SHARE or not world.clients:
        return
    client, wish = rng.choice(world.clients), rng.choice(WISHES)
    chain, first = rng.randrange(world.plan.chains), rng.randrange(world.plan.chain_blocks)
    count = rng.randrange(1, world.plan.chain_blocks - first + 1)
    if not client.spaces:
        return
    space = rng.choice(client.spaces)
    world.counts["op.hint"] += 1
    hashes = [hash_of(chain, index) for index in range(first, first + count)]
    if wish.ttl_s:
        keys = [(space.tenant, space.namespace.digest, hash_) for hash_ in hashes]
        world.model.prolonged(keys, world.node.clock.wall() + wish.ttl_s + HINT_S)
    task = world.loop.create_task(_hint(world, client, space, hashes, wish))
    world.hinting.add(task)
    task.add_done_callback(world.hinting.discard)


async def _hint(world, client, space, hashes, wish):
    try:
        await world.node.store.hints.hint(client.session, space, hashes, wish)
    except (NotFound, InvalidArgument) as error:
        if not client.session.ended:
            world.complain(f"a hint ended with {error!r}", error)
