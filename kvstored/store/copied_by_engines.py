"""Memory of GPUs that device workers cannot open, so that its engines copy by themselves (`shm`): whose, and why."""

from __future__ import annotations

from collections import Counter
from typing import Final

from kvstored.catalog.leases import Caller, Session
from kvstored.device.processes import has_own_process_ids

MEMORIES_MAX: Final = 64  # of one session
REASON_MAX: Final = 400
REASONS_SHOWN: Final = 8
_OPENING: Final = "cuIpcOpenMemHandle"


class CopiedByEngines:
    """By session and the client's own number of the memory."""

    def __init__(self) -> None:
        self._reasons: dict[Session, dict[int, str]] = {}

    def note(self, session: Session, memory: int, reason: str) -> bool:
        """Remember why, or with an empty reason that it is open now; True: this is news."""
        mine = self._reasons.setdefault(session, {})
        if not reason or session.ended or (memory not in mine and len(mine) >= MEMORIES_MAX):
            mine.pop(memory, None)
            if not mine:
                del self._reasons[session]
            return False
        before = mine.get(memory)
        mine[memory] = reason
        return before != reason

    def end_session(self, session: Session) -> None:
        """Nothing of it is copied any more."""
        self._reasons.pop(session, None)

    def status(self) -> dict[str, str]:
        """How many, and the most frequent reasons; nothing where there are none."""
        reasons = Counter(reason for mine in self._reasons.values() for reason in mine.values())
        if not reasons:
            return {}
        listed = "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common(REASONS_SHOWN))
        return {"shm": f"{reasons.total()} memories of engines are copied by these: {listed}"}


def cleaned(reason: str) -> str:
    """What a client says, for logs and status."""
    return "".join(c if c.isprintable() else "?" for c in reason[:REASON_MAX])


def explained(reason: str, caller: Caller) -> str:
    """With what probably is behind it: handles name a process by its id, so both sides must count alike."""
    if _OPENING in reason and caller.transport == "session" and has_own_process_ids(caller.pid):
        return f"{reason}: the engine's container has process ids of its own (share them: --pid=host, hostPID)"
    return reason
