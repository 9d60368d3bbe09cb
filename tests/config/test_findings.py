"""Findings: what they are about, how a sweep's are put together, and which are raised."""

import pytest

from pipeline_lib.config.findings import Finding, finding_of, merged, refusals, refuse
from pipeline_lib.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("train.lr: 4 is unusual", "train.lr"),
        ("data.train[0].path: no file", "data.train[0].path"),
        ("evaluate: takes about 5 h", "evaluate"),
        ("the run writes 5 GB (base: 1 GB)", ""),
        ("SLURM would refuse the job: no account", ""),
        ("node: its clock is 9 s behind this machine's", ""),
    ],
)
def test_a_text_that_begins_with_a_key_is_about_it(text: str, key: str) -> None:
    found = finding_of("warning", text)
    assert found.key == key
    assert found.text == text
    assert found.line == f"warning: {text}"


def test_what_all_experiments_have_is_said_once_and_the_rest_with_whom() -> None:
    note = Finding("note", "", "12 steps", {"steps": 12})
    warning = finding_of("warning", "train.lr: 4 is unusual")
    [refusal] = refusals(["train.strategy: ddp needs more"])
    found = merged([("a", [note, warning]), ("b", [refusal, note])])
    assert [one.kind for one in found] == ["refusal", "warning", "note"]
    assert [one.among for one in found] == [" (with b)", " (with a)", ""]
    assert found[1].text == "train.lr: 4 is unusual (with a)"
    assert found[2].numbers == {"steps": 12}
    assert found[1] == warning  # whoever has it


def test_all_refusals_are_raised_at_once_and_nothing_else() -> None:
    warning = finding_of("warning", "train.lr: 4 is unusual")
    refuse("my.yaml", [warning])
    with pytest.raises(ConfigError) as raised:
        refuse("my.yaml", [*refusals(["a: 1", "b: 2"]), warning])
    assert (raised.value.source, raised.value.problems) == ("my.yaml", ["a: 1", "b: 2"])
