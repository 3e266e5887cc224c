"""`kvstorectl` in a test, with a real daemon on a machine that has its time for others."""

from kvstored_client import Client
from kvstored_client.ctl import connection

PATIENCE_S = 60.0


def be_patient(monkeypatch):
    """Commands wait for the daemon's answers as long as it takes; `--timeout` still says how long they ask for room."""

    def made(*arguments, timeout_s, connect_timeout_s, **more):
        patient_s = max(PATIENCE_S, timeout_s)
        return Client(*arguments, timeout_s=patient_s, connect_timeout_s=PATIENCE_S, **more)

    monkeypatch.setattr(connection, "Client", made)
