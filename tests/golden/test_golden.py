"""What users see, pinned: the plans of the shipped scenarios and the numbers of one short run on the embedded engine.

A change here is a change for users: `make golden` rewrites the files and shows the difference.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.whole import ROOT, kvbench, simulated

HERE = Path(__file__).parent
SCENARIOS = sorted(path.stem for path in (ROOT / "scenarios").glob("*.yaml"))


def compare(request: pytest.FixtureRequest, name: str, text: str) -> None:
    file = HERE / name
    if request.config.getoption("--golden-rewrite"):
        file.write_text(text)
    assert text == file.read_text(), f"{name} has changed: if that is meant, run `make golden` and commit it"


def rounded(value: Any) -> Any:
    """Six significant digits: beyond them platforms differ."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


@pytest.mark.parametrize("name", SCENARIOS)
def test_plan_of_a_shipped_scenario(name: str, request: pytest.FixtureRequest) -> None:
    done = kvbench("check", f"scenarios/{name}.yaml", "--json")
    assert done.returncode == 0, done.stderr
    plan = rounded(json.loads(done.stdout))
    plan["files"] = [Path(file["file"]).name for file in plan["files"]]
    compare(request, f"plan_{name}.json", json.dumps(plan, indent=1, sort_keys=True) + "\n")


def test_numbers_of_smoke(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    run = simulated((ROOT / "scenarios/smoke.yaml").read_text(), tmp_path)
    latency = {
        name: {way: run.summary["latency"][name][way] for way in ("mean", "p50", "p99", "max")}
        for name in ("response_ttft", "ttft", "tpot", "e2e")
    }
    found = {
        "accounting": run.summary["accounting"]["total"],
        "latency": latency,
        "tokens": run.summary["tokens"],
        "engine": run.summary["engine"],
        "verdict": run.summary["verdict"]["verdict"],
        "code": run.code,
    }
    compare(request, "smoke.json", json.dumps(rounded(found), indent=1, sort_keys=True) + "\n")
