"""How long prompts and outputs are, in tokens: distributions over whole numbers between two bounds.

All but `fixed` and `uniform` hold an exact table of probabilities and draw by inverting its cumulative sum: one uniform per
length, nothing rounded or clipped afterwards, and the mean and the quantiles are those of what is drawn.
"""

import json
from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator, ValidationInfo, WithJsonSchema, model_validator
from scipy.special import ndtr

from kvbench.workload import Lengths
from kvbench.workload.spec import Spec, choices, named, weights, written

MOST = 10_000_000  # tokens: beyond any context there is, and the size of the largest table
Tokens = Annotated[int, Field(ge=1, le=MOST)]
TokensFromZero = Annotated[int, Field(ge=0, le=MOST)]


class Table(NamedTuple):
    """Lengths in rising order, their probabilities, and the cumulative sum that ends in exactly 1."""

    lengths: NDArray[np.int64]
    shares: NDArray[np.float64]
    upto: NDArray[np.float64]


def tabulate(lengths: NDArray[np.int64], heights: NDArray[np.floating[Any]]) -> Table:
    """A table from unscaled, non-negative heights of which at least one is above 0."""
    shares = np.asarray(heights / heights.sum(), dtype=np.float64)
    upto = np.cumsum(shares)
    upto[np.flatnonzero(shares)[-1] :] = 1.0  # so that rounding can neither miss the last length nor reach an impossible one
    return Table(lengths, shares, upto)


class Fixed(Spec):
    """Always the same length."""

    value: TokensFromZero = Field(description="tokens")
    example: ClassVar[dict[str, Any]] = {"value": 128}

    def sample(self, rng: Generator) -> int:
        return self.value

    def mean(self) -> float:
        return float(self.value)

    def bounds(self) -> tuple[int, int]:
        return self.value, self.value

    def quantile(self, q: float) -> int:
        return self.value


