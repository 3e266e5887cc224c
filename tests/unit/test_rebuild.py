"""An index that is damaged, lost or of an older format: made anew, with nothing wrong in it."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys

import lmdb
import pytest

from kvstored.device.file import ALIGN_BYTES, FileDevice
from kvstored.errors import CorruptData, DeviceError
from kvstored.testing.contract_lower_tier import DIGEST, OTHER_DIGEST, Blocks, block_hash, content, find, load_all
from kvstored.tiers import check, index_check, pages, rebuild
from kvstored.tiers.base import Health
from kvstored.tiers.formats import State, pack_extent_key, pack_row, unpack_row
from kvstored.tiers.index_copy import IndexCopy
from kvstored.tiers.sources import Source
from kvstored.tiers.tombstones import ENTRY_BYTES, unpack_tombstones
from kvstored.tiers.trailer import unpack_trailer
from tests.old_code import extract
from tests.unit import format1
from tests.unit.test_nvme import EXTENT_BYTES, Harness, names, refused, store

OLD_COMMIT = "a74f597"


@pytest.fixture
def blocks():
    made = Blocks()
    yield made
    made.close()


@pytest.fixture
def modes(monkeypatch):
    """The children that were started, by what they were asked for."""
    started = []
    run = index_check.run

    def noting(mode, source):
        started.append(mode)
        return run(mode, source)

    monkeypatch.setattr(index_check, "run", noting)
    return started


def data_file(directory, drive="drive0"):
    return directory / drive / "index" / "data.mdb"


def damage(path, at=None):
    with path.open("r+b") as file:
        at = at if at is not None else path.stat().st_size // 2
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x41]))


def ruin(path):
    """Every page but the first two made useless."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(b"\xff" * size)


async def delete(harness, chosen, tenant="t", digest=DIGEST):
    return await harness.tier.delete(tenant, digest, [block_hash(name) for name in chosen])


async def loaded(harness, blocks, chosen, tenant="t", digest=DIGEST):
    found = await load_all(harness, blocks, tenant, chosen, digest)
    harness.audit()
    assert all(data == content(name, len(data)) for name, data in found.items())
    return set(found)


def as_killed(directory):
    """What a SIGKILL leaves: the files as they are now, in a place where nobody has them open."""
    copy = directory.parent / (directory.name + "-killed")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(directory, copy)
    return copy


# --- whether it is checked at all ---


async def test_after_an_orderly_close_the_index_is_opened_without_a_child(tmp_path, blocks, modes):
    async with Harness(tmp_path) as harness:
        await store(harness, blocks, ["a"])
        await harness.restart()
        assert await loaded(harness, blocks, ["a"]) == {"a"}
        await store(harness, blocks, ["b"])
        await harness.restart()
        assert await loaded(harness, blocks, ["a", "b"]) == {"a", "b"}
    assert modes == []


async def test_after_a_kill_it_is_checked_and_everything_is_there(tmp_path, blocks, modes):
    async with Harness(tmp_path / "d") as harness:
        await store(harness, blocks, names("a", 10))
        await delete(harness, ["a3"])
        copy = as_killed(tmp_path / "d")
        before = harness.tier.usage(), harness.tier.tenant_usage()
    async with Harness(copy) as harness:
        assert modes == ["check"]
        assert (harness.tier.usage(), harness.tier.tenant_usage()) == before
        assert await loaded(harness, blocks, names("a", 10)) == set(names("a", 10)) - {"a3"}
        assert await store(harness, blocks, names("b", 10)) == [True] * 10


async def test_a_mark_from_before_a_kill_is_not_believed(tmp_path, blocks, modes):
    async with Harness(tmp_path / "d") as harness:
        await store(harness, blocks, ["a"])
        await harness.restart()
        copy = as_killed(tmp_path / "d")
    async with Harness(copy) as harness:
        assert await loaded(harness, blocks, ["a"]) == {"a"}
    assert modes == ["check"]


# --- damaged and lost ---


