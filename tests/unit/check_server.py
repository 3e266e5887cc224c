"""Checks and rebuilds in processes that are forked from one that has everything imported: 3 ms each, not 100.

What runs is `kvstored.tiers.check.main` as in its own program, in a process of its own that may die or hang.
Run as a program: one JSON line in, [mode, source]; one out, [wait status, what it printed].
"""

import json
import os
import signal
import subprocess
import sys

import msgspec

TIMEOUT_S = 60


class CheckServer:
    """Takes the place of `index_check.run`."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.modes = []
        self.deaths = 0

    def run(self, mode, source):
        from kvstored.tiers.index_check import ChildFailed
        from kvstored.tiers.sources import Report

        spec = msgspec.json.encode(msgspec.structs.replace(source, parent_pid=0)).decode()
        self._process.stdin.write(json.dumps([mode, spec]) + "\n")
        self._process.stdin.flush()
        status, printed = json.loads(self._process.stdout.readline())
        self.modes.append(mode)
        if os.WIFSIGNALED(status):
            self.deaths += 1
            raise ChildFailed(f"signal {os.WTERMSIG(status)}")
        report = msgspec.json.decode(printed, type=Report)
        if status:
            raise ChildFailed(report.reason)
        return report

    def close(self):
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def serve():
    from kvstored.tiers import check, migrate, rebuild  # noqa: F401 - all that the forks need

    for line in sys.stdin:
        read_end, write_end = os.pipe()
        child = os.fork()
        if not child:
            os.dup2(write_end, 1)
            signal.alarm(TIMEOUT_S)
            status = 1
            try:
                status = check.main(json.loads(line))
            finally:
                os._exit(status)
        os.close(write_end)
        with os.fdopen(read_end) as out:
            printed = out.read()
        print(json.dumps([os.waitpid(child, 0)[1], printed]), flush=True)


if __name__ == "__main__":
    serve()
