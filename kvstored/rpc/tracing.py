"""Recording of the daemon's own traffic, over both transports; admins only (`roles`)."""

from __future__ import annotations

import math
from typing import Final

import msgspec
from google.protobuf.message import Message
from kvstored_proto.v1 import admin_pb2 as pb

from kvstored.catalog.leases import Session
from kvstored.errors import DeviceError, FailedPrecondition, InvalidArgument
from kvstored.recorder import RecorderStatus
from kvstored.rpc.context import Context
from kvstored.rpc.roles import Handler


async def _start(context: Context, session: Session, request: pb.StartTraceRequest) -> Message:
    if context.state == "stopping":
        raise FailedPrecondition("the daemon is stopping: there is nothing to record any more")
    if not math.isfinite(request.time_limit_s):
        raise InvalidArgument("time_limit_s is no number")
    try:
        return _reply(context, await context.recorder.start(request.size_limit_bytes, request.time_limit_s))
    except DeviceError as error:
        setting = "server.trace_dir" if context.config.server.trace_dir else "server.state_dir, or set server.trace_dir"
        raise DeviceError(f"{error}: see {setting}") from None


async def _stop(context: Context, session: Session, request: pb.StopTraceRequest) -> Message:
    return _reply(context, await context.recorder.stop())


def _status(context: Context, session: Session, request: pb.TraceStatusRequest) -> Message:
    return _reply(context, context.recorder.status())


def _reply(context: Context, status: RecorderStatus) -> Message:
    return pb.TraceReply(boot_id=context.boot_id, **msgspec.structs.asdict(status))


SERVED: Final[dict[str, tuple[type[Message], Handler]]] = {
    "StartTrace": (pb.StartTraceRequest, _start),
    "StopTrace": (pb.StopTraceRequest, _stop),
    "TraceStatus": (pb.TraceStatusRequest, _status),
}
