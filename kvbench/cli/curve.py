"""`kvbench curve`: hit rate against cache size for every eviction policy, on a recorded trace. Parses and prints."""

import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench.cli.trace import AsJson, Block, File, Kind, Stamps

if TYPE_CHECKING:
    from kvbench.plan.curve import Point
    from kvbench.plan.replay.references import References
    from kvbench.workload.traces import Trace


class Counted(StrEnum):
    """Which blocks of a prompt are references."""

    every = "all"
    full = "full"


def curve(
    file: File,
    policies: Annotated[str, typer.Option(metavar="A,B", help="Which policies; all adds those without a kernel (slow).")] = "",
    blocks: Annotated[str, typer.Option(metavar="N,M", help="Capacities in blocks; left out, shares of the distinct ones.")] = "",
    tiers: Annotated[str, typer.Option(metavar="N,M", help="Blocks of each tier of an exclusive LRU hierarchy, top first.")] = "",
    count: Annotated[Counted, typer.Option(help="all blocks with ids, or the full ones, as engines cache them.")] = Counted.every,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="A model profile: capacities in GiB too.")] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the curves (needs matplotlib).")] = None,
    kind: Kind = "auto",
    unit: Stamps = None,
    block: Block = None,
    as_json: AsJson = False,
) -> None:
    """Hit rate against cache size for every eviction policy, on a recorded trace: ideal, knee, why blocks miss, working set.

    Example: kvbench curve scenarios/traces/mooncake_conversation.jsonl.gz --policies lru,arc,belady --blocks 5859,30000
    """
    try:
        from kvbench.plan import curve as plan
        from kvbench.plan.replay.references import references
        from kvbench.workload.traces import read

        names = plan.known(_names(policies))
        asked, sizes = _capacities(blocks), _tier_sizes(tiers)
        if png:
            from kvbench.plan.curve_png import check, draw

            check(png)  # before the minutes that the curves may take
        trace = read(file, kind, unit.value if unit else None, block)
        refs = references(trace, "full" if count is Counted.full else "all")
        token_bytes = _token_bytes(model, refs)
        _say(trace, len(names))
        lru = plan.Lru(refs)
        found = plan.points(refs, lru, names, asked or plan.capacities(refs, lru))
        if png:
            draw(png, lru, found, file.name)
    except (ValueError, OSError) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from None
    facts = plan.facts(refs, lru, sizes)
    if as_json:
        points = [point.json() | _amount(point.blocks, refs, token_bytes) for point in found]
        head = {"trace": str(file), "format": trace.facts["format"], "counted": count.value, "model": model} | facts
        tail = {"points": points, "conclusion": plan.conclusion(lru, found), "warnings": trace.warnings}
        typer.echo(json.dumps(head | tail, allow_nan=False, indent=1))
        return
    lines = [
        *_head(str(file), facts),
        "",
        *_table(found, refs, token_bytes),
        "",
        *_reasons(found, facts["refs"]),
        *_tiers(facts["tiers"]),
    ]
    if left := [name for name in plan.NAMES if name not in names and not policies]:
        lines += ["", f"not replayed: {', '.join(left)} (they have no kernel: --policies all takes about a minute)"]
    said = textwrap.wrap(plan.conclusion(lru, found), max(40, shutil.get_terminal_size().columns))
    typer.echo("\n".join([*lines, "", *said]))
    if most := max((n for n in asked if n > refs.unique), default=0):
        typer.echo(f"note: {most:,} blocks are more than the {refs.unique:,} distinct ones: nothing is ever evicted", err=True)


def _say(trace: "Trace", policies: int) -> None:
    """What the user should know before waiting, on stderr."""
    from kvbench.plan.replay.compiled import COMPILES

    for warning in trace.warnings:
        typer.echo(f"warning: {warning}", err=True)
    if not COMPILES:
        typer.echo("note: numba is not installed: minutes instead of seconds (pip install -e '.[curve]')", err=True)
    elif sys.stderr.isatty():
        typer.echo(f"replaying {policies} policies (compiled when first used: about 15 s once)", err=True)


def _names(text: str) -> list[str]:
    return [name.strip().lower() for name in text.split(",") if name.strip()]


def _numbers(option: str, text: str) -> list[int]:
    """Numbers of blocks between commas. Raises ValueError for what is none."""
    found = []
    for part in text.split(",") if text.strip() else []:
        try:
            value = int(part)
        except ValueError:
            raise ValueError(f"{option} {text}: {part.strip()!r} is no number of blocks: write 1000,5859,30000") from None
        if value < 1:
            raise ValueError(f"{option} {text}: {value} blocks: a cache has at least 1")
        found.append(value)
    return found


def _capacities(text: str) -> list[int]:
    found = _numbers("--blocks", text)
    if twice := next((n for n in found if found.count(n) > 1), None):
        raise ValueError(f"--blocks {text}: {twice} is given twice")
    return sorted(found)


def _tier_sizes(text: str) -> list[int]:
    found = _numbers("--tiers", text)
    if len(found) == 1:
        raise ValueError(f"--tiers {text}: one tier is what --blocks shows; name two or more, top first: --tiers 10000,50000")
    return found


