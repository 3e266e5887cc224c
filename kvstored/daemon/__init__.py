"""Wires all of it into one process that starts, serves and stops."""
