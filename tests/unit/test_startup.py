"""Where the time of a start goes."""

import subprocess
import sys

from kvstored.daemon.startup import StartTimes


def test_the_first_step_is_the_life_of_the_process_so_far():
    program = "import time; time.sleep(0.3)\nfrom kvstored.daemon.startup import StartTimes as T; print(T().seconds)"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout
    assert eval(printed)["process"] >= 0.29  # its start is known to 10 ms


def test_each_step_takes_from_the_end_of_the_one_before():
    times = StartTimes()
    times.ended("dram")
    times.ended("nvme")
    assert list(times.rounded()) == ["process", "dram", "nvme"]
    assert all(seconds >= 0 for seconds in times.seconds.values())
