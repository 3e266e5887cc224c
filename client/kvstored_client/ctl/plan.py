"""`kvstorectl plan`: how much KV a model makes, where it fits, and whether loading it beats computing it again.

It needs no daemon: `kvstored_client.sizing` is the arithmetic, and has the formulas' sources.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from kvstored_client.ctl import model_config
from kvstored_client.ctl.connection import Exit, Failure, options_of
from kvstored_client.ctl.output import print_json, print_table, size
from kvstored_client.ctl.sizes import parse_size
from kvstored_client.kv_shape import Model, SizingError
from kvstored_client.sizing import BLOCK_BYTES_MAX, BLOCK_BYTES_MIN, Hardware, Move, Plan, Wish, make_plan

_DRAM_BYTES_MIN: Final = 1 << 20  # the least that the daemon starts with
_NVME_BYTES_MIN: Final = 512 << 20  # two extents
_READ_BYTES_MIN: Final = 512
_TIER_NAMES: Final = {"gpu": "GPU memory", "dram": "DRAM", "nvme": "NVMe"}
# What is not given of these is assumed, and said to be.
_ASSUMED: Final = (
    *("tp", "pp", "context_tokens", "requests", "block_tokens", "gpu", "dram", "nvme", "pcie", "nvme_rate", "prefill"),
    *("read", "part"),
)
_OPTION_NAMES: Final = {"context_tokens": "context"}


def _count(help_: str, most: int = model_config.COUNT_MAX) -> Any:
    return typer.Option(min=1, max=most, metavar="N", help=help_)


def _rate(help_: str) -> Any:
    return typer.Option(min=1e-6, max=1e6, metavar="GB/s", help=help_)


def _size_option(help_: str) -> Any:
    return typer.Option(metavar="SIZE", help=help_)


def plan(  # one parameter an option
    context: typer.Context,
    model: Annotated[Path | None, typer.Argument(metavar="[MODEL]", help="Its config.json, or the directory.")] = None,
    layers: Annotated[int | None, _count("Layers with attention.", model_config.LAYERS_MAX)] = None,
    kv_heads: Annotated[int | None, _count("KV heads of a layer.")] = None,
    head_dim: Annotated[int | None, _count("Elements of a head.")] = None,
    kv_lora_rank: Annotated[int | None, _count("Latent attention (MLA): elements of the latent.")] = None,
    qk_rope_head_dim: Annotated[int | None, _count("Latent attention (MLA): elements of the rotary key.")] = None,
    window: Annotated[int | None, _count("Sliding window in tokens.")] = None,
    window_layers: Annotated[
        int | None, _count("Layers with that window; default: all.", model_config.LAYERS_MAX)
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the KV; default: the model's, or float16.")] = None,
    tp: Annotated[int, _count("Tensor parallelism.", 1 << 12)] = 1,
    pp: Annotated[int, _count("Pipeline parallelism.", 1 << 12)] = 1,
    context_tokens: Annotated[int, typer.Option("--context", min=1, max=1 << 30, help="Tokens of a request.")] = 32_768,
    requests: Annotated[int, _count("Requests to be kept.")] = 32,
    block_tokens: Annotated[int, _count("Tokens of a block.")] = 16,
    gpu: Annotated[str, _size_option("Memory for KV on each GPU.")] = "40GiB",
    dram: Annotated[str, _size_option("DRAM for kvstored.")] = "256GiB",
    nvme: Annotated[str, _size_option("NVMe for kvstored; 0: none.")] = "2TiB",
    pcie: Annotated[float, _rate("PCIe, each GPU.")] = 64.0,
    nvme_rate: Annotated[float, _rate("NVMe reads, all drives together.")] = 7.0,
    prefill: Annotated[float, typer.Option(min=1e-3, max=1e9, metavar="TOKENS/s", help="Prefill, all GPUs.")] = 5000.0,
    read: Annotated[str, _size_option("Count reads of this size.")] = "128KiB",
    part: Annotated[float, typer.Option(min=0, max=100, metavar="PERCENT", help="Show this part of it too.")] = 1.0,
) -> None:
    """Size a model's KV cache: bytes, what fits where, loading against computing again.

    MODEL, or --layers, --kv-heads and --head-dim; options win over the model's config.
    """
    hardware = Hardware(
        gpu_bytes=parse_size("--gpu", gpu),
        dram_bytes=parse_size("--dram", dram, least=_DRAM_BYTES_MIN),
        nvme_bytes=parse_size("--nvme", nvme, least=_NVME_BYTES_MIN, or_none=True),
        pcie_bytes_per_s=pcie * 1e9,
        nvme_bytes_per_s=nvme_rate * 1e9,
        prefill_tokens_per_s=prefill,
    )
    wish = Wish(context_tokens, requests, block_tokens, parse_size("--read", read, least=_READ_BYTES_MIN), part)
    shape = {"num_hidden_layers": layers, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    shape |= {"kv_lora_rank": kv_lora_rank, "qk_rope_head_dim": qk_rope_head_dim}
    try:
        config = _config(model, shape, window, window_layers)
        kept, notes = model_config.layers_of(config)
        dtype = dtype or model_config.dtype_of(config) or model_config.DEFAULT_DTYPE
        cut = Model(kept, _element_bytes(dtype), tp, pp)
        made = make_plan(cut, hardware, wish)
    except SizingError as error:
        raise Failure(f"planning: {error}", Exit.USAGE) from error
    notes += _warnings(cut, made)
    about = {"model": str(model or ""), "dtype": dtype, "kv_layers": cut.kv_layers, "gpus": cut.gpus}
    assumed = _assumed(context)
    if options_of(context).output == "json":
        inputs = {"wish": asdict(wish), "hardware": asdict(hardware), "assumed": assumed}
        print_json({**about, **asdict(made), **inputs, "notes": notes})
    else:
        print(f"{_name(model)}: {cut.kv_layers} layers with KV, {dtype}, {cut.gpus} GPU{'s' * (cut.gpus > 1)}")
        _print(hardware, wish, made)
        _print_settings(made)
        print("\n".join(["", *(f"note: {note}" for note in notes)]))
        if assumed:
            print(f"assumed: {', '.join(f'--{name} {value}' for name, value in assumed.items())}")


def _name(model: Path | None) -> str:
    """The model's directory is called like the model."""
    path = Path("model") if model is None else model.resolve()
    return path.parent.name if path.name == "config.json" else path.name


