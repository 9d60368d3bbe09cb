"""The plan as people see it, and its formulas with the numbers put in."""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.arch.families import geometry_in, published
from pipeline_lib.arch.geometry import Geometry
from pipeline_lib.config.schema import Config
from pipeline_lib.config.strategies import STRATEGIES
from pipeline_lib.config.train import Train
from pipeline_lib.core.files import write_json
from pipeline_lib.core.store import Store
from pipeline_lib.core.units import brief, gib, gpu_hours, rounded
from pipeline_lib.plan.answer import Answer, answer, lacking, question_of
from pipeline_lib.plan.choose import best_way
from pipeline_lib.plan.evaluation import evaluation_warnings
from pipeline_lib.plan.formulas import explain
from pipeline_lib.plan.host import host_need
from pipeline_lib.plan.machine import Ranks
from pipeline_lib.plan.memory import PARTS
from pipeline_lib.plan.near import missed
from pipeline_lib.plan.passes import shape_of
from pipeline_lib.plan.predict import Prediction
from pipeline_lib.plan.show import WIDTH, banded, render, render_what_if
from pipeline_lib.plan.steps import Steps
from pipeline_lib.plan.words import describe
from pipeline_lib.records.plan import PART_NAMES, Figure, PlanDocument, PlannedWay
from pipeline_lib.records.record import to_json
from tests.complete import merged, record
from tests.plan.fleet import lean

PYDOC = {"train": [{"source": "pydoc"}]}
H200 = {"gpus_per_node": 8, "gpu": "h200", "memory_gb": 1800}
A10 = {"nodes": 2, "gpus_per_node": 2, "gpu": "a10", "internode_gbit_s": 9, "memory_gb": 64}


def planned(name: str, block_tokens: int, cluster: dict[str, Any], **train: Any) -> Answer:
    model = {"source": "huggingface", "name": name} if "/" in name else {"source": name}
    sections = {
        "experiment": "shown",
        "model": model,
        "data": {"train": [{"source": "pydoc"}]},
        "tokenize": {"max_tokens": block_tokens},
        "shard": {"block_tokens": block_tokens},
        "cluster": cluster,
        "train": {"global_batch_tokens": 16 * block_tokens, **train},
    }
    return answer(
        question_of(Config.model_validate_json(json.dumps(sections)), Store(Path("/nowhere")))
    )


CASES: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "demo": ("tiny", 256, {}, {"precision": "fp32"}),
    "8B on 8 H200": ("Qwen/Qwen3-8B", 4096, H200, {"strategy": "auto"}),
    "LoRA": ("Qwen/Qwen3-8B", 4096, H200, {"strategy": "ddp", "method": "lora"}),
    "experts": ("Qwen/Qwen3-30B-A3B", 4096, H200, {"strategy": "fsdp", "recompute": "full"}),
    "2 x 2 A10": ("Qwen/Qwen2-1.5B", 512, A10, {"strategy": "zero3", "micro_batch_blocks": 2}),
    "zero1": ("Qwen/Qwen3-0.6B", 1024, {**H200, "gpus_per_node": 4}, {"strategy": "zero1"}),
    "zero2": ("Qwen/Qwen3-0.6B", 1024, H200, {"strategy": "zero2", "recompute": "selective"}),
    "hsdp": ("Qwen/Qwen3-1.7B", 1024, H200, {"strategy": "hsdp", "shard_ranks": 4}),
    "offload": ("Qwen/Qwen3-8B", 4096, H200, {"strategy": "fsdp", "offload": "optimizer+params"}),
    "too large": ("Qwen/Qwen3-32B", 4096, {**A10, "nodes": 1}, {"strategy": "ddp"}),
    "no way fits": ("Qwen/Qwen3-32B", 4096, {**A10, "nodes": 1}, {"strategy": "auto"}),
    "a GPU that is not named": ("Qwen/Qwen3-8B", 4096, {"gpus_per_node": 8}, {"strategy": "fsdp"}),
}


@cache
def planned_case(case: str) -> Answer:
    name, block_tokens, cluster, train = CASES[case]
    return planned(name, block_tokens, cluster, **train)


@pytest.fixture(params=CASES)
def found(request: pytest.FixtureRequest) -> Answer:
    return planned_case(request.param)