@pytest.mark.parametrize("how", ["ruined", "empty", "lost", "cut short"])
async def test_sealed_extents_are_found_again_by_their_footers(tmp_path, blocks, how):
    async with Harness(tmp_path) as harness:
        await harness.tier.remember_namespace("t", DIGEST, b"encoding", {"model": "m"})
        await store(harness, blocks, names("a", 14), size=16384)
        await store(harness, blocks, names("b", 7), tenant="u", digest=OTHER_DIGEST)
        await store(harness, blocks, ["open"])
    path = data_file(tmp_path)
    match how:
        case "ruined":
            ruin(path)
        case "empty":
            path.write_bytes(b"")
        case "lost":
            shutil.rmtree(path.parent)
        case "cut short":
            os.truncate(path, 3 * 4096)
    async with Harness(tmp_path) as harness:
        assert harness.tier.health is Health.OK
        assert await loaded(harness, blocks, names("a", 14)) == set(names("a", 14))
        assert await loaded(harness, blocks, names("b", 7), "u", OTHER_DIGEST) <= set(names("b", 7))
        assert [(n.tenant, n.digest, n.fields) for n in harness.tier.namespaces()] == [("t", DIGEST, {"model": "m"})]
        used = {tenant: count for tenant, (_, count) in harness.tier.tenant_usage().items()}
        assert used["t"] in (14, 15)
        assert await store(harness, blocks, names("c", 7)) == [True] * 7
        await harness.restart()
        assert await loaded(harness, blocks, names("c", 7)) == set(names("c", 7))


async def test_open_extents_are_saved_from_what_is_whole_of_a_damaged_index(tmp_path, blocks, modes):
    async with Harness(tmp_path) as harness:
        await store(harness, blocks, names("a", 5))
        await store(harness, blocks, names("b", 3), tenant="u", digest=OTHER_DIGEST)
        before = harness.tier.tenant_usage()
    path = data_file(tmp_path)
    with path.open("r+b") as file:
        file.write(bytes(8192))  # LMDB's two heads
    async with Harness(tmp_path) as harness:
        assert modes == ["check", "rebuild"]
        assert harness.tier.tenant_usage() == before
        assert await loaded(harness, blocks, names("a", 5)) == set(names("a", 5))
        assert await loaded(harness, blocks, names("b", 3), "u", OTHER_DIGEST) == set(names("b", 3))
        # Nothing is written over what they may hold; they are sealed.
        assert await store(harness, blocks, names("c", 7)) == [True] * 7
        assert await loaded(harness, blocks, names("a", 5)) == set(names("a", 5))
    trailer = unpack_trailer((tmp_path / "drive0" / "extents" / "00000001.ext").read_bytes()[-4096:])
    assert (trailer.tenant, trailer.records) == ("t", 5)


@pytest.mark.parametrize("how", ["damaged", "lost"])
async def test_deleted_blocks_do_not_come_back(tmp_path, blocks, how):
    chosen = names("a", 15 if how == "lost" else 5)
    async with Harness(tmp_path) as harness:
        await store(harness, blocks, chosen)
        assert await delete(harness, chosen[1:4]) == 3
        await store(harness, blocks, ["a1"])  # once more, elsewhere
        await store(harness, blocks, names("b", 6))
    if how == "lost":
        shutil.rmtree(data_file(tmp_path).parent)
    else:
        with data_file(tmp_path).open("r+b") as file:
            file.write(bytes(8192))
    async with Harness(tmp_path) as harness:
        assert await loaded(harness, blocks, chosen) == set(chosen) - {"a2", "a3"}


async def test_an_index_from_before_a_delete_is_made_anew(tmp_path, blocks, modes):
    async with Harness(tmp_path) as harness:
        await store(harness, blocks, names("a", 5))
    saved = data_file(tmp_path).read_bytes()
    async with Harness(tmp_path) as harness:
        await delete(harness, ["a0"])
    data_file(tmp_path).write_bytes(saved)
    async with Harness(tmp_path) as harness:
        assert modes == ["check", "rebuild"]
        assert await find(harness, "t", ["a0"]) == [None]
        assert await loaded(harness, blocks, names("a", 5)) == set(names("a", 5)[1:])


