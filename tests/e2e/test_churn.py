"""A short churn: clients die by `kill -9` at random, nothing is wrong and nothing is held."""

import pytest
from kvstored_client import Client, NamespaceSpec

from bench.cell import chain_hashes
from kvstored.testing.daemon_process import DaemonProcess
from tests import churn_audit
from tests.churn import LEAKS, SEGMENTS, SETTINGS, churn

# Without these a run would have shown nothing.
SHOWN = {"kills": 3, "puts": 100, "hits": 100, "demoted_blocks": 1, "promoted_blocks": 1}


def shown(figures):
    return all(figures[name] >= least for name, least in SHOWN.items())


@pytest.mark.timeout(600)
def test_clients_that_die_at_random_get_no_wrong_byte_and_leave_nothing_held(tmp_path):
    figures = churn(seconds=15, seed=7, directory=tmp_path, enough=shown)
    assert figures["wrong_bytes"] == 0
    assert {leak.key: figures[leak.key] for leak in LEAKS} == {leak.key: 0 for leak in LEAKS}
    assert figures["client_errors"] == 0
    assert shown(figures), figures


def test_the_audit_sees_what_a_client_still_holds(tmp_path, monkeypatch):
    hashes = chain_hashes("audit", 4)
    with DaemonProcess(SETTINGS, nvme=True, parent_directory=tmp_path) as daemon:
        before = churn_audit.descriptors_at_rest(daemon)
        with Client(daemon.address, name="churn-9", staging_bytes=1 << 20) as client:
            namespace = client.namespace(NamespaceSpec(model="audit"))
            client.put(namespace, hashes[:2], [bytes(4096)] * 2)
            holding = client.get(namespace, hashes[:2]), client.stage(namespace, hashes[2:], 4096)
            with holding[0], holding[1], monkeypatch.context() as patch:
                patch.setattr(churn_audit, "SETTLE_S", 0.2)  # what is held does not go
                leaks, _ = churn_audit.audit(daemon, before, SEGMENTS)
        clean, _ = churn_audit.audit(daemon, before, SEGMENTS)
    assert leaks["leaked_sessions"] == 1
    assert leaks["leaked_leases"] == 1
    assert leaks["leaked_reservations"] == 1
    assert leaks["leaked_staging_bytes"] == 1 << 20
    assert leaks["leaked_holds"] == 4
    assert leaks["leaked_unfinished_blocks"] == 2
    assert leaks["leaked_descriptors"] >= 2  # its socket and its staging memory
    assert not any(clean.values())
