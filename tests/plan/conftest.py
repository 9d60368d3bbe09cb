"""What tests of the plan share."""

import pytest

from pipeline_lib.plan.case import Case
from pipeline_lib.plan.legal import ways_of
from pipeline_lib.plan.ways import Ways


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each table of ways that is counted: what a search takes, on any machine."""
    rows: list[int] = []

    def counted(case: Case, counts: list[int], is_lean: bool = False) -> Ways:
        ways = ways_of(case, counts, is_lean)
        rows.append(len(ways))
        return ways

    monkeypatch.setattr("pipeline_lib.plan.choose.ways_of", counted)
    return rows