@pytest.mark.parametrize("later", ["sealed", "begun and sealed", "recycled"])
async def test_an_index_that_is_older_than_an_extent_is_made_anew(tmp_path, blocks, modes, later):
    before, after = {"sealed": (5, 9), "begun and sealed": (7, 16), "recycled": (28, 49)}[later]
    async with Harness(tmp_path) as harness:
        await store(harness, blocks, names("a", before))
    saved = tmp_path / "saved"
    shutil.copytree(data_file(tmp_path).parent, saved)
    async with Harness(tmp_path) as harness:
        for name in names("a", after)[before:]:
            await store(harness, blocks, [name])
        sealed = {name for name in names("a", after) if await sealed_in(harness, name)}
    shutil.rmtree(data_file(tmp_path).parent)
    saved.rename(data_file(tmp_path).parent)
    modes.clear()
    async with Harness(tmp_path) as harness:
        assert modes == ["check", "rebuild"]
        assert await loaded(harness, blocks, sealed) == sealed
        assert await store(harness, blocks, names("b", 10)) == [True] * 10
        await harness.restart()
        assert await loaded(harness, blocks, names("b", 10)) == set(names("b", 10))
    assert modes == ["check", "rebuild"]


async def sealed_in(harness, name):
    (record,) = await find(harness, "t", [name])
    extent = record and harness.tier._volumes[0].table.get(record.location.extent)
    return extent is not None and extent.state is State.SEALED


async def test_what_was_emptied_as_a_whole_does_not_come_back_either(tmp_path, blocks):
    async with Harness(tmp_path) as harness:
        await store(harness, blocks, names("a", 15))
        volume = harness.tier._volumes[0]
        await volume.recycler.empty(volume.table.with_records())
        assert harness.tier.usage().blocks == 0
    shutil.rmtree(data_file(tmp_path).parent)
    async with Harness(tmp_path) as harness:
        assert await loaded(harness, blocks, names("a", 15)) == set()


async def test_an_account_that_is_not_that_of_the_records_is_made_anew(tmp_path, blocks, modes):
    async with Harness(tmp_path) as harness:
        await store(harness, blocks, names("a", 10))
        before = harness.tier.usage()
    env = lmdb.open(str(data_file(tmp_path).parent), max_dbs=4)
    extents = env.open_db(b"extents")
    with env.begin(extents, write=True) as txn:
        row = unpack_row(*next(iter(txn.cursor())))
        row.live_blocks += 1
        row.live_bytes += 4096
        txn.put(pack_extent_key(row.extent), pack_row(row))
    env.close()
    async with Harness(tmp_path) as harness:
        assert modes == ["check", "rebuild"]
        assert (harness.tier.usage().blocks, harness.tier.usage().used_bytes) == (10, before.used_bytes)
        assert await loaded(harness, blocks, names("a", 10)) == set(names("a", 10))


async def test_tombstones_go_with_the_extents_that_they_are_about(tmp_path, blocks):
    async with Harness(tmp_path, capacity_bytes=2 * EXTENT_BYTES) as harness:
        await store(harness, blocks, names("a", 7))
        await delete(harness, ["a0"])
        for i in range(30):
            await store(harness, blocks, [f"b{i}"])
        await delete(harness, ["b29"])
        await harness.restart()
    kept, damaged = unpack_tombstones((tmp_path / "drive0" / "tombstones").read_bytes())
    assert [t.key for t in kept] == [DIGEST + block_hash("b29")]
    assert damaged == 0


async def test_of_two_copies_the_one_sealed_last_counts(tmp_path, blocks):
    async with Harness(tmp_path) as harness:
        await store(harness, blocks, names("a", 8))  # the first extent is sealed
        first = (await find(harness, "t", ["a0"]))[0]
        # Dropped, since its bytes are wrong: the footer still names it, and no tombstone.
        damage(tmp_path / "drive0" / "extents" / "00000001.ext", first.location.offset)
        assert "a0" not in await loaded(harness, blocks, ["a0"])
        await store(harness, blocks, ["a0", *names("b", 12)])
        second = (await find(harness, "t", ["a0"]))[0]
        assert second.location.extent != first.location.extent
        usage = harness.tier.usage()
    shutil.rmtree(data_file(tmp_path).parent)
    async with Harness(tmp_path) as harness:
        assert (await find(harness, "t", ["a0"]))[0].location == second.location
        assert harness.tier.usage().blocks <= usage.blocks
        assert "a0" in await loaded(harness, blocks, names("a", 8))


