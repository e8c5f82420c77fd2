"""Length distributions against exact probabilities and hand-made numbers, and what they refuse."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel, ValidationError
from scipy import stats

from kvbench.workload.lengths import (
    AnyLengths,
    Fixed,
    Histogram,
    LogNormal,
    PowerLaw,
    Uniform,
    Zipf,
    parse_lengths,
)


def drawn(lengths: Any, count: int = 50_000) -> np.ndarray:
    rng = np.random.default_rng(11)
    return np.array([lengths.sample(rng) for _ in range(count)])


def chi_square(sample: np.ndarray, lengths: np.ndarray, shares: np.ndarray) -> float:
    """p of the sample under exact probabilities, lengths joined so that every cell expects 20 or more."""
    expected = len(sample) * shares / shares.sum()
    cell = np.floor(np.cumsum(expected) / 20).astype(int)
    cell = np.minimum(cell, cell.max() - 1)  # the last one may be short
    seen = np.bincount(cell, np.array([(sample == length).sum() for length in lengths]))
    wanted = np.bincount(cell, expected)
    used = wanted > 0
    return float(stats.chisquare(seen[used], wanted[used]).pvalue)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 1.8, 2.1, 3.5])
def test_power_law_draws_its_exact_probabilities(alpha: float) -> None:
    """p(x) = x^-alpha / sum, on 16..400; the exponent is the density's, not the tail's."""
    x = np.arange(16, 401)
    shares = x.astype(float) ** -alpha
    law = PowerLaw(alpha=alpha, min=16, max=400)
    assert chi_square(drawn(law), x, shares) > 1e-4
    assert law.mean() == pytest.approx((x * shares).sum() / shares.sum(), rel=1e-12)


def test_power_law_by_hand() -> None:
    """alpha 1 on 1..3: 1, 1/2, 1/3 of 11/6, so 6/11, 3/11, 2/11; mean 18/11."""
    law = PowerLaw(alpha=1, min=1, max=3)
    assert law.table.shares == pytest.approx([6 / 11, 3 / 11, 2 / 11])
    assert law.mean() == pytest.approx(18 / 11)
    assert [law.quantile(q) for q in (0, 0.54, 0.55, 0.82, 1)] == [1, 1, 2, 3, 3]


def test_a_very_steep_or_very_wide_power_law_holds() -> None:
    assert PowerLaw(alpha=100, min=5000, max=10_000).mean() == pytest.approx(5000 * 99 / 98, rel=0.01)  # tail index 99
    wide = PowerLaw(alpha=2, min=1, max=1_000_000)
    assert wide.mean() == pytest.approx((math.log(1e6) + np.euler_gamma) / (math.pi**2 / 6), rel=1e-5)
    assert PowerLaw(alpha=1.5, min=7, max=7).mean() == 7


def test_zipf_is_by_rank() -> None:
    """min 100: ranks 1, 2, 3 at 100, 101, 102 with 6/11, 3/11, 2/11 (a power law would give them almost equally)."""
    zipf = Zipf(s=1, min=100, max=102)
    assert zipf.table.shares == pytest.approx([6 / 11, 3 / 11, 2 / 11])
    ranks = np.arange(1, 301)
    assert chi_square(drawn(Zipf(s=1.1, min=50, max=349)), ranks + 49, ranks**-1.1) > 1e-4


def test_lognormal_is_cut_not_piled_up() -> None:
    law = LogNormal(median=100, sigma=1.0, min=50, max=400)
    x = np.arange(50, 401)
    whole = stats.lognorm(1.0, scale=100)
    assert chi_square(drawn(law), x, whole.cdf(x + 0.5) - whole.cdf(x - 0.5)) > 1e-4
    assert LogNormal(median=200, sigma=0.5, max=100_000).quantile(0.5) == pytest.approx(200, abs=1)
    assert LogNormal(median=200, sigma=0.5, max=100_000).mean() == pytest.approx(200 * math.exp(0.125), rel=1e-3)


def test_lognormal_far_in_either_tail_keeps_its_digits() -> None:
    """20 sigma above the median the tail falls like exp(-20 (ln x - ln min) / sigma): almost all at the bound, and finite."""
    high = LogNormal(median=1, sigma=0.5, min=22_026, max=50_000)  # ln 22,026 = 10 = 20 sigma
    assert 22_026 <= high.mean() < 22_026 * 1.03
    assert high.mean() > 22_026 * 1.02  # e^(1/40) - 1 = 2.5 %
    low = LogNormal(median=5_000_000, sigma=0.7, min=1, max=10)
    assert 9 < low.mean() < 10


def test_uniform_and_fixed() -> None:
    assert chi_square(drawn(Uniform(min=3, max=12)), np.arange(3, 13), np.ones(10)) > 1e-4
    assert [Uniform(min=3, max=12).quantile(q) for q in (0, 0.1, 0.11, 0.5, 1)] == [3, 3, 4, 7, 12]
    assert parse_lengths(64) == Fixed(value=64)
    assert parse_lengths({"dist": "fixed", "value": 64}) == Fixed(value=64)


def test_histogram_inline_by_shares_or_counts() -> None:
    shares = Histogram.model_validate({"values": {512: "50%", 128: "30%", 64: "20%"}}, context={"text": True})
    counts = Histogram.model_validate({"values": {512: 5, 128: 3, 64: 2, 9000: 0}}, context={"text": True})
    assert shares.mean() == pytest.approx(counts.mean()) == pytest.approx(256 + 38.4 + 12.8)
    assert counts.bounds() == (64, 512)  # what has no weight cannot come
    assert counts.quantile(1) == 512
    assert chi_square(drawn(counts), np.array([64, 128, 512]), np.array([2.0, 3, 5])) > 1e-4
    thirds = Histogram.model_validate({"values": {1: "33.3%", 2: "33.3%", 3: "33.3%"}})
    assert thirds.mean() == pytest.approx(2)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "length,weight\n128,3\n\n 64 , 1\n128,4.0\n"),
        ("b.csv", "128,7\n64,1"),
        ("c.json", json.dumps({"128": 7, "64": 1})),
    ],
)
def test_histogram_from_a_file_beside_the_scenario(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    lengths = parse_lengths({"dist": "histogram", "file": name}, {"text": True, "base": tmp_path})
    assert lengths.mean() == pytest.approx((7 * 128 + 64) / 8)
    assert parse_lengths({"dist": "histogram", "file": str(tmp_path / name)}) == lengths


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("128,3\n64\n", ":2: '64' is not `length,weight`"),
        ("128,3\n64,x\n", ":2: '64,x' is not"),
        ("1.5,3\n", ":1: '1.5,3' is not"),
        ("", "has no values"),
        ("128,0\n", "add up to 0"),
        ("128,-1\n", "out of range"),
        ("128,nan\n", "out of range"),
        ("-5,1\n", "greater than or equal to 0"),
        ('{"a": 1}', "not a JSON object"),
        ('{"1": [1]}', "not a JSON object"),
        ('{"1": 1', "not a JSON object"),
    ],
)
def test_a_bad_histogram_file_says_where(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "h").write_text(text)
    with pytest.raises(ValidationError) as caught:
        parse_lengths({"dist": "histogram", "file": "h"}, {"base": tmp_path})
    assert says in str(caught.value)


def test_a_missing_or_binary_histogram_file_is_an_error_not_a_crash(tmp_path: Path) -> None:
    (tmp_path / "h").write_bytes(b"\xff\xfe\x00")
    for name in ("none.csv", "h"):
        with pytest.raises(ValidationError, match="cannot be read"):
            parse_lengths({"dist": "histogram", "file": name}, {"base": tmp_path})


class Holder(BaseModel):
    prompt: AnyLengths


@pytest.mark.parametrize(
    ("spec", "loc", "says"),
    [
        ({"dist": "power_law", "alpha": 1.8, "min": 100, "max": 10}, (), "min: 100 is more than max: 10"),
        ({"dist": "power_law", "alpha": float("nan"), "max": 10}, ("alpha",), "finite"),
        ({"dist": "power_law", "alpha": -1, "max": 10}, ("alpha",), "greater than or equal to 0"),
        ({"dist": "power_law", "alpha": 2, "min": 0, "max": 10}, ("min",), "greater than or equal to 1"),
        ({"dist": "power_law", "alpha": 2, "max": 10**9}, ("max",), "less than or equal to 10000000"),
        ({"dist": "power_law", "alpha": 2}, ("max",), "required"),
        ({"dist": "lognormal", "median": 100, "sigma": 0, "max": 10}, ("sigma",), "greater than 0"),
        ({"dist": "lognormal", "median": 1e6, "sigma": 0.1, "max": 10}, (), "30 sigma outside min: 1 to max: 10"),
        ({"dist": "zipf", "s": float("inf"), "max": 10}, ("s",), "finite"),
        ({"dist": "uniform", "min": 1.5, "max": 10}, ("min",), "valid integer"),
        ({"dist": "fixed", "value": -1}, ("value",), "greater than or equal to 0"),
        ({"dist": "fixed", "value": 5, "vlaue": 6}, ("vlaue",), "not permitted"),
        ({"dist": "histogram", "values": {1: "50%", 2: "40%"}}, ("values",), "add up to 90 %"),
        ({"dist": "histogram", "values": {1: "50%", 2: 3}}, ("values",), "mixes percentages and bare weights"),
        ({"dist": "histogram", "values": {1: 0}}, ("values",), "add up to 0"),
        ({"dist": "histogram", "values": {}}, ("values",), "has no values"),
        ({"dist": "histogram", "values": {1: None}}, ("values",), "not a weight"),
        ({"dist": "histogram", "values": [1, 2]}, ("values",), "not a mapping"),
        ({"dist": "histogram", "values": {"x": 1}}, ("values", "x", "[key]"), "valid integer"),
        ({"dist": "histogram"}, ("values",), "required"),
        ({"dist": "histogram", "file": "a", "values": {1: 1}}, (), "both given"),
        ({"dist": "powerlaw", "alpha": 2}, (), "did you mean 'power_law'"),
        ({"alpha": 2}, (), "the key 'dist' is missing"),
        ({"dist": ["fixed"]}, (), "unknown"),
        (True, (), "not a mapping"),
        ("64", (), "not a mapping"),
        (-3, ("value",), "greater than or equal to 0"),
    ],
)
def test_refusals_name_place_value_and_range(spec: Any, loc: tuple[str, ...], says: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Holder.model_validate({"prompt": spec})
    (error,) = caught.value.errors()
    assert error["loc"] == ("prompt", *loc)
    assert says in error["msg"]