class _Between(Spec):
    """Lengths min, min + 1, ..., max."""

    min: Tokens = Field(1, description="least tokens")
    max: Tokens = Field(description="most tokens")

    @model_validator(mode="after")
    def _order(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min: {self.min} is more than max: {self.max}; it must be at most that")
        return self

    def bounds(self) -> tuple[int, int]:
        return self.min, self.max


class Uniform(_Between):
    """Every length between min and max, equally often."""

    min: TokensFromZero = Field(description="least tokens")
    example: ClassVar[dict[str, Any]] = {"min": 0, "max": 9}

    def sample(self, rng: Generator) -> int:
        return int(rng.integers(self.min, self.max, endpoint=True))

    def mean(self) -> float:
        return (self.min + self.max) / 2

    def quantile(self, q: float) -> int:
        count = self.max - self.min + 1
        return self.min + max(0, int(np.ceil(q * count)) - 1)


class _Tabled(Spec):
    """A distribution given by its table of probabilities, built when first asked for."""

    @abstractmethod
    def _tabulate(self) -> Table: ...

    @cached_property
    def table(self) -> Table:
        return self._tabulate()

    def sample(self, rng: Generator) -> int:
        return int(self.table.lengths[self.table.upto.searchsorted(rng.random(), "right")])

    def mean(self) -> float:
        return float(self.table.lengths @ self.table.shares)

    def quantile(self, q: float) -> int:
        return int(self.table.lengths[self.table.upto.searchsorted(q, "left")])


class LogNormal(_Tabled, _Between):
    """A lognormal cut off at min and max (not piled up there), each whole length taking the mass half a token to either side."""

    median: float = Field(gt=0, le=MOST, description="median before the cut")
    sigma: float = Field(gt=0, le=20, description="standard deviation of the natural logarithm")
    example: ClassVar[dict[str, Any]] = {"median": 60, "sigma": 0.8, "min": 16, "max": 300}

    @model_validator(mode="after")
    def _reached(self) -> Self:
        low, high = (np.log([self.min - 0.5, self.max + 0.5]) - np.log(self.median)) / self.sigma
        if low > 30 or high < -30:  # float probabilities end near 38 standard deviations
            raise ValueError(f"median: {self.median:g} lies more than 30 sigma outside min: {self.min} to max: {self.max}")
        return self

    def _tabulate(self) -> Table:
        edges = np.arange(self.min, self.max + 2) - 0.5
        z = (np.log(edges) - np.log(self.median)) / self.sigma
        z = np.where(z[0] > 0, -1.0, 1.0) * z  # above the median the upper tail is differenced: it keeps its digits
        mass = np.abs(np.diff(ndtr(z)))
        return tabulate(np.arange(self.min, self.max + 1), mass)


class PowerLaw(_Tabled, _Between):
    """p(x) ~ x^-alpha on the whole numbers from min to max: Clauset, Shalizi and Newman's exponent (Pareto tail index + 1)."""

    alpha: float = Field(ge=0, le=100, description="exponent of the density; 0 is uniform, 1 is log-uniform")
    example: ClassVar[dict[str, Any]] = {"alpha": 1.8, "min": 16, "max": 512}

    def _tabulate(self) -> Table:
        x = np.arange(self.min, self.max + 1)
        return tabulate(x, (x / self.min) ** -self.alpha)


class Zipf(_Tabled, _Between):
    """Rank law: the shortest length has rank 1, the next rank 2, ...; p ~ 1 / rank^s. Steeper than power_law for min > 1."""

    s: float = Field(ge=0, le=100, description="exponent; 0 is uniform")
    example: ClassVar[dict[str, Any]] = {"s": 1.2, "min": 10, "max": 200}

    def _tabulate(self) -> Table:
        rank = np.arange(1.0, self.max - self.min + 2)
        return tabulate(np.arange(self.min, self.max + 1), rank**-self.s)


class Histogram(_Tabled):
    """Lengths with their weights: written here, or read from a file of two columns (CSV) or a JSON object {length: weight}."""

    file: str | None = Field(None, exclude=True, description="CSV or JSON file; what it holds becomes `values`")
    values: Annotated[dict[TokensFromZero, float], BeforeValidator(weights)] = Field(description="{128: 50%, 512: 50%} or counts")
    example: ClassVar[dict[str, Any]] = {"values": {512: "30%", 8: "50%", 64: "20%"}}

    @model_validator(mode="before")
    @classmethod
    def _read(cls, given: Any, info: ValidationInfo) -> Any:
        if not isinstance(given, Mapping) or given.get("file") is None:
            return given
        if given.get("values") is not None:
            raise ValueError("file and values are both given: one of them is needed")
        path = Path((info.context or {}).get("base", "."), str(given["file"]))
        return {**given, "file": None, "values": read_histogram(path)}

    def _tabulate(self) -> Table:
        lengths = sorted(self.values)
        return tabulate(np.array(lengths), np.array([self.values[length] for length in lengths]))

    def bounds(self) -> tuple[int, int]:
        possible = [length for length, share in self.values.items() if share > 0]
        return min(possible), max(possible)


def read_histogram(path: Path) -> dict[int, float]:
    """{length: weight} from a JSON object or from CSV lines `length,weight` (a heading is allowed; equal lengths add up).

    Raises ValueError naming the file, the line and what is wrong with it.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"file: {path} cannot be read: {error}") from error
    if text.lstrip().startswith("{"):
        return _from_json(text, path)
    found: dict[int, float] = {}
    for number, line in enumerate(text.splitlines(), 1):
        cells = [cell.strip() for cell in line.split(",")]
        if cells == [""] or (number == 1 and cells[0][:1].isalpha()):
            continue
        try:
            length, weight = int(cells[0]), float(cells[1])
        except (ValueError, IndexError):
            raise ValueError(f"{path}:{number}: {line!r} is not `length,weight` (such as 128,0.5)") from None
        found[length] = found.get(length, 0.0) + weight
    return found


def _from_json(text: str, path: Path) -> dict[int, float]:
    try:
        return {int(length): float(weight) for length, weight in json.loads(text).items()}
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: not a JSON object of the form {{length: weight}}: {error}") from error


LENGTHS: dict[str, type[Fixed] | type[Uniform] | type[LogNormal] | type[PowerLaw] | type[Zipf] | type[Histogram]] = {
    "fixed": Fixed,
    "uniform": Uniform,
    "lognormal": LogNormal,
    "power_law": PowerLaw,
    "zipf": Zipf,
    "histogram": Histogram,
}


def parse_lengths(value: Any, context: Any = None) -> Lengths:
    """A distribution from 128 or {dist: power_law, alpha: 1.8, min: 64, max: 2048}.

    Raises ValueError naming the nearest known distribution, or pydantic's located one for a wrong field. `context["base"]` is the
    directory that a histogram's file is relative to.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return Fixed(value=value)
    return named(value, "dist", LENGTHS, context)


AnyLengths = Annotated[
    Lengths,
    PlainValidator(lambda value, info: parse_lengths(value, info.context)),
    PlainSerializer(lambda lengths: written(lengths, "dist", LENGTHS)),
    WithJsonSchema(choices("dist", LENGTHS, {"type": "integer", "minimum": 0, "maximum": MOST})),
]
"""The field type of a scenario: `prompt: AnyLengths`."""
