"""Erasing for good, with a receipt."""
