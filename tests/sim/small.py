"""Limits of single steps, made so small that a world of a few dozen blocks meets them; and timers made fewer."""

import importlib


class _Silence:
    """A logger that says nothing."""

    def info(self, *_, **__):
        pass

    warning = error = info


SMALL = {
    "kvstored.store.commits": {"INLINE_COPY_BYTES": 6000, "THREAD_COPY_BYTES": 8192},
    "kvstored.store.durability": {"BATCH_BYTES_MAX": 32 << 10, "BATCH_BLOCKS_MAX": 6},
    "kvstored.store.endings": {"BLOCKS_PER_TURN": 8},
    "kvstored.mover.flush_order": {
        "SLICE_BLOCKS": 4,
        "STEP_BYTES_MAX": 32 << 10,
        "STEP_BLOCKS_MAX": 6,
        "SCAN_BLOCKS": 16,
    },
    "kvstored.mover.demotion": {"STEP_BYTES_MAX": 32 << 10, "STEP_BLOCKS_MAX": 6},
    "kvstored.mover.mover": {"STEP_BLOCKS_MAX": 6},
    "kvstored.store.prefetches": {"PIECE_BLOCKS": 8},
    "kvstored.store.predictions": {"PIECE_BLOCKS": 8},
    "kvstored.policy.turns": {"INTERVALS_MIN": 1, "INTERVAL_S_MIN": 0.0, "DEVIATION_MAX": 100.0},
    "kvstored.tiers.volume_io": {"RUNS_PER_CALL_MAX": 1},  # more ways in which they follow one another
    "kvstored.mover.promoter": {"PIECE_BLOCKS": 8, "BATCH_BYTES": 8 << 10},
    "kvstored.store.reads": {"PIECE_BLOCKS": 8},
    "kvstored.store.releases": {"BLOCKS_PER_TURN": 8, "LOOK_EVERY_S": 0.1},
    "kvstored.store.quarantine": {"UNSEEN_S": 8.0},
    "kvstored.mover.recency": {"PIECE_BLOCKS": 16},
    "kvstored.mover.revival": {"BATCH_BYTES": 16 << 10, "BATCH_BLOCKS": 4},
    "kvstored.tiers.recycling": {"PAGE_RECORDS": 5},
    "kvstored.tiers.scrub": {"PIECE_BYTES": 16 << 10, "FIRST_PASS_S": 5.0, "PASS_EVERY_S": 30.0, "KEYS_PER_SEARCH": 6},
    "kvstored.tiers.runs": {"RUN_BYTES_MIN": 8 << 10},
    "kvstored.daemon.warm_restart": {"log": _Silence()},
    "kvstored.store.writes": {"PIECE_BLOCKS": 8},
}


def make_small():
    """Set them; returns what sets them back."""
    before = []
    for name, limits in SMALL.items():
        module = importlib.import_module(name)
        for limit, value in limits.items():
            before.append((module, limit, getattr(module, limit)))
            setattr(module, limit, value)

    def restore():
        for module, limit, value in before:
            setattr(module, limit, value)

    return restore
