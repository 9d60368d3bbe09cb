"""A training comes to a rung, with or without a loss, and a rung decides; the table tells all."""

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.config.compile import run_digest
from pipeline_lib.config.dag import Dag
from pipeline_lib.config.halving import (
    Reached,
    decision_path,
    reached_path,
    read_decision,
    read_reached,
    until,
    write_record,
)
from pipeline_lib.core.errors import (
    Diverged,
    IntegrityError,
    Interrupted,
    PipelineError,
    TrainingError,
)
from pipeline_lib.core.files import write_json, write_jsonl
from pipeline_lib.core.lock import locked
from pipeline_lib.core.stage import Job, run_stage
from pipeline_lib.core.store import Spec, Store
from pipeline_lib.launch.outcome import explain
from pipeline_lib.launch.rank_report import Reporting
from pipeline_lib.report.outcomes import outcome_table, outcomes
from pipeline_lib.workflow.rungs import conclude_rung, reach
from tests.complete import step_json, training_json
from tests.status.stubs import CONFIG

WHOLE = Spec("train", 1, {"seed": 3})
LOSSES = {5: 3.0, 10: 2.0, 15: 1.0}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def seal(
    spec: Spec, store: Store, steps: int, total_steps: int = 20, *, stopped_early: bool = False
) -> None:
    """What a training leaves that validated every 5 steps."""

    def train(job: Job) -> dict[str, Any]:
        rows = [
            step_json(step, **({"validation_loss": LOSSES.get(step, 0.5)} if step % 5 == 0 else {}))
            for step in range(1, steps + 1)
        ]
        write_jsonl(job.out / "metrics.jsonl", rows)
        summary = training_json(steps=steps, total_steps=total_steps, stopped_early=stopped_early)
        write_json(job.out / "summary.json", summary)
        return summary

    run_stage(train, spec, store, lambda _: None)


def reached(store: Store, step: int, train: Any) -> Reached:
    spec = until(step, WHOLE)
    out = reached_path(store, spec.digest)
    reach(spec, store, out, train, lambda _: None)
    return read_reached(out)


def test_the_loss_of_the_rung_is_kept(store: Store) -> None:
    spec = until(10, WHOLE)
    assert reached(store, 10, lambda: seal(spec, store, 10)) == Reached(10, 2.0, False, None)


def test_who_waited_for_what_another_snakemake_has_decided_by_meanwhile_takes_its_word(
    store: Store,
) -> None:
    """It removed what was sealed. Whatever else is missing is an error."""
    spec = until(10, WHOLE)
    found = Reached(10, 2.0, False, None)
    assert (
        reached(store, 10, lambda: write_record(reached_path(store, spec.digest), found)) == found
    )
    with pytest.raises(FileNotFoundError):
        reach(spec, store, reached_path(store, "other"), lambda: None, lambda _: None)


@pytest.mark.parametrize(
    ("steps", "stopped_early", "expected"),
    [
        (20, False, Reached(10, 2.0, False, None)),  # a whole run says what it had come to
        (7, True, Reached(5, 3.0, True, None)),
        (15, True, Reached(10, 2.0, False, None)),
    ],
)
def test_a_whole_training_that_is_done_is_asked(
    store: Store, steps: int, stopped_early: bool, expected: Reached
) -> None:
    seal(WHOLE, store, steps, stopped_early=stopped_early)
    assert reached(store, 10, lambda: pytest.fail("trained again")) == expected
    assert store.sealed(WHOLE.ref).exists()


def test_the_end_before_the_rung_is_the_end(store: Store) -> None:
    spec = until(50, WHOLE)
    assert reached(store, 50, lambda: seal(spec, store, 20)) == Reached(20, 0.5, True, None)


def test_numbers_that_go_wrong_lose_and_whatever_may_go_well_elsewhere_is_no_answer(
    store: Store, tmp_path: Path
) -> None:
    """A rank tells the launcher which it was."""

    def fail(error: PipelineError) -> None:
        with suppress(PipelineError), Reporting(tmp_path, 0):
            raise error
        raise explain("spawn", error.exit_code, None, 1, tmp_path)

    found = reached(store, 10, lambda: fail(Diverged("gave up at step 7")))
    assert found == Reached(None, None, False, "rank 0: gave up at step 7")
    out = reached_path(store, "other")
    for error in (
        Interrupted("killed"),
        TrainingError("wte is not the same on ranks 0, 1. Run again, elsewhere"),
        TrainingError("GPU memory is full in step 2"),
    ):
        with pytest.raises(PipelineError, match=str(error)) as raised:
            reach(until(10, WHOLE), store, out, partial(fail, error), lambda _: None)
        assert raised.value.exit_code == error.exit_code
        assert not out.exists()


def test_without_a_validation_there_is_no_answer(store: Store) -> None:
    spec = until(4, WHOLE)
    with pytest.raises(TrainingError, match="no validation up to step 4"):
        reached(store, 4, lambda: seal(spec, store, 4))
    assert not reached_path(store, spec.digest).exists()


