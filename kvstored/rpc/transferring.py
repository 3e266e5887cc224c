"""The operations on engines' memory, for both transports: see `operations`, whose table takes in `SERVED`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

from google.protobuf.message import DecodeError, Message
from kvstored_proto.frames import Frame, close_all
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored import keys
from kvstored.catalog.leases import Session
from kvstored.device.worker_messages import Region
from kvstored.errors import FailedPrecondition
from kvstored.reporting.logs import get_logger
from kvstored.rpc.context import Context
from kvstored.rpc.hinting import wish_of
from kvstored.rpc.terms import lifetime_of, wants_durable
from kvstored.store.copied_by_engines import cleaned
from kvstored.store.outcomes import HIT
from kvstored.store.registrations import Opened
from kvstored.store.transfer_marks import Terms
from kvstored.store.transfers import Transfers

_log = get_logger("gpu")


def _transfers(context: Context) -> Transfers:
    if context.store.transfers is None:
        raise FailedPrecondition("this daemon does not use GPUs")
    return context.store.transfers


def offer(context: Context, session: Session, frame: Frame) -> None:
    """Keep the descriptors that came with a frame for the registration that will name them. They are ours to close."""
    try:
        number = pb.OfferDescriptors.FromString(frame.body).memory_number
    except DecodeError:
        number = -1
    if number < 0 or context.store.transfers is None:
        close_all(frame.fds)
        return
    context.store.transfers.registrations.offers.add(session, number, frame.fds)


async def _register(context: Context, session: Session, request: pb.RegisterMemoryRequest) -> Message:
    registrations = _transfers(context).registrations
    if request.not_exportable:
        opened = Opened(0, cleaned(request.not_exportable))
    else:
        regions = [Region(r.ipc_handle, r.offset, r.size_bytes, r.probe, r.probe_end) for r in request.regions]
        fragments = [(f.region, f.offset, f.stride, f.size_bytes) for f in request.fragments]
        opened = await registrations.register(
            *(session, request.device_uuid, regions, fragments, request.blocks, list(request.layer_fragments)),
            *(list(request.chunk_bytes), request.memory_number),
        )
    if request.memory_number and registrations.by_engines.note(session, request.memory_number, opened.reason):
        _log.warning(
            "an engine copies GPU memory by itself",
            tenant=session.caller.tenant,
            client=cleaned(session.caller.client),
            reason=opened.reason,
        )
    return pb.RegisterMemoryReply(
        boot_id=context.boot_id,
        registration_id=opened.number,
        reason=opened.reason,
        retry_after_ms=round(opened.retry_after_s * 1000),
    )


async def _unregister(context: Context, session: Session, request: pb.UnregisterMemoryRequest) -> Message:
    await _transfers(context).unregister(session, request.registration_id)
    return pb.UnregisterMemoryReply(boot_id=context.boot_id)


async def _load(context: Context, session: Session, request: pb.LoadRequest) -> Message:
    hashes = keys.split_hashes(request.hashes, request.hash_bytes)
    space = session.space_of(request.namespace_id)
    loaded = await _transfers(context).load(
        session,
        space,
        hashes,
        request.registration_id,
        request.block_ids,
        request.wait_ms / 1000,
        Terms(
            request.transfer_id,
            request.done_word,
            request.first_layer,
            request.layers,
            request.layers_word,
            request.deadline_ms / 1000,
        ),
    )
    if context.recorder.on:
        context.recorder.got(session, [space], hashes, loaded.blocks)
    return pb.LoadReply(
        boot_id=context.boot_id, blocks=loaded.blocks, next=cast(pb.Outcome, loaded.next), error=loaded.error
    )


async def _store(context: Context, session: Session, request: pb.StoreRequest) -> Message:
    hashes = keys.split_hashes(request.hashes, request.hash_bytes)
    space, wish = session.space_of(request.namespace_id), wish_of(request)
    stored = await _transfers(context).store(
        session,
        space,
        hashes,
        request.registration_id,
        request.block_ids,
        request.parent,
        request.wait_ms / 1000,
        durable=wants_durable(session, request),
        lifetime=lifetime_of(session, request, request.namespace_id),
        terms=Terms(
            request.transfer_id,
            request.done_word,
            layers_word=request.layers_word,
            deadline_s=request.deadline_ms / 1000,
            by_layers=request.by_layers,
        ),
    )
    if context.recorder.on:
        context.recorder.put(session, space, hashes, request.parent, stored.size_bytes)
    if wish is not None and HIT in stored.outcomes:
        await context.store.hints.hint(session, space, hashes, wish)
    return pb.StoreReply(
        boot_id=context.boot_id,
        outcomes=stored.outcomes,
        written=stored.written,
        retry_after_ms=stored.retry_after_ms,
        error=stored.error,
    )


async def _store_layers(context: Context, session: Session, request: pb.StoreLayersRequest) -> Message:
    found = _transfers(context).layers_ready(session, request.transfer_id, request.layers)
    return pb.StoreLayersReply(boot_id=context.boot_id, found=found)


async def _cancel(context: Context, session: Session, request: pb.CancelTransferRequest) -> Message:
    found = await _transfers(context).cancel(session, request.transfer_id)
    return pb.CancelTransferReply(boot_id=context.boot_id, found=found)


SERVED: Final[dict[str, tuple[type[Message], Callable[[Context, Session, Any], Any]]]] = {
    "RegisterMemory": (pb.RegisterMemoryRequest, _register),
    "UnregisterMemory": (pb.UnregisterMemoryRequest, _unregister),
    "Load": (pb.LoadRequest, _load),
    "Store": (pb.StoreRequest, _store),
    "StoreLayers": (pb.StoreLayersRequest, _store_layers),
    "CancelTransfer": (pb.CancelTransferRequest, _cancel),
}
