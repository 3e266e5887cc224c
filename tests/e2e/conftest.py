"""The test's own process as an engine on the fake driver, whose settings are read once per process."""

import pytest

from kvstored.device.cuda import Driver
from tests import fakecuda


@pytest.fixture(scope="session")
def driver():
    """The driver in this process; daemons that are started later find the same devices."""
    made = []
    with pytest.MonkeyPatch.context() as patch:
        for name, value in fakecuda.environment(fakecuda.directory(), MEM_MB=512).items():
            patch.setenv(name, value)
        made.append(Driver())
        made[0].bind(made[0].context(0))
        yield made[0]
