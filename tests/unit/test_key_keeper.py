"""Keys that are missing at first, change, or come back, followed by the daemon's part that reads them."""

import asyncio
import threading

import pytest

from kvstored.config.tenants import Tenant
from kvstored.encryption import key_keeper
from kvstored.encryption.key_keeper import KeyKeeper
from kvstored.errors import DeviceError, KVStoredError, NotFound
from kvstored.tenancy.merge import Change, Changes
from kvstored.tenancy.tenants import Tenants
from kvstored.testing.contract_lower_tier import Blocks
from kvstored.testing.node import ManualClock
from kvstored.testing.waiting import PATIENCE_S
from tests.unit.test_encryption import FEW, NEW, OLD, loaded, plain_names
from tests.unit.test_nvme import Harness, store


@pytest.fixture
def blocks():
    made = Blocks()
    yield made
    made.close()


class Keys:
    """A tier, a tenant whose key is a file, and the keeper between them."""

    def __init__(self, tmp_path, algorithm="aes-256-gcm"):
        self.file = tmp_path / "master"
        self.harness = Harness(tmp_path)
        self.clock = ManualClock()
        self.tenants = Tenants([self.tenant(encryption=algorithm)])
        self.keeper = KeyKeeper(self.tenants, self.harness.tier.keys, self.clock)

    def tenant(self, **fields):
        return Tenant(name="t", key_file=self.file, **fields)

    def become(self, **fields):
        self.tenants.become(Changes({"t": Change("t", fields=fields)}))

    async def restarted(self):
        """A keeper and a tier that know nothing."""
        await self.keeper.stop()
        await self.harness.restart()
        self.keeper = KeyKeeper(self.tenants, self.harness.tier.keys, self.clock)
        await self.keeper.start()

    async def __aenter__(self):
        await self.harness.tier.open()
        await self.keeper.start()
        return self

    async def __aexit__(self, *_):
        await self.keeper.stop()
        await self.harness.tier.close()

    async def until(self, condition):
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)


def keep(keys, *masters):
    keys.file.write_text("\n".join(master.hex() for master in masters))


async def test_a_key_that_is_there_at_the_start_is_used_at_once(tmp_path, blocks):
    keys = Keys(tmp_path)
    keep(keys, OLD)
    async with keys:
        assert all(await store(keys.harness, blocks, FEW))
        assert keys.keeper.warnings() == []
        await keys.restarted()
        assert await loaded(keys.harness, blocks) == set(FEW)
    assert not plain_names(tmp_path, FEW)


async def test_a_key_that_comes_later_is_found_by_itself_and_the_warning_goes(tmp_path, blocks):
    async with Keys(tmp_path) as keys:
        assert await store(keys.harness, blocks, FEW) == [False] * 3
        (warning,) = keys.keeper.warnings()
        assert "No such file" in warning
        assert "kvstorectl tenant rekey t" in warning
        assert "new ones stay in DRAM" in warning
        assert keys.keeper.warnings("u") == []
        (own,) = keys.keeper.warnings("t")
        assert str(keys.file) not in own, "where keys lie is the host's"
        keep(keys, OLD)
        keys.clock.now += 5
        await keys.until(lambda: not keys.harness.tier.barred)
        assert keys.keeper.warnings() == []
        assert all(await store(keys.harness, blocks, FEW))


async def test_it_is_tried_less_and_less_often_until_it_is_there(tmp_path, monkeypatch):
    tried = []

    def read(tenant):
        tried.append(tenant.name)
        raise DeviceError("no {braces} here")

    monkeypatch.setattr("kvstored.encryption.key_keeper.read_masters", read)
    keys = Keys(tmp_path)
    async with keys:
        for _ in range(600):
            keys.clock.now += 1
            await keys.keeper._look()
        assert 10 <= len(tried) <= 20
        assert "no {braces} here" in keys.keeper.warnings()[0]


async def test_a_source_that_hangs_has_one_thread_however_often_it_is_tried(tmp_path, monkeypatch):
    back, began = threading.Event(), list[str]()

    def read(tenant):
        began.append(tenant.name)
        back.wait(60)
        return [OLD]

    monkeypatch.setattr("kvstored.encryption.key_keeper.read_masters", read)
    monkeypatch.setattr("kvstored.encryption.key_keeper.LOOK_S", 0.0)
    keys = Keys(tmp_path)
    keys.tenants = Tenants([keys.tenant(encryption="aes-256-gcm", key_timeout_s=0.1)])
    keys.keeper = KeyKeeper(keys.tenants, keys.harness.tier.keys, keys.clock)
    async with keys:
        for _ in range(5):
            with pytest.raises(KVStoredError, match="could not be read within"):
                await keys.keeper.rekey("t")
        assert began == ["t"]
        back.set()
        monkeypatch.setattr("kvstored.encryption.key_keeper.LOOK_S", 60.0)  # of which it has so much more time
        await keys.until(lambda: not keys.keeper._reading)
        assert await keys.keeper.rekey("t") == 1


