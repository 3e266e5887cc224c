"""What the frames of the session socket ask for: the names of their operations, and their bodies as messages."""

from __future__ import annotations

from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message
from kvstored_proto import frames
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.errors import InvalidArgument
from kvstored.rpc.operations import OPERATIONS

Parsed = TypeVar("Parsed", bound=Message)
NAMES: Final = {
    **{number: operation.name for number, operation in OPERATIONS.items()},
    pb.OPERATION_OPEN_SESSION: "OpenSession",
    pb.OPERATION_SEGMENTS_DROPPED: "SegmentsDropped",
    pb.OPERATION_OFFER_DESCRIPTORS: "OfferDescriptors",
}


def parsed(kind: type[Parsed], frame: frames.Frame) -> Parsed:
    """The request in a frame. Raises InvalidArgument."""
    try:
        return kind.FromString(frame.body)
    except DecodeError:
        raise InvalidArgument(f"the body of {NAMES[frame.operation]} is not its request message") from None
