"""What a seed stands for: the size of the node, who uses it, which faults fall, when and how it restarts."""

import random
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvstored.policy.orders import ORDERS
from kvstored.policy.quota import Quota
from kvstored.policy.watermarks import Watermarks
from kvstored.store.parts import Limits
from kvstored.testing.simulated_device import NO_FAULTS, DeviceFaults
from kvstored.testing.simulated_node import NodeConfig
from kvstored.tiers.dram import DramConfig
from kvstored.tiers.nvme_config import EXTENT_BYTES_MIN, NvmeConfig
from kvstored.tiers.sealing import ALGORITHMS
from tests.sim import quotas

SEGMENT_BYTES = 64 << 10
ROOT = Path("/sim")
ORDERLY, KILL, POWER_CUT = "orderly", "kill", "power_cut"
RESTARTS = (ORDERLY, KILL, POWER_CUT)
SIZES = (4096, 4096, 5000, 8192, 12_000)


@dataclass
class Plan:
    """Drawn from the seed alone."""

    seed: int
    ops: int
    node: NodeConfig
    faults: DeviceFaults
    slow_share: float
    keeps_memory: bool  # over the end of the process
    restarts: dict[int, str]  # by the number of the operation before it
    tenants: tuple[str, ...]
    sizes: dict[str, tuple[int, ...]]  # per tenant: block sizes of its namespaces
    chains: int
    chain_blocks: int
    rng: random.Random = field(repr=False)

    @property
    def purges(self) -> bool:
        """Whether tenants are purged; not drawn, so that other worlds stay what they were."""
        return self.seed % 3 == 2

    @property
    def prefetches(self) -> bool:
        """Whether lookups prefetch; likewise not drawn."""
        return self.seed % 4 == 1

    @property
    def hints(self) -> bool:
        """Whether clients give hints; not drawn either."""
        return self.seed % 2 == 1

    @property
    def times(self) -> bool:
        """Whether blocks end and epochs pass; not drawn either. Some of these worlds have purges as well."""
        return self.seed % 3 == 1 or self.seed % 12 == 11


def make_plan(seed, ops):
    rng = random.Random(seed * 2 + 1)
    tenants = ("alice", "bob", "carol")[: rng.choice((2, 2, 3))]
    sizes = {tenant: tuple(rng.choice(SIZES) for _ in range(rng.choice((1, 2)))) for tenant in tenants}
    calm = rng.random() < 0.4
    return Plan(
        seed=seed,
        ops=ops,
        node=_node(rng, tenants, seed),
        faults=NO_FAULTS if calm else _faults(rng),
        slow_share=rng.choice((0.0, 0.0, 0.002, 0.02)),
        keeps_memory=rng.random() < 0.5,
        restarts=_restarts(rng, ops),
        tenants=tenants,
        sizes=sizes,
        chains=rng.choice((2, 4, 6)),
        chain_blocks=rng.choice((6, 10, 14)),
        rng=rng,
    )


def _node(rng, tenants, seed):
    node = msgspec.structs.replace(_without_quotas(rng, tenants, seed), encrypted=_encrypted(seed, tenants))
    extents = len(node.nvme.paths) * (node.nvme.capacity_bytes // EXTENT_BYTES_MIN)
    drawn = quotas.draw(seed, tenants, node.dram.capacity_bytes // SEGMENT_BYTES, SEGMENT_BYTES, extents)
    return node if drawn is None else msgspec.structs.replace(node, quotas=drawn[0], nvme_quotas=drawn[1])


def _encrypted(seed, tenants):
    """Whose blocks are encrypted; drawn apart, so that every other choice of a seed stays what it was."""
    rng = random.Random(f"encryption {seed}")
    return {tenant: rng.choice(sorted(ALGORITHMS)) for tenant in tenants if rng.random() < 0.25}


def _without_quotas(rng, tenants, seed):
    segments = rng.choice((2, 3, 3, 5))
    held = segments * SEGMENT_BYTES * rng.choice((1, 2)) // 2
    limited = {tenants[1]: Quota(2 * SEGMENT_BYTES)} if rng.random() < 0.3 else {}
    return NodeConfig(
        dram=DramConfig(segments * SEGMENT_BYTES, SEGMENT_BYTES, "never", "never"),
        nvme=NvmeConfig(
            paths=[ROOT / f"drive{i}" for i in range(rng.choice((1, 1, 2)))],
            capacity_bytes=rng.choice((3, 6, 12, 16)) * EXTENT_BYTES_MIN,
            extent_bytes=EXTENT_BYTES_MIN,
            io_threads=rng.choice((1, 2, 3)),
            run_bytes=16 << 10,
            share_blocks=rng.choice((1, 4)),
            index_map_bytes=rng.choice((64 << 10, 1 << 20)),
            open_files_max=rng.choice((2, 8)),
            scrub_bytes_per_s=rng.choice((0, 1 << 20)),
        ),
        limits=Limits(SEGMENT_BYTES, 12, 6, held, 2.0, 2.0),
        staging_bytes=5 * SEGMENT_BYTES,
        sessions=8,
        eviction=rng.choice(sorted(ORDERS)),
        # Drawn apart, so that every other choice of a seed stays what it was.
        admission=random.Random(f"admission {seed}").choice(("admit_all", "admit_all", "second_hit", "hinted")),
        quotas=limited,
        watermarks=rng.choice((Watermarks(), Watermarks(0.6, 0.3, 0.2), Watermarks(0.5, 0.1, 0.5))),
        queue_blocks=rng.choice((2, 8, 64)),
        inflight_bytes=rng.choice((8 << 10, 16 << 10, 64 << 10)),
        predicts=seed % 4 == 1,
        speculative_bytes=random.Random(f"speculation {seed}").choice((8 << 10, 16 << 10, 64 << 10)),
    )


def _faults(rng):
    """Some kinds at a time: where everything fails nothing is seen."""
    kinds = rng.sample(list(DeviceFaults.__struct_fields__), rng.choice((1, 2, 4)))
    shares = {kind: rng.choice((0.003, 0.01, 0.04)) for kind in kinds}
    for kind in ("read_only", "vanished"):
        if kind in shares:
            shares[kind] /= 10
    return DeviceFaults(**shares)


def _restarts(rng, ops):
    count = rng.choice((0, 0, 0, 1, 1, 1, 2, 2, 3))
    return {rng.randrange(1, ops): rng.choice(RESTARTS) for _ in range(count)}
