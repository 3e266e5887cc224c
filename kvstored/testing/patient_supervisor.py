"""`kvstored --supervise` for tests: it starts the daemon again at once, however often it dies.

python -m kvstored.testing.patient_supervisor [serve options]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvstored import supervise


def start(command: Sequence[str], check: Sequence[str]) -> supervise.Supervisor:
    """The supervisor, with endless patience."""
    endless = supervise.Restarts(most=1 << 30, within_s=1.0, first_delay_s=0.0, longest_delay_s=0.0)
    return supervise.Supervisor(command, check=check, restarts=endless)


if __name__ == "__main__":
    sys.exit(supervise.main(start))
