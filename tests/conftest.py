"""Options of the suite."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden-rewrite", action="store_true", help="write the golden files anew (make golden shows what changed)")
