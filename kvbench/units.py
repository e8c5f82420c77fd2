"""Quantities as users write them ("100ms", "5m", "2/s", "90%", "80GiB", "5x") to SI numbers and back. Used only at the edges.

Every type here is a pydantic annotation. Read from a scenario (validation context {"text": True}) a bare number for a quantity
that has a unit is an error; constructed from Python a number is taken as seconds, requests/s, a share or bytes.
"""

import math
import re
from typing import Annotated, Any

from pydantic import BeforeValidator, ValidationInfo, WithJsonSchema

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
DURATIONS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
RATES = {"/s": 1.0, "/m": 1 / 60, "/min": 1 / 60, "/h": 1 / 3600}
SHARES = {"%": 0.01}
SIZES = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
SIZES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
MULTIPLES = {"x": 1.0}


def parse(text: str, units: dict[str, float], what: str, example: str) -> float:
    """`text` as one number in base units. Durations may be compound ("1m30s"). Raises ValueError naming what is allowed."""
    parts = re.findall(rf"({_NUMBER})\s*([^\d\s.+-]+)", text.strip())
    if not parts or "".join(n + u for n, u in parts) != re.sub(r"\s+", "", text):
        allowed = f"one of {', '.join(units)}" if len(units) > 1 else next(iter(units))
        raise ValueError(f"{text!r} is not {what}: write a number and {allowed} (for example {example})")
    if len(parts) > 1 and units is not DURATIONS:
        raise ValueError(f"{text!r} is not {what}: one number and one unit (for example {example})")
    total = 0.0
    for number, unit in parts:
        if unit not in units:
            raise ValueError(f"unknown unit {unit!r} in {text!r}: allowed are {', '.join(units)} (for example {example})")
        total += float(number) * units[unit]
    if not math.isfinite(total):
        raise ValueError(f"{text!r} is too large for {what}")
    return total


def _reader(units: dict[str, float], what: str, example: str, low: float, low_open: bool) -> BeforeValidator:
    def read(value: Any, info: ValidationInfo) -> float:
        text_only = bool(info.context and info.context.get("text"))
        if isinstance(value, str):
            number = parse(value, units, what, example)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            if text_only:
                raise ValueError(
                    f"{value!r} has no unit: {what} is written with one of {', '.join(units)} (for example {example})"
                )
            number = float(value)
        else:
            raise ValueError(f"{value!r} is not {what}: write it as {example}")
        if math.isnan(number) or number < low or (low_open and number <= low):
            raise ValueError(f"{value!r} is out of range: {what} must be {'more than' if low_open else 'at least'} {low:g}")
        return number

    return BeforeValidator(read)


def _schema(what: str, example: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "description": f"{what}, with its unit", "examples": [example]})


Duration = Annotated[float, _reader(DURATIONS, "a duration", "100ms", 0, False), _schema("a duration", "100ms")]
Span = Annotated[float, _reader(DURATIONS, "a duration", "5m", 0, True), _schema("a duration above zero", "5m")]
Rate = Annotated[float, _reader(RATES, "a rate", "2/s", 0, True), _schema("a rate above zero", "2/s")]
Share = Annotated[float, _reader(SHARES, "a share", "90%", 0, False), _schema("a share", "90%")]
Size = Annotated[float, _reader(SIZES, "a size", "80GiB", 0, False), _schema("a size in bytes", "80GiB")]
Multiple = Annotated[float, _reader(MULTIPLES, "a multiple", "5x", 0, True), _schema("a multiple", "5x")]


def duration(seconds: float | None) -> str:
    """Seconds for people: 0.00123 -> "1.23 ms", 3725 -> "1h02m05s". None -> "-"."""
    if seconds is None:
        return "-"
    if math.isinf(seconds):
        return "unlimited"
    sign, value = ("-", -seconds) if seconds < 0 else ("", seconds)
    if value == 0:
        return "0 s"
    if value < 999.5e-6:  # what would be rounded to 1,000 us is 1 ms
        return f"{sign}{value * 1e6:.3g} us"
    if value < 999.5e-3:
        return f"{sign}{value * 1e3:.3g} ms"
    if value < 60:
        return f"{sign}{value:.3g} s"
    whole = round(value)
    if whole < 3600:
        return f"{sign}{whole // 60}m{whole % 60:02d}s"
    return f"{sign}{whole // 3600}h{whole % 3600 // 60:02d}m{whole % 60:02d}s"


def size(count: float | None) -> str:
    """Bytes for people: 327680 -> "320 KiB". None -> "-"."""
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def share(value: float | None) -> str:
    """0.1234 -> "12.3 %". None -> "-"."""
    return "-" if value is None else f"{100 * value:.3g} %"


def multiple(value: float | None) -> str:
    """2.5 -> "2.5x". None -> "-"."""
    return "-" if value is None else f"{value:.4g}x"