def way_of(plan: PlanDocument) -> PlannedWay:
    """The prediction of the chosen way, which there is."""
    assert plan.prediction is not None
    return plan.prediction


@pytest.mark.parametrize("is_detailed", [False, True])
def test_it_fits_the_terminal_and_survives_json(found: Answer, is_detailed: bool) -> None:
    content = json.loads(json.dumps(to_json(found.content), allow_nan=False))
    text = render(record(PlanDocument, content), is_detailed)
    assert max(len(line) for line in text.splitlines()) <= WIDTH
    assert text == render(found.content, is_detailed)
    assert is_detailed or len(text.splitlines()) <= 35
    assert not re.search(r"\bNone\b|\bnan\b|\binf\b|[{}]", text)


@pytest.mark.parametrize(
    ("case", "verdict", "said"),
    [
        (
            "8B on 8 H200",
            "fits",
            r"FITS +[\d.]+ of 139.8 GiB a GPU \(\d+% free\); host \d+ of 1,800 GB",
        ),
        (
            "too large",
            "too large",
            r"TOO LARGE +[\d.]+ of 22.0 GiB a GPU \([\d.]+ GiB too much\); host [\d.]+ of 64 GB",
        ),
        ("no way fits", "too large", r"TOO LARGE +[\d.]+ of 22.0 GiB a GPU "),
        (
            "demo",
            "not checked",
            r"MEMORY +33.7 MiB a rank; host 1.48 GB \(not checked: set cluster.memory_gb\)",
        ),
        (
            "a GPU that is not named",
            "not checked",
            r"MEMORY +[\d.]+ GiB a GPU; host \d+ GB \(not checked: set cluster.gpu\)",
        ),
    ],
)
def test_the_first_line_answers_whether_it_fits(case: str, verdict: str, said: str) -> None:
    content = planned_case(case).content
    assert content.summary.verdict == verdict
    text = render(content)
    assert re.match(said, text.splitlines()[2])
    assert re.findall(r"^(TIME|STEPS|WAY|ASSUMED|NEXT) ", text, re.MULTILINE) == [
        "TIME",
        "STEPS",
        "WAY",
        "ASSUMED",
        "NEXT",
    ]


def test_what_lacks_only_the_margin_is_tight() -> None:
    found = planned_case("LoRA")
    assert found.choice is not None and found.case is not None
    needed, setting = found.choice.chosen.memory.total_bytes, found.case
    just = replace(setting.machine, gpu_memory_bytes=round(needed * 1.02))
    way = best_way(replace(setting, machine=just).by(found.choice.chosen.train))
    assert not way.fits
    assert re.match(r"tight: [\d.]+ [GM]iB short of the margin$", missed(way, just).briefly(just))
    changed: dict[str, Any] = {
        "machine": {"gpu_memory_bytes": 100 * 2**30},
        "memory": {"ddp": {"total_bytes": 97 * 2**30}},
        "summary": {"verdict": "tight"},
    }
    lines = render(record(PlanDocument, merged(to_json(found.content), changed))).splitlines()
    assert re.match(r"TIGHT +97.0 of 100.0 GiB a GPU \(3% free\); ", lines[2])


def test_what_is_given_or_measured_is_not_called_assumed(tmp_path: Path) -> None:
    given = planned_case("8B on 8 H200").content.summary.assumed
    assert list(given) == [
        "documents of 1,024 tokens, 50% supervised in blocks 98% full",
        "speeds are typical of H200 (measured in layers of this card)",
    ]
    name, block_tokens, cluster, train = CASES["8B on 8 H200"]
    roomy = planned(name, block_tokens, {**cluster, "memory_gb": None}, **train)
    assumed = roomy.content.summary.assumed
    assert "1,536 GB of host memory" in assumed
    measured = measured_at(tmp_path, geometry_in(published("Qwen/Qwen3-8B") or {}))
    some = planned(name, block_tokens, measured, **train).content.summary.assumed
    # 8 GPUs of one node have no links between nodes
    assert list(some[1:]) == [
        "9 of 10 speeds are typical of H200 (measured in layers of this card)"
    ]
    assert planned_case("a GPU that is not named").content.summary.assumed == given[:1]


