"""Hash chains and the seed that only a session brings."""

from kvstored_client import AsyncClient, Client, NamespaceSpec

from kvstored.testing.daemon_process import DaemonProcess

SPEC = NamespaceSpec(model="seeds", block_tokens=4)
IDS = list(range(16))


async def test_chains_of_both_clients_are_equal_from_the_first():
    with DaemonProcess({"dram.capacity_bytes": "8MiB"}) as daemon, Client(daemon.address) as client:
        hashes = client.namespace(SPEC).chain(IDS)
        async with AsyncClient(daemon.address) as other:
            namespace = other.namespace(SPEC)
            assert namespace.chain(IDS) == hashes
            assert (await other.put(namespace, hashes, [b"x" * 100] * 4)).stored == 4
            assert namespace.chain(IDS) == hashes
        assert client.lookup(client.namespace(SPEC), hashes).ready_blocks == 4


def test_hashes_made_before_any_session_are_a_miss_and_store_nothing():
    daemon = DaemonProcess({"dram.capacity_bytes": "8MiB"})
    client = Client(daemon.address)
    namespace = client.namespace(SPEC)
    early = namespace.chain(IDS)
    assert [len(hash_) for hash_ in early] == [32] * 4
    with daemon:
        while not client.connected:
            client.status()
        assert client.put(namespace, early, [b"x" * 100] * 4).stored == 0
        with client.stage(namespace, early, 100) as staged:
            assert staged.views == [None] * 4
        assert client.lookup(namespace, early).prefix_blocks == 0
        assert client.get_into(namespace, early, [bytearray(100)] * 4) == 0
        assert namespace.chain(IDS) != early
        assert client.put(namespace, namespace.chain(IDS), [b"x" * 100] * 4).stored == 4
        client.close()
