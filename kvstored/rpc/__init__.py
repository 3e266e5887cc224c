"""The two transports and what both serve: frames on the session socket, and gRPC."""