async def test_a_key_whose_source_was_changed_while_it_was_read_makes_no_data_key(tmp_path, blocks, monkeypatch):
    real, reading, go_on = key_keeper.read_masters, threading.Event(), threading.Event()
    keys, other = Keys(tmp_path, algorithm=""), tmp_path / "other"
    keep(keys, OLD)
    other.write_text(NEW.hex())

    def slow(tenant):
        if tenant.key_file == keys.file:
            reading.set()
            assert go_on.wait(PATIENCE_S)
        return real(tenant)

    monkeypatch.setattr(key_keeper, "read_masters", slow)
    async with keys:
        keys.become(encryption="aes-256-gcm")
        await keys.until(reading.is_set)
        keys.become(encryption="aes-256-gcm", key_file=str(other))
        go_on.set()
        await keys.until(lambda: not keys.harness.tier.barred)
        assert all(await store(keys.harness, blocks, FEW))
        keys.file.unlink()
        await keys.restarted()
        assert keys.keeper.warnings() == []
        assert await loaded(keys.harness, blocks) == set(FEW)


async def test_encryption_is_turned_on_and_off_while_it_runs(tmp_path, blocks):
    keys = Keys(tmp_path, algorithm="")
    keep(keys, OLD)
    async with keys:
        await store(keys.harness, blocks, ["plain"])
        keys.become(encryption="chacha20-poly1305")
        assert keys.harness.tier.barred == {"t"}, "from this moment on, though the key is not read yet"
        await keys.until(lambda: not keys.harness.tier.barred)
        await store(keys.harness, blocks, ["sealed"])
        keys.become(encryption="")
        await store(keys.harness, blocks, ["plain too"])
        assert await loaded(keys.harness, blocks, ["plain", "sealed", "plain too"]) == {"plain", "sealed", "plain too"}
    assert plain_names(tmp_path, ["plain", "sealed", "plain too"]) == {"plain", "plain too"}


async def test_a_rekey_reads_the_key_again_and_wraps_with_it(tmp_path, blocks):
    keys = Keys(tmp_path)
    keep(keys, OLD)
    async with keys:
        await store(keys.harness, blocks, FEW)
        keep(keys, NEW)
        assert await keys.keeper.rekey("t") == 1
        await keys.restarted()
        assert await loaded(keys.harness, blocks) == set(FEW)
        with pytest.raises(NotFound):
            await keys.keeper.rekey("nobody")


async def test_a_rekey_of_what_is_locked_opens_it_or_says_why_not(tmp_path, blocks):
    keys = Keys(tmp_path)
    keep(keys, OLD)
    async with keys:
        await store(keys.harness, blocks, FEW)
        keep(keys, NEW)
        await keys.restarted()
        assert await loaded(keys.harness, blocks) == set()
        with pytest.raises(KVStoredError, match="another master key"):
            await keys.keeper.rekey("t")
        keep(keys, NEW, OLD)
        assert await keys.keeper.rekey("t") == 1
        assert await loaded(keys.harness, blocks) == set(FEW)
        keep(keys, NEW)
        await keys.restarted()
        assert await loaded(keys.harness, blocks) == set(FEW)


async def test_after_its_key_was_destroyed_a_tenant_gets_a_new_one_by_itself(tmp_path, blocks, monkeypatch):
    monkeypatch.setattr("kvstored.encryption.key_keeper.LOOK_S", 3600.0)
    keys = Keys(tmp_path)
    keep(keys, OLD)
    async with keys:
        await store(keys.harness, blocks, FEW)
        await keys.harness.tier.keys.destroy("t")
        assert keys.harness.tier.barred == {"t"}
        keys.keeper._wake.set()  # as when it looks next
        await keys.until(lambda: not keys.harness.tier.barred)
        assert await loaded(keys.harness, blocks) == set()
        assert all(await store(keys.harness, blocks, FEW))
        assert await loaded(keys.harness, blocks) == set(FEW)
