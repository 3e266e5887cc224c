"""What a process may run out of, for tests of who must go on without it."""

import contextlib
import os
import resource
import threading

import pytest


@contextlib.contextmanager
def no_threads():
    """No thread can be started, as at a limit of processes."""

    def refused(*_):
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "_start_new_thread", refused)
        yield


@contextlib.contextmanager
def no_descriptors():
    """Not one more file can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 4096), hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
