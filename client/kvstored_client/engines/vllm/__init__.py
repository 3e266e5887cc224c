"""KV connector for vLLM: prefixes are loaded from kvstored, and saved to it, beside the engine's steps.

    LLM(model, kv_transfer_config=KVTransferConfig(
        kv_connector="KVStoredConnector", kv_connector_module_path="kvstored_client.engines.vllm",
        kv_role="kv_both"))

`kv_connector_extra_config` takes the keys of `settings.Settings`. Only `connector` imports vLLM; the modules below it
plan (`requests`, `saves`) and move bytes (`lookups`, `pages`, `loader`, `saver`) without it.
"""

from __future__ import annotations

from typing import Any

from kvstored_client.engines.vllm.settings import UnsupportedError

__all__ = ["KVStoredConnector", "UnsupportedError", "register"]


def __getattr__(name: str) -> Any:
    if name == "KVStoredConnector":  # vLLM only for those who use it
        from kvstored_client.engines.vllm.connector import KVStoredConnector

        return KVStoredConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> None:
    """Entry point of `vllm.general_plugins`: makes `kv_connector="KVStoredConnector"` known by its name alone."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector("KVStoredConnector", __name__, "KVStoredConnector")
    except ValueError:
        pass  # loaded once before in this process
