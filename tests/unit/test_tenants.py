import zlib

import msgspec
import pytest

from kvstored.config.schema import Tenant
from kvstored.device.state_directory import StateDirectory
from kvstored.errors import ConfigError, DeviceError, FailedPrecondition, InvalidArgument, LimitExceeded, NotFound
from kvstored.tenancy.changes import TenantChanges
from kvstored.tenancy.file import FILE_NAME, open_tenants, read_changes, write_changes
from kvstored.tenancy.merge import Change, Changes
from kvstored.tenancy.tenants import Tenants
from kvstored.tenancy.tokens import id_of, make_token, matches
from kvstored.testing.node import ManualClock

OTHER_UID = 12345
ROOT = Tenant(name="root", uids=[0], role="admin")
ACME = Tenant(name="acme", uids=[1], dram_limit_bytes=1 << 20)


@pytest.fixture
def state(tmp_path):
    directory = StateDirectory(tmp_path / "state")
    yield directory
    directory.close()


@pytest.fixture
def tenants():
    return Tenants([ROOT, ACME])


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def changes(tenants, state, clock):
    return TenantChanges(tenants, state, clock)


# ---- the registry ----


def test_the_registry_tells_the_names_that_differ_and_only_those(tenants):
    names, told = tenants.names, []
    tenants.watch(lambda name: told.append((name, tenants.get(name))))
    tenants.become(
        Changes({"acme": Change("acme", removed=True), "new": Change("new", made=True, fields={"uids": [OTHER_UID]})})
    )
    assert dict(told) == {"acme": None, "new": Tenant(name="new", uids=[OTHER_UID])}
    assert set(names) == {"root", "new"} == {tenant.name for tenant in tenants}
    assert ("acme" in tenants, len(tenants)) == (False, 2)


# ---- what counts, of the configuration and of changes ----


def test_what_an_admin_set_counts_and_the_rest_is_the_configurations():
    change = Changes({"acme": Change("acme", fields={"role": "reader"})})
    tenants = Tenants([ROOT, ACME], change)
    assert tenants.get("acme") == ACME.model_copy(update={"role": "reader"})
    origins = {field: tenants.origin("acme", field) for field in ("role", "uids", "certificates")}
    assert origins == {"role": "admin", "uids": "configuration", "certificates": "default"}
    raised = ACME.model_copy(update={"dram_limit_bytes": 5})
    assert Tenants([ROOT, raised], change).get("acme").dram_limit_bytes == 5


def test_a_tenant_of_the_configuration_goes_with_it_and_its_tokens_too():
    token, _ = make_token("acme", 0.0)
    change = Changes({"acme": Change("acme", fields={"role": "admin"})}, {token.token_id: token})
    assert Tenants([ROOT, ACME], change).token(token.token_id) == token
    gone = Tenants([ROOT], change)
    assert (gone.get("acme"), gone.token(token.token_id)) == (None, None)
    assert "acme count for nothing" in gone.warnings[0]


@pytest.mark.parametrize("left", ["changes", "a token"])
async def test_what_is_left_of_a_tenant_that_went_with_the_configuration_is_forgotten(state, clock, left):
    before = TenantChanges(Tenants([ROOT, ACME]), state, clock)
    await (before.set("acme", {"role": "admin"}) if left == "changes" else before.add_token("acme"))
    tenants = open_tenants([ROOT], state)
    (warning,) = tenants.warnings
    assert "`kvstorectl tenant rm acme`" in warning
    await TenantChanges(tenants, state, clock).remove("acme")
    assert (tenants.warnings, tenants.changes) == ([], Changes(leaving=["acme"]))
    await TenantChanges(tenants, state, clock).left("acme")
    again = open_tenants([ROOT, ACME], state)
    assert (again.get("acme"), again.tokens, again.warnings) == (ACME, [], [])


