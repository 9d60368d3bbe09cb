"""What is read is typed; what is missing is None; what is of another make is refused by name."""

import re

import pytest

from pipeline_lib.core.errors import IntegrityError
from tests.complete import training
from tests.report.fakes import RESTART_AFTER, STEPS, World, facts_of


def test_restarts_are_known_from_the_steps_and_attempts_from_the_events(world: World) -> None:
    world.files["train"]["events.jsonl"].append({"event": "run.launched", "attempt": 3})
    facts = facts_of(world)
    assert facts.restart_steps == [RESTART_AFTER + 1]
    assert (facts.attempts, facts.restarts) == (3, 1)  # the third follows one that was done


def test_what_continues_an_attempt_that_came_to_its_end_is_no_restart(world: World) -> None:
    """As at a rung of a sweep, and after a rehearsal."""
    world.files["train"]["events.jsonl"].append({"event": "run.end", "attempt": 1})
    facts = facts_of(world)
    assert (facts.attempts, facts.restarts, facts.restart_steps) == (2, 0, [])


def test_totals(finished: World) -> None:
    facts = facts_of(finished)
    first_attempt_s = 24.7
    assert facts.total_s == pytest.approx(
        4.1 + 1 + 1 + 9.8 + 2.2 + first_attempt_s + 64.5 + 6.3 + 21.7
    )
    assert facts.peak_memory_bytes == 612_000_000 + 1000 * STEPS
    assert facts.train_index.packing_efficiency == pytest.approx(468_000 / (1884 * 256))
    assert facts.plan is not None and facts.plan.prediction is not None
    assert facts.plan.chosen_memory.state_bytes == 16_793_600
    assert facts.plan.prediction.step_s.value == 0.4
    assert [one.key for one in facts.compared if not one.within] == ["update_s"]


def test_a_file_of_another_schema_is_named(world: World) -> None:
    world.files["tokenize"]["ledger.json"]["sources"][0]["rows"] = "many"
    with pytest.raises(
        IntegrityError, match=re.escape("ledger.json: sources.0.rows: ") + ".*run snakemake again"
    ):
        facts_of(world)


@pytest.mark.parametrize(
    ("keeps_best", "best_step", "result_step", "is_lost"),
    [(True, 4, 6, True), (True, 4, 4, False), (True, None, 6, False), (False, 4, 6, False)],
)
def test_a_best_step_is_lost_if_the_result_should_be_it(
    keeps_best: bool, best_step: int | None, result_step: int, is_lost: bool
) -> None:
    found = training(best_step=best_step, result_step=result_step)
    assert found.has_lost_best(keeps_best) is is_lost
