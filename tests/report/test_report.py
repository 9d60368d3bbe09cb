"""The report stage: its files, their content, and that a page trusts and fetches nothing."""

import csv
import json
import re
import shutil
from contextlib import nullcontext
from html.parser import HTMLParser
from unittest.mock import patch

import pytest

from pipeline_lib.config.dag import Dag
from pipeline_lib.core.errors import IntegrityError
from pipeline_lib.core.language import speaking
from pipeline_lib.core.units import brief
from pipeline_lib.plan.answer import answer
from pipeline_lib.plan.words import describe
from pipeline_lib.records.record import to_json
from pipeline_lib.report.charts import clip
from pipeline_lib.report.curves import COLUMNS, curves_of
from pipeline_lib.report.outcomes import tell_results
from pipeline_lib.report.page import render
from tests.plan.test_context_choice import asked
from tests.report.fake_plans import gpu_run, plan_without_times
from tests.report.fakes import (
    STEPS,
    World,
    experiment_named,
    facts_of,
    hostile_files,
    index,
    ledger,
    metrics,
    scores,
)

FETCHING = {
    "link",
    "iframe",
    "img",
    "object",
    "embed",
    "video",
    "audio",
    "source",
    "form",
    "base",
    "frame",
}


class Page(HTMLParser):
    """Elements, attributes and text of a page, as a browser would parse it."""

    def __init__(self, html: str) -> None:
        """Parse `html`."""
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep the element."""
        self.elements.append((tag, dict(attrs)))
        self._inside = tag

    def handle_data(self, data: str) -> None:
        """Keep what a reader sees."""
        if self._inside not in ("script", "style"):
            self.text += data

    def handle_endtag(self, tag: str) -> None:
        """Leave a script or style; what stands in the next cell is another word."""
        self._inside = ""
        self.text += " " if tag in ("td", "th") else ""


def page_of(world: World, with_figures: bool = False) -> Page:
    """The page of `world`, whose report is sealed if it is not yet.

    Figures take most of the time.
    """
    if not world.folder("report").exists():
        world.seal_inputs()
        without = (
            nullcontext()
            if with_figures
            else patch("pipeline_lib.report.page.figures_of", return_value={})
        )
        with without:
            world.seal_report()
    return Page((world.folder("report") / "report.html").read_text(encoding="utf-8"))


def text_of(world: World) -> str:
    """What a reader sees of the page without its figures, with single spaces."""
    return " ".join(page_of(world).text.split())


def test_writes_three_files_with_every_step_and_counts(finished: World) -> None:
    folder = finished.folder("report")
    assert sorted(path.name for path in folder.iterdir()) == [
        "curves.csv",
        "manifest.json",
        "report.html",
        "summary.json",
    ]
    counts = finished.manifest("report").counts
    assert counts == {
        "page_bytes": (folder / "report.html").stat().st_size,
        "steps": STEPS,
        "points": STEPS,
    }
    assert counts["page_bytes"] < 3_000_000
    with (folder / "curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["step", *COLUMNS, "held_out_loss"]
    assert [int(row["step"]) for row in rows] == list(range(1, STEPS + 1))


def test_the_summary_is_one_row_of_numbers(finished: World) -> None:
    summary = json.loads((finished.folder("report") / "summary.json").read_text())
    assert summary["eval"] == {
        "base": {"loss": 7.631, "perplexity": pytest.approx(2061.1101)},
        "tuned": {"loss": 2.404, "perplexity": pytest.approx(11.067357)},
        "unigram": {"loss": 5.872},
        "shuffled": {"loss": 3.318},
    }
    assert summary["data"] == {"samples_kept": 6838, "packing_efficiency": pytest.approx(0.970342)}
    assert summary["train"].keys() == {
        *("final_loss", "steps", "supervised_tokens", "tokens_per_s", "train_s", "peak_memory_mb"),
    }
    assert summary["train"]["peak_memory_mb"] == 612
    # no memory error on CPUs
    assert summary["plan"] == {"step_s": 0.4, "step_error": pytest.approx(0.025)}


def test_sections_stand_in_order_with_their_numbers(finished: World) -> None:
    page = page_of(finished)
    sections = [attributes["id"] for tag, attributes in page.elements if tag == "section"]
    assert sections == [
        *("settings", "training", "answers", "next"),
        *("evaluation", "data", "plan", "steps", "faults", "time", "lineage"),
    ]
    marked = [
        attributes
        for tag, attributes in page.elements
        if tag == "span" and attributes.get("class") == "trained"
    ]
    assert len(marked) == 3, "supervised pieces"
    for shown in (
        *(
            "2.404 nats/token",
            "\u00b1 0.157, base 7.631",
            "base 2,061",
            "604 k tokens",
            "19.4 k tokens/s",
            "2 min 15 s",
        ),
        *(
            "1.05 M",
            "610.4 MiB",
            "8,192 tokens",
            "19.5 MiB, 16.0 MiB of it model state",
            "not compared",
        ),
        "longer than 256 tokens",
        *(
            "278 samples",
            "49 rows",
            "2 attempts",
            "It resumed at step 51",
            "run.resumed",
            "12.6 MB",
            "1.2e-07",
        ),
        *(
            "0.0335 CPU core-hours to train: 2 CPU cores held for 1 min 00 s, 2 attempts",
            "lower by more than chance",
        ),
        *(
            "What does json.dumps do?",
            finished.experiment.specs["train"].digest,
            "Every step is drawn.",
        ),
    ):
        assert shown in " ".join(page.text.split()), shown


def test_the_settings_that_people_ask_for_stand_at_the_top(finished: World) -> None:
    shown = text_of(finished)
    for said in (
        "Model tiny: built by the pipeline, 1.05 M parameters",
        "Method all weights",
        "Learning rate 0.003, cosine, warm-up 3.0%",
        "Batch 8,192 tokens a step, packed into blocks of 256 tokens",
        "Length 118 steps, 2 epochs",
        "qwen3 compare demo OTHER",
    ):
        assert said in shown, said
    assert shown.index("Method all weights") < shown.index("What to type next")


def test_stages_stand_in_the_order_of_the_pipeline(finished: World) -> None:
    shown = text_of(finished)
    took = shown[shown.index("What it did") :]
    rows = [
        took.index(f" {part} ")
        for part in finished.experiment.specs
        if part not in ("plan", "report")
    ]
    assert rows == sorted(rows)


def test_nothing_in_the_page_points_outside_it(finished: World) -> None:
    for tag, attributes in page_of(finished).elements:
        assert tag not in FETCHING, tag
        for name, value in attributes.items():
            assert name not in ("src", "srcset", "action", "background", "poster"), (tag, name)
            assert name != "href" or (value or "").startswith("#"), (tag, value)
            assert "url(" not in (value or ""), (tag, name)


def test_every_table_scrolls_in_its_own_box(world: World) -> None:
    """On a narrow screen a wide table must not widen the page."""
    gpu_run(world.files)
    world.seal_inputs()
    world.seal_report()
    html = (world.folder("report") / "report.html").read_text()
    opened_before = [before for before, _ in re.findall(r"(<[^<>]*>)\s*(<table\b)", html)]
    assert len(opened_before) == html.count("<table") > 10
    assert all(re.fullmatch(r'<div class="scroll( \w+)?">', before) for before in opened_before), (
        opened_before
    )


def test_hostile_text_stays_text(world: World) -> None:
    world.files = hostile_files()
    page = page_of(world, with_figures=True)
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 3
    assert not FETCHING & set(tags)
    assert not [
        name for _, attributes in page.elements for name in attributes if name.startswith("on")
    ]
    assert "<img src=x onerror=" in page.text  # shown as it is, not interpreted and not thrown away
    assert "{{ 7 * 7 }}" in page.text


def test_a_policy_names_the_two_scripts_and_nothing_else(finished: World) -> None:
    page = page_of(finished)
    policy = next(
        a["content"] or "" for tag, a in page.elements if tag == "meta" and a.get("http-equiv")
    )
    rules = {rule.split()[0]: rule.split()[1:] for rule in policy.split(";")}
    assert rules["default-src"] == ["'none'"]
    assert len(rules["script-src"]) == 2
    assert all(source.startswith("'sha256-") for source in rules["script-src"])


def test_validation_and_skipped_steps_are_told(world: World) -> None:
    rows = world.files["train"]["metrics.jsonl"]
    rows[49]["validation_loss"], rows[99]["validation_loss"] = 2.5, 2.25
    rows[60] |= {"loss": None, "grad_norm": None, "verdict": "skip"}
    world.files["train"]["events.jsonl"].append(
        {"event": "step.skipped", "step": 61, "reason": "the loss is not finite"}
    )
    world.files["train"]["summary.json"] |= {
        **{"best_step": 100, "best_validation_loss": 2.25, "result_step": 100},
        **{"stopped_early": True, "skipped_steps": 1},
    }
    page = page_of(world, with_figures=True)
    for said in (
        "The held-out loss was lowest after step 100, 2.250 nats/token.",
        "That step is the result.",
        "Training stopped early",
        "far out of range: 1; the events list them",
        "step.skipped",
    ):
        assert said in page.text
    drawn = (world.folder("report") / "report.html").read_text(encoding="utf-8")
    assert "held-out loss" in drawn
    with (world.folder("report") / "curves.csv").open(newline="") as file:
        assert list(csv.DictReader(file))[60]["loss"] == ""


def test_a_best_step_that_was_lost_is_told(world: World) -> None:
    world.experiment = experiment_named(keep_best=True, validate_every_steps=20)
    world.files["train"]["summary.json"] |= {
        "best_step": 100,
        "best_validation_loss": 2.25,
        "result_step": 80,
    }
    assert (
        "after step 100, 2.250 nats/token. Its checkpoint was damaged or missing, so step 80 is"
        in text_of(world)
    )


def test_rows_of_earlier_code_tell_nothing_of_other_ranks(world: World) -> None:
    assert "What each rank used" not in text_of(world)


@pytest.mark.parametrize("ranks", [2, 100])
def test_what_each_rank_used_is_listed_and_warned_of(world: World, ranks: int) -> None:
    rows = world.files["train"]["metrics.jsonl"]
    for row in rows[9::10]:
        row["gpu_utilization_of_ranks"] = [0.95] * (ranks - 1) + [0.5]
        row["peak_memory_bytes_of_ranks"] = [70 * 2**30] * (ranks - 1) + [50 * 2**30]
    text = text_of(world)
    assert "Peak memory 70.0 GiB" in text
    assert f"Warning: GPU utilization stays under 80% on rank {ranks - 1} (50%)" in text
    assert (
        f"Warning: peak memory differs between ranks: 50.0 GiB on rank {ranks - 1}, 70.0 GiB on "
        "rank 0." in text
    )
    assert "1 50.0% 50.0 GiB" in text if ranks == 2 else "The first 64 of 100 ranks" in text


def test_a_long_run_with_long_texts_and_many_sources_stays_small_and_says_so(world: World) -> None:
    source = ledger()["sources"][0]
    sources = [{**source, "name": f"data/part-{number:04d}.jsonl"} for number in range(400)]
    world.files["tokenize"]["ledger.json"] = {**ledger(), "sources": sources}
    world.files["tokenize"]["preview.json"] = [
        {"source": "a", "tokens": 9, "pieces": [{"text": "x" * 100_000, "supervised": True}]}
    ] * 20
    world.files["train"]["metrics.jsonl"] = metrics(9001)
    world.files["shard"]["train/index.json"] = index(10**7, 10**10, 10**9, 10**8)
    text = {"prompt": "p" * 50_000, "reference": None, "base": "b" * 50_000, "tuned": "t" * 50_000}
    world.files["evaluate"]["generations.jsonl"] = [text] * 60
    page = page_of(world, with_figures=True)
    counts = world.manifest("report").counts
    assert counts["page_bytes"] < 3_000_000
    assert counts["points"] == 1801
    for said in (
        "Each point is the mean of 5 steps",
        "380 more sources",
        "36 more are in generations.jsonl",
    ):
        assert said in page.text
    assert "97,000 more characters" in page.text


def test_what_was_not_read_of_the_rows_is_listed(world: World) -> None:
    page = page_of(world)
    assert "field-notes-2026-spring.jsonl" in page.text
    assert "conversations[].id 2,360, id 1,180, <b> 3, further keys 7" in page.text


def test_clipped_text_says_how_much_is_missing() -> None:
    assert clip("abc", 3) == "abc"
    assert clip("abcdef", 2) == "ab [... 4 more characters]"


def test_the_plan_is_held_against_what_came_of_it(finished: World) -> None:
    shown = text_of(finished)
    for said in (
        "Plan against measurement",
        "12 of 12 ways to train fit, and this is the simplest one within 2% of the fastest",
        "What would help 3% of the tokens are padding",
        "7 of 8 figures are within their bands. Outside: update of a step, 78.3% above the band.",
        "time of a step 400 ms 340 ms to 460 ms 410 ms +2.5% yes",
        "update of a step 10 ms 8.5 ms to 11.5 ms 20.5 ms +105.0% no, 78.3% above",
        "medians over 112 of 118 steps: the first 3 of every attempt",
        "Memory is not compared on CPUs",
        "The step is bound by computing.",
        "launch_s 0.02 ms",
    ):
        assert said in shown, said


def test_answers_that_were_left_out_are_explained(world: World) -> None:
    why = "no answers: the whole model has no room"
    world.files["evaluate"]["metrics.json"]["answers"] = why
    world.files["evaluate"]["generations.jsonl"] = []
    text = page_of(world, with_figures=True).text
    assert f"{why}." in text
    assert "None were requested" not in text


def test_a_band_that_says_nothing_has_no_verdict(world: World) -> None:
    world.files["train"]["plan.json"]["prediction"]["step_s"] |= {"low": 0.1, "high": 7.0}
    shown = text_of(world)
    assert "time of a step 400 ms 100 ms to 7.00 s 410 ms +2.5% not judged" in shown
    assert "6 of 7 figures are within their bands, 1 not judged." in shown
    assert "Bands wider than a factor of 4 are not judged" in shown


def test_a_plan_for_gpus_is_shown_with_every_strategy_and_the_memory_there_is(world: World) -> None:
    gpu_run(world.files)
    shown = " ".join(page_of(world, with_figures=True).text.split())
    for said in (
        "peak of the allocator 66.9 GiB 63.6 GiB to 70.2 GiB 80.0 GiB +19.6% no, 13.9% above",
        "A GPU here has 80.0 GiB",
        "the GPU has 80.0 GiB",
        "fsdp, chosen micro-batch 2 x accumulation 2, selective activation checkpointing, no "
        "reshard after forward, compiled 3.41 s",
        "hsdp over 4 ranks micro-batch 2 x accumulation 2 3.17 s",
        "all-gather of weights forward between nodes 16.4 GB 2 818 ms 170 ms",
        "2 nodes of 4 ranks. The passes through 2 parts of the model were measured on it.",
    ):
        assert said in shown, said
    assert "Memory is not compared" not in shown
    summary = json.loads((world.folder("report") / "summary.json").read_text())
    assert summary["plan"]["memory_error"] == pytest.approx(0.195815)


def test_the_table_of_strategies_names_all_that_the_plan_says_of_each_way(world: World) -> None:
    lora = {"method": "lora", "lora": {"base": "nf4"}}
    one_gpu = {"gpus_per_node": 1, "gpu": "h100", "memory_gb": 128}
    found = answer(asked("Qwen3-8B", one_gpu, 262_144, 2, **lora))
    assert found.choice is not None and len(found.choice.best) > 1
    world.files["train"]["plan.json"] = to_json(found.content)
    table = text_of(world).partition("Strategies compared")[2].partition("Planned and measured")[0]
    for said in ("base in nf4", r"attention kept in \d+ layers", "activations on the host"):
        assert len(re.findall(said, table)) == len(found.choice.best), said
    for way in found.choice.best.values():
        _, _, settings = describe(way).partition(", ")
        assert f" {settings} {brief(way.step_s.value)}" in table


def test_a_plan_that_earlier_code_made_is_not_shown_beside_its_training(world: World) -> None:
    """The training is not computed again for it."""
    plan = world.files["train"]["plan.json"]
    for way in (plan["prediction"], *plan["others"].values()):
        del way["words"]
    shown = text_of(world)
    assert "Plan against measurement" not in shown
    assert "118 optimizer steps, last training loss" in shown
    assert "Where the time of a step goes" not in shown


def test_a_plan_without_predicted_times_is_shown_without(world: World) -> None:
    world.files["train"]["plan.json"] = plan_without_times(STEPS)
    shown = text_of(world)
    assert "Plan An optimizer step takes 32 blocks" in shown
    assert "19.5 MiB, 16.0 MiB of it model state" in shown
    for absent in (
        "Predicted against measured",
        "figure-timeline",
        "Each strategy",
        "What the machine",
        "Why not",
    ):
        assert absent not in shown, absent


def test_a_plan_whose_figures_nothing_was_measured_for_says_so(world: World) -> None:
    world.files["train"] |= {"metrics.jsonl": [], "events.jsonl": []}
    assert "No measurement can be compared with the plan." in page_of(world).text


def test_damaged_events_are_left_out_and_counted(world: World) -> None:
    world.seal_inputs()
    events = world.folder("train") / "events.jsonl"
    damaged = (
        '{"at": 1.8e9, "event": "run.sta',
        "[1, 2]",
        "7",
        '{"event": 3}',
        '{"event": "x", "at": "noon"}',
        '{"event": "x", "attempt": []}',
        '{"event": "x", "at": NaN}',
        '{"event": "run.launched", "attempt": 3, "nodes": 5, "job": 7}',
        '{"event": "kept.event", "at": 1.8e9, "left_s": Infinity, "bytes": -Infinity}',
    )
    facts = facts_of(world)
    events.write_text(events.read_text() + "\n".join(damaged) + "\n")
    world.seal_again("train")
    shown = " ".join(Page(render(facts_of(world), curves_of(facts.steps))).text.split())
    assert "Damaged lines of events.jsonl, which are not shown: 7." in shown
    assert "kept.event" in shown


@pytest.mark.parametrize(
    ("part", "name"),
    [("train", "metrics.jsonl"), ("evaluate", "metrics.json"), ("evaluate", "scores.jsonl")],
)
def test_a_result_that_is_cut_short_is_refused_by_name(world: World, part: str, name: str) -> None:
    world.seal_inputs()
    path = world.folder(part) / name
    path.write_text(path.read_text()[:-20])
    with pytest.raises(IntegrityError, match=f"{name}: content differs .*run snakemake again"):
        facts_of(world)
    world.seal_again(part)
    with pytest.raises(IntegrityError, match=f"{name} is damaged: .*run snakemake again"):
        facts_of(world)


def test_losses_without_errors_leave_it_open_whether_they_differ(world: World) -> None:
    for score in world.files["evaluate"]["metrics.json"]["eval"].values():
        if isinstance(score, dict):
            score["standard_error"] = None
    world.files["evaluate"]["metrics.json"]["eval"]["unigram"].pop("standard_error")
    world.files["evaluate"]["scores.jsonl"] = []
    shown = text_of(world)
    assert "so their differences may be noise" in shown
    assert "more than chance" not in shown


def test_a_difference_within_its_interval_is_called_noise(world: World) -> None:
    world.files["evaluate"]["scores.jsonl"] = scores(gain=0.0)
    assert "noise: the interval holds 0, by 287 documents one by one" in text_of(world)


def test_the_lineage_goes_back_to_the_sources(finished: World) -> None:
    shown = text_of(finished)
    lineage = shown[shown.index("From the model back to its sources.") :]
    parts = ("evaluate", "merge", "train", "shard", "tokenize", "data.0", "model")
    order = [lineage.rindex(f"{part} {finished.experiment.ref(part).digest}") for part in parts]
    assert order == sorted(order)
    for said in ("tiny: built by the pipeline", "config.json sha256:", "1 restart", "python 3."):
        assert said in lineage, said


def test_the_page_and_the_end_of_the_run_say_how_to_call_the_model(world: World) -> None:
    world.counts["tokenize"] = {"prompts": {"thinking_off": 6838}, "thinking_default": "on"}
    text = page_of(world).text
    said: list[str] = []
    tell_results(Dag((world.experiment,), world.store), said.append)
    call = (
        "tokenizer.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=False)"
    )
    for each in (
        call,
        "6,838 answers were trained with enable_thinking=False",
        "no answer was trained",
    ):
        assert each in text
        assert any(line.startswith("call ") and each in line for line in said)


def test_of_results_that_counted_no_prompts_nothing_is_said_of_calls(world: World) -> None:
    text = page_of(world).text
    assert "enable_thinking" not in text + "".join(world.said) and "How to call it" not in text


def test_the_page_says_what_samples_that_repeat_each_other_cost(world: World) -> None:
    world.files["tokenize"]["ledger.json"]["total"]["repeated_tokens"] = 400_000
    assert (
        "6,838 samples of 7,174 conversations have 2.9 times the tokens of one sample each"
        in page_of(world).text
    )


def test_the_losses_of_several_sources_are_listed(world: World) -> None:
    score = {"loss": 1.25, "perplexity": 3.49, "standard_error": 0.01, "documents": 40}
    of_source = {
        "source": "<b>rows</b>.jsonl",
        "samples": 41,
        "supervised_tokens": 1234,
        "base": score,
        "tuned": score,
    }
    empty = {"source": "none.jsonl", "samples": 0, "supervised_tokens": 0}
    world.files["evaluate"]["metrics.json"]["eval"]["by_source"] = [of_source, empty]
    text = text_of(world)
    assert "Held-out loss by source" in text
    assert "<b>rows</b>.jsonl 41 1,234 1.2500 1.2500 1.2298 to 1.2702" in text
    assert "none.jsonl 0 0 n/a n/a" in text


def test_a_run_without_held_out_data_says_so_and_shows_no_loss(world: World) -> None:
    world.files["evaluate"]["metrics.json"] = {
        "eval": {"samples": 0},
        "verdict": {"text": "Nothing was held out."},
    }
    world.files["evaluate"]["scores.jsonl"] = []
    text = text_of(world)
    assert "data.validation_fraction: 0" in text
    assert (
        "Held-out loss" not in text
        and "Held-out perplexity" not in text
        and "held-out samples with" not in text
    )
    summary = json.loads((world.folder("report") / "summary.json").read_text())
    assert not any(summary["eval"].values())


def test_the_page_is_chinese_where_the_config_says_so(world: World) -> None:
    world.experiment = experiment_named(language="zh")
    page = page_of(world)
    for heading in ("配置", "基座与微调后", "数据与样本", "预测与实测", "时间去向", "来源与导出"):
        assert heading in page.text
    for heading in ("Settings", "Data and samples", "Where the time went"):
        assert heading not in page.text
    assert ("html", {"lang": "zh-CN"}) in page.elements


def test_nothing_of_the_page_depends_on_the_terminals_language(world: World) -> None:
    english = page_of(world)
    shutil.rmtree(world.folder("report"))
    without_figures = patch("pipeline_lib.report.page.figures_of", return_value={})
    with speaking("zh"), without_figures:
        world.seal_report()
    again = page_of(world)
    # Of the scripts, Bokeh numbers its documents anew.
    assert (again.text, again.elements) == (english.text, english.elements)
