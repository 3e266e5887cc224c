"""A stand-in for the daemon under a supervisor: says hello to the test, then does what it is told.

Its one argument is the Unix socket on which the test listens. Each line that it gets is an
expression, each answer one line of JSON.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys

from kvstored.device import service_manager
from kvstored.device.service_manager import from_environment

service_manager.ANSWER_S = 60.0  # the supervisor answers, whenever it has a CPU
manager = from_environment(os.environ)
inherited = manager.keeper.inherited()


def keep(name, data):
    fd = os.memfd_create("kept")
    os.write(fd, data.encode())
    return manager.keeper.keep(name, fd)


def read(name):
    return os.pread(inherited[name], 4096, 0).decode()


def send(*assignments, fds=()):
    """Whatever it is, by the same socket; returns when the supervisor has it."""
    return manager.notify.send(*assignments, fds=fds, wait=True) and manager.notify.barrier()


def send_bytes(data, fds=0, barrier=True):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as raw:
        raw.connect(manager.notify._address)
        memfds = [os.memfd_create("x") for _ in range(fds)]
        socket.send_fds(raw, [data], memfds)
        for fd in memfds:
            os.close(fd)
    return manager.notify.barrier() if barrier else True


def tell(what):
    connection.sendall(json.dumps(what).encode() + b"\n")


def end(code):
    os._exit(code)


def catch(number, then_exit=None):
    """Note a signal with the test, and end or not."""

    def handler(number, frame):
        tell({"signal": number})
        if then_exit is not None:
            end(then_exit)

    signal.signal(number, handler)


def default(number):
    signal.signal(number, signal.SIG_DFL)


def death_signal():
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(number))
    return number.value


def start_orphan():
    """A process whose parent is gone; returns its id."""
    script = (
        "import subprocess as s, sys; sleep = [sys.executable, '-c', 'import time; time.sleep(600)']; "
        "print(s.Popen(sleep, stdout=s.DEVNULL, stderr=s.DEVNULL).pid)"
    )
    return int(subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True).stdout)


connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
hello = {"pid": os.getpid(), "parent": os.getppid(), "group": os.getpgid(0), "inherited": sorted(inherited)}
tell({**hello, "environment": dict(os.environ), "watchdog_s": manager.watchdog_s})
for line in connection.makefile():
    tell({"value": eval(line)})
end(0)
