"""The page in a real browser: every figure is drawn, nothing complains, no attack runs."""

from pathlib import Path

import pytest
from bokeh.models import Scatter

from pipeline_lib.compare.figures import LineStyle, course_of, line_styles, seconds_of, swept_figure
from pipeline_lib.compare.page import render, write_page, write_sweep_page
from pipeline_lib.compare.verdict import verdict
from pipeline_lib.config.compile import run_digest
from pipeline_lib.config.dag import Dag
from pipeline_lib.config.halving import Halving, Reached, decide, decision_path, write_record
from pipeline_lib.core.files import write_jsonl
from pipeline_lib.core.store import Store
from tests.compare.fakes import Samples, compared, curve, evaluated, experiment, made, seal, weights
from tests.compare.test_command import hostile
from tests.compare.test_sameness import files, twin
from tests.report.browser import Seen, look_at
from tests.report.fakes import ATTACK, hostile_files, metrics, realistic_files

FIGURES = {
    *("figure-versus", "figure-loss", "figure-held-out", "figure-loss-tokens", "figure-loss-time"),
    *("figure-lr", "figure-throughput", "figure-gradient", "figure-memory"),
    "figure-swept-train-lr",
}
MAX_BYTES = 3_000_000


def complaints(page: Seen) -> list[str]:
    return [line for line in page.console if "setting log level" not in line]


def drawn(page: Seen) -> dict[str, int]:
    """Without the logarithmic twins, which are hidden until they are asked for."""
    return {name: count for name, count in page.figures.items() if not name.endswith("-log")}


@pytest.mark.parametrize("width", [1280, 400])
def test_every_figure_is_painted_and_the_page_fits_its_window(
    three: Store, tmp_path: Path, width: int
) -> None:
    path = tmp_path / "compare.html"
    write_page(compared(three, "demo-*"), path)
    page = look_at(path, tmp_path, width)

    assert drawn(page).keys() == FIGURES
    assert all(count > 0 for count in drawn(page).values()), page.figures
    assert page.width <= width
    assert complaints(page) == []


def test_no_attack_runs(store: Store, tmp_path: Path) -> None:
    for number in range(2):
        found = hostile_files()
        curve(found, number)
        evaluated(Samples.drawn(0).scores(0.1 * number, number), found)
        found["tokenize"]["ledger.json"]["total"]["dropped"] = {ATTACK: number}
        seal(
            store,
            experiment("demo", train={"seed": number}, tokenize={"system": f"{number}{ATTACK}"}),
            found,
        )
    names = hostile(store, ATTACK)
    path = tmp_path / "compare.html"
    write_page(compared(store, *names), path)
    page = look_at(path, tmp_path, 1280)

    assert page.owned is None
    assert page.width <= 1280
    assert all(count > 0 for count in drawn(page).values()), page.figures
    assert complaints(page) == []


def test_twenty_long_runs_fit_three_megabytes(store: Store, tmp_path: Path) -> None:
    for number in range(20):
        found = realistic_files()
        found["train"]["metrics.jsonl"] = metrics(10_000 if number < 2 else 1000)
        found["evaluate"]["generations.jsonl"] = [
            {
                "prompt": f"{prompt} {'why ' * 300}",
                "reference": "r" * 4000,
                "base": "b" * 4000,
                "tuned": "t" * 4000,
            }
            for prompt in range(30)
        ]
        evaluated(Samples.drawn(0).scores(0.01 * number, number), found)
        weights(found, str(number))
        seal(
            store,
            experiment(f"long-run-of-a-large-sweep-seed={number}", train={"seed": number}),
            found,
        )
    size_bytes = write_page(compared(store, "long*"), tmp_path / "compare.html")

    assert size_bytes < MAX_BYTES


def test_identical_runs_and_those_without_steps_make_a_page_too(
    store: Store, tmp_path: Path
) -> None:
    twin(store, files())
    twin(store, files(), "again")
    seal(store, experiment("later", train={"lr": 1e-3}), {}, ())
    path = tmp_path / "compare.html"
    write_page(compared(store, "twin", "again", "later"), path)
    page = look_at(path, tmp_path, 400)

    assert "twin and again are identical" in path.read_text()
    assert drawn(page).keys() == FIGURES - {
        "figure-versus",
        "figure-held-out",
        "figure-swept-train-lr",
    }
    assert complaints(page) == []
    assert "not begun" in render(compared(store, "twin", "later"))


def test_a_prompt_stands_once_with_the_answers_of_all(store: Store) -> None:
    made(store, "one", 0.0, 0)
    other = files()
    other["evaluate"]["generations.jsonl"] = [
        {
            "prompt": "Who are you?\nAnswer in one line.",
            "reference": None,
            "base": "",
            "tuned": "Another one.",
        },
        {"prompt": "Asked of the second only", "reference": "right", "base": "", "tuned": "wrong"},
    ]
    seal(store, experiment("two", train={"lr": 1e-3}), other)
    page = render(compared(store, "one", "two"))

    assert page.count("Who are you?") == 1
    assert page.index("A small model.") < page.index("Another one.")
    assert (
        page.index("Who are you?")
        < page.index("What does json.dumps do?")
        < page.index("Asked of the second only")
    )
    assert page.count("not asked") == 2


