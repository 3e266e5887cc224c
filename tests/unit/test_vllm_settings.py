import pytest
from kvstored_client.engines.vllm.settings import UnsupportedError, settings_from


def test_defaults():
    settings = settings_from({})
    assert (settings.mode, settings.reads, settings.writes) == ("read-write", True, True)


@pytest.mark.parametrize(("mode", "reads", "writes"), [("read-only", True, False), ("write-only", False, True)])
def test_modes(mode, reads, writes):
    settings = settings_from({"mode": mode})
    assert (settings.reads, settings.writes) == (reads, writes)


def test_whole_numbers_are_fine_for_seconds():
    assert settings_from({"timeout_s": 3}).timeout_s == 3.0


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"adress": "unix:/x"}, "adress"),
        ({"mode": "rw"}, "read-write"),
        ({"min_tokens": "many"}, "min_tokens"),
        ({"min_tokens": True}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"load_async": 1}, "load_async"),
    ],
)
def test_what_is_wrong_is_named(extra, named):
    with pytest.raises(UnsupportedError, match=named):
        settings_from(extra)


@pytest.mark.parametrize(
    "extra", [{"address": "grpc:h:1"}, {"timeout_s": 0}, {"lookup_wait_s": 0.0}, {"load_timeout_s": 0}], ids=str
)
def test_what_would_never_hit_is_refused(extra):
    with pytest.raises(UnsupportedError, match=next(iter(extra))):
        settings_from(extra)
