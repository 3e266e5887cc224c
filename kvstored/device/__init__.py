"""Devices: the only code that touches files and memory."""
