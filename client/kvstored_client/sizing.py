"""What fits where of a model's KV, and whether loading it beats computing it again. Pure arithmetic.

How many bytes a model keeps: `kv_shape`. Time is bytes over bandwidth. Loading pays where the link is faster than
`KV bytes per token x prefill tokens/s`, the rate at which prefill itself makes KV: below it, computing is done first
(both times, of the same tokens, set equal).

Sizes are bytes, rates are bytes or tokens a second, times are seconds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from kvstored_proto.frames import SLOT_ALIGN_BYTES

from kvstored_client.kv_shape import Model, SizingError

GIB: Final = 1 << 30
BLOCK_BYTES_MIN: Final = 16 << 10  # the sizes that the daemon is made for
BLOCK_BYTES_MAX: Final = 16 << 20  # and the largest that it takes
HIGH_WATERMARK: Final = 0.9  # default of mover.high_watermark: above it blocks leave DRAM
EXTENT_BYTES: Final = 256 << 20  # default of nvme.extent_bytes: one is written while another is recycled


@dataclass(frozen=True)
class Hardware:
    """Of one node; `gpu_bytes` (memory left for KV) and `pcie_bytes_per_s` are those of each GPU."""

    gpu_bytes: int
    dram_bytes: int
    nvme_bytes: int
    pcie_bytes_per_s: float
    nvme_bytes_per_s: float
    prefill_tokens_per_s: float


@dataclass(frozen=True)
class Wish:
    """What is to be kept, and how it is moved."""

    context_tokens: int
    requests: int
    block_tokens: int
    read_bytes: int
    part_percent: float


@dataclass(frozen=True)
class Move:
    """Some KV, and how long it takes to bring it to the GPUs, or to compute it again."""

    bytes: int
    pcie_s: float
    """All GPUs load at once, each its part."""
    nvme_s: float | None
    """None where there is no NVMe."""
    recompute_s: float
    reads: int


@dataclass(frozen=True)
class Tier:
    """What fits."""

    capacity_bytes: int
    tokens: int
    requests: int
    placed: int
    """How many of the wished requests lie here, each in the fastest tier that has room."""


@dataclass(frozen=True)
class Block:
    """What the daemon stores at once: some tokens of one shard."""

    tokens: int
    bytes: int
    """KV of all layers and shards."""
    shards: int
    """Blocks of the same tokens: of each head range, pipeline stage and kind of layer."""
    shard_bytes_max: int
    slot_bytes: int
    """What all shards take in the tiers, each rounded up to 4 KiB."""


@dataclass(frozen=True)
class Bottleneck:
    """What limits: `none` (all fits in GPU memory), `capacity`, `nvme` or `pcie`."""

    name: str
    text: str


@dataclass(frozen=True)
class Plan:
    """The answer."""

    bytes_per_token: int
    bytes_per_token_past_windows: int
    bytes_per_token_per_gpu: int
    block: Block
    stored_bytes_per_request: int
    token: Move
    request: Move
    total: Move
    part: Move
    tiers: dict[str, Tier]
    break_even_bytes_per_s: dict[str, float]
    """The rate of PCIe (per GPU) and of NVMe above which loading beats computing."""
    bottleneck: Bottleneck
    settings: dict[str, int]
    """For kvstored.toml."""
    short_bytes: dict[str, int]
    """By how much a setting is below what the wish takes, where the hardware has no more."""


@dataclass(frozen=True)
class _Shards:
    """Blocks of one kind in the store: the same layers of one stage, one for each head range."""

    count: int
    block_bytes: int
    blocks: int  # of a request, for each shard

    @property
    def slot_bytes(self) -> int:
        return -(-self.block_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES


def make_plan(model: Model, hardware: Hardware, wish: Wish) -> Plan:
    """Sizes, times and settings. Raises SizingError where a request fills no block."""
    if wish.context_tokens < wish.block_tokens:
        raise SizingError(
            f"a request of {wish.context_tokens} tokens fills no block of {wish.block_tokens}, and only whole ones "
            "are stored: give a longer context, or fewer block tokens"
        )
    tokens, requests = wish.context_tokens, wish.requests
    shards = _shards(model, wish)
    stored = sum(kind.count * kind.blocks * kind.slot_bytes for kind in shards)
    request_bytes, gpu_bytes = model.request_bytes(tokens), model.gpu_request_bytes(tokens)
    request = _move(hardware, wish, request_bytes, gpu_bytes, tokens)
    tiers = _tiers(hardware, wish, stored, gpu_bytes, model.gpus)
    part = wish.part_percent / 100 * requests
    settings, short = _settings(hardware, stored * requests)
    rate = hardware.prefill_tokens_per_s / tokens
    break_even = {"pcie": gpu_bytes * rate, "nvme": request_bytes * rate}
    return Plan(
        bytes_per_token=model.bytes_per_token,
        bytes_per_token_past_windows=sum(model.layer_bytes(x) for x in model.layers if x.window_tokens is None),
        bytes_per_token_per_gpu=model.gpu_request_bytes(1),
        block=_block(model, wish.block_tokens, shards),
        stored_bytes_per_request=stored,
        token=_move(hardware, wish, model.bytes_per_token, model.gpu_request_bytes(1), 1),
        request=request,
        total=_move(hardware, wish, request_bytes * requests, gpu_bytes * requests, tokens * requests),
        part=_move(hardware, wish, round(request_bytes * part), round(gpu_bytes * part), tokens * part),
        tiers=tiers,
        break_even_bytes_per_s=break_even,
        bottleneck=_bottleneck(wish, tiers, request, break_even, stored),
        settings=settings,
        short_bytes=short,
    )


def _shards(model: Model, wish: Wish) -> list[_Shards]:
    """Layers of different windows are different KV groups: other blocks, other namespaces."""
    found = []
    for stage in model.stages():
        kinds = Counter(layer for layer in stage if layer.head_elements)
        for window, heads in sorted({(kind.window_tokens or 0, kind.heads) for kind in kinds}):
            ranges = min(model.tensor_parallel, heads)
            alike = [kind for kind in kinds if (kind.window_tokens or 0, kind.heads) == (window, heads)]
            per_token = sum(model.layer_bytes(kind) * kinds[kind] for kind in alike)
            blocks = wish.context_tokens // wish.block_tokens
            if window:
                blocks = min(blocks, -(-window // wish.block_tokens))
            found.append(_Shards(ranges, per_token * wish.block_tokens // ranges, blocks))
    return found


def _block(model: Model, tokens: int, shards: list[_Shards]) -> Block:
    return Block(
        tokens=tokens,
        bytes=model.bytes_per_token * tokens,
        shards=sum(kind.count for kind in shards),
        shard_bytes_max=max(kind.block_bytes for kind in shards),
        slot_bytes=sum(kind.count * kind.slot_bytes for kind in shards),
    )


def _move(hardware: Hardware, wish: Wish, size_bytes: int, gpu_bytes: int, tokens: float) -> Move:
    return Move(
        bytes=size_bytes,
        pcie_s=gpu_bytes / hardware.pcie_bytes_per_s,
        nvme_s=size_bytes / hardware.nvme_bytes_per_s if hardware.nvme_bytes else None,
        recompute_s=tokens / hardware.prefill_tokens_per_s,
        reads=-(-size_bytes // wish.read_bytes),
    )


def _tiers(hardware: Hardware, wish: Wish, stored_bytes: int, gpu_bytes: int, gpus: int) -> dict[str, Tier]:
    whole_tokens = wish.context_tokens // wish.block_tokens * wish.block_tokens
    tiers, left = {}, wish.requests
    gpu = hardware.gpu_bytes
    fits = {"gpu": (gpu * gpus, gpu * wish.context_tokens // gpu_bytes, gpu // gpu_bytes)}
    for name, capacity in (("dram", hardware.dram_bytes), ("nvme", hardware.nvme_bytes)):
        blocks = capacity * whole_tokens // stored_bytes // wish.block_tokens
        fits[name] = (capacity, blocks * wish.block_tokens, capacity // stored_bytes)
    for name, (capacity, tokens, requests) in fits.items():
        tiers[name] = Tier(capacity, tokens, requests, placed := min(left, requests))
        left -= placed
    return tiers


def _settings(hardware: Hardware, stored_bytes: int) -> tuple[dict[str, int], dict[str, int]]:
    """Each tier for all of the wish, as far as the hardware goes.

    All of it, because what leaves GPU memory has to find room, and a block that is brought up to DRAM keeps its place
    on NVMe. DRAM so that the wish ends at the high watermark; NVMe with an extent to write and one to recycle.
    """
    wanted = {"dram.capacity_bytes": (int(stored_bytes / HIGH_WATERMARK), hardware.dram_bytes)}
    if hardware.nvme_bytes:
        wanted["nvme.capacity_bytes"] = (stored_bytes + 2 * EXTENT_BYTES, hardware.nvme_bytes)
    settings, short = {}, {}
    for name, (wanted_bytes, there_bytes) in wanted.items():
        settings[name] = min(-(-wanted_bytes // GIB) * GIB, there_bytes // SLOT_ALIGN_BYTES * SLOT_ALIGN_BYTES)
        if settings[name] < wanted_bytes:
            short[name] = wanted_bytes - settings[name]
    return settings, short


def _bottleneck(
    wish: Wish, tiers: dict[str, Tier], request: Move, break_even: dict[str, float], stored_bytes: int
) -> Bottleneck:
    nowhere = wish.requests - sum(tier.placed for tier in tiers.values())
    if tiers["gpu"].placed == wish.requests:
        return Bottleneck("none", f"GPU memory holds all {wish.requests} requests: nothing has to be loaded")
    if nowhere:
        return Bottleneck(
            "capacity",
            f"room: {nowhere} of {wish.requests} requests fit in no tier and are computed again, "
            f"{request.recompute_s:.3g} s each; {nowhere * stored_bytes / 1e9:.4g} GB are missing",
        )
    nvme_s = request.nvme_s if tiers["nvme"].placed and request.nvme_s is not None else 0.0
    name, label = ("nvme", "NVMe bandwidth") if nvme_s > request.pcie_s else ("pcie", "PCIe bandwidth")
    load_s = max(nvme_s, request.pcie_s)  # what comes from NVMe goes over PCIe while the rest is read
    if load_s < request.recompute_s:
        faster = f"{request.recompute_s / load_s:.3g} times faster than computing it ({request.recompute_s:.3g} s)"
        return Bottleneck(name, f"{label}: a request loads in {load_s:.3g} s, {faster}")
    return Bottleneck(
        name,
        f"{label}: a request loads in {load_s:.3g} s, and is computed in {request.recompute_s:.3g} s; "
        f"loading pays above {break_even[name] / 1e9:.3g} GB/s",
    )
