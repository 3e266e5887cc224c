"""What every transport must do, as tests that its own test module inherits.

A subclass provides two fixtures: `transport`, a `contract_client.Transport` to a fresh daemon set up
with `SETTINGS`, and `deep_transport`, the same with a lower tier. All clients are ended afterwards,
and then nothing may be held. The suites, one per module, can be taken alone too.
"""

from __future__ import annotations

from typing import Any, Final

from kvstored.testing.contract_admin import AdminContract
from kvstored.testing.contract_blocks import BlockContract
from kvstored.testing.contract_client import ACME, RIVAL, ROOT, VIEWER
from kvstored.testing.contract_durability import DurabilityContract
from kvstored.testing.contract_epochs import EpochContract
from kvstored.testing.contract_errors import ErrorContract
from kvstored.testing.contract_expiry import ExpiryContract
from kvstored.testing.contract_explain import ExplainContract
from kvstored.testing.contract_hints import HintContract
from kvstored.testing.contract_movement import MovementContract
from kvstored.testing.contract_purge import PurgeContract
from kvstored.testing.contract_sessions import SessionContract
from kvstored.testing.contract_tenants import TenantContract
from kvstored.testing.daemon_in_loop import tenant

SETTINGS: Final[dict[str, Any]] = {
    "tenants": [tenant(ACME), tenant(RIVAL), tenant(VIEWER, role="reader"), tenant(ROOT, role="admin")],
    "limits": {
        "leases_per_session": 16,
        "reservations_per_session": 8,
        "namespaces_per_session": 8,
        # However slow the machine is: who waits for room or for what is below gets it.
        "put_wait_max_s": 60.0,
        "get_wait_max_s": 60.0,
    },
}


class TransportContract(
    SessionContract,
    BlockContract,
    AdminContract,
    ExplainContract,
    ErrorContract,
    MovementContract,
    DurabilityContract,
    TenantContract,
    EpochContract,
    HintContract,
    PurgeContract,
    ExpiryContract,
):
    """All of it."""