def test_one_that_was_removed_stays_away_and_it_is_said():
    tenants = Tenants([ROOT, ACME], Changes({"acme": Change("acme", removed=True)}))
    assert tenants.get("acme") is None
    assert "acme of the configuration stays away" in tenants.warnings[0]


def test_two_tenants_cannot_be_the_same_user(tenants):
    clash = Changes({"new": Change("new", made=True, fields={"uids": [1]})})
    with pytest.raises(InvalidArgument, match="stands in uids of both"):
        tenants.become(clash)
    assert tenants.get("new") is None


# ---- changes ----


async def test_a_tenant_is_added_changed_and_removed_and_all_of_it_is_kept(changes, tenants, state):
    await changes.add("new", {"uids": "7, 8", "dram_limit_bytes": "8GiB", "certificates": '["a,b"]'})
    await changes.set("new", {"role": "reader", "dram_limit_bytes": ""})
    expected = Tenant(name="new", uids=[7, 8], certificates=["a,b"], role="reader")
    assert tenants.get("new") == expected
    assert open_tenants([ROOT, ACME], state).get("new") == expected
    await changes.set("new", {}, reset=["certificates"])
    assert tenants.get("new").certificates == []
    await changes.remove("new")
    assert tenants.get("new") is None
    with pytest.raises(FailedPrecondition, match="still being taken away"):
        await changes.add("new", {})
    await changes.left("new")
    assert read_changes(state) == Changes()


async def test_a_tenant_of_the_configuration_is_removed_and_comes_back_when_it_is_added(changes, tenants, state):
    await changes.set("acme", {"role": "reader"})
    await changes.remove("acme")
    await changes.left("acme")
    assert open_tenants([ROOT, ACME], state).get("acme") is None
    await changes.add("acme", {})
    assert tenants.get("acme") == ACME


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"rolle": "reader"}, "did you mean role"),
        ({"role": "king"}, "role: 'king' must be"),
        ({"dram_limit_bytes": "much"}, "a size in bytes"),
        ({"name": "other"}, "cannot be changed"),
        ({"uids": "[1"}, "not JSON"),
        ({"uids": "[" * 100_000}, "not JSON"),
        ({"uids": f"[{'9' * 5000}]"}, "not JSON"),
        ({"uids": "[true]"}, "numbers or texts"),
        ({"dram_limit_bytes": "16777216TiB"}, "less than 8 EiB"),
        ({"key_file": "/x\0y"}, "zero byte"),
        ({"certificates": '["a\\u0000"]'}, "zero byte"),
        ({}, "nothing to change"),
    ],
)
async def test_a_wrong_field_is_said_and_changes_nothing(changes, tenants, fields, wrong):
    with pytest.raises(InvalidArgument, match=wrong):
        await changes.set("acme", fields)
    assert tenants.get("acme") == ACME


async def test_a_field_is_checked_beside_those_that_the_tenant_has(state, clock):
    """As `tenant set search encryption=aes-256-gcm`, where the key stands in the configuration."""
    pytest.importorskip("cryptography")
    keyed = Tenant(name="keyed", uids=[2], key_file="/a/key")
    tenants = Tenants([ROOT, keyed])
    changes = TenantChanges(tenants, state, clock)
    assert (await changes.set("keyed", {"encryption": "aes-256-gcm"})).encryption == "aes-256-gcm"
    with pytest.raises(InvalidArgument, match="tenant 'keyed': encryption needs"):
        await changes.set("keyed", {"key_file": ""})
    await changes.set("keyed", {"key_file": "", "key_credential": "other"})
    with pytest.raises(InvalidArgument, match="key_file and key_credential"):
        await changes.set("keyed", {}, reset=["key_file"])


async def test_the_largest_limit_is_kept_as_it_is(changes, state):
    await changes.set("acme", {"dram_limit_bytes": str((1 << 63) - 1)})
    assert open_tenants([ROOT, ACME], state).get("acme").dram_limit_bytes == (1 << 63) - 1


