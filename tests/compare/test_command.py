"""`compare` as people type it: in text, in JSON, on a large store, and before an attacker."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.config.dag import Dag
from pipeline_lib.core.files import read_json, write_json
from pipeline_lib.core.store import Store
from tests.compare.fakes import Samples, compared, experiment, made

ROOT = Path(__file__).parents[2]


def run(store: Store, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeline_lib", "compare", *arguments]
    environ = {**os.environ, "PIPELINE_STORE": str(store.root), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, env=environ, cwd=store.root.parent, capture_output=True, text=True, check=False
    )


def test_the_answer_comes_first_then_the_numbers_then_what_differs(three: Store) -> None:
    done = run(three, "demo-*")
    lines = [line.rstrip() for line in done.stdout.splitlines()]

    assert (done.returncode, done.stderr) == (0, "")
    assert lines[0] == "demo: 3 experiments"
    assert " ".join(lines[1:4]).startswith(
        "lr=0.003 has the lowest held-out loss of 3, 2.3502 nats/token, but its lead over "
        "lr=0.001 is within noise. It is better than lr=0.01 by more than chance."
    )
    assert "hold together for all 3 pairs" in done.stdout
    rows = [line.split() for line in lines]
    assert ["train.lr", "0.003", "0.001", "0.01"] in rows  # the best first
    assert ["cluster.cpu_ranks", "2", "2", "4"] in rows
    assert "Software of the training" not in done.stdout
    assert max(map(len, lines)) <= 100


def test_two_are_told_with_their_interval_and_what_it_rests_on(three: Store) -> None:
    said = " ".join(run(three, "demo-lr=0.01", "demo-lr=0.003").stdout.split())

    assert (
        "demo-lr=0.003 is better than demo-lr=0.01 by more than chance: its held-out loss is "
        "0.1617 nats/token" in said
    )
    assert re.search(
        r"lower, 95% interval 0\.15\d\d to 0\.17\d\d, on the same 287 held-out documents\.", said
    )
    assert "first differ" not in said


def test_json_holds_what_the_text_says(three: Store) -> None:
    found = json.loads(run(three, "demo-*", "--json").stdout)

    assert (found["best"], found["identical"], found["pairs"]) == ("lr=0.003", False, 3)
    assert found["config"] == {"train.lr": ["0.001", "0.003", "0.01"]}
    numbers = {one["name"]: one for one in found["experiments"]}
    assert numbers["demo-lr=0.003"]["versus_best"]["kind"] == "best"
    versus = numbers["demo-lr=0.01"]["versus_best"]
    assert versus["kind"] == "paired"
    assert 0 < versus["low"] < versus["difference"] < versus["high"]
    assert found["verdict"].startswith("lr=0.003 has the lowest held-out loss of 3")


def test_the_page_is_written_where_it_was_asked_for(three: Store, tmp_path: Path) -> None:
    page = tmp_path / "new" / "compare.html"
    done = run(three, "demo-*", "--page", str(page))

    assert f"wrote {page}" in done.stdout
    assert page.read_text().startswith("<!doctype html>")


def test_a_mistake_is_one_message_and_no_traceback(three: Store) -> None:
    for arguments, told in (
        (["demo-lr=0.003"], "name at least two different ones"),
        (["demo-lr=0.003", "demo-lr=0.3"], "did you mean"),
    ):
        done = run(three, *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert told in done.stderr
        assert "Traceback" not in done.stderr


def test_a_thousand_experiments_do_not_slow_down_the_comparison_of_two(store: Store) -> None:
    for number in range(2):
        made(store, f"demo-{number}", 0.1 * number, number, train={"seed": number})
    frozen = read_json(Dag((experiment("other"),), store).freeze())
    for number in range(1000):
        frozen["config"]["experiment"] = f"other-{number}"
        path = store.root / "experiments" / f"{number:016x}.json"
        path.write_text(json.dumps(frozen))

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run(store, "demo-0", "demo-1")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)

    assert done.returncode == 0, done.stderr
    # of a core: others may be busy
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5


def hostile(store: Store, attack: str) -> list[str]:
    """Two experiments whose names were edited into an attack; how to name them."""
    found = []
    for number in range(2):
        world = made(store, "demo", 0.1 * number, number, Samples.drawn(0), train={"seed": number})
        digest = world.experiment.ref("report").digest
        for path in (store.root / "experiments").iterdir():
            frozen: dict[str, Any] = read_json(path)
            if frozen["parts"]["report"] == digest:
                frozen["config"] |= {"experiment": attack, attack: attack}
                write_json(path, frozen)
        found.append(digest)
    return found


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_a_name_cannot_move_the_cursor(store: Store, arguments: tuple[str, ...]) -> None:
    names = hostile(store, "\x1b[2J\x1b]0;owned\x07evil\r\u202e[red]x[/red]")
    done = run(store, *names, *arguments)

    assert done.returncode == 0, done.stderr
    assert not [
        character for character in done.stdout if not character.isprintable() and character != "\n"
    ]
    assert "evil" in done.stdout
    assert compared(store, *names).title
