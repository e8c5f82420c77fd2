"""A server's own counters of prefix-cache hits: which names it gives them, and what its /metrics says they are."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

PAIRS = (  # (prompt tokens found in the cache, prompt tokens looked up); the first pair that is there counts
    ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
    ("vllm:gpu_prefix_cache_hits_total", "vllm:gpu_prefix_cache_queries_total"),  # as it was called before
    ("sglang:cached_tokens_total", "sglang:prompt_tokens_total"),
    ("dynamo_frontend_cached_tokens_sum", "dynamo_frontend_input_sequence_tokens_sum"),
)


class Hits(NamedTuple):
    """Tokens since the server's start, over all of its engines; `names`: of the two counters."""

    hits: float
    queries: float
    names: tuple[str, str]


def read(exposition: str) -> Hits | None:
    """The prefix-cache counters in a text of Prometheus' format; None where it has none, or is not such a text.

    The parser sees only their lines: the whole text of a server takes it tens of milliseconds, and a run would show them.
    """
    starts = tuple(start + _family(name) for pair in PAIRS for name in pair for start in ("", "# TYPE "))
    lines = [line for line in exposition.splitlines() if line.startswith(starts)]
    for names in PAIRS:
        hits, queries = (_total(lines, name) for name in names)
        if hits is not None and queries is not None:
            return Hits(hits, queries, names)
    return None


def _family(name: str) -> str:
    return name.removesuffix("_total").removesuffix("_sum")


def _total(lines: Sequence[str], name: str) -> float | None:
    """The sum over a counter's series. One with labels has none before it first counts: its TYPE line then shows it is there."""
    try:
        values = list(_values(lines, name))
    except (ValueError, LookupError):  # what the parser raises on a line that is none
        return None
    declared = any(line.split()[2:] in ([name, "counter"], [_family(name), "counter"]) for line in lines if line[:1] == "#")
    return sum(values) if values or declared else None


def _values(lines: Sequence[str], name: str) -> Iterator[float]:
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            if sample.name == name and math.isfinite(sample.value):
                yield sample.value
