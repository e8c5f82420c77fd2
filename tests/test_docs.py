"""The docs against the product: commands, scenarios, links. test_scenario.py holds docs/scenario.md against the code."""

import re
import shlex
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvbench.cli import app
from kvbench.scenario import load

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE = re.compile(r"^```.*?^```|^    .*$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?:`| *)(?:- )?(?:\.venv/bin/)?kvbench ([^`\n#|>]+)", re.MULTILINE)


def commands(page: Path) -> list[str]:
    """What follows `kvbench` in a page's code, up to a comment, a pipe or a redirection."""
    return [found.strip() for code in CODE.findall(page.read_text()) for found in COMMAND.findall(code)]


COMMANDS = [(page, command) for page in PAGES for command in commands(page)]
SNIPPETS = [(page, text) for page in PAGES for text in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.S)]
SCENARIOS = [(page, text) for page, text in SNIPPETS if re.search(r"^target:", text, re.M)]


def names(pairs: list[tuple[Path, str]]) -> list[str]:
    return [f"{page.name}: {text.splitlines()[0][:60]}" for page, text in pairs]


@cache
def helped(*verb: str) -> str:
    result = CliRunner().invoke(app, [*verb, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0, f"kvbench {' '.join(verb)} --help: {result.output}"
    return result.output


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as Markdown viewers make them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_something_was_found() -> None:
    assert len(COMMANDS) > 20
    assert len(SCENARIOS) >= 2
    assert {page.name for page, _ in COMMANDS} >= {
        "README.md",
        "first-run.md",
        "nightly-ci.md",
        "traces.md",
        "reading-a-report.md",
    }


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=names(COMMANDS))
def test_commands_are_those_of_the_product(page: Path, command: str) -> None:
    """The verb and every option exist; a scenario of ours loads with the overrides given."""
    words = shlex.split(command)
    verb = words[:2] if words[0] in ("trace", "laws") and len(words) > 1 else words[:1]
    shown = helped(*verb)
    options = [word.split("=")[0] for word in words if re.fullmatch(r"--?[a-z][a-z-]*(=.*)?", word)]
    assert [option for option in options if not re.search(rf"(?<![\w-]){option}(?![\w-])", shown)] == []
    file = words[len(verb)] if len(words) > len(verb) else ""
    if verb[0] in ("run", "check", "laws") and file.startswith("scenarios/"):
        pairs = list(pairwise(words))
        load(ROOT / file, [value for option, value in pairs if option == "--set"], dict(pairs).get("--target"))


@pytest.mark.parametrize(("page", "text"), SCENARIOS, ids=names(SCENARIOS))
def test_scenarios_in_the_docs_load(page: Path, text: str, tmp_path: Path) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text(text)
    load(file, [], None)


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not link.startswith("http"):
            path, _, anchor = link.partition("#")
            target = (page.parent / path) if path else page
            assert target.exists(), f"{page}: {link}"
            assert not anchor or anchor in anchors(target), f"{page}: no heading for {link}"


def test_the_index_names_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / link).resolve() for link in re.findall(r"\]\(([^)#\s]+\.md)\)", index.read_text())}
    assert {page.resolve() for page in (ROOT / "docs").rglob("*.md")} - linked == {index.resolve()}


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_no_page_knows_the_machine_it_was_written_on(page: Path) -> None:
    assert re.findall(r"(?<![\w.])/(?:work|tmp|root|home|mnt)/\S*", page.read_text()) == []