def test_where_the_files_tell_how_many_steps_there_are_the_time_of_the_run_is_estimated() -> None:
    sections: dict[str, Any] = {
        "experiment": "estimated",
        "model": {"source": "huggingface", "name": "Qwen/Qwen3-8B"},
        "data": {"train": [{"source": "pydoc"}]},
        "cluster": H200,
        "train": {"strategy": "auto"},
    }
    question = question_of(
        Config.model_validate_json(json.dumps(sections)), Store(Path("/nowhere"))
    )
    content = answer(replace(question, estimated=Steps((80, 160, 310), (240, 480, 930)))).content
    assert content.summary.steps == Figure(480, 240, 930)
    run_s, gpu_hours = way_of(content).run_s, way_of(content).gpu_hours
    assert run_s is not None and gpu_hours is not None
    for end, steps in vars(content.summary.steps).items():
        train = Train.model_validate({**sections["train"], "max_steps": steps})
        certain = way_of(answer(replace(question, train=train)).content).run_s
        assert getattr(run_s, end) == getattr(certain, end)
    assert gpu_hours.value == pytest.approx(8 * run_s.value / 3600)
    text = " ".join(render(content).split())
    assert f", {brief(run_s.value)} in all (" in text
    assert "STEPS about 480 optimizer steps (240 to 930 by the first rows) in 1 epoch, " in text
    assert " in all" not in render(answer(question).content)


def test_the_price_of_a_gpu_hour_makes_money_of_gpu_hours() -> None:
    name, block_tokens, cluster, train = CASES["8B on 8 H200"]
    unknown = planned(name, block_tokens, {**cluster, "gpu_hour_price": 2.5}, **train).content
    assert unknown.summary.cost is None
    assert "COST     20.00 an hour, at 2.50 a GPU-hour" in render(unknown)
    content = planned(
        name, block_tokens, {**cluster, "gpu_hour_price": 2.5}, **train, max_steps=100_000
    ).content
    hours, cost = way_of(content).gpu_hours, content.summary.cost
    assert hours is not None and cost is not None
    assert vars(cost) == pytest.approx({end: 2.5 * one for end, one in vars(hours).items()})
    text = " ".join(render(content).split())
    said = f"COST {cost.value:,.2f} ({cost.low:,.2f} to {cost.high:,.2f}) for the training: "
    assert f"{said}{gpu_hours(hours.value)} at 2.50 a GPU-hour" in text
    assert "COST" not in render(planned_case("8B on 8 H200").content)
    on_cpus = planned("tiny", 256, {"gpu_hour_price": 2.5}, precision="fp32", max_steps=10).content
    assert "COST" not in render(on_cpus)


def test_every_strategy_that_was_compared_is_shown_and_the_chosen_one_marked(found: Answer) -> None:
    lines = render(found.content).splitlines()
    shown = [
        match
        for line in lines
        if (match := re.match(r"([* ])  (ddp|fsdp|hsdp|zero\d) .* ([\d.]+ (?:ms|s) .*)", line))
    ]
    expected = {found.content.chosen.strategy, *found.content.others} if found.choice else set()
    assert {match[2] for match in shown} == expected <= set(STRATEGIES)
    if found.choice:
        assert [match[2] for match in shown if match[1] == "*"] == [found.content.chosen.strategy]
        assert shown[0][1] == "*"
    for name, prediction in found.content.others.items():
        verdict = found.content.words.verdicts[name]
        is_said = re.match(r"too large by |tight: |a node lacks ", verdict)
        assert bool(is_said) == (not prediction.fits)
        assert prediction.fits == bool(re.search(r"% (longer|shorter)|as long", verdict))


def test_strategies_that_are_not_installed_are_said_to_be() -> None:
    question = question_of(
        Config.model_validate_json(
            json.dumps({"experiment": "none", "model": {"source": "tiny"}, "data": PYDOC})
        ),
        Store(Path("/nowhere")),
    )
    text = render(answer(replace(question, has_deepspeed=False)).content)
    assert re.findall(r"^   (zero\d) +(.*)$", text, re.MULTILINE) == [
        (name, "DeepSpeed is not installed here") for name in ("zero1", "zero2", "zero3")
    ]


