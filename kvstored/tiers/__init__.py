"""Tiers: who owns bytes, where they lie, and the account of them."""
