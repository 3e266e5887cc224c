"""Lookup: message in, store call, message out; a part of `operations`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.catalog.catalog import Space
from kvstored.catalog.leases import Session
from kvstored.rpc.context import Context
from kvstored.store.answers import FoundRun, Looked
from kvstored.store.lookups import Wish


async def looked(
    context: Context, session: Session, request: pb.LookupRequest, spaces: list[Space], hashes: Sequence[bytes]
) -> pb.LookupReply:
    """A lookup that asks for more than where the blocks are. Raises InvalidArgument."""
    wish = Wish(request.prefill_tokens_per_s, request.prefetch, request.prefetch_deadline_ms / 1000)
    found = await context.store.reads.lookups.look(session, spaces, hashes, wish)
    reply = looked_up(context, session, spaces, hashes, found.run)
    _fill(reply, found)
    return reply


def _fill(reply: pb.LookupReply, found: Looked) -> None:
    reply.prefetch_id, reply.queued_blocks = found.prefetch_id, found.queued_blocks
    if found.estimate is not None:
        reply.load_s, reply.recompute_s = found.estimate.load_s, found.estimate.recompute_s
        reply.paying_blocks = found.estimate.paying_blocks


def looked_up(
    context: Context, session: Session, spaces: list[Space], hashes: Sequence[bytes], run: FoundRun
) -> pb.LookupReply:
    """The reply for what was found, which is recorded where the daemon records its traffic."""
    if context.recorder.on:
        context.recorder.looked_up(session, spaces, hashes, run.prefix_blocks)
    return pb.LookupReply(
        boot_id=context.boot_id,
        prefix_blocks=run.prefix_blocks,
        ready_blocks=run.ready_blocks,
        dram_blocks=run.dram_blocks,
        nvme_blocks=run.nvme_blocks,
        pending_blocks=run.pending_blocks,
        next=cast(pb.Outcome, run.next),
    )