def test_each_sweep_has_its_page_beside_the_results_once_an_experiment_is_done(
    store: Store, tmp_path: Path
) -> None:
    swept = [experiment(f"swept-lr={lr}", train={"lr": lr}) for lr in (1e-3, 2e-3)]
    later = [experiment(f"later-lr={lr}", train={"lr": lr}) for lr in (3e-3, 4e-3)]
    for number, one in enumerate(swept):
        found = realistic_files()
        evaluated(Samples.drawn(0).scores(0.1 * number, number), found)
        seal(store, one, found, one.specs)

    path = write_sweep_page(Dag(tuple(swept), store, name="swept"), tmp_path / "results")

    assert path == tmp_path / "results" / "swept" / "compare.html"
    assert "<h1>swept-lr=0.001 against swept-lr=0.002</h1>" in path.read_text()
    assert write_sweep_page(Dag(tuple(later), store, name="later"), tmp_path / "results") is None
    assert [one.name for one in (tmp_path / "results").iterdir()] == ["swept"]


RATES = (1e-3, 3e-3, 1e-2, 1e-4)  # from the best to the worst


@pytest.fixture
def halved(store: Store) -> Dag:
    """A sweep of four rates: one trained to its end after a pause, the others stopped early.

    They stop after the first validation.
    """
    swept = tuple(experiment(f"swept-lr={lr:g}", train={"lr": lr}) for lr in RATES)
    dag = Dag(swept, store, Halving(20, 0.25), "swept")
    for number, one in enumerate(swept):
        found = realistic_files()
        curve(found, number, 0.3 * number)
        evaluated(Samples.drawn(0).scores(0.1 * number, number), found)
        rows = found["train"]["metrics.jsonl"]
        for row in rows:
            row["attempt"] = 1 if row["step"] <= 20 else 2
        paused = [
            {"event": name, "attempt": 1, "at": at}
            for at, name in enumerate(("run.start", "run.end"))
        ]
        events = [
            *paused,
            *({"event": name, "attempt": 2, "at": 9} for name in ("run.start", "run.end")),
        ]
        found["train"]["events.jsonl"] = events
        found["train"]["summary.json"]["attempts"] = 2
        world = seal(
            store,
            one,
            found,
            one.specs if number == 0 else ("model", "data.0", "tokenize", "shard", "plan"),
        )
        if number:
            folder = store.run_dir(run_digest(world.experiment.specs["train"]))
            write_jsonl(folder / "metrics.jsonl", rows[:20])
            write_jsonl(folder / "events.jsonl", paused)
    rung = dag.rungs[0]
    losses = [1.5 + number for number in range(len(RATES))]
    reached = {
        one: Reached(20, loss, False, None)
        for one, loss in zip(rung.trainings, losses, strict=True)
    }
    decision = decide(rung, None, reached, {one: dag.names_of(one) for one in reached})
    write_record(decision_path(store, rung.digest), decision)
    dag.freeze()
    return dag


def test_the_page_of_a_sweep_knows_its_winner_whom_it_stopped_and_the_loss_by_rate(
    halved: Dag, tmp_path: Path
) -> None:
    path = write_sweep_page(halved, tmp_path / "results")
    assert path is not None
    page = look_at(path, tmp_path, 400)
    assert drawn(page)["figure-swept-train-lr"] > 0
    assert page.width <= 400
    assert complaints(page) == []
    text = path.read_text()
    assert "lr=0.001 won its sweep, which stopped lr=0.003, lr=0.01 and lr=0.0001: " in text
    assert "not finished" not in text
    assert text.count("stopped by its sweep after step 20: place ") == 3


def test_a_pause_of_a_sweep_is_no_restart_and_the_command_knows_the_same(halved: Dag) -> None:
    found = compared(halved.store, "swept-*")
    assert [numbers.restarts for numbers in found.measured] == [0] * 4
    assert [found.measured[place].rung_loss for place in found.order] == [None, 2.5, 3.5, 4.5]
    assert found.swept == {
        "train.lr": [known.subject.config["train"]["lr"] for known in found.found]
    }
    assert "won its sweep" in verdict(found)
    chart = swept_figure(found, "train.lr", line_styles(found))
    assert chart is not None
    assert [type(axis).__name__ for axis in chart.plot.xaxis] == ["LogAxis"]
    finished, stopped = (one for one in chart.plot.renderers if isinstance(one.glyph, Scatter))
    assert list(finished.data_source.data["value"]) == [1e-3]
    assert sorted(stopped.data_source.data["loss"]) == [2.5, 3.5, 4.5]


def test_curves_keep_their_place_whatever_axis_they_are_on(three: Store) -> None:
    """The last point has all steps, tokens and time behind it; points may average steps."""
    found = compared(three, "demo-*")
    course = course_of(found, 0, LineStyle("#000000", False))
    rows = found.found[0].steps

    assert course is not None
    assert course.tokens[-1] == sum(row.supervised_tokens or 0 for row in rows)
    attempts = [
        [row.elapsed_s or 0.0 for row in rows if row.attempt == number] for number in (1, 2)
    ]
    assert course.seconds[-1] == pytest.approx(sum(each[-1] for each in attempts))
    assert (seconds_of(rows)[1:] > seconds_of(rows)[:-1]).all()
