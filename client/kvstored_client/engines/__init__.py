"""Integrations: each one imports its engine only when it is itself imported."""
