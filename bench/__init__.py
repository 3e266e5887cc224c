"""Benches: each prints one JSON object with `--json -`, and a table without."""
