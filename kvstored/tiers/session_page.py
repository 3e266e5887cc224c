"""The memory of session pages: 4 KiB that one client and the daemon both write.

What stands in it is `kvstored_proto.page`. The page is the session's own and goes with it: it is
never given to another.
"""

from __future__ import annotations

from kvstored.device.memory import MODE_CLIENTS_WRITE, PAGE_BYTES, Mapping


class SessionPage:
    """One session's page, all zeros at first. Raises DeviceError where the kernel refuses it."""

    def __init__(self) -> None:
        self._mapping = Mapping(PAGE_BYTES, name="kvstored-session-page", mode=MODE_CLIENTS_WRITE)
        self.size_bytes = self._mapping.size_bytes
        self.memory = self._mapping.view()

    def read_write_fd(self) -> int:
        """The descriptor for the client to map; it stays the page's."""
        return self._mapping.fd

    def close(self) -> None:
        """Give the memory back; harmless when repeated. Views of `memory` must be released before."""
        if self._mapping.fd < 0:
            return
        self.memory.release()
        try:
            self._mapping.punch()  # a client that keeps its mapping keeps no memory
        finally:
            self._mapping.close()
