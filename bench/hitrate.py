"""Hit rates of the eviction orders on a recorded workload, by simulation with the daemon's own code.

A hit is a leading block of a request that is there; the rate is hits / blocks asked for. `opt` is
what a tier that knows the future would have (Belady). With `--cost` it is measured instead what
the orders cost a block when they are large.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from itertools import islice
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench.common import BadInput, Figure, count, counts, parser, progress, run, write_json
from bench.traces import find_trace, read_trace
from kvstored.policy.eviction import EvictionOrder
from kvstored.policy.ideal import ideal_hits
from kvstored.policy.orders import ORDERS, make_order
from kvstored.policy.simulator import Block, simulate
from kvstored.policy.trace import Request

OPT: Final = "opt"
BATCH_BLOCKS: Final = 512
COST_BATCHES: Final = 400

FIGURES: Final = (
    Figure("trace", "name of the trace's file"),
    Figure("requests", "requests simulated"),
    Figure("blocks", "blocks asked for"),
    Figure("hit_rate", "policy -> capacity in blocks -> hits / blocks"),
    Figure("gap_closed", "policy -> capacity -> (hit rate - that of lru) / (that of opt - that of lru)"),
    Figure("references_per_s", "policy -> blocks simulated a second, all capacities together", ">= 200000"),
    Figure("cost_us", "with --cost: policy -> enter, use and evict, us a block", "<= 2 for evict"),
)
Rates = dict[str, dict[str, float]]


def hits_of(policy: str, requests: Sequence[Request], capacity: int) -> int:
    """Hits of all requests."""
    if policy == OPT:
        return sum(ideal_hits(requests, capacity))
    return sum(simulate(requests, make_order(policy), capacity))


def compare(requests: Sequence[Request], policies: Sequence[str], capacities: Sequence[int]) -> dict[str, Any]:
    """The figures for every policy at every capacity."""
    blocks = sum(map(len, requests))
    rates: Rates = {}
    speed: dict[str, float] = {}
    for policy in policies:
        progress(f"{policy} at {', '.join(map(str, capacities))}")
        started = time.perf_counter()
        rates[policy] = {str(c): hits_of(policy, requests, c) / max(1, blocks) for c in capacities}
        speed[policy] = blocks * len(capacities) / (time.perf_counter() - started)
    return {
        "requests": len(requests),
        "blocks": blocks,
        "hit_rate": rates,
        "gap_closed": gap_closed(rates),
        "references_per_s": speed,
    }


def gap_closed(rates: Rates) -> Rates:
    """How much of what lru leaves to be won each policy wins; empty where lru or opt was not simulated."""
    if not {"lru", OPT} <= rates.keys():
        return {}
    lru, opt = rates["lru"], rates[OPT]
    return {
        policy: {c: (rate - lru[c]) / (opt[c] - lru[c]) for c, rate in by_capacity.items() if opt[c] > lru[c]}
        for policy, by_capacity in rates.items()
        if policy not in ("lru", OPT)
    }


def cost(order: EvictionOrder, blocks: int) -> dict[str, float]:
    """Microseconds a block for entering, using and evicting, in an order that is as large throughout."""
    seconds = {"enter": 0.0, "use": 0.0, "evict": 0.0}
    nodes: list[Block] = []
    for start in range(0, blocks, BATCH_BLOCKS):
        batch = [Block(block_id=start + i) for i in range(BATCH_BLOCKS)]
        order.enter_many(batch)
        nodes += batch
    for number in range(COST_BATCHES):
        place = number * 7919 * BATCH_BLOCKS % (len(nodes) - BATCH_BLOCKS)
        used = [node for node in nodes[place : place + BATCH_BLOCKS] if node.next is not None]
        fresh = [Block(block_id=blocks + number * BATCH_BLOCKS + i) for i in range(BATCH_BLOCKS)]
        marks = [time.perf_counter()]
        victims = list(islice(order, BATCH_BLOCKS))
        order.evict_many(victims)
        marks.append(time.perf_counter())
        order.enter_many(fresh)
        marks.append(time.perf_counter())
        order.remove_many(used)
        order.touch_many(used)
        marks.append(time.perf_counter())
        for name, begin, end in zip(("evict", "enter", "use"), marks[:-1], marks[1:], strict=True):
            seconds[name] += end - begin
    return {name: total / (COST_BATCHES * BATCH_BLOCKS) * 1e6 for name, total in seconds.items()}


def show(values: dict[str, Any]) -> None:
    """Tables for people."""
    if rates := values.get("hit_rate"):
        capacities = list(next(iter(rates.values())))
        table = Table("policy", *capacities, "references/s", title=f"hit rate of {values['trace']} (gap to opt closed)")
        for policy, by_capacity in rates.items():
            gaps = values["gap_closed"].get(policy, {})
            cells = [f"{by_capacity[c]:.4f}" + (f" ({gaps[c]:+.0%})" if c in gaps else "") for c in capacities]
            table.add_row(policy, *cells, f"{values['references_per_s'][policy]:,.0f}")
        Console().print(table)
    if costs := values.get("cost_us"):
        table = Table("policy", "enter", "use", "evict", title="us a block")
        for policy, by_call in costs.items():
            table.add_row(policy, *(f"{by_call[call]:.2f}" for call in ("enter", "use", "evict")))
        Console().print(table)


def main() -> int:
    """Entry point."""
    arguments = _arguments()
    policies = arguments.policies.split(",") if arguments.policies else [*ORDERS, OPT]
    if unknown := [policy for policy in policies if policy not in (*ORDERS, OPT)]:
        raise BadInput(f"--policies: {unknown[0]!r} is none of {', '.join([*ORDERS, OPT])}")
    values: dict[str, Any] = {}
    if arguments.cost:
        values["cost_us"] = {p: cost(make_order(p), arguments.cost_blocks) for p in policies if p != OPT}
    elif not arguments.trace:
        raise SystemExit("bench.hitrate: --trace PATH or --cost is needed")
    else:
        path = find_trace(arguments.trace)
        requests = list(read_trace(path, arguments.limit))
        values = {"trace": path.name} | compare(requests, policies, arguments.capacities)
    if arguments.json:
        write_json(values, FIGURES, arguments.json)
    else:
        show(values)
    return 0


def _arguments() -> argparse.Namespace:
    built = parser("bench.hitrate", "Hit rates of the eviction orders on a trace, with the ideal.", FIGURES)
    built.add_argument("--trace", help="a trace file, or the name of one in $KVSTORED_TRACES")
    built.add_argument(
        "--capacities", type=counts, default="3000,10000,30000,50000", help="blocks, with commas between"
    )
    built.add_argument("--policies", help=f"of {', '.join([*ORDERS, OPT])}, with commas between (default: all)")
    built.add_argument("--limit", type=count, help="simulate only the first so many requests")
    built.add_argument("--cost", action="store_true", help="measure what the orders cost instead")
    built.add_argument("--cost-blocks", type=int, default=1_000_000, help="size of the orders for --cost")
    return built.parse_args()


if __name__ == "__main__":
    run(main)