async def test_a_name_that_is_configured_while_an_earlier_tenant_leaves_waits(changes, state, clock):
    await changes.add("new", {})
    await changes.remove("new")
    state.close()
    tenants = open_tenants([ROOT, Tenant(name="new", uids=[7])], state)
    assert tenants.get("new") is None, "its blocks would be those of the earlier one, or be purged with them"
    assert any("new stays away until" in warning for warning in tenants.warnings)
    await TenantChanges(tenants, state, clock).left("new")
    assert tenants.get("new") == Tenant(name="new", uids=[7])
    assert tenants.warnings == []


async def test_a_token_in_the_wrong_place_is_not_repeated(changes):
    with pytest.raises(InvalidArgument) as refused:
        await changes.set("acme", {"tokens_sha256": "hunter2"})
    assert "hunter2" not in str(refused.value)


async def test_there_is_always_an_admin_that_somebody_can_be(changes):
    for attempt in (changes.remove("root"), changes.set("root", {"role": "tenant"}), changes.set("root", {"uids": ""})):
        with pytest.raises(FailedPrecondition, match="no tenant with the role admin"):
            await attempt
    await changes.add("second", {"role": "admin"})
    with pytest.raises(FailedPrecondition):
        await changes.remove("root")
    await changes.add_token("second")
    await changes.remove("root")


async def test_names_are_checked_and_must_be_there(changes):
    with pytest.raises(InvalidArgument, match="1 to 63"):
        await changes.add("No Name", {})
    with pytest.raises(FailedPrecondition, match="already"):
        await changes.add("acme", {})
    for attempt in (changes.set("nobody", {"role": "reader"}), changes.remove("nobody"), changes.add_token("nobody")):
        with pytest.raises(NotFound):
            await attempt


async def test_what_cannot_be_kept_is_not_done(changes, tenants, state, monkeypatch):
    def full(name, data):
        raise DeviceError("no space left")

    monkeypatch.setattr(state, "replace", full)
    with pytest.raises(DeviceError):
        await changes.add("new", {})
    assert tenants.get("new") is None
    monkeypatch.undo()
    other = StateDirectory(state.path)
    other.take()
    with pytest.raises(FailedPrecondition, match="in use by another"):
        await changes.add("new", {})
    other.close()
    await changes.add("new", {})


# ---- tokens ----


def test_a_token_is_known_by_its_hash_alone():
    token, text = make_token("acme", 5.0, label="ci")
    assert (token.tenant, token.created_s, token.label, id_of(text)) == ("acme", 5.0, "ci", token.token_id)
    assert matches(token, text)
    assert text not in msgspec.json.encode(token).decode()
    other, others = make_token("acme", 5.0)
    assert not matches(token, others)
    assert not matches(None, text)
    assert token.salt != other.salt
    for wrong in ("", "kvs_", text[:-1], text + "x", text.upper(), f"kvs_{token.token_id}_{'x' * 43}"):
        assert not matches(token, wrong)
    assert id_of("a token of before") == ""


async def test_rotation_leaves_the_old_one_for_the_grace_and_no_longer_than_it_had(changes, tenants, clock):
    old, _ = await changes.add_token("acme", expires_in_s=100, label="ci")
    new, _ = await changes.rotate(old.token_id, grace_s=10, expires_in_s=50)
    assert (new.label, new.expires_s) == ("ci", clock.wall() + 50)
    assert tenants.token(old.token_id).expires_s == clock.wall() + 10
    await changes.revoke(new.token_id)
    await changes.rotate(old.token_id, grace_s=1000)
    assert tenants.token(old.token_id).expires_s == clock.wall() + 10
    await changes.revoke(old.token_id)
    assert tenants.token(old.token_id) is None
    with pytest.raises(NotFound):
        await changes.rotate(old.token_id, grace_s=1)


