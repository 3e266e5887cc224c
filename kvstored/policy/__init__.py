"""Policy: pure decisions, without I/O, clock or await; the simulator runs the same code."""