@pytest.fixture
def dag(tmp_path: Path, store: Store) -> Dag:
    config = tmp_path / "swept.yaml"
    text = CONFIG.format(name="swept", lr="1.0e-3").replace(
        "save_every", "validate_every_steps: 5, save_every"
    )
    config.write_text(
        text + "sweep: {train.lr: [1.0e-3, 2.0e-3, 3.0e-3, 4.0e-3], halving: {first_step: 10}}\n"
    )
    return Dag.compile([str(config)], {}, store)


def come_to(dag: Dag, place: int, losses: list[float | None]) -> None:
    """Say what the trainings came to at a rung; None for one that failed."""
    rung = dag.rungs[place]
    for (_, spec), loss in zip(rung.trainings.items(), losses, strict=False):
        failure = None if loss is not None else "diverged"
        write_record(reached_path(dag.store, spec.digest), Reached(rung.step, loss, False, failure))


def test_a_decision_removes_what_was_sealed_for_the_rung_but_what_is_used_or_worked_on(
    dag: Dag,
) -> None:
    first = dag.rungs[0]
    free, used, busy, missing = first.trainings.values()
    for spec in (free, used, busy):
        write_json(dag.store.sealed(spec.ref) / "manifest.json", {})
        dag.store.pointer(spec.ref).touch()
    write_json(
        dag.store.root / "experiments" / "one.json", {"config": {}, "parts": {"train": used.digest}}
    )
    come_to(dag, 0, [3.0, 2.0, 1.0, 4.0])
    with locked(dag.store.lock_path(run_digest(busy)), print):
        conclude_rung(dag, first.digest, lambda _: None)

    assert [dag.store.sealed(spec.ref).exists() for spec in (free, used, busy, missing)] == [
        False,
        True,
        True,
        False,
    ]
    assert [dag.store.pointer(spec.ref).exists() for spec in (free, used, busy)] == [
        False,
        True,
        True,
    ]


def test_rungs_decide_one_after_the_other_and_open_the_next(dag: Dag, tmp_path: Path) -> None:
    said: list[str] = []
    come_to(dag, 0, [3.0, 2.0, None, 1.0])
    first, second = dag.rungs
    conclude_rung(dag, first.digest, said.append)
    assert "decided at step 10; the next decision is at step 20" in said[-1]
    specs = [dag.store.spec_path(spec.digest).exists() for spec in second.trainings.values()]
    assert specs == [False, True, False, True]
    with pytest.raises(IntegrityError, match="not the result of a training at a rung"):
        conclude_rung(dag, second.digest, said.append)
    come_to(dag, 1, [0.0, 1.5, 0.0, 0.5])  # those of who was stopped are not looked at
    conclude_rung(dag, second.digest, said.append)
    assert [
        one.loss for one in read_decision(decision_path(dag.store, second.digest)).competitors
    ] == [0.5, 1.5]

    log = tmp_path / "logs" / "rung" / f"{list(first.trainings.values())[2].digest}.log"
    log.parent.mkdir(parents=True)
    log.touch()
    cells = [one.cells[:3] for one in outcomes(dag, logs=tmp_path / "logs")]
    assert cells == [
        ("swept-lr=0.002", "stopped", "1.500 at step 20"),
        ("swept-lr=0.001", "stopped", "3.000 at step 10"),
        ("swept-lr=0.003", "failed: train", "n/a at step 10"),
        ("swept-lr=0.004", "not done: download", "0.500 at step 20"),
    ]
    assert str(log) in outcome_table(outcomes(dag, logs=tmp_path / "logs"))
    assert outcome_table(outcomes(dag)).endswith("4 experiments: 2 stopped, 1 failed, 1 not done")


def test_where_all_failed_nobody_goes_on_and_all_reasons_are_told(dag: Dag) -> None:
    come_to(dag, 0, [None] * 4)
    with pytest.raises(
        TrainingError, match=r"no training came to step 10 with a loss; delete the files"
    ) as raised:
        conclude_rung(dag, dag.rungs[0].digest, print)
    paths = [reached_path(dag.store, spec.digest) for spec in dag.rungs[0].trainings.values()]
    assert str(raised.value).splitlines()[1:] == [
        f"  - swept-lr=0.00{place}: diverged ({path})" for place, path in enumerate(paths, start=1)
    ]
    assert not decision_path(dag.store, dag.rungs[0].digest).exists()


def test_a_damaged_decision_is_named_and_nothing_is_shown_for_it(dag: Dag) -> None:
    path = decision_path(dag.store, dag.rungs[0].digest)
    path.parent.mkdir(parents=True)
    path.write_text('{"step": 10, "competitors": []}')
    with pytest.raises(IntegrityError, match=f"{path.name}: not the decision of a rung.*delete it"):
        outcomes(dag)