@pytest.mark.parametrize("expires_in_s", [0.0, 100.0])
async def test_a_rotated_token_ends_when_the_old_one_would_have(changes, clock, expires_in_s):
    old, _ = await changes.add_token("acme", expires_in_s)
    clock.now += 60
    new, _ = await changes.rotate(old.token_id, grace_s=10)
    assert new.expires_s == old.expires_s
    await changes.revoke(new.token_id)  # it was lost: another, which does not end with the grace either
    again, _ = await changes.rotate(old.token_id, grace_s=10)
    assert again.expires_s == old.expires_s
    clock.now += 60
    if expires_in_s:
        with pytest.raises(InvalidArgument, match=r"has expired: .*--expires-in"):
            await changes.rotate(again.token_id, grace_s=10)
    later, _ = await changes.rotate(again.token_id, grace_s=10, expires_in_s=5)
    assert later.expires_s == clock.wall() + 5


async def test_a_token_has_one_in_its_place_and_no_more(changes, tenants, state):
    old, _ = await changes.add_token("acme")
    new, _ = await changes.rotate(old.token_id, grace_s=10)
    for one in (changes, TenantChanges(open_tenants([ROOT, ACME], state), state, ManualClock())):
        with pytest.raises(FailedPrecondition, match=f"rotated already: {new.token_id} is in its place"):
            await one.rotate(old.token_id, grace_s=10)
    assert len(tenants.tokens) == 2


async def test_a_file_without_rotations_says_nothing_of_them(changes, state):
    """Versions before rotations were noted refuse fields that they do not know."""
    await changes.add_token("acme", 5.0, "ci")
    assert "rotated" not in (state.path / FILE_NAME).read_text()


async def test_a_token_in_place_of_its_id_is_not_repeated(changes):
    token, text = await changes.add_token("acme")
    for attempt in (changes.revoke(text), changes.rotate(text, grace_s=1)):
        with pytest.raises(InvalidArgument, match=token.token_id) as refused:
            await attempt
        assert text not in str(refused.value)


async def test_expired_tokens_give_way_where_there_are_too_many(changes, tenants, clock, monkeypatch):
    monkeypatch.setattr("kvstored.tenancy.changes.TOKENS_MAX", 3)
    first, _ = await changes.add_token("acme", expires_in_s=100)
    for _ in range(5):
        clock.now += 11
        first, _ = await changes.rotate(first.token_id, grace_s=5)
    assert tenants.token(first.token_id) is not None
    clock.now += 6
    await changes.add_token("acme")
    await changes.add_token("acme")
    with pytest.raises(LimitExceeded, match="revoke some"):
        await changes.add_token("acme")


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
async def test_times_are_checked(changes, seconds):
    with pytest.raises(InvalidArgument):
        await changes.add_token("acme", expires_in_s=seconds)


# ---- the file ----


def test_a_damaged_file_is_named_and_nobody_is_let_in(state):
    write_changes(state, Changes({"acme": Change("acme", removed=True)}))
    path = state.path / FILE_NAME
    whole = path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    for index in range(len(whole) - 1):
        path.write_bytes(whole[:index] + bytes([whole[index] ^ 1]) + whole[index + 1 :])
        with pytest.raises(ConfigError, match=FILE_NAME):
            open_tenants([ROOT, ACME], state)
    path.write_bytes(whole[:-5])
    with pytest.raises(ConfigError, match="damaged: put back a copy"):
        read_changes(state)


def test_what_a_later_version_wrote_is_refused(state):
    for document in (
        {"format": 2, "crc32": 0, "body": {}},
        {"format": 1, "crc32": zlib.crc32(b'{"more":1}'), "body": msgspec.Raw(b'{"more":1}')},
    ):
        state.replace(FILE_NAME, msgspec.json.encode(document))
        with pytest.raises(ConfigError, match="upgrade kvstored"):
            read_changes(state)


def test_a_clash_with_the_configuration_names_both(state):
    write_changes(state, Changes({"new": Change("new", made=True, fields={"uids": [1]})}))
    with pytest.raises(ConfigError, match=r"tenants\.json and the configuration"):
        open_tenants([ROOT, ACME], state)
