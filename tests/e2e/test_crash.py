"""A short crash test, and proof that it would see what it looks for."""

import time
from collections import Counter

import pytest
from kvstored_client import Client, NamespaceSpec

from bench.cell import chain_hashes
from bench.payload import Payloads
from kvstored.testing.daemon_process import DaemonProcess
from tests.crash import accounting
from tests.crash.__main__ import MUST_BE_ZERO, crash, passed
from tests.crash.model import Chain, Promise
from tests.crash.phases import PHASES
from tests.crash.verdict import Checker
from tests.crash.writer import ADMIN, TENANTS, token

SHORT = [phase for phase in PHASES if phase.name != "promoting"]
SIZE = 16 << 10
SPEC = NamespaceSpec(model="crash", extra=str(SIZE))


# Without these a run would have shown nothing.
SHOWN = {"kills": len(SHORT), "puts": 100, "durable_checked": 1, "dram_checked": 1}


@pytest.mark.timeout(900)
def test_a_daemon_that_is_killed_at_random_loses_nothing_and_delivers_nothing_wrong(tmp_path):
    for seconds in (5, 40):  # a busy machine does less in five
        figures = crash(seconds=seconds, seed=7, directory=tmp_path, phases=SHORT)
        assert {name: figures[name] for name in MUST_BE_ZERO} == dict.fromkeys(MUST_BE_ZERO, 0)
        if all(figures[name] >= least for name, least in SHOWN.items()):
            break
    else:
        pytest.fail(f"nothing was shown: {figures}")
    assert figures["dram_survived"] == 1.0
    assert passed(figures)


@pytest.fixture
def daemon(tmp_path):
    with DaemonProcess(PHASES[0].settings(), nvme=True, parent_directory=tmp_path) as running:
        yield running


@pytest.fixture
def client(daemon):
    with Client(daemon.address, token=token(TENANTS[0]), staging_bytes=1 << 20) as connected:
        yield connected


def put(client, chain, numbers):
    rows, asked_s = list(Payloads(SIZE).make(numbers)), time.time()
    assert client.put(client.namespace(SPEC), chain.hashes, rows).stored == len(chain)
    for index in range(len(chain)):
        chain.acknowledged(index, Promise.MEMORY, asked_s)


def check(client, chain):
    counts = Counter()

    def count(name, number=1):
        counts[name] += number

    checker = Checker(client, {SIZE: client.namespace(SPEC)}, {SIZE: Payloads(SIZE)}, count, all_in_dram=True)
    checker.connect()
    checker.check(chain)
    return counts


def test_the_check_sees_blocks_that_are_lost_wrong_or_back_from_the_dead(client):
    chain = Chain(1, SIZE, chain_hashes("check", 6))
    put(client, chain, chain.begin_put(0, 6))
    clean = check(client, chain)
    assert (clean["checked_blocks"], clean["dram_checked"]) == (6, 6)
    chain.promises[4] = Promise.NVME
    client.delete(client.namespace(SPEC), chain.hashes[3:5])  # behind the chain's back
    chain.versions[0] += 1
    chain.promises[1] = Promise.GONE
    counts = check(client, chain)
    assert (counts["durable_lost"], counts["dram_lost"]) == (1, 1)
    assert counts["wrong_bytes"] > SIZE // 2
    assert counts["resurrected"] == 1
    assert counts["evicted_blocks"] == 0


def test_the_account_is_compared_with_what_is_listed(daemon, client):
    chain = Chain(1, SIZE, chain_hashes("account", 6))
    put(client, chain, chain.begin_put(0, 6))
    with Client(daemon.address, token=token(ADMIN), staging_bytes=0) as admin:
        assert not accounting.errors(admin, lambda fields: int(fields["extra"]), Counter())
        status, blocks, spaces = accounting.quiet(admin)
    assert accounting.compare(status, blocks[1:], spaces, lambda _: SIZE, Counter())
    leased = Counter({(TENANTS[0], "dram_blocks"): 1, (TENANTS[0], "dram_bytes"): SIZE})
    assert not accounting.compare(status, blocks[1:], spaces, lambda _: SIZE, leased)
    status.tiers[0].used_bytes += 1
    assert accounting.compare(status, blocks, spaces, lambda _: SIZE, Counter())
