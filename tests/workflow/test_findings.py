"""What the machines of a training refuse: each refusal says what it is about."""

import json
from pathlib import Path
from typing import NoReturn

import pytest

from pipeline_lib.config.schema import Config
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.store import Store
from pipeline_lib.workflow.findings import TrainingMachines
from tests.config.keys import TINY


def test_a_refusal_says_its_key_or_that_it_is_of_the_hosts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    problems = ["node: its clock is 9 s behind", "cluster.nodes: 2, and the hosts are 3"]

    def refuse(*_: object) -> NoReturn:
        raise ConfigError("the hosts", problems)

    monkeypatch.setattr("pipeline_lib.workflow.findings.refuse_now", refuse)
    machines = TrainingMachines({}, Store(tmp_path), lambda line: None)
    config = Config.model_validate_json(json.dumps(TINY))
    assert [(one.key, one.text) for one in machines(config)] == [
        ("", f"the hosts: {problems[0]}"),
        ("cluster.nodes", problems[1]),
    ]
