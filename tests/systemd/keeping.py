"""A stand-in for the daemon under the daemon's own unit: counts its lives in memory that systemd keeps."""

import os
import signal
import time

from kvstored.device.service_manager import from_environment

manager = from_environment(os.environ)
found = manager.keeper.inherited()
kept = True
if "lives" not in found:
    found["lives"] = os.memfd_create("lives")
    kept = manager.keeper.keep("lives", found["lives"])
    gone = os.memfd_create("gone")
    kept = kept and manager.keeper.keep("gone", gone)
    manager.keeper.drop("gone")
lives = len(os.pread(found["lives"], 100, 0)) + 1
os.pwrite(found["lives"], b"x", lives - 1)
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
manager.notify.send("READY=1", f"STATUS=lives={lives} kept={kept} names={':'.join(sorted(found))}", wait=True)
while True:
    manager.notify.send("WATCHDOG=1")
    time.sleep(manager.watchdog_s / 4)
