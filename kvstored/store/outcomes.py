"""The `Outcome` of the schema as plain integers, for packing and comparing without a lookup."""

from __future__ import annotations

from typing import Final

from kvstored_proto.v1 import kvstored_pb2 as pb

MISS: Final = int(pb.OUTCOME_MISS)
HIT: Final = int(pb.OUTCOME_HIT)
PENDING: Final = int(pb.OUTCOME_PENDING)
THROTTLED: Final = int(pb.OUTCOME_THROTTLED)
NO_ROOM: Final = int(pb.OUTCOME_NO_ROOM)
RESERVED: Final = int(pb.OUTCOME_RESERVED)
NOT_DURABLE: Final = int(pb.OUTCOME_NOT_DURABLE)
