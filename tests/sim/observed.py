"""What a model sees of the NVMe tier: stores acknowledged, entries removed; and that nothing blocks the loop."""

from kvstored.testing.simulated_index import SimulatedIndex


class ObservedTier:
    """The tier, and a note in the model of each store and delete. The rest goes through as it is."""

    def __init__(self, tier, model):
        self._tier = tier
        self._model = model
        for name in ("open", "close", "find", "unpin", "load", "list_records", "remember_namespace", "namespaces"):
            setattr(self, name, getattr(tier, name))
        self.usage, self.tenant_usage = tier.usage, tier.tenant_usage
        self.properties, self.counters, self.flush = tier.properties, tier.counters, tier.flush

    @property
    def health(self):
        return self._tier.health

    async def store(self, tenant, stores):
        began = self._model.now()
        results = await self._tier.store(tenant, stores)
        for store, done in zip(stores, results, strict=True):
            if done:
                self._model.stored((tenant, store.digest, store.hash), began)
        return results

    async def delete(self, tenant, digest, hashes):
        keys = [(tenant, digest, hash_) for hash_ in hashes]
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

    def recycle(self, extent, generation, keys):
        before = self._keys()
        try:
            return super().recycle(extent, generation, keys)
        finally:  # also where the process ends right after the commit
            self._gone(before - self._keys())

    def remove_unchanged(self, entries):
        before, good = self._keys(), {key: record for key, record in entries if self._is_good(record)}
        try:
            return super().remove_unchanged(entries)
        finally:
            removed = before - self._keys()
            self._gone(removed)
            for key in removed & good.keys():
                self._world.complain(f"a good record was dropped: {key[16:]} at {good[key].location}")

    def _keys(self):
        return self.files.committed[b"records"].entries.keys()

    def _gone(self, keys):
        for key in keys:
            self._world.model.gone((self._world.tenant_of[key[:16]], key[:16], key[16:]))

    def _is_good(self, record):
        table = self._world.table(self._volume)
        return not self._world.is_spoilt(record) and (table is None or table.owner(record) is not None)