@pytest.mark.parametrize("where", ["trailer", "headers", "another volume's"])
async def test_an_extent_without_a_whole_footer_of_its_own_is_free(tmp_path, blocks, where):
    async with Harness(tmp_path) as harness:
        await store(harness, blocks, names("a", 15))
    extents = tmp_path / "drive0" / "extents"
    if where == "another volume's":
        async with Harness(tmp_path / "other") as other:
            await store(other, blocks, names("z", 15))
        shutil.copy(tmp_path / "other" / "drive0" / "extents" / "00000001.ext", extents)
    else:
        damage(extents / "00000001.ext", EXTENT_BYTES - (4096 if where == "trailer" else 8192))
    shutil.rmtree(data_file(tmp_path).parent)
    async with Harness(tmp_path) as harness:
        assert await loaded(harness, blocks, names("a", 15) + names("z", 15)) == set(names("a", 14)[7:])
        assert harness.tier.usage().blocks == 7
        for i in range(28):
            assert await store(harness, blocks, [f"b{i}"]) == [True]


# --- children that fail ---


async def test_an_index_that_ends_who_reads_it_is_made_anew(tmp_path, blocks, monkeypatch):
    async with Harness(tmp_path) as harness:
        await store(harness, blocks, names("a", 14))
    damage(data_file(tmp_path))
    run = index_check.run

    def dying(mode, source):
        if mode == "check":
            killed = subprocess.run([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"])
            assert killed.returncode == -signal.SIGSEGV
            raise index_check.ChildFailed("signal 11")
        return run(mode, source)

    monkeypatch.setattr(index_check, "run", dying)
    async with Harness(tmp_path) as harness:
        assert await loaded(harness, blocks, names("a", 14)) == set(names("a", 14))


async def test_a_check_that_does_not_end_is_given_up(tmp_path, blocks, monkeypatch):
    async with Harness(tmp_path) as harness:
        await store(harness, blocks, names("a", 14))
    damage(data_file(tmp_path))
    monkeypatch.setattr(index_check, "_timeout_s", lambda mode, source: 0.0001 if mode == "check" else 60.0)
    async with Harness(tmp_path) as harness:
        assert await loaded(harness, blocks, names("a", 14)) == set(names("a", 14))


async def test_where_even_that_fails_the_path_is_off_and_says_so(tmp_path, blocks, monkeypatch):
    async with Harness(tmp_path) as harness:
        await store(harness, blocks, names("a", 14))
    damage(data_file(tmp_path))
    monkeypatch.setattr(index_check, "_timeout_s", lambda mode, source: 0.0001)
    async with Harness(tmp_path) as harness:
        assert harness.tier.health is Health.OFF
        assert "cannot be made anew" in harness.tier.properties()["path.0"]


async def test_a_child_that_somebody_asks_to_end_says_nothing_about_the_index(tmp_path, blocks, monkeypatch):
    async with Harness(tmp_path) as harness:
        await store(harness, blocks, ["a"])
    before = data_file(tmp_path).read_bytes()
    (tmp_path / "drive0" / "CLEAN").unlink()

    def ended(command, **_):
        return subprocess.CompletedProcess(command, -signal.SIGTERM, b"", b"")

    with monkeypatch.context() as patched:
        patched.setattr(index_check.subprocess, "run", ended)
        async with Harness(tmp_path) as harness:
            assert harness.tier.health is Health.OFF
    assert data_file(tmp_path).read_bytes() == before
    async with Harness(tmp_path) as harness:
        assert await loaded(harness, blocks, ["a"]) == {"a"}


class Full(FileDevice):
    """A file system without room."""

    def _pwritev(self, file, buffers, offset):
        raise OSError(errno.ENOSPC, "no room")


async def test_on_a_full_file_system_it_opens_with_all_that_is_there(tmp_path, blocks):
    async with Harness(tmp_path) as harness:
        await store(harness, blocks, names("a", 10))
        await delete(harness, ["a0"])
    tombstones = tmp_path / "drive0" / "tombstones"
    tombstones.write_bytes(tombstones.read_bytes()[:-5])  # to be written anew
    (tmp_path / "drive0" / "RESERVE").unlink()
    async with Harness(tmp_path, Full()) as harness:
        assert harness.tier.health is Health.OK
        assert await loaded(harness, blocks, names("a", 10)) == set(names("a", 10)[1:])
        assert await store(harness, blocks, ["b"]) == [False]
        with pytest.raises(DeviceError):
            await delete(harness, ["a1"])
    assert not list((tmp_path / "drive0").glob("*.new"))
    async with Harness(tmp_path) as harness:
        await delete(harness, ["a1"])
        assert await loaded(harness, blocks, names("a", 10)) == set(names("a", 10)[2:])
    kept, damaged = unpack_tombstones(tombstones.read_bytes())
    assert ({t.key for t in kept}, damaged) == ({DIGEST + block_hash(name) for name in ("a0", "a1")}, 0)


async def test_an_index_that_cannot_be_made_anew_for_want_of_room_is_said_so(tmp_path, blocks, monkeypatch):
    async with Harness(tmp_path) as harness:
        await store(harness, blocks, names("a", 10))

    def no_room(*_, **__):
        raise lmdb.DiskError("no space left")

    source = Source(str(tmp_path / "drive0"), b"", EXTENT_BYTES)
    monkeypatch.setattr(lmdb, "open", no_room)
    with pytest.raises(DeviceError, match="no space left"):
        rebuild.rebuild(source)
    assert {path.name for path in data_file(tmp_path).parent.iterdir()} == {"data.mdb"}


@pytest.mark.parametrize("call", ["__init__", "append"])
async def test_without_room_for_a_copy_the_index_is_checked_as_it_is(tmp_path, blocks, monkeypatch, call):
    async with Harness(tmp_path) as harness:
        await store(harness, blocks, names("a", 10))

    def no_room(*_):
        raise lmdb.DiskError("no space")

    monkeypatch.setattr(IndexCopy, call, no_room)
    source = Source(str(tmp_path / "drive0"), b"", EXTENT_BYTES)
    before = data_file(tmp_path).read_bytes()
    assert check.check(source).records == 10
    assert data_file(tmp_path).read_bytes() == before
    assert {path.name for path in data_file(tmp_path).parent.iterdir()} == {"data.mdb"}
    at = before.index(block_hash("a3")) + 40
    damage(data_file(tmp_path), at)
    with pytest.raises(CorruptData, match="damaged entry"):
        check.check(source)


# --- the format ---


@pytest.mark.parametrize("marker", ["FORMAT", "FORMAT.copy"])
@pytest.mark.parametrize("how", ["flipped", "lost"])
async def test_a_damaged_format_file_is_repaired_from_its_copy(tmp_path, blocks, marker, how):
    async with Harness(tmp_path) as harness:
        await store(harness, blocks, ["a"])
    path = tmp_path / "drive0" / marker
    whole = path.read_bytes()
    for at in range(len(whole)) if how == "flipped" else [0]:
        if how == "lost":
            path.unlink()
        else:
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x01]) + whole[at + 1 :])
        async with Harness(tmp_path) as harness:
            assert harness.tier.health is Health.OK
        assert path.read_bytes() == whole