def test_bars_follow_each_other_and_are_as_long_as_what_they_stand_for(found: Answer) -> None:
    lines = render(found.content, is_detailed=True).splitlines()
    memory = found.content.memory[found.content.chosen.strategy]
    is_gpu = found.content.cluster.device == "cuda"
    whole = memory.total_bytes if is_gpu else memory.allocated_bytes
    whole = max(whole, found.content.gpu_memory_bytes or 0)
    end = 0
    for part in PARTS:
        size = getattr(memory, f"{part}_bytes")
        bars = [
            line.split()[-1]
            for line in lines
            if re.match(rf" +{PART_NAMES.get(part, part)} +[\d.]+ [GM]iB ", line)
        ]
        assert len(bars) == (1 if size and (is_gpu or part != "reserve") else 0)
        for bar in bars:
            assert len(bar) == 42
            assert abs(bar.count("█") - 42 * size / whole) <= 1.5
            assert abs(bar.index("█") - end) <= 1
            end = bar.rindex("█") + 1


def test_the_figures_are_those_of_the_plan(found: Answer) -> None:
    text = " ".join(render(found.content, is_detailed=True).split())
    if found.choice is None:
        assert "TIME not known: set cluster.gpu" in text
        return
    figure = found.choice.chosen.step_s
    assert f"TIME {brief(figure.value)} a step (" in text
    assert f"WAY {describe(found.choice.chosen)}" in text
    assert found.content.words.chosen in text
    for said in (*found.content.words.others, *found.content.words.advice):
        assert said in text
    if found.content.cluster.nodes == 2:
        assert re.search(
            r"network [\d.]+ GB \([\d.]+ to [\d.]+\) sent by each node in a step, at 9 Gbit/s", text
        )
    else:
        assert "sent by each node" not in text


@pytest.mark.parametrize(
    ("case", "memory_gb", "said"),
    [
        ("offload", 1800, "of 1,800 GB"),
        ("offload", None, "of 1,536 GB (assumed: set cluster.memory_gb)"),
        ("demo", None, "GB (not checked: set cluster.memory_gb)"),
    ],
)
def test_the_host_memory_of_a_node_is_shown(case: str, memory_gb: int | None, said: str) -> None:
    name, block_tokens, cluster, train = CASES[case]
    found = planned(name, block_tokens, {**cluster, "memory_gb": memory_gb}, **train).content
    memory = found.chosen_memory
    ranks, is_gpu = Ranks(found.cluster.ranks, found.cluster.ranks), case == "offload"
    offloaded, copied, on_cpus = memory.host_bytes, memory.copied_bytes, memory.cpu_rank_bytes
    need = host_need(offloaded, copied, on_cpus, ranks, is_gpu)
    held = memory.host_bytes if is_gpu else memory.allocated_bytes
    assert need.total_bytes > ranks.total * held
    assert found.summary.host_needed_bytes == need.total_bytes
    number = rounded(need.total_bytes / 10**9, "GB").removesuffix(
        "" if said.startswith("GB") else " GB"
    )
    assert f"host {number} {said.removeprefix('GB ')}" in " ".join(render(found).split())
    assert found.machine is not None
    assert found.machine.host_memory_bytes == (memory_gb and memory_gb * 10**9)
    assumed = 8 * 192 * 10**9 if is_gpu and memory_gb is None else None
    assert found.machine.assumed_host_memory_bytes == assumed


@pytest.mark.parametrize("memory_gb", [60, 400])
def test_where_only_the_hosts_lack_memory_that_is_said(memory_gb: int) -> None:
    """Of the same way as preflight: the one that lacks least."""
    cluster = {"gpus_per_node": 8, "gpu": "h100", "memory_gb": memory_gb}
    found = planned("Qwen/Qwen3-32B", 8192, cluster, strategy="auto", global_batch_tokens=2**18)
    assert found.refusal and found.choice and found.case
    train, memory = lean(found.case)
    words = lacking(train, memory, found.case.machine).removeprefix("train.strategy: ")
    assert found.refusal.startswith("train.strategy: auto finds no way that fits: even ")
    assert words in found.refusal
    assert f"cluster.memory_gb gives {memory_gb}.00 GB; set cluster.memory_gb: " in words
    assert found.choice.chosen.train == train


