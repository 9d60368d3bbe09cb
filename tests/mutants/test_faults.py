"""The list of faults fits the tree: `make mutants` can put each of them in."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutants.faults import Fault, ListError, problems, read_faults

KNOWN = Fault("a fault", "module.py", "step < 2", "step <= 2", ("test_it.py",))


def test_each_old_text_occurs_once_in_its_file() -> None:
    faults = read_faults()
    assert problems(faults) == []
    assert len({fault.name for fault in faults}) == len(faults)
    assert sum(not fault.equivalent for fault in faults) >= 60


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (KNOWN, None),
        (replace(KNOWN, equivalent="none sees it", tests=()), None),
        (replace(KNOWN, old="step < 3"), "occurs 0 times"),
        (replace(KNOWN, old="step"), "occurs 2 times"),
        (replace(KNOWN, file="moved.py"), "occurs 0 times"),
        (replace(KNOWN, new=KNOWN.old), "changes nothing"),
        (replace(KNOWN, tests=()), "either tests or the reason"),
        (replace(KNOWN, tests=("test_none.py::test",)), "there is no test_none.py"),
    ],
)
def test_a_fault_that_does_not_fit_is_named(tmp_path: Path, fault: Fault, said: str | None) -> None:
    (tmp_path / "module.py").write_text("if step < 2:\n    step = 3\n")
    (tmp_path / "test_it.py").touch()
    found = problems([fault], tmp_path)
    assert len(found) == (said is not None)
    assert all(line.startswith(fault.name) and str(said) in line for line in found)


@pytest.mark.parametrize(
    "text", ["", "fault = 3", '[[fault]]\nwhat = "?"', '[[fault]]\nwhy = "?"', "[["]
)
def test_a_list_that_does_not_read_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "faults.toml"
    path.write_text(text)
    with pytest.raises(ListError, match=str(path)):
        read_faults(path)
