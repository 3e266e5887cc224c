"""The master keys of tenants whose blocks are encrypted on NVMe: where they come from, who keeps them."""