def _assumed(context: typer.Context) -> dict[str, Any]:
    """The options that were left at their defaults."""
    sources = {name: context.get_parameter_source(name) for name in _ASSUMED}
    left = [name for name, source in sources.items() if source is not None and source.name == "DEFAULT"]
    return {_OPTION_NAMES.get(name, name.replace("_", "-")): context.params[name] for name in left}


def _config(
    model: Path | None, shape: dict[str, int | None], window: int | None, window_layers: int | None
) -> dict[str, Any]:
    """The model's config with the options in place of what it says."""
    config = {} if model is None else model_config.read_config(model)
    config |= {name: value for name, value in shape.items() if value is not None}
    if model is None and not shape["num_hidden_layers"]:
        raise SizingError("no model is named: give its config.json, or --layers, --kv-heads and --head-dim")
    if config.get("kv_lora_rank") and (shape["num_key_value_heads"] or shape["head_dim"]):
        raise SizingError("latent attention (kv_lora_rank) has no KV heads: leave --kv-heads and --head-dim away")
    if window:
        config["sliding_window"] = window
    if window_layers:
        if not config.get("sliding_window"):
            raise SizingError("--window-layers needs --window, the tokens that these layers keep")
        config["layer_types"] = _spread(model_config.layer_count(config), window_layers)
    elif window:
        types = model_config.layer_types(config, model_config.layer_count(config))
        config["layer_types"] = types if "sliding_attention" in types else _spread(len(types), len(types))
    return config


