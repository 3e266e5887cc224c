"""Settings: their schema, where they come from, what is reported of them."""
