"""What every test starts from."""

import logging
import os

import pytest

# What a shell or a build says of colours, widths, daemons and drivers is about others than those of the tests.
KEPT = {"KVSTORED_TRACES", "KVSTORED_SYSTEMD_ROOT"}
STRAY = ("KVSTORED_", "FAKECUDA_", "CLICOLOR", "LISTEN_", "WATCHDOG_")
STRAY_NAMES = {"COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"}
STRAY_NAMES |= {"NOTIFY_SOCKET", "CREDENTIALS_DIRECTORY"}
for _name in [name for name in os.environ if name.startswith(STRAY) or name in STRAY_NAMES]:
    if _name not in KEPT:
        del os.environ[_name]

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # vLLM's environment has none, and none of its tests wants it
    pass
else:
    # How long an example takes says how busy the machine is; and a run that fails by chance tells of no change.
    # Other examples than those of every run: --hypothesis-profile=default.
    settings.register_profile(
        "every-run-alike", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("every-run-alike")


@pytest.fixture(autouse=True)
def _client_logs_as_before():
    """A command of `kvstorectl` that ran in this process silences the client's warnings: not for the next test."""
    log = logging.getLogger("kvstored_client")
    level = log.level
    yield
    log.setLevel(level)