def _spread(count: int, sliding: int) -> list[str]:
    """Layers with a window, evenly among the others, so that every pipeline stage gets its share."""
    if sliding > count:
        raise SizingError(f"--window-layers {sliding}: the model has {count} layers")
    ends = [number * sliding // count for number in range(count + 1)]
    return ["sliding_attention" if ends[n + 1] > ends[n] else "full_attention" for n in range(count)]


def _element_bytes(dtype: str) -> int:
    if dtype not in model_config.ELEMENT_BYTES:
        raise SizingError(f"dtype {dtype!r} is none of {', '.join(model_config.ELEMENT_BYTES)}: give --dtype")
    return model_config.ELEMENT_BYTES[dtype]


def _warnings(model: Model, made: Plan) -> list[str]:
    notes = []
    block = made.block
    if block.shard_bytes_max > BLOCK_BYTES_MAX:
        most = block.tokens * BLOCK_BYTES_MAX // block.shard_bytes_max
        remedy = f"give --block-tokens {most} or less" if most else "cut the model by --tp or --pp"
        notes.append(f"a block has {size(block.shard_bytes_max)} in one shard, the daemon takes 16 MiB: {remedy}")
    elif block.shard_bytes_max < BLOCK_BYTES_MIN:
        notes.append(f"blocks are small ({size(block.shard_bytes_max)}): with 16 KiB or more they move faster")
    if any(model.tensor_parallel > layer.heads for layer in model.layers if layer.head_elements):
        notes.append(
            "some KV lies on several GPUs: DRAM and NVMe are counted with one copy, a namespace per head range"
        )
    if made.short_bytes:
        missing = ", ".join(f"{name} by {_gb(short)}" for name, short in made.short_bytes.items())
        below = " (NVMe holds all of it)" if "nvme.capacity_bytes" in made.settings.keys() - made.short_bytes else ""
        notes.append(f"too small for all of the wish: {missing}{below}")
    return notes


def _print(hardware: Hardware, wish: Wish, made: Plan) -> None:
    rows = [
        ("a token", made.token),
        (f"a request of {wish.context_tokens:,} tokens", made.request),
        (f"all {wish.requests:,} requests", made.total),
        (f"{wish.part_percent:g} % of all", made.part),
    ]
    columns = ["", "KV ", "over PCIe ", "from NVMe ", "computed again ", f"reads of {size(wish.read_bytes)} "]
    print_table(columns, [[name, *_move_row(move)] for name, move in rows])
    block = made.block
    print(f"\na token {made.bytes_per_token:,} bytes, a block of {block.tokens} tokens {block.bytes:,} bytes", end="")
    print(f" in {block.shards} shards" if block.shards > 1 else "")
    if made.bytes_per_token_past_windows != made.bytes_per_token:
        print(f"a token of a long request {made.bytes_per_token_past_windows:,} bytes")
    tiers = [
        [_TIER_NAMES[key], size(tier.capacity_bytes), f"{tier.tokens:,}", f"{tier.requests:,}", f"{tier.placed:,}"]
        for key, tier in made.tiers.items()
    ]
    print()
    print_table(["fits in", "capacity ", "tokens ", "requests ", f"of these {wish.requests:,} "], tiers)
    even, has = made.break_even_bytes_per_s, hardware
    print(
        f"\nloading pays above {even['pcie'] / 1e9:.3g} GB/s of PCIe (there are {has.pcie_bytes_per_s / 1e9:g})", end=""
    )
    nvme = f" and {even['nvme'] / 1e9:.3g} GB/s of NVMe (there are {has.nvme_bytes_per_s / 1e9:g})"
    print((nvme if has.nvme_bytes else "") + ": KV bytes per token x prefill rate")
    print(f"bottleneck: {made.bottleneck.text}")


def _print_settings(made: Plan) -> None:
    print("\n# kvstored.toml: all of the wish in each tier, as far as it goes")
    for key, value in made.settings.items():
        section, _, name = key.partition(".")
        remark = "  # in one path; with more, divide by their number" if section == "nvme" else ""
        print(f"[{section}]\n{name} = {_setting(value)}{remark}")


def _move_row(move: Move) -> list[str]:
    nvme = "-" if move.nvme_s is None else _time(move.nvme_s)
    return [_gb(move.bytes), _time(move.pcie_s), nvme, _time(move.recompute_s), f"{move.reads:,}"]


def _gb(size_bytes: float) -> str:
    """Decimal, as bandwidths are."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= 0.9995 * factor:
            value = size_bytes / factor
            return f"{value:.1f} {unit}" if value >= 100 else f"{value:.2f} {unit}"
    return f"{size_bytes:.0f} B"


def _time(seconds: float) -> str:
    for unit, factor in (("h", 3600.0), ("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= factor and (unit != "h" or seconds >= 36_000):
            return f"{seconds / factor:,.0f} {unit}" if seconds >= 100 * factor else f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def _setting(size_bytes: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if size_bytes % factor == 0:
            return f'"{size_bytes // factor}{unit}"'
    return str(size_bytes)
