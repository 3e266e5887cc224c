"""Which blocks there are: spaces, entries and their leases, room for new ones, what has gone."""