def test_what_cpus_lack_is_host_memory_and_no_gpus() -> None:
    cluster = {"cpu_ranks": 2, "memory_gb": 2}
    found = planned("Qwen/Qwen3-0.6B", 1024, cluster, strategy="ddp", precision="fp32")
    verdicts = found.content.words.verdicts
    assert re.fullmatch(r"the default, a node lacks [\d.]+ GB of host memory", verdicts["ddp"])
    assert not any("a GPU" in verdict for verdict in verdicts.values())


@pytest.mark.parametrize(
    ("model", "settings", "counted"),
    [
        ("Qwen/Qwen3-8B", {"precision": "fp8"}, "; fp8 as the products in bf16 that take as long"),
        ("Qwen/Qwen3-8B", {"method": "lora"}, ""),
        ("Qwen/Qwen3-30B-A3B", {}, "; experts counted as the dense products that take as long"),
        ("Qwen/Qwen3.5-9B", {}, ""),
    ],
)
def test_the_parts_of_a_token_in_a_layer_add_up(
    model: str, settings: dict[str, Any], counted: str
) -> None:
    found = planned(model, 4096, H200, strategy="fsdp", global_batch_tokens=2**19, **settings)
    assert found.choice is not None and found.case is not None
    text = explain(found.choice.chosen, found.case)
    lines = re.findall(r"forward of one token, (.+?): (?:.* = )?([\d.e-]+) s(.*)", text)
    seconds = {name: float(value) for name, value, _ in lines}
    total_s = seconds.pop("in all")
    assert ("delta rule" in seconds) == ("3.5" in model)
    assert min(seconds.values()) > 0
    assert sum(seconds.values()) == pytest.approx(total_s, rel=1e-5)
    assert dict((name, rest) for name, _, rest in lines)["matrix products"] == counted


def test_a_rounding_error_is_no_part_of_a_step() -> None:
    plan = planned_case("8B on 8 H200").content
    way = way_of(plan)
    parts_s = {**way.parts, "exchange": 5.47e-12, "data": 0.01 * way.step_s.value}
    plan = replace(plan, prediction=replace(way, parts=parts_s))
    parts = re.findall(r" (\w+) +[\d.]+ m?s  [·█]", render(plan, is_detailed=True))
    assert "data" in parts
    assert "exchange" not in parts


def test_of_cpus_that_were_not_measured_times_are_said_to_be_rough() -> None:
    text = " ".join(render(planned_case("demo").content).split())
    assert "speeds are typical of CPUs, so times are rough" in text
    assert "NEXT 1. qwen3 calibrate CONFIG, which measures the speeds" in text


def test_what_to_do_next_begins_with_what_makes_a_run_fit_or_gains_most() -> None:
    large = planned_case("no way fits").content.summary.next
    slow = planned_case("2 x 2 A10").content
    assert large and not [action for action in large if "calibrate" in action]
    assert re.match(r"train\.|cluster\.", large[0])
    actions = slow.summary.next
    assert all(re.search(r" \([\d.]+ times as fast\)$", action) for action in actions[:2])
    gains = [float(re.findall(r"[\d.]+", action)[-1]) for action in actions[:2]]
    assert gains == sorted(gains, reverse=True)
    assert len(actions) == 3 and "calibrate" in actions[2]
    assert len(slow.words.advice) == 4
    text = render(slow)
    assert all(f"{number}. {action[:40]}" in text for number, action in enumerate(actions, start=1))


@pytest.fixture(params=[name for name in CASES if name != "a GPU that is not named"])
def explained(request: pytest.FixtureRequest) -> tuple[str, Prediction]:
    """The formulas of a plan, and the prediction that they explain."""
    found = planned_case(request.param)
    assert found.choice
    assert found.case
    return explain(found.choice.chosen, found.case), found.choice.chosen


