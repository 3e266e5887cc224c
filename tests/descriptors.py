"""How many descriptors this process has, where a test looks whether any is left open."""

import gc
import os


def descriptors():
    """Without those of garbage, which are closed whenever the next collection comes, in the midst of any test."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))
