"""What every end-to-end attack is judged by: a bystander who goes on, and a daemon that holds nothing afterwards."""

import os
import pickle
import signal
import threading
import traceback
from collections import Counter
from pathlib import Path

from kvstored.keys import slot_bytes
from kvstored.testing.daemon_process import status
from tests.e2e.raw_client import HIT, RawClient, eventually, hashes_of, payload

BLOCK_BYTES = 64 << 10
TIER_MEMORY = "memfd:kvstored-dram"
NOBODY = 65534
BYSTANDER = "bystander"


class Bystander:
    """An honest client in a thread of its own: puts, gets and looks up while others attack.

    As a context manager it fails the test that it stands beside when it saw a wrong byte, an
    error, or did not get a full round of answers before and during the body.
    """

    def __init__(self, path, *, token="", blocks=8):
        self._client = RawClient(path, token=token, name=BYSTANDER, staging_bytes=1 << 20)
        self._namespace = self._client.namespace("bystander")
        self._hashes = hashes_of("bystander", blocks)
        self._blocks = [payload(hash_, BLOCK_BYTES) for hash_ in self._hashes]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._failure = ""
        self.rounds = 0

    def __enter__(self):
        self._thread.start()
        self.wait_rounds(1)
        return self

    def __exit__(self, kind, *_):
        try:
            if kind is None:
                self.wait_rounds(3)
        finally:
            self._stop.set()
            self._thread.join()
            self._client.close()
        if kind is None:
            assert not self._failure, self._failure

    def wait_rounds(self, count):
        """Return when so many more rounds were right."""
        aim = self.rounds + count
        eventually(lambda: self.rounds >= aim or self._failure, "the honest client is answered")
        assert not self._failure, self._failure

    def _run(self):
        try:
            while not self._stop.wait(0.002):
                self._round()
                self.rounds += 1
        except BaseException:
            self._failure = traceback.format_exc()

    def _round(self):
        client, namespace, hashes = self._client, self._namespace, self._hashes
        if client.lookup(namespace, hashes).prefix_blocks < len(hashes):
            client.put(namespace, hashes, self._blocks, wait_s=0.2)  # new, or evicted by whoever needs room
        found = client.read(namespace, hashes, wait_s=1.0)
        assert found == self._blocks[: len(found)], "the honest client got wrong bytes"


def descriptors(daemon):
    """Open descriptors of the daemon by kind, without those of its own files: on NVMe, and of its state."""
    own = (str(daemon.nvme_path), str(daemon.directory / "state"))
    links = (link for link in daemon.descriptors() if not link.startswith(own))
    return Counter(link.split(":[")[0] if ":[" in link else link for link in links)


def rss_bytes(pid):
    """Memory of a process that is its own (shared memory of the tiers does not count)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/{pid}/status has no RssAnon")


def tier(reply, name):
    return next(tier for tier in reply.tiers if tier.name == name)


class Level:
    """What the daemon holds before an attack; `check` compares when all attackers are gone."""

    def __init__(self, daemon):
        self._daemon = daemon
        self._descriptors = self._count()

    def _count(self):
        found = descriptors(self._daemon)
        segments = int(tier(status(self._daemon.session_socket), "dram").properties["segments"])
        tier_memory = sum(count for name, count in found.items() if TIER_MEMORY in name)
        records = "memfd:kvstored-slots"  # one per segment in use
        count = Counter({k: n for k, n in found.items() if TIER_MEMORY not in k and records not in k})
        # One to write and one to hand out per segment, the latter made when it is first needed.
        count[f"{tier_memory} of {segments} segments"] = max(0, tier_memory - 2 * segments)
        return count

    def check(self):
        """Nothing is held that was not before; a `Bystander` may go on meanwhile."""
        path = self._daemon.session_socket
        eventually(lambda: not _strangers(status(path)), "the attackers' sessions end")
        eventually(lambda: not self._count() - self._descriptors, "descriptors are back")
        # The bystander holds something for moments only: there is an instant at which nothing is held.
        eventually(lambda: not _held(status(path)), "nothing is held")


def _strangers(reply):
    return [s.client for s in reply.sessions if s.client not in (BYSTANDER, "probe", "audit")]


def _held(reply):
    """What sessions hold, apart from the honest client's staging."""
    held = {name: reply.counters[f"held_{name}"] for name in ("leases", "leased_bytes", "reservations")}
    held["staging_bytes"] = reply.counters["held_staging_bytes"] - sum(
        s.staging_bytes for s in reply.sessions if s.client == BYSTANDER
    )
    return {name: count for name, count in held.items() if count}


def check_balance(path, token=""):
    """Every slot in use belongs to a block that is ready and that nothing holds; needs an admin."""

    def balanced():
        with RawClient(path, token=token, name="audit") as client:
            blocks = [block for block in client.list_blocks() if "dram" in block.tiers]
            dram = tier(client.status(), "dram")
        idle = all(block.state == "ready" and not block.holds for block in blocks)
        whole = dram.used_bytes + dram.dead_bytes + dram.retired_bytes + dram.free_bytes == dram.capacity_bytes
        return idle and whole and sum(slot_bytes(block.size_bytes) for block in blocks) == dram.used_bytes

    eventually(balanced, "slots and blocks agree")


def fill(client, namespace_id, name, total_bytes, *, size_bytes=BLOCK_BYTES, chain=16, version=0, wait_s=5.0):
    """Put chains of blocks until so many bytes were offered; returns (hashes, outcomes) per chain."""
    done = []
    for number in range(-(-total_bytes // (size_bytes * chain))):
        hashes = hashes_of(f"{name} {number}", chain)
        blocks = [payload(hash_, size_bytes, version) for hash_ in hashes]
        done.append((hashes, client.put(namespace_id, hashes, blocks, wait_s=wait_s)))
    return done


def count_hits(done):
    return sum(outcomes.count(HIT) for _, outcomes in done)


# ---- in another process ----


def in_fork(work, *, uid=None):
    """Run `work()` in a forked child, as another user where asked; returns its result or raises what it raised."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reader)
        _run_and_exit(work, uid, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        raw = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert raw, f"the child ended with {code} and said nothing"
    result = pickle.loads(raw)
    if isinstance(result, BaseException):
        raise result
    return result


def _run_and_exit(work, uid, writer):
    try:
        if uid is not None:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        result = work()
    except BaseException as error:
        traceback.print_exc()
        result = AssertionError(f"in the child: {error!r}")
    try:
        os.write(writer, pickle.dumps(result))
    finally:
        os._exit(0)


def dies_of(work, signal_number):
    """Whether a forked child that does `work()` is ended by this signal."""
    pid = os.fork()
    if not pid:
        signal.signal(signal_number, signal.SIG_DFL)
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal_number
