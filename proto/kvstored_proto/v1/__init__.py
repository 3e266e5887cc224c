"""Generated from `proto/kvstored/v1` by `make proto`."""
