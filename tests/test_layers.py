"""The line between rooms: who may import whom (docs/architecture.md). A violation names the file and the line to look at."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "kvbench"
CONTRACTS = {"core", "units", "clock"}  # the vocabulary; every room but core itself may use it
DOORS = {"workload", "control", "target", "engine", "metrics", "sink", "report", "collect", "nsys"}

# room: what it may import besides itself. A dotted name is that module alone.
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "units": set(),
    "clock": {"core"},
    "shape": set(),
    "layout": {"shape"},
    "profile": {"core", "units", "shape", "layout"},
    "reference": {"units"},
    "workload": {"core", "units"},
    "workload.standard": {"core", "units", "profile"},
    "metrics": {"core", "units"},
    "engine": {"core", "units", "profile"},
    "control": {"core", "clock", "units"},
    "control.policy": {"core", "units", "profile"},
    "unanswered": set(),
    "target": {"core", "clock", "units", "unanswered"},
    "target.overheard": {"core", "collect"},
    "target.sim": {"core", "clock", "units", "engine", "profile"},
    "sink": {"core", "clock", "units", "metrics.names", "metrics.request"},
    "replay": {"core", "clock", "report", "sink"},
    "tables": {"core", "metrics.request", "report", "sink.lines"},
    "serve": {"core", "clock", "engine", "workload.tokenizers"},
    "journal": {"core"},
    "collect": {"core", "clock", "units", "metrics", "unanswered"},
    "nsys": {"core"},
    "collect.serverlog": {"core", "clock", "units", "profile"},
    "collect.moments": {"core", "metrics", "stop"},
    "collect.session": {"core", "nsys"},
    "launch": {"core", "clock", "units", "spec", "collect.serverlog", "target"},
    "agent": {"core", "clock", "collect", "sink"},
    "crew": {"core", "clock", "collect"},
    "scribe": {"core", "crew", "journal", "metrics", "sink"},
    "stop": {"core", "units", "metrics"},
    "evidence": {"core", "units"},
    "counted": {"core", "evidence"},
    "losses": {"core", "units", "evidence"},
    "verdict": {"core", "units", "metrics", "evidence", "counted", "losses"},
    "report": {"core", "units", "metrics", "evidence", "counted", "losses", "verdict", "stop"},
    "report.changes": {"core", "metrics", "residuals"},
    "source": {"core"},
    "pulse": {"core", "clock"},
    "signals": set(),
    "crowd": {"core"},
    "driver": {"core", "clock", "control.gate", "crowd", "source", "target"},
    "phases": {"core", "level", "metrics", "source"},
    "level": {"core"},
    "residuals": {"core", "metrics"},
    "watch": {"core", "units", "metrics", "level", "residuals"},
    "warmup": {"core", "units", "metrics", "source"},
    "pilot": {"core", "control", "driver", "level", "metrics", "phases", "stop", "watch"},
    "run": {
        "core", "clock", "control", "crew", "driver", "journal", "metrics", "phases", "pilot", "pulse", "scribe", "signals",
        "sink", "source", "stop", "target",
    },
}  # fmt: skip
COMPOSERS = {"scenario", "cli", "__main__", "compose", "spec", "endpoint", "yaml_source", "problem", "forecast", "timetable"}
COMPOSERS |= {"agenda", "fleet", "baseline", "doubts", "expected", "plan", "startup"}


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> list[tuple[str, int]]:
    """(imported module of ours without the `kvbench.` prefix, line)."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "kvbench":
            base = node.module.partition(".")[2]
            names = [f"{base}.{a.name}" if base else a.name for a in node.names]
            for name in names:
                inside = (ROOT / (name.replace(".", "/") + ".py")).exists() or (ROOT / name.replace(".", "/")).is_dir()
                found.append((name if inside else base, node.lineno))
        elif isinstance(node, ast.Import):
            found += [(a.name.partition(".")[2], node.lineno) for a in node.names if a.name.split(".")[0] == "kvbench"]
    return [(name, line) for name, line in found if name]


MODULES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=[module_name(p) or "kvbench" for p in MODULES])
def test_imports_stay_in_their_room(path: Path) -> None:
    module = module_name(path)
    room = module.split(".")[0]
    for name, line in imports(path):
        other = name.split(".")[0]
        if other == room:
            continue
        where = f"{path.relative_to(ROOT.parent)}:{line}: {module or 'kvbench'} imports {name}"
        if room in COMPOSERS:
            assert other != "cli" or room == "__main__", where
            continue
        allowed = ALLOWED.get(module, ALLOWED.get(room))
        assert allowed is not None, f"{path}: a new room; say in ALLOWED what it may import"
        assert name in allowed or other in allowed, f"{where}; it may import {sorted(allowed) or 'nothing of ours'}"


@pytest.mark.parametrize("door", sorted(DOORS))
def test_a_door_holds_contracts_only(door: str) -> None:
    """A package's __init__ is its door: Protocols and the errors and data their signatures name, no functions."""
    tree = ast.parse((ROOT / door / "__init__.py").read_text())
    assert ast.get_docstring(tree), f"{door}: the door says what the room is for"
    for node in tree.body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        assert not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.For, ast.If)), f"{door}/__init__.py:{node.lineno}"


def test_decisions_do_no_io() -> None:
    """Laws, windows, stop rules and the engine are synchronous: no await, no clock."""
    for path in MODULES:
        module = module_name(path)
        if (
            module.split(".")[0] in {"metrics", "stop", "control", "engine", "level", "watch", "residuals"}
            and module != "engine.server"
        ):
            for node in ast.walk(ast.parse(path.read_text())):
                assert not isinstance(node, (ast.Await, ast.AsyncFunctionDef)), f"{path}:{getattr(node, 'lineno', 0)} awaits"


def test_only_the_clock_reads_time() -> None:
    for path in MODULES:
        if module_name(path) in {"clock"}:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time":
                used = (module_name(path), node.attr)
                assert used == ("cli.doctor", "get_clock_info"), f"{path}:{node.lineno} reads time.{node.attr}"


def test_modules_stay_small() -> None:
    """About 300 lines: a file that needs more has two nouns in it."""
    sizes = {str(p.relative_to(ROOT.parent)): len(p.read_text().splitlines()) for p in MODULES}
    assert {name: lines for name, lines in sizes.items() if lines > 320} == {}
