"""What all tests with real daemons start from: patient clients, and this process as an engine on the fake driver."""

import pytest
from kvstored_client import AsyncClient, Client

from kvstored.device.cuda import Driver
from kvstored.testing.waiting import PATIENCE_S
from tests import fakecuda


@pytest.fixture(scope="module", autouse=True)
def _patient_clients():
    """A call that is not answered within its limit is a miss: where a test sets no limit, a busy machine makes none."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in (Client, AsyncClient):
            for name in ("timeout_s", "connect_timeout_s"):
                patch.setitem(kind.__init__.__kwdefaults__, name, PATIENCE_S)
        yield


@pytest.fixture(scope="session")
def driver():
    """The driver in this process, whose settings are read once; daemons that are started later find its devices."""
    made = []
    with pytest.MonkeyPatch.context() as patch:
        for name, value in fakecuda.environment(fakecuda.directory(), MEM_MB=512).items():
            patch.setenv(name, value)
        made.append(Driver())
        made[0].bind(made[0].context(0))
        yield made[0]
