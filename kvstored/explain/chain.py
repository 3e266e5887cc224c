"""How far a whole chain hits, and where and why it breaks; what a namespace holds, and which others are near."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec

from kvstored.catalog.catalog import Space
from kvstored.catalog.history import Reason
from kvstored.explain.difference import fields_differ
from kvstored.explain.explain import Answer, Near, explain
from kvstored.keys import Namespace
from kvstored.store.answers import IN_DRAM
from kvstored.store.outcomes import MISS, PENDING
from kvstored.store.parts import Parts
from kvstored.store.reads import Reads

PIECE_BLOCKS: Final = 512  # looked at in one go; between two the loop does other things


class ChainAnswer(msgspec.Struct):
    """See `ExplainChainReply`. `first` is about the block that ends the run, at index `hit_blocks`; None: all hit."""

    hit_blocks: int = 0
    dram_blocks: int = 0
    nvme_blocks: int = 0
    pending_blocks: int = 0
    stored_after: int = 0
    missing: Counter[str] = msgspec.field(default_factory=Counter)
    first: Answer | None = None


async def explain_chain(parts: Parts, reads: Reads, space: Space, hashes: Sequence[bytes]) -> ChainAnswer:
    """Look at every block of a chain in one namespace; the others of its tenant only for the first that is missing.

    The reasons of the rest are those in memory: what only NVMe's record of evictions knows counts as never stored.
    """
    answer = ChainAnswer()
    for start in range(0, len(hashes), PIECE_BLOCKS):
        piece = hashes[start : start + PIECE_BLOCKS]
        outcomes, tiers = await reads.contains(space, piece)
        for hash_, outcome, where in zip(piece, outcomes, tiers, strict=True):
            _add(parts, answer, space, hash_, outcome, where)
        await asyncio.sleep(0)
    if answer.hit_blocks < len(hashes):
        others = parts.catalog.tenant_spaces(space.tenant)
        first = answer.first = await explain(parts, others, space, hashes[answer.hit_blocks])
        if first.verdict not in ("hit", "pending"):  # else it came meanwhile
            counted = parts.history.why(space, hashes[answer.hit_blocks])
            answer.missing[counted.reason if counted else Reason.NEVER_STORED] -= 1
            answer.missing[first.verdict] += 1
            answer.missing = +answer.missing
    return answer


def _add(parts: Parts, answer: ChainAnswer, space: Space, hash_: bytes, outcome: int, where: int) -> None:
    if outcome == MISS:
        gone = parts.history.why(space, hash_)
        answer.missing[gone.reason if gone is not None else Reason.NEVER_STORED] += 1
    elif answer.missing:
        answer.stored_after += 1
    else:
        answer.hit_blocks += 1
        answer.pending_blocks += outcome == PENDING
        if where & IN_DRAM or outcome == PENDING:
            answer.dram_blocks += 1
        else:
            answer.nvme_blocks += 1


async def near_namespaces(spaces: Sequence[Space], ours: Namespace, most: int) -> list[Near]:
    """Other namespaces of the same model, where there is none of the tenant at all; the nearest first."""
    model = ours.fields.get("model")
    others = [space for space in spaces if space.namespace.digest != ours.digest]
    others = [space for space in others if space.namespace.fields.get("model") == model] or others
    others.reverse()
    found: list[Near] = []
    for start in range(0, len(others), PIECE_BLOCKS):
        piece = others[start : start + PIECE_BLOCKS]
        found += [Near(space, fields_differ(ours.fields, space.namespace.fields)) for space in piece]
        # Of equally near ones those that hold something, and of these the one that became known last.
        found.sort(key=lambda near: (len(near.differences), not near.space.entries))
        del found[most:]
        await asyncio.sleep(0)
    return found