def test_every_formula_is_worked_out_rightly(explained: tuple[str, Prediction]) -> None:
    """Whatever stands left of an equals sign in numbers is what stands right of it."""
    text, chosen = explained
    number = r"[\d,]+(?:\.\d+)?(?:e[+-]?\d+)?"
    formulas = re.findall(
        rf"= ([\d(][\d,.e+()x/ -]*?[\d)]) = ({number})|: ([\d(][\d,.e+()x/ -]*?[\d)]) = ({number})",
        text,
    )
    formulas += [
        ("", "", *match)
        for match in re.findall(rf"device ([\d(][\d,.e+()x/ -]*?) = ({number})", text)
    ]
    worked = 0
    for left, right in ((one or three, two or four) for one, two, three, four in formulas):
        value = eval(left.replace(",", "").replace("x", "*"), {"__builtins__": {}})  # noqa: S307 - our own text
        written = float(right.replace(",", ""))
        # whole bytes
        assert value == pytest.approx(written, rel=1e-4, abs=1 if written > 1000 else 0), left
        worked += 1
    assert worked >= 8
    for part in ("weights", "optimizer"):
        size = getattr(chosen.memory, f"{part}_bytes")
        assert not size or f" = {size:,} B = {gib(size)}" in text, part


def test_the_explained_step_is_the_predicted_one(explained: tuple[str, Prediction]) -> None:
    text, chosen = explained
    match = re.search(r"step = ([\d.e-]+) \+ ([\d.e-]+) \+ ([\d.e-]+) = ([\d.e-]+) s", text)
    assert match
    *phases, total = (float(each) for each in match.groups())
    assert total == pytest.approx(chosen.step_s.value, rel=1e-5)
    assert phases == pytest.approx(
        [chosen.forward_s.value, chosen.backward_s.value, chosen.update_s.value], rel=1e-5
    )
    assert text.count("of it not hidden") == len(chosen.exchanges)


def test_then_and_now_stand_side_by_side() -> None:
    name, block_tokens, cluster, train = CASES["2 x 2 A10"]
    now = planned_case("2 x 2 A10")
    then = planned(name, block_tokens, {**cluster, "internode_gbit_s": 36}, **train)
    lines = render_what_if(now.content, then.content, ["cluster.internode_gbit_s=36"]).splitlines()
    assert "what if cluster.internode_gbit_s=36" in lines[2]
    rows = {line[:10].strip(): line for line in lines if line[:1].strip()}
    for found in (now, then):
        assert found.choice is not None
        assert brief(found.choice.chosen.step_s.value) in rows["TIME"]
    assert re.search(r"FITS: .* the same$", rows["MEMORY"])
    assert max(len(line) for line in lines) <= WIDTH


def test_memory_is_shown_beside_what_if_also_of_a_gpu_that_is_not_named() -> None:
    name, block_tokens, cluster, train = CASES["a GPU that is not named"]
    now = planned_case("a GPU that is not named").content
    then = planned(name, block_tokens, {**cluster, "gpus_per_node": 4}, **train).content
    rows = {
        line[:10].strip(): line
        for line in render_what_if(now, then, ["cluster.gpus_per_node=4"]).splitlines()
    }
    assert [gib(plan.memory["fsdp"].total_bytes) for plan in (now, then)] == re.findall(
        r"[\d.]+ GiB", rows["MEMORY"]
    )
    assert "not known" in rows["TIME"]


def measured_at(tmp_path: Path, geometry: Geometry) -> dict[str, Any]:
    """A cluster section of eight H200 that were measured with a model of these sizes."""
    cost: dict[str, Any] = {"fixed_s": 0.0, "per_token_s": 1e-7, "host_s": 1e-3}
    part: dict[str, Any] = {
        "part": "layer",
        "shape": shape_of(geometry),
        "variant": "fsdp/full/none",
        "forward": cost,
    }
    part |= {"backward": cost, "document_tokens": 500.0, "supervised_fraction": 0.5}
    rates = {"launch_s": {"value": 1e-5, "low": 1e-5, "high": 1e-5}}
    gpu = {
        "gpu": "NVIDIA H200",
        "gpu_memory_bytes": 150 * 10**9,
        "ranks": 8,
        "nodes": 1,
        "precision": "bf16",
    }
    write_json(tmp_path / "cluster.json", {"schema": 1, **gpu, "rates": rates, "parts": [part]})
    return {"gpus_per_node": 8, "memory_gb": 1800, "measured": str(tmp_path / "cluster.json")}