class BadSectors(FileDevice):
    """The first page of some files cannot be read."""

    def __init__(self, *names):
        self.bad = names

    def _preadv(self, file, buffers, offset):
        if file.path.name in self.bad and offset < ALIGN_BYTES:
            raise OSError(errno.EIO, "bad sector")
        return super()._preadv(file, buffers, offset)


@pytest.mark.parametrize("marker", ["FORMAT", "FORMAT.copy", "CLEAN"])
async def test_a_bad_sector_in_a_small_file_is_lived_through(tmp_path, blocks, marker):
    async with Harness(tmp_path) as harness:
        await store(harness, blocks, names("a", 10))
    async with Harness(tmp_path, BadSectors(marker)) as harness:
        assert harness.tier.health is Health.OK
        assert await loaded(harness, blocks, names("a", 10)) == set(names("a", 10))


async def test_a_bad_sector_in_the_tombstones_costs_those_in_it(tmp_path, blocks):
    chosen = names("a", 100)
    async with Harness(tmp_path, capacity_bytes=100 * EXTENT_BYTES) as harness:
        await store(harness, blocks, chosen)
        assert await delete(harness, chosen[:50]) == 50
    device = BadSectors("tombstones")
    async with Harness(tmp_path, device, capacity_bytes=100 * EXTENT_BYTES) as harness:
        assert harness.tier.health is Health.OK
        assert await loaded(harness, blocks, chosen) == set(chosen[50:])
    kept, damaged = unpack_tombstones((tmp_path / "drive0" / "tombstones").read_bytes())
    assert (len(kept), damaged) == (50 - ALIGN_BYTES // ENTRY_BYTES, 0)


async def test_tombstones_that_cannot_be_read_at_all_are_the_device_s_fault(tmp_path, blocks):
    async with Harness(tmp_path) as harness:
        await store(harness, blocks, names("a", 3))
        await delete(harness, ["a1"])
    async with Harness(tmp_path, BadSectors("tombstones")) as harness:
        assert harness.tier.health is Health.OFF
    assert (tmp_path / "drive0" / "tombstones").stat().st_size


async def test_a_bad_sector_in_the_index_costs_what_is_in_it(tmp_path, blocks, monkeypatch):
    async with Harness(tmp_path) as harness:
        await store(harness, blocks, names("a", 5))
    pread, at = os.pread, data_file(tmp_path).read_bytes().index(block_hash("a3"))

    def bad(descriptor, size, offset):
        if offset <= at < offset + size:
            raise OSError(errno.EIO, "bad sector")
        return pread(descriptor, size, offset)

    whole = set(pages.entries(data_file(tmp_path)))
    monkeypatch.setattr(os, "pread", bad)
    found = set(pages.entries(data_file(tmp_path)))
    assert found < whole
    assert found


async def test_without_a_whole_format_file_the_path_is_off(tmp_path):
    async with Harness(tmp_path):
        pass
    for name in ("FORMAT", "FORMAT.copy"):
        (tmp_path / "drive0" / name).write_bytes(b"{")
    async with Harness(tmp_path) as harness:
        assert harness.tier.health is Health.OFF
        assert "FORMAT is damaged" in harness.tier.properties()["path.0"]


def old_volume(path):
    """Format 1: a sealed extent and two open ones, of two tenants."""

    def made(prefix, count, digest):
        return [(digest, block_hash(n), b"p" * 32, content(n, 16384)) for n in names(prefix, count)]

    extents = [
        format1.Extent(1, "t", made("a", 7, DIGEST), sealed=True, sequence=1, generation=4),
        format1.Extent(2, "t", made("b", 3, DIGEST), sealed=False),
        format1.Extent(3, "u", made("c", 2, OTHER_DIGEST), sealed=False, generation=2),
    ]
    format1.write_volume(path, extents, [("t", DIGEST, b"encoding", {"model": "m"})])


async def check_old_volume(harness, blocks):
    assert await loaded(harness, blocks, names("a", 7) + names("b", 3)) == {*names("a", 7), *names("b", 3)}
    assert await loaded(harness, blocks, names("c", 2), "u", OTHER_DIGEST) == set(names("c", 2))
    assert {t: blocks for t, (_, blocks) in harness.tier.tenant_usage().items()} == {"t": 10, "u": 2}
    assert [n.fields for n in harness.tier.namespaces()] == [{"model": "m"}]


async def test_a_volume_of_format_1_is_taken_over_whole(tmp_path, blocks, modes):
    old_volume(tmp_path / "drive0")
    async with Harness(tmp_path) as harness:
        await check_old_volume(harness, blocks)
        assert await store(harness, blocks, names("d", 14)) == [True] * 14
        await harness.restart()
        assert len(await loaded(harness, blocks, names("d", 14))) == 14
    assert json.loads((tmp_path / "drive0" / "FORMAT").read_bytes())["format"] == 2
    assert modes == ["migrate"]


async def test_a_conversion_that_was_cut_short_is_taken_up_again(tmp_path, blocks, modes):
    old_volume(tmp_path / "drive0")
    marker = (tmp_path / "drive0" / "FORMAT").read_bytes()
    async with Harness(tmp_path) as harness:
        copy = as_killed(tmp_path / "drive0").rename(tmp_path / "drive1")
        await check_old_volume(harness, blocks)
    (copy / "FORMAT").write_bytes(marker)  # the index was converted, the marker not yet written
    (copy / "FORMAT.copy").unlink()
    shutil.rmtree(tmp_path / "drive0")
    copy.rename(tmp_path / "drive0")
    async with Harness(tmp_path) as harness:
        await check_old_volume(harness, blocks)


async def test_a_damaged_index_of_format_1_is_made_from_the_footers(tmp_path, blocks, modes):
    old_volume(tmp_path / "drive0")
    ruin(data_file(tmp_path))
    async with Harness(tmp_path) as harness:
        assert await loaded(harness, blocks, names("a", 7)) == set(names("a", 7))
    assert modes == ["migrate", "rebuild"]


@pytest.fixture(scope="module")
def old_code(tmp_path_factory):
    """The code of the last commit that wrote format 1."""
    return extract(OLD_COMMIT, tmp_path_factory.mktemp("old"), "kvstored")


OLD_WRITER = """
import asyncio, sys
from pathlib import Path
from kvstored.clock import SystemClock
from kvstored.device.file import FileDevice
from kvstored.testing.contract_lower_tier import DIGEST, Blocks
from kvstored.tiers.nvme import NvmeConfig, NvmeTier

async def main(path, extent_bytes, count):
    config = NvmeConfig(paths=[path], capacity_bytes=4 * extent_bytes, extent_bytes=extent_bytes)
    tier, blocks = NvmeTier(config, FileDevice(), SystemClock()), Blocks()
    await tier.open()
    await tier.remember_namespace("t", DIGEST, b"encoding", {"model": "m"})
    assert all(await tier.store("t", [blocks.store(f"a{i}", 16384) for i in range(count)]))
    await tier.close()

asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
"""


def run_old(old_code, path, count=10):
    command = [sys.executable, "-c", OLD_WRITER, str(path), str(EXTENT_BYTES), str(count)]
    environment = {**os.environ, "PYTHONPATH": str(old_code)}
    return subprocess.run(command, cwd=old_code, env=environment, capture_output=True, text=True, timeout=100)


async def test_what_the_previous_format_s_own_code_wrote_is_taken_over_and_refused_by_it_after(
    tmp_path, blocks, old_code
):
    written = run_old(old_code, tmp_path / "drive0")
    assert written.returncode == 0, written.stderr
    assert json.loads((tmp_path / "drive0" / "FORMAT").read_bytes())["format"] == 1
    async with Harness(tmp_path) as harness:
        assert await loaded(harness, blocks, names("a", 10)) == set(names("a", 10))
        assert [n.fields for n in harness.tier.namespaces()] == [{"model": "m"}]
    refusal = run_old(old_code, tmp_path / "drive0")
    assert refusal.returncode != 0
    assert "has format 2, this kvstored reads up to 1" in refusal.stderr
    async with Harness(tmp_path) as harness:  # and the refusal changed nothing
        assert await loaded(harness, blocks, names("a", 10)) == set(names("a", 10))


async def test_a_newer_format_is_refused_whatever_its_copy_says(tmp_path):
    async with Harness(tmp_path):
        pass
    (tmp_path / "drive0" / "FORMAT").write_text(json.dumps({"format": 4}))
    assert "format 4" in await refused(Harness(tmp_path))


def test_a_copy_of_an_index_whose_keys_are_out_of_order_is_damage(tmp_path):
    copy = IndexCopy(tmp_path)
    with pytest.raises(CorruptData):
        copy.append(b"records", [(b"b", b""), (b"a", b"")])
    copy.discard()
    assert list(tmp_path.iterdir()) == []
