"""Starting a recording where it cannot be written: the answer names the setting that says where."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from kvstored_proto.v1 import admin_pb2 as pb

from kvstored.clock import SystemClock
from kvstored.device.state_directory import StateDirectory
from kvstored.errors import DeviceError
from kvstored.recorder import Recorder
from kvstored.rpc.tracing import SERVED

NOWHERE = Path("/proc/kvstored")  # a directory that not even root can make


@pytest.mark.parametrize(
    ("trace_dir", "named"), [(None, "server.state_dir, or set server.trace_dir"), (NOWHERE, "server.trace_dir")]
)
async def test_a_directory_that_cannot_be_written_is_named_with_its_setting(trace_dir, named):
    take = (lambda: None) if trace_dir else StateDirectory(NOWHERE).take
    directory = trace_dir or NOWHERE / "traces"
    recorder = Recorder(directory, SystemClock(), take, size_bytes_max=1 << 20, seconds_max=60.0)
    server = SimpleNamespace(trace_dir=trace_dir, state_dir=NOWHERE)
    context = SimpleNamespace(state="serving", recorder=recorder, config=SimpleNamespace(server=server))
    request_type, start = SERVED["StartTrace"]
    assert request_type is pb.StartTraceRequest
    with pytest.raises(DeviceError, match=f"{NOWHERE}.*: see {named}$"):
        await start(context, None, request_type())
    assert not recorder.on
