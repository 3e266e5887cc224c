"""What a model sees of the NVMe tier: stores acknowledged, entries removed; and that nothing blocks the loop."""

from math import inf

from kvstored.testing.simulated_index import SimulatedIndex
from tests.sim import times


class ObservedTier:
    """The tier, and a note in the model of each store and delete; that no record is read twice at once.

    The rest goes through as it is.
    """

    def __init__(self, tier, world):
        self._tier = tier
        self._world = world
        self._model = world.model
        self._loading = {}  # record -> since when, by the clocks of the world and of the model
        for name in (
            "open",
            "close",
            "find",
            "unpin",
            "list_records",
            "remember_namespace",
            "forget_namespaces",
            "namespaces",
        ):
            setattr(self, name, getattr(tier, name))
        self.paths, self.forget, self.barred = tier.paths, tier.forget, tier.barred
        self.limit_ages, self.remember_epochs = tier.limit_ages, tier.remember_epochs
        self.usage, self.tenant_usage, self.trim = tier.usage, tier.tenant_usage, tier.trim
        self.wear, self.write_budget, self.wipe = tier.wear, tier.write_budget, tier.wipe
        self.properties, self.counters, self.flush = tier.properties, tier.counters, tier.flush

    @property
    def health(self):
        return self._tier.health

    async def load(self, loads):
        node = self._world.node
        now, limit_s = self._world.loop.time(), self._world.plan.node.nvme.io_deadline_s
        records = [(load.digest, load.hash, load.record.location) for load in loads if self._comes_up(load)]
        for record in records:
            # Beyond the deadline a read is given up, while its device goes on; so it is when its block goes.
            since_s, since = self._loading.get(record, (-limit_s, 0))
            tenant = node.parts.catalog.stored[record[0]].tenant
            if now - since_s < limit_s and not self._model.went((tenant, *self._name(record)), since):
                self._world.complain(f"{record[1]} is read twice at once")
        self._loading.update(dict.fromkeys(records, (now, self._model.now())))
        try:
            return await self._tier.load(loads)
        finally:
            for record in records:
                self._loading.pop(record, None)

    def _name(self, record):
        return self._world.names.first(record[0]), record[1]

    def _comes_up(self, load):
        """Whether it is read into its slot, and not by somebody who only wants to see whether it can be read."""
        node = self._world.node
        space = node.parts.catalog.stored.get(load.digest)
        entry = space.entries.get(load.hash) if space else None
        return entry is not None and node.dram.address(entry.slot) == load.address

    async def store(self, tenant, stores):
        began = self._model.now()
        results = await self._tier.store(tenant, stores)
        for store, done in zip(stores, results, strict=True):
            key = (tenant, self._world.names.first(store.digest), store.hash)
            if done and times.is_past(self._world, store.digest):
                self._model.gone(key)  # who put it is answered all the same
            elif done:
                self._model.stored(key, began, store.expiry.expires_s if store.expiry is not None else inf)
        return results

    async def delete(self, tenant, digest, hashes):
        keys = (
            [] if times.is_past(self._world, digest) else [(tenant, self._world.names.first(digest), h) for h in hashes]
        )
        for key in keys:
            self._model.gone(key)
        try:
            return await self._tier.delete(tenant, digest, hashes)
        finally:
            for key in keys:
                self._model.gone(key)


class ObservedIndex(SimulatedIndex):
    """An index that tells which entries left it, and complains of good ones."""

    def __init__(self, world, path, volume, map_bytes):
        super().__init__(world.device, path, volume, map_bytes)
        self._world = world
        self._generations = {}  # of extents recycled since it was opened

    def recycle(self, extent, generation, keys):
        before = self._keys()
        try:
            recycled = super().recycle(extent, generation, keys)
            if generation <= self._generations.get(extent, 0):
                self._world.complain(f"extent {extent} was recycled twice to generation {generation}")
            self._generations[extent] = generation
            return recycled
        finally:  # also where the process ends right after the commit
            self._gone(before - self._keys())

    def remove_unchanged(self, entries):
        before, good = self._keys(), {key: record for key, record in entries if self._is_good(record)}
        try:
            return super().remove_unchanged(entries)
        finally:
            removed = before - self._keys()
            self._gone(removed)
            for key in sorted(removed & good.keys()):
                if times.may_be_forgotten(self._world, key, good[key]):
                    continue
                self._world.complain(f"a good record was dropped: {key[16:]} at {good[key].location}")

    def _keys(self):
        return self.files.committed[b"records"].entries.keys()

    def _gone(self, keys):
        for key in sorted(keys):
            if not times.is_past(self._world, key[:16]):
                first = self._world.names.first(key[:16])
                self._world.model.gone((self._world.tenant_of[first], first, key[16:]))

    def _is_good(self, record):
        table = self._world.table(self._volume)
        return not self._world.is_spoilt(record) and (table is None or table.owner(record) is not None)
