"""Fuzzing: whatever bytes come in, by socket, by file or in memory that was kept, nothing breaks.

`python -m tests.fuzz --seconds 600` (`make fuzz`). Each target is a function over bytes; see `targets`,
`service` and `client`. `tests/unit/test_fuzz.py` runs them on their seeds, on every case that once
broke something (`cases`) and on what hypothesis makes of them.
"""
