"""Lists that are longer than a frame of the session socket."""

import pytest
from kvstored_proto import frames
from kvstored_proto.v1 import admin_pb2 as admin
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.keys import Namespace
from kvstored.rpc import status
from kvstored.rpc.paging import Page, after, fitting
from kvstored.tenancy.audit_log import RECORDS_PER_READ_MAX
from kvstored.testing.contract import SETTINGS
from kvstored.testing.contract_client import ROOT, CallFailed
from kvstored.testing.contract_transports import SocketClient, opening_request
from kvstored.testing.daemon_in_loop import serving, tenant
from kvstored.tiers.epochs import About

MANY = [f"t{number:04}" for number in range(1100)]
LONG = "x" * 3000
LIMIT = 8


@pytest.fixture
async def daemon(tmp_path):
    settings = {**SETTINGS, "tenants": [*SETTINGS["tenants"], *(tenant(name, role="reader") for name in MANY)]}
    async with serving(tmp_path, settings) as running:
        yield running


@pytest.fixture
async def root(daemon):
    return await SocketClient.connect(str(daemon.config.server.session_socket), opening_request(ROOT))


async def pages(client, method, request, field):
    request.limit = LIMIT
    while True:
        reply = await client.call(method, request)
        items = getattr(reply, field)
        assert 0 < len(items) <= LIMIT
        yield list(items)
        if not reply.cursor:
            return
        request.cursor = reply.cursor


async def all_of(client, method, request, field):
    return [item async for page in pages(client, method, request, field) for item in page]


async def test_more_tenants_than_fit_into_a_frame_are_listed_in_pages(root):
    with pytest.raises(CallFailed, match="ask for less"):
        await root.call("ListTenants", admin.ListTenantsRequest())
    listed = await all_of(root, "ListTenants", admin.ListTenantsRequest(), "tenants")
    names = [one.name for one in listed]
    assert names == sorted(names)
    assert len(names) == len(MANY) + len(SETTINGS["tenants"])


async def test_namespaces_and_epochs_with_long_names_are_listed_in_pages(daemon, root):
    count, store = 400, daemon.context.store
    for number in range(count):
        name = f"{LONG}{number:04}"
        store.parts.catalog.space(Namespace(MANY[0], number.to_bytes(16, "big"), b"", {"model": name}))
        store.parts.epochs.now.bump(About(MANY[0], f"of {name}"), 1.0 + number)
    for method, request, field in (
        ("ListNamespaces", admin.ListNamespacesRequest, "namespaces"),
        ("ListEpochs", admin.ListEpochsRequest, "epochs"),
    ):
        with pytest.raises(CallFailed, match="ask for less"):
            await root.call(method, request())
        listed = await all_of(root, method, request(), field)
        assert len(listed) == count
        assert len({one.SerializeToString() for one in listed}) == count


async def test_what_comes_and_goes_between_two_pages_moves_nothing_else(daemon, root):
    walk = pages(root, "ListTenants", admin.ListTenantsRequest(), "tenants")
    names = [one.name for one in await anext(walk)]
    await root.call("RemoveTenant", admin.RemoveTenantRequest(name=names[-1]))
    await root.call("AddTenant", admin.AddTenantRequest(name=names[0] + "a"))
    async for page in walk:
        names += [one.name for one in page]
    assert names == sorted(set(names))
    assert set(names) >= set(MANY)


async def test_status_is_answered_however_many_tenants_and_sessions_there_are(daemon, root, monkeypatch):
    monkeypatch.setattr(status, "LIST_BYTES_MAX", 1000)
    daemon.context.warnings += [f"{number} {LONG}" for number in range(500)]
    reply = await root.call("Status", pb.StatusRequest())
    assert reply.state == "serving"
    assert 0 < len(reply.tenants) < len(MANY)
    assert any(f"of {len(MANY) + len(SETTINGS['tenants'])} tenants only the first" in text for text in reply.warnings)
    assert any("more warnings" in text for text in reply.warnings)
    assert len(status.report(daemon.context).tenants) > len(MANY), "the metrics have all of them"


async def test_as_much_of_the_audit_log_is_told_as_an_answer_holds(daemon, root):
    for number in range(RECORDS_PER_READ_MAX):
        daemon.context.audit.record("Act", outcome=str(number), **{f"fact{n}": LONG for n in range(4)})
        if number % 100 == 0:
            await daemon.context.audit.settled()
    lines = (await root.call("ReadAudit", admin.ReadAuditRequest(limit=RECORDS_PER_READ_MAX))).lines
    assert f'"outcome":"{RECORDS_PER_READ_MAX - 1}"' in lines[-1]
    assert sum(map(len, lines)) > frames.MAX_BODY_BYTES // 2
    with (daemon.config.server.state_dir / "audit.jsonl").open("ab") as file:
        file.write((b"\xff" * 900 + b"\n") * RECORDS_PER_READ_MAX)
    assert (await root.call("ReadAudit", admin.ReadAuditRequest(limit=RECORDS_PER_READ_MAX))).lines


def test_a_page_takes_one_item_even_if_it_is_too_long():
    long = admin.TenantInfo(name="x" * (2 << 20))
    assert fitting([long, long]) == [long]
    page = Page(5)
    assert (page.add(b"a", long), page.add(b"b", long), page.cursor) == (True, False, b"a")


def test_a_page_that_takes_the_last_item_is_the_last():
    page = Page(2)
    assert all(page.add(key, admin.TenantInfo()) for key in (b"a", b"b"))
    assert page.cursor == b""


def test_items_come_in_the_order_of_their_keys():
    assert [key for key, _ in after(["c", "a", "b"], str.encode, b"a")] == [b"b", b"c"]