def test_parts_that_were_measured_of_another_model_are_not_counted(tmp_path: Path) -> None:
    cluster = measured_at(tmp_path, geometry_in(published("Qwen/Qwen3-8B") or {}))
    for name, said in (
        ("Qwen/Qwen3-8B", "1 of 12 measured, and 1 parts of this model; the others"),
        (
            "Qwen/Qwen3-0.6B",
            "1 of 12 measured, and none of the 1 measured parts is of this model; the others",
        ),
    ):
        text = " ".join(
            render(planned(name, 4096, cluster, strategy="fsdp").content, is_detailed=True).split()
        )
        assert f"rates {said} are typical values" in text


@pytest.mark.parametrize(
    ("figure", "said"),
    [
        ((1.24, 1.1, 1.41), "1.24 s (1.10 to 1.41)"),
        ((1.24, 0.9, 1.41), "1.24 s (900 ms to 1.41 s)"),
        ((130.0, 100.0, 7300.0), "2 min 10 s (1 min 40 s to 2 h 02 min)"),
        ((0.25, 0.25, 0.25), "250 ms"),
        ((59.0, 50.0, 61.0), "59.0 s (50.0 s to 1 min 01 s)"),
    ],
)
def test_a_band_repeats_a_unit_only_where_it_differs(
    figure: tuple[float, float, float], said: str
) -> None:
    assert banded(Figure(**dict(zip(("value", "low", "high"), figure, strict=True))), brief) == said


def test_a_plan_of_all_micro_batches_is_one_table(tables: list[int]) -> None:
    render(planned("Qwen/Qwen3-8B", 4096, H200, strategy="auto", global_batch_tokens=2**22).content)
    assert tables == [17_206]


def test_one_of_a_thing_is_no_plural() -> None:
    content = planned(
        "tiny", 1024, {"cpu_ranks": 1}, global_batch_tokens=1024, precision="fp32"
    ).content
    text = " ".join(render(content, is_detailed=True).split())
    assert "1 epoch; the number of steps is known after packing" in text
    assert "batch 1 block = 1,024 tokens a step" in text
    assert "blocks of 1,024 tokens" in text
    ones = dict.fromkeys(
        ("blocks", "epoch_blocks", "steps", "steps_per_epoch", "last_step_blocks"), 1
    )
    changes = {
        "batch": {**ones, "padding_fraction": 0.0},
        "summary": {"steps": {"value": 1, "low": 1, "high": 1}},
    }
    made = record(PlanDocument, merged(to_json(content), changes))
    text = " ".join(render(made, is_detailed=True).split())
    assert "1 optimizer step in 1 epoch, 1,024 tokens each" in text
    assert "1 in the first epoch, whose last step has 1 block" in text


def test_epochs_are_not_said_of_a_run_that_max_steps_ends() -> None:
    content = planned(
        "tiny", 1024, {"cpu_ranks": 1}, global_batch_tokens=1024, max_steps=3, precision="fp32"
    ).content
    assert "STEPS 3 optimizer steps, 1,024 tokens each" in " ".join(
        render(content, is_detailed=False).split()
    )
    made = replace(content, batch=replace(content.batch, blocks=5, epochs=0.56))
    text = " ".join(render(made, is_detailed=False).split())
    assert "STEPS 3 optimizer steps in 0.56 epochs, 1,024 tokens each" in text


@pytest.mark.parametrize(("blocks", "said"), [(10, False), (20_000, True)])
def test_an_evaluation_on_cpus_that_takes_long_is_said_to(blocks: int, said: bool) -> None:
    """Of 20,000 blocks: 82 M held-out and 4 M shuffled tokens twice, 2 x 26 M FLOPs each.

    At 80 GFLOP/s.
    """
    sections = {
        "experiment": "long",
        "model": {"source": "tiny", "hidden_size": 512, "layers": 8, "heads": 8},
        "data": {"train": [{"source": "pydoc"}]},
        "shard": {"block_tokens": 4096},
    }
    config = Config.model_validate_json(json.dumps(sections))
    question = question_of(config, Store(Path("/nowhere")))
    workload = replace(question.workload, is_assumed=False, validation_blocks=blocks)
    assert question.machine is not None
    warnings = list(evaluation_warnings(config, question.geometry, workload, question.machine))
    assert len(warnings) == said
    assert all(
        re.search(r"takes about [\d,]+ h \d\d min on 2 of them; a smaller data.v", text)
        for text in warnings
    )


