"""A per-node storage daemon for the KV cache of LLM inference. Start at `daemon`; ARCHITECTURE.md tells the rest."""
