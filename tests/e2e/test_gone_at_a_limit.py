"""A client that goes while it is at a limit, when nothing is read from it: its end is noticed all the same."""

from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.testing.daemon_process import DaemonProcess, status
from tests.e2e.raw_client import RawClient, eventually, hashes_of


def test_a_client_that_goes_while_its_requests_wait_is_noticed():
    settings = {"dram.capacity_bytes": "8MiB", "limits.requests_in_flight": "1", "limits.get_wait_max_s": "3600"}
    with DaemonProcess(settings) as daemon, RawClient(daemon.session_socket, staging_bytes=1 << 20) as writer:
        namespace = writer.namespace("m")
        hashes = hashes_of("pending", 2)
        writer.reserve(namespace, hashes, 4096)
        waiting = RawClient(daemon.session_socket)
        get = pb.GetRequest(namespace_ids=[waiting.namespace("m")], hashes=b"".join(hashes), hash_bytes=len(hashes[0]))
        get.wait_ms = 3_600_000
        for _ in range(3):  # the first waits for what is being written; the others are not read any more
            waiting.send(pb.OPERATION_GET, get)
        waiting.close()
        eventually(lambda: len(status(daemon.session_socket).sessions) <= 2, "its session ends")