def test_every_stage_has_a_line_with_what_it_needs() -> None:
    """235B on 8 GPUs: its answers take 7 of them, its merge 470 GB of disk, its evaluation none."""
    sections = {
        "experiment": "large",
        "model": {"source": "huggingface", "name": "Qwen/Qwen3-235B-A22B"},
        "data": {"train": [{"source": "pydoc"}]},
        "cluster": {"gpus_per_node": 8, "gpu": "h100", "cpus_per_rank": 8},
        "train": {"strategy": "zero3", "method": "lora"},
    }
    question = question_of(
        Config.model_validate_json(json.dumps(sections)), Store(Path("/nowhere"))
    )
    lines = render(
        answer(replace(question, data_bytes=10**9)).content, is_detailed=True
    ).splitlines()
    start = lines.index("what each stage needs")
    rows = [re.split(r"  +", line.strip()) for line in lines[start + 2 : start + 8]]
    assert [row[0] for row in rows] == [
        "download",
        "tokenize",
        "shard",
        "train",
        "merge",
        "evaluate",
    ]
    assert rows[4][1] == "1 GPU and 8 CPUs"
    assert rows[4][3] == "470.19 GB"
    assert rows[5][1] == "7 GPUs and 8 CPUs"
    assert re.match(r"\d\d\.\d GiB a GPU, 478.69 GB", rows[5][2])
    text = " ".join(" ".join(lines[start:]).split())
    assert "layer by layer; 6 answers of up to 96 tokens from each model on 7 GPUs" in text


def test_the_near_miss_stands_below_the_reason_and_in_the_plan() -> None:
    """Where it lacks only the memory of a host that is assumed; no near miss is null."""
    cluster = {"gpus_per_node": 8, "gpu": "rtx 4090"}
    settings = {"strategy": "auto", "method": "lora", "global_batch_tokens": 64 * 4096}
    near = planned("Qwen/Qwen3-30B-A3B", 4096, cluster, **settings).content
    text = " ".join(render(near).split())
    assert re.search(
        r"near miss .* times as fast; a node needs [\d.]+ GB of host memory, and 256.00 GB are assumed",
        text,
    )
    assert text.index("TIME ") < text.index("verdict ") < text.index("near miss ")
    assert near.near_miss is not None
    assert near.near_miss.lacks.host_bytes > 0
    assert near.near_miss.prediction.fits is False
    faster_s = near.near_miss.prediction.step_s.value
    assert faster_s < way_of(near).step_s.value

    none = planned("Qwen/Qwen3-30B-A3B", 4096, {**cluster, "memory_gb": 500}, **settings).content
    assert none.near_miss is None
    assert "near miss" not in render(none)


def test_where_nothing_fits_the_fastest_that_lacks_little_is_told_too() -> None:
    """All weights of 14B on one H200, of which a host of 192 GB is assumed."""
    settings = {"strategy": "auto", "global_batch_tokens": 64 * 4096}
    found = planned("Qwen/Qwen3-14B", 4096, {"gpus_per_node": 1, "gpu": "h200"}, **settings)
    assert found.refusal is not None
    assert found.content.near_miss is not None
    assert found.content.near_miss.lacks.host_bytes > 0
    near = found.content.words.near_miss
    assert re.search(
        r" a step; .*a node needs [\d.]+ GB of host memory, and 192.00 GB are assumed", near
    )
    hopeless = planned("Qwen/Qwen3-235B-A22B", 4096, {"gpus_per_node": 1, "gpu": "a10"}, **settings)
    assert hopeless.refusal is not None
    assert hopeless.content.near_miss is None


@pytest.mark.parametrize(("precision", "of"), [("bf16", ""), ("fp8", " of bf16's peak")])
def test_mfu_says_how_it_counts(precision: str, of: str) -> None:
    found = planned(
        "Qwen/Qwen3-8B", 4096, H200, strategy="auto", precision=precision, global_batch_tokens=2**19
    )
    text = " ".join(render(found.content, is_detailed=True).split())
    assert re.search(rf"; causal MFU [\d.]+% \([\d.]+% to [\d.]+%\){of} memory ", text)
    assert found.choice is not None and found.case is not None
    said = explain(found.choice.chosen, found.case)
    assert ("may exceed 100%" in said) == (precision == "fp8")
