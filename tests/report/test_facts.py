"""What is read is typed; what is missing is None; what is of another make is refused by name."""

import re
from pathlib import Path

import pytest

from pipeline_lib.core.errors import IntegrityError
from pipeline_lib.records.results import Training
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
    assert facts.plan.chosen_memory.state_bytes == 16_793_600
    assert facts.plan.prediction.step_s.value == 0.4
    assert [one.key for one in facts.compared if not one.within] == ["update_s"]


def test_absent_files_null_values_and_strange_numbers_are_not_known(world: World) -> None:
    world.files["train"] = {"summary.json": {"steps": None, "tokens": 5}}
    world.files["evaluate"] = {}
    world.files["shard"] = {"train/index.json": {"blocks": 0, "block_tokens": 256, "tokens": 0}}
    facts = facts_of(world)
    assert facts.training.steps is None
    assert facts.training.tokens == 5
    assert facts.evaluation.eval.tuned.loss is None
    assert facts.steps == []
    assert (
        facts.tokens_per_s
        is facts.peak_memory_bytes
        is facts.train_index.packing_efficiency
        is None
    )


def test_infinity_is_not_a_number_to_show(finished: World, tmp_path: Path) -> None:
    facts = facts_of(finished)
    path = tmp_path / "metrics.json"
    path.write_text('{"eval": {"base": {"loss": 800.0, "perplexity": Infinity}}}')
    read = type(facts.evaluation).model_validate_json(path.read_text())
    assert read.eval.base.loss == 800.0
    assert read.eval.base.perplexity is None


def test_a_file_of_another_schema_is_named(world: World) -> None:
    world.files["tokenize"]["ledger.json"] = {"sources": [{"name": "a", "rows": "many"}]}
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
    assert (
        Training(best_step=best_step, result_step=result_step).has_lost_best(keeps_best) is is_lost
    )
