"""The project's own unit under a real systemd: `python -m tests.systemd`. As root, about a minute and a half.

KVSTORED_SYSTEMD_ROOT names a directory in which the Debian is kept for the next time; without it
one is made and removed. Exit status: 0 all as it should be, or skipped (it says why), 1 not.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.systemd.container import INTERPRETER, PYTHON_ENVIRONMENT, REPOSITORY, Container, make_root, missing

UNITS = REPOSITORY / "systemd"
BLOCKS, BLOCK_BYTES = 64, 64 << 10
CONFIG = """
[dram]
capacity_bytes = "32MiB"
[nvme]
paths = ["/var/lib/kvstored"]
capacity_bytes = "64MiB"
extent_bytes = "32MiB"
"""
# Puts blocks, or reads them: how many of them are there, and right.
CLIENT = f"""
import hashlib, sys
from kvstored_client import Client, NamespaceSpec
client = Client(timeout_s=60, connect_timeout_s=60)
namespace = client.namespace(NamespaceSpec(model="m", model_version="1", dtype="bfloat16", layers=1, kv_heads=1,
                                           head_dim=64, block_tokens=16, layout="layers,kv,heads,tokens,dim"))
hashes = namespace.chain(list(range(16 * {BLOCKS})))
wanted = [hashlib.shake_128(h).digest({BLOCK_BYTES}) for h in hashes]
if sys.argv[1] == "put":
    print(client.put(namespace, hashes, wanted, wait_s=60).stored)
else:
    assert client.lookup(namespace, hashes).dram_blocks == len(hashes), "blocks in DRAM are missing"
    found = [bytearray({BLOCK_BYTES}) for _ in hashes]
    n = client.get_into(namespace, hashes, found, wait_s=60)
    assert found[:n] == wanted[:n], "wrong bytes"
    print(n)
"""


def drop_in(command):
    """What differs from the unit: where things are in the container."""
    environment = "".join(f"Environment={name}={value}\n" for name, value in PYTHON_ENVIRONMENT.items())
    return f"[Service]\nExecStart=\nExecStart={command}\n{environment}"


class Service:
    """One unit of the container."""

    def __init__(self, container, name, command, more=""):
        self._container = container
        self._name = name
        container.write(f"/etc/systemd/system/{name}.service", (UNITS / "kvstored.service").read_text())
        container.write(f"/etc/systemd/system/{name}.service.d/test.conf", drop_in(command) + more)
        container.run("systemctl", "daemon-reload")

    def ctl(self, *verb):
        """systemctl VERB NAME; where that fails, with the unit's log."""
        try:
            return self._container.run("systemctl", *verb, self._name)
        except RuntimeError as error:
            log = self._container.run("journalctl", "-u", self._name, "-n", "40", "--no-pager", check=False)
            raise RuntimeError(f"{error}\n{log}") from None

    def show(self, name):
        """One property."""
        return self.ctl("show", "--value", "-p", name)

    def next_life(self, act):
        """Do what ends the process that runs; returns when another one serves."""
        before = self.show("MainPID")
        act()
        deadline = time.monotonic() + 300
        while self.show("MainPID") in (before, "0") or self.show("ActiveState") != "active":
            assert time.monotonic() < deadline, self.ctl("status")
            time.sleep(0.1)

    def kill(self):
        """SIGKILL to all of it."""
        self.ctl("kill", "-s", "KILL")


def check_keeping(container):
    """The unit, with a stand-in that counts its lives in memory that systemd keeps."""
    command = f"{INTERPRETER} -P /opt/kvstored/tests/systemd/keeping.py"
    service = Service(container, "kvstored-keeping", command, "WatchdogSec=15s\n")
    service.ctl("start")

    def expect(lives, what):
        wanted = f"lives={lives} kept=True names=lives"
        assert service.show("StatusText") == wanted, f"{what}: {service.show('StatusText')}, not {wanted}"
        assert service.show("NFileDescriptorStore") == "1", f"{what}: {service.show('NFileDescriptorStore')} kept"
        print(f"kept: {what}", flush=True)

    expect(1, "start")
    service.next_life(service.kill)
    expect(2, "SIGKILL")
    for lives in (3, 4):
        service.next_life(lambda: service.ctl("restart"))
        expect(lives, "restart")
    container.run("systemctl", "daemon-reexec")
    service.next_life(service.kill)
    expect(5, "SIGKILL after daemon-reexec")
    service.next_life(lambda: service.ctl("kill", "-s", "STOP"))
    expect(6, "a process that hangs, ended by the watchdog")
    service.ctl("stop")
    service.ctl("start")
    expect(1, "not over stop and start")
    service.ctl("stop")


def check_daemon(container):
    """The unit with the daemon itself."""
    container.write("/etc/kvstored/kvstored.toml", CONFIG)
    command = f"{INTERPRETER} -P -m kvstored serve --config=/etc/kvstored/kvstored.toml"
    service = Service(container, "kvstored", command)
    service.ctl("start")
    assert service.show("StatusText").startswith("serving on /run/kvstored"), service.show("StatusText")
    stored = int(container.python(CLIENT, "put"))
    assert stored == BLOCKS, stored
    print(
        f"daemon: serves, {stored} blocks in DRAM, {service.show('NFileDescriptorStore')} descriptors kept", flush=True
    )
    for what, act in {"SIGKILL": service.kill, "restart": lambda: service.ctl("restart")}.items():
        service.next_life(act)
        found = int(container.python(CLIENT, "get"))
        assert found == stored, f"{found} of {stored} blocks after {what}"
        print(f"daemon: all blocks in DRAM and right after {what}", flush=True)
    service.ctl("stop")
    assert service.show("Result") == "success", service.show("Result")
    container.write("/etc/kvstored/kvstored.toml", "[dram]\nno_such_key = 1\n")
    container.run("systemctl", "start", "kvstored", check=False)
    assert service.show("ExecMainStatus") == "78"
    assert service.show("NRestarts") == "0", "a wrong setting is not tried again"
    print("daemon: stopped in order; a wrong setting is not tried again", flush=True)


def main():
    """Make the root, boot it, check; returns the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # tidy up then, too
    why = missing()
    if why:
        print(f"skipped: no systemd to test against ({why})")
        return 0
    with tempfile.TemporaryDirectory(prefix="kvstored-systemd-") as temporary:
        root = Path(os.environ.get("KVSTORED_SYSTEMD_ROOT") or Path(temporary, "root"))
        try:
            make_root(root)
        except subprocess.SubprocessError as error:
            print(f"skipped: no systemd to test against ({error})")
            return 0
        log = Path(temporary, "log")
        with log.open("wb") as out:
            try:
                with Container(root, out) as container:
                    version = container.run("systemctl", "--version").split("\n")[0]
                    print(f"booted: {version}", flush=True)
                    container.write("/etc/sysusers.d/kvstored.conf", (UNITS / "kvstored.sysusers").read_text())
                    container.run("systemd-sysusers")
                    check_keeping(container)
                    check_daemon(container)
            except (AssertionError, RuntimeError) as error:
                print(f"failed: {error}\n{log.read_text(errors='replace')[-2000:]}")
                return 1
            finally:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what is left to do is to tidy up
    print(json.dumps({"systemd": "ok"}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
