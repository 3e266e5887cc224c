"""What may be done with blocks, whatever the transport: put, get, prefetch, delete, and their ends."""
