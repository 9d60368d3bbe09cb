"""Successive halving: the rungs, who goes on, and what is said of incomparable experiments."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_lib.config.compile import run_digest
from pipeline_lib.config.dag import Dag
from pipeline_lib.config.halving import (
    Decision,
    Halving,
    Reached,
    decide,
    decision_path,
    read_decision,
    read_reached,
    rungs_of,
    write_record,
)
from pipeline_lib.core.errors import ConfigError, IntegrityError, Unreadable
from pipeline_lib.core.store import Spec, Store
from tests.config.test_sweep import BASE, problems_of, written
from tests.core.unreadable import endless_link

VALIDATED = BASE.replace("lr: 1.0e-4", "lr: 1.0e-4, validate_every_steps: 5")
FOUR = "train.seed: [1, 2, 3, 4]"


def decided(losses: list[float | None], *, ended: bool = False) -> Decision:
    specs = {f"t{number}": Spec("train", 1, {"seed": number}) for number in range(len(losses))}
    rung = rungs_of(Halving(10, 0.5), specs)[0]
    reached = {
        key: Reached(10, loss, ended, None if loss is not None else "diverged")
        for key, loss in zip(specs, losses, strict=True)
    }
    return decide(rung, 20, reached, {key: [key] for key in specs})


@pytest.mark.parametrize(
    ("count", "keep", "steps"),
    [
        (8, 0.5, [10, 20, 40]),
        (7, 0.5, [10, 20, 40]),
        (9, 0.3333, [10, 30]),
        (2, 0.1, [10]),
        (100, 0.1, [10, 100]),
        (1, 0.5, []),
    ],
)
def test_rungs_lie_ever_further_apart_until_one_is_left(
    count: int, keep: float, steps: list[int]
) -> None:
    assert Halving(10, keep).steps(count) == steps


@given(st.integers(1, 1000), st.floats(0.01, 0.5), st.integers(1, 1000))
def test_every_rung_stops_somebody_and_lies_where_all_validate(
    count: int, keep: float, first_step: int
) -> None:
    halving = Halving(first_step, keep)
    steps = halving.steps(count)
    assert steps == sorted(set(steps))
    assert all(step % first_step == 0 for step in steps)
    for _ in steps:
        assert 1 <= halving.survivors(count) < count
        count = halving.survivors(count)
    assert count == 1


def test_the_best_part_goes_on() -> None:
    decision = decided([3.0, 1.0, 4.0, 2.0])
    assert decision.survivors == ["t1", "t3"]
    assert [one.why for one in decision.competitors][::3] == [
        "place 1 of 4, 2 go on",
        "place 4 of 4, 2 go on",
    ]
    assert decision.next_step == 20


def test_of_the_same_losses_the_earlier_in_the_file_goes_on() -> None:
    decision = decided([2.0, 1.0, 2.0, 2.0])
    assert decision.survivors == ["t1", "t0"]
    assert decision.competitors[2].why.endswith(
        "as good as the last of them, which stands earlier in the file"
    )


def test_what_failed_is_last_and_never_goes_on() -> None:
    decision = decided([None, None, None, 9.0])
    assert decision.survivors == ["t3"]
    assert decision.next_step is None  # one is left
    assert [one.failure for one in decision.competitors] == [
        None,
        "diverged",
        "diverged",
        "diverged",
    ]
    assert decided([None, None]).survivors == []


def test_what_has_ended_is_not_stopped() -> None:
    decision = decided([3.0, 1.0, None, 2.0], ended=True)
    assert decision.survivors == ["t1", "t3", "t0"]
    assert decision.next_step is None


def test_records_are_read_as_written_and_damaged_ones_are_named(tmp_path: Path) -> None:
    path, decision = tmp_path / "one.json", decided([3.0, 1.0, None])
    write_record(path, decision)
    read = read_decision(path)
    assert (read.step, read.next_step, list(read.competitors)) == (
        10,
        decision.next_step,
        decision.competitors,
    )
    for content in (
        "",
        "[]",
        "{}",
        path.read_text().replace("1.0", '"1.0"'),
        path.read_text().replace("true", "false"),
    ):
        path.write_text(content)
        with pytest.raises(IntegrityError, match="one.json: not the decision of a rung.*delete it"):
            read_decision(path)
        with pytest.raises(
            IntegrityError, match="one.json: not the result of a training at a rung.*delete it"
        ):
            read_reached(path)


def test_records_that_cannot_be_read_are_not_to_be_deleted(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    write_record(path, decided([3.0, 1.0, None]))
    for read in (read_decision, read_reached):
        with endless_link(path), pytest.raises(Unreadable, match=f"{path}: cannot be read"):
            read(path)


WRONG = {
    "not a mapping": (
        "3",
        "sweep: halving: 3 is not keys with values, as in {first_step: 50, keep: 0.5}",
    ),
    "no first step": (
        "{keep: 0.5}",
        "sweep: halving: first_step: missing; the step of the first decision, as in",
    ),
    "no step": (
        "{first_step: 0}",
        "sweep: halving: first_step: 0 is not a whole number of at least 1",
    ),
    "too much": (
        "{first_step: 5, keep: 0.7}",
        "sweep: halving: keep: 0.7 is not a number above 0 and up to 0.5",
    ),
    "unknown": (
        "{first_step: 5, keeps: 0.5}",
        "sweep: halving: keeps: unknown key; did you mean 'keep'?",
    ),
    "not validated then": (
        "{first_step: 12}",
        "train.validate_every_steps: 5 does not divide sweep.halving.first_step (12); "
        "set it to a divisor, or first_step to 15",
    ),
}


@pytest.mark.parametrize(("halving", "said"), WRONG.values(), ids=WRONG)
def test_wrong_settings_are_named(tmp_path: Path, halving: str, said: str) -> None:
    [problem] = problems_of(written(tmp_path, f"{{{FOUR}, halving: {halving}}}", VALIDATED))
    assert said in problem
    assert problem.startswith("line ")


def test_what_cannot_be_compared_or_stopped_is_named_with_its_key(tmp_path: Path) -> None:
    sweep = f"{{{FOUR}, halving: {{first_step: 10}}}}"
    assert problems_of(written(tmp_path, sweep)) == [
        "line 4: train.validate_every_steps: missing, but sweep.halving compares held-out losses; "
        "set it to 10 or a divisor of 10"
    ]
    stopped = VALIDATED.replace("lr:", "until_step: 8, local_sgd_steps: 2, strategy: ddp, lr:")
    assert [
        problem.split(":")[1] for problem in problems_of(written(tmp_path, sweep, stopped))
    ] == [
        " train.until_step",
        " train.local_sgd_steps",
    ]
    [problem] = problems_of(
        written(tmp_path, "{train.seed: [1], halving: {first_step: 10}}", VALIDATED)
    )
    assert (
        problem == "line 5: sweep: halving: needs at least two experiments, but the sweep has one"
    )


@pytest.fixture
def dag(tmp_path: Path) -> Dag:
    sweep = f"{{{FOUR}, cluster.cpus_per_rank: [1, 2], halving: {{first_step: 10}}}}"
    return Dag.compile([str(written(tmp_path, sweep, VALIDATED))], {}, Store(tmp_path / "store"))


def test_trainings_to_a_rung_work_in_the_folder_of_the_whole_run_and_change_nothing_of_it(
    dag: Dag,
) -> None:
    dag.freeze()
    assert [rung.step for rung in dag.rungs] == [10, 20]
    assert [len(rung.trainings) for rung in dag.rungs] == [4, 4]  # two experiments share each
    plain = Dag(dag.experiments, dag.store)
    assert plain.pointers("report") == dag.pointers("report")
    for whole, spec in dag.rungs[0].trainings.items():
        assert run_digest(spec) == whole != spec.digest
        assert dag.plan_pointer(spec.digest) == dag.plan_pointer(whole)
        assert dag.pointers_read_by(spec.digest) == dag.pointers_read_by(whole)
        assert "to step 10, where the best go on, shared with 1 more" not in dag.title(whole)
        assert "to step 10, where the best go on, shared with 1 more" in dag.title(spec.digest)
        assert dag.store.spec_path(spec.digest).exists()
        assert not dag.is_trained(spec.digest)


def test_a_frozen_sweep_has_its_rungs_and_a_decision_opens_the_next(dag: Dag) -> None:
    thawed = Dag.thaw(dag.freeze(), dag.store)
    assert thawed == dag
    assert thawed.name == "demo"
    assert [rung.digest for rung in thawed.rungs] == [rung.digest for rung in dag.rungs]
    first, second = dag.rungs
    assert (dag.rung(first.digest), dag.rung(second.digest)) == ((first, None), (second, first))
    reached = {
        whole: Reached(10, float(place), False, None) for place, whole in enumerate(first.trainings)
    }
    decision = decide(
        first, second.step, reached, {whole: dag.names_of(whole) for whole in reached}
    )
    write_record(decision_path(dag.store, first.digest), decision)
    assert [rung.step for rung, _ in dag.open_rungs()] == [10, 20]
    assert list(dag.open_rungs()[1][1]) == list(first.trainings)[:2]
    assert len(dag.pointers("report", decision.survivors)) == 4
    assert len(decision.competitors[0].experiments) == 2


def test_another_experiment_makes_other_decisions_and_keeps_what_was_trained(
    dag: Dag, tmp_path: Path
) -> None:
    sweep = (
        f"{{{FOUR.replace('4]', '4, 5]')}, cluster.cpus_per_rank: [1, 2], halving: "
        f"{{first_step: 10}}}}"
    )
    more = Dag.compile([str(written(tmp_path, sweep, VALIDATED))], {}, dag.store)
    assert not {rung.digest for rung in more.rungs} & {rung.digest for rung in dag.rungs}
    assert {one.digest for one in dag.rungs[0].trainings.values()} < {
        one.digest for one in more.rungs[0].trainings.values()
    }


def test_experiments_that_share_one_training_cannot_be_compared_at_rungs(tmp_path: Path) -> None:
    sweep = (
        "{evaluate.generations: [1, 2], cluster.cpus_per_rank: [1, 2], halving: {first_step: 10}}"
    )
    with pytest.raises(ConfigError) as raised:
        Dag.open(written(tmp_path, sweep, VALIDATED), Store(tmp_path / "store"))
    assert raised.value.problems == [
        "line 5: sweep: halving: all experiments share one training, so there is nothing to compare"
    ]


def test_a_digest_of_another_sweep_is_refused(dag: Dag) -> None:
    with pytest.raises(IntegrityError, match="0123: no rung of this sweep"):
        dag.rung("0123")
