"""The daemons that are crashed: sizes that decide what a crash can hit, and what must survive it."""

import hashlib
import json
import os
from typing import NamedTuple

from bench.common import MIB
from tests.crash.writer import ADMIN, TENANTS, Verb, token

WRITERS = 4
GIB = 1 << 30
NVME_BYTES_PER_S = 80 * MIB  # of puts, all writers together, where nothing may be evicted


class Phase(NamedTuple):
    """One daemon: its tiers, how much its writers keep in them, and at what they are killed."""

    name: str
    dram_bytes: int
    nvme_bytes: int
    live_bytes: int  # of all writers together
    bytes_per_s: float
    all_in_dram: bool
    aims: tuple[Verb, ...]

    def settings(self):
        """As the daemon takes them."""
        tenants = [_tenant(name, "tenant") for name in TENANTS]
        tenants.append({**_tenant(ADMIN, "admin"), "uids": [os.getuid()]})
        return {
            "dram.capacity_bytes": str(self.dram_bytes),
            "dram.segment_bytes": str(4 * MIB),
            "nvme.capacity_bytes": str(self.nvme_bytes),
            "nvme.extent_bytes": str(32 * MIB),
            "tenants": json.dumps(tenants),
        }


def _tenant(name, role):
    return {"name": name, "role": role, "tokens_sha256": [hashlib.sha256(token(name).encode()).hexdigest()]}


# At most so much is written in a phase of 40 s that nothing of what is live can be recycled.
LARGE = 4 * GIB
PHASES = (
    Phase("roomy", 256 * MIB, LARGE, 96 * MIB, NVME_BYTES_PER_S, True, (Verb.PUT, Verb.FLUSH, Verb.DELETE)),
    Phase("promoting", 32 * MIB, LARGE, 96 * MIB, NVME_BYTES_PER_S, False, (Verb.GET, Verb.PREFETCH, Verb.PUT)),
    Phase("recycling", 32 * MIB, 160 * MIB, 192 * MIB, 1e12, False, (Verb.PUT, Verb.PUT, Verb.GET, Verb.FLUSH)),
)
