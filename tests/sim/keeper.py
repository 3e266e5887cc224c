"""Who keeps the DRAM tier's memory over the end of a simulated process: real descriptors, as a service manager has."""

import os


class MemoryKeeper:
    """A `Keeper` that outlives the nodes it is given to; a power cut empties it."""

    def __init__(self):
        self._kept = {}

    def inherited(self):
        return {name: os.dup(fd) for name, fd in self._kept.items()}

    def keep(self, name, fd):
        self.drop(name)
        self._kept[name] = os.dup(fd)
        return True

    def drop(self, name):
        if name in self._kept:
            os.close(self._kept.pop(name))

    def power_cut(self):
        for name in list(self._kept):
            self.drop(name)