def _token_bytes(model: str | None, refs: "References") -> float | None:
    """KV bytes per token of the model. Raises ValueError where blocks have no one size."""
    if model is None:
        return None
    from kvbench.profile import load_model

    if refs.block is None:
        raise ValueError("--model: the trace mixes block sizes, so a number of blocks is no number of bytes: leave it out")
    return load_model(model).kv_token_bytes()


def _amount(blocks: int, refs: "References", token_bytes: float | None) -> dict[str, Any]:
    """What so many blocks are in tokens and, where a model is named, in bytes."""
    if refs.block is None:
        return {}
    tokens = blocks * refs.block
    return {"tokens": tokens} | ({} if token_bytes is None else {"bytes": round(tokens * token_bytes)})


def _head(file: str, facts: dict[str, Any]) -> Iterator[str]:
    from kvbench.units import duration

    size = f" of {facts['block']:,} tokens" if facts["block"] else " of several sizes"
    yield f"{file}: {facts['requests']:,} requests, {facts['refs']:,} references to {facts['unique']:,} distinct blocks{size}"
    rates = {name: _percent(value) for name, value in facts["ideal"].items()}
    yield f"  ideal        {rates['block']} of blocks, by a cache that forgets nothing; of full blocks {rates['full']},"
    yield f"               with answers cached too {rates['with_generated']}; of prompt tokens {rates['token']},"
    yield f"               as the mean over requests {rates['request_mean']}"
    reuse = facts["reuse"]
    if not reuse["repeats"]:
        return
    again, top = _percent(reuse["reused_share"]), _percent(reuse["top_tenth"])
    yield f"  reuse        {again} of the blocks are used again; a tenth of the blocks takes {top} of these references"
    blocks = ", ".join(f"p{float(q) * 100:g} {value:,}" for q, value in reuse["blocks"].items())
    yield f"  distance     {blocks} (distinct blocks in between)"
    if reuse["seconds"]:
        yield f"               {', '.join(f'p{float(q) * 100:g} {duration(value)}' for q, value in reuse['seconds'].items())}"
    for row in facts["working_set"]:
        yield f"  working set  mean {row['mean']:,.0f}, peak {row['peak']:,} blocks within {duration(row['seconds'])}"
    knee = facts["knee"]
    yield f"  knee         {knee['blocks']:,} blocks: LRU has {100 * knee['of_ideal']:.0f} % of the ideal there"
    needed = ", ".join(f"{100 * float(share):g} % {blocks:,}" for share, blocks in facts["lru_blocks_for"].items())
    yield f"  LRU needs    {needed} blocks (share of the ideal)"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"


def _table(found: "Sequence[Point]", refs: "References", token_bytes: float | None) -> Iterator[str]:
    """Policies down, capacities across."""
    sizes = list(dict.fromkeys(point.blocks for point in found))
    yield "block hit rate, %"
    yield _line("blocks", [_short(n) if n >= 10**7 else f"{n:,}" for n in sizes])
    yield _line("% of distinct", [f"{100 * n / refs.unique:.1f}" if n <= refs.unique else "> 100" for n in sizes])
    amounts = [_amount(n, refs, token_bytes) for n in sizes]
    if refs.block:
        yield _line("tokens", [_short(amount["tokens"]) for amount in amounts])
    if token_bytes is not None:
        yield _line("GiB", [f"{amount['bytes'] / 2**30:,.6g}" for amount in amounts])
    for name in dict.fromkeys(point.policy for point in found):
        rates = [f"{100 * point.block_hit_rate:.2f}" for point in found if point.policy == name]
        yield _line(f"{name} (bound)" if name == "belady" else name, rates)


def _short(number: float) -> str:
    """A number in a cell: 936k, 4.68M, 2e+15."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def _line(name: str, cells: Sequence[str]) -> str:
    return f"  {name:<16}" + "".join(f"{cell:>10}" for cell in cells)


def _reasons(found: "Sequence[Point]", refs: int) -> Iterator[str]:
    """Why the first policy's misses miss; --json has every policy's."""
    first = next((point.policy for point in found if point.policy == "lru"), found[0].policy)
    rows = [point for point in found if point.policy == first]
    yield f"misses of {first}, % of references"
    for name, counts in (
        ("compulsory", [point.compulsory for point in rows]),
        ("capacity", [point.capacity for point in rows]),
        ("policy", [point.policy_misses for point in rows]),
    ):
        yield _line(name, [f"{100 * count / refs:.2f}" for count in counts])


def _tiers(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    if not rows:
        return
    yield ""
    yield "exclusive LRU tiers"
    yield _line("tier", [str(row["tier"]) for row in rows])
    yield _line("blocks", [f"{row['blocks']:,}" for row in rows])
    yield _line("hits, %", [f"{100 * row['block_hit_rate']:.2f}" for row in rows])
    yield _line("with those above", [f"{100 * row['reach']:.2f}" for row in rows])
