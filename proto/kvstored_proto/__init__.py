"""The wire: protobuf messages, frames of the session socket, and namespace digests.

Shared by daemon and client, and imports neither.
"""
