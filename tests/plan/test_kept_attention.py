"""`train.kept_attention_layers: auto` is all layers with attention, or as many as memory allows."""

import random
import re
from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from pipeline_lib.arch.families import geometry_in, published
from pipeline_lib.config.schema import Cluster
from pipeline_lib.config.train import Train
from pipeline_lib.core.units import from_gigabytes
from pipeline_lib.plan.answer import answer
from pipeline_lib.plan.case import Case
from pipeline_lib.plan.choose import AS_GOOD, best_way, choose, fits_somehow
from pipeline_lib.plan.cluster import machine_of
from pipeline_lib.plan.fitting import remedies_of
from pipeline_lib.plan.host import AROUND_BYTES, RANK_BYTES
from pipeline_lib.plan.machine import End, MeasuredPart
from pipeline_lib.plan.passes import layer_passes, shape_of
from pipeline_lib.plan.predict import host_bytes_of_node
from pipeline_lib.plan.show import render, render_what_if
from pipeline_lib.plan.step_time import step_time
from pipeline_lib.plan.ways import Ways
from pipeline_lib.plan.words import describe
from pipeline_lib.records.plan import Workload
from tests.plan.fleet import asking, case_of, lean
from tests.plan.test_context_choice import PAGES, asked

LONGEST = 262_144
ONE_GPU: dict[str, Any] = {"gpus_per_node": 1, "gpu": "h100", "memory_gb": 128}
ADAPTERS: dict[str, Any] = {"method": "lora", "strategy": "ddp", "recompute": "full"}

AWAY = Train.model_validate({**ADAPTERS, "compile": True, "offload_activations": True})


def setting_of(model: str, tokens: int, gpu: str, ranks: int, memory_gb: int | None) -> Case:
    machine = machine_of(Cluster(gpus_per_node=ranks, gpu=gpu, memory_gb=memory_gb), "bf16", None)
    assert machine is not None
    data = Workload(tokens, 0.98, 0.5, float(tokens), None, None, is_assumed=True)
    return case_of(geometry_in(published(f"Qwen/{model}") or {}), machine, data, ranks, None)


def test_adapters_of_8b_train_a_block_of_262_144_tokens_on_one_gpu_of_80_gb_with_128_gb_of_host_memory() -> (
    None
):
    """36 layers keep their inputs there, 4096 numbers a token, and some 32 heads with sums.

    As many keep those of 32 heads, and a sum of each, as fit.
    """
    found = answer(asked("Qwen3-8B", ONE_GPU, LONGEST, 1, method="lora"))
    assert found.refusal is None and found.choice is not None and found.case is not None
    way, machine = found.choice.chosen, found.case.machine
    assert way.fits
    assert way.memory.total_bytes < 60 * 2**30
    kept = way.train.kept_attention_layers
    assert isinstance(kept, int) and 0 < kept < 36
    of_attention = LONGEST * (2 * 4096 + 4 * 32)
    assert way.memory.host_bytes == LONGEST * 36 * 2 * 4096 + kept * of_attention
    needed = way.memory.host_bytes + way.memory.copied_bytes + AROUND_BYTES + RANK_BYTES["cuda"]
    assert host_bytes_of_node(way.memory, machine) == needed
    assert needed <= from_gigabytes(128) < needed + of_attention
    plan = found.content
    assert plan.chosen.kept_attention_layers == found.content.train["kept_attention_layers"] == kept
    said = f"attention kept in {kept} layers"
    assert said in describe(way)
    assert plan.prediction is not None and said in plan.prediction.words
    shown = " ".join(render(found.content, False).split())
    assert (
        f"{said}, activations on the host" in shown.partition(" WAY ")[2].partition(" ASSUMED ")[0]
    )


def test_the_long_context_pages_say_what_the_plan_says_of_one_document_of_that_length() -> None:
    few, many = (
        best_way(replace(setting, workload=replace(setting.workload, real_fraction=1.0)).by(AWAY))
        for setting in (
            setting_of("Qwen3-8B", LONGEST, "h100", 1, memory_gb) for memory_gb in (128, 512)
        )
    )
    machine = setting_of("Qwen3-8B", LONGEST, "h100", 1, 128).machine
    figures = {
        str(few.train.kept_attention_layers),
        f"{few.memory.host_bytes / from_gigabytes(1):.1f}",
    }
    figures |= {
        f"{host_bytes_of_node(way.memory, machine) / from_gigabytes(1):.0f}" for way in (few, many)
    }
    figures |= {f"{way.step_s.value:.0f}" for way in (few, many)}
    for page in PAGES:
        assert figures <= set(re.findall(r"\d+(?:\.\d+)?", page.read_text(encoding="utf-8")))


def test_a_what_if_question_compares_numbers_of_layers() -> None:
    given = asked("Qwen3-8B", ONE_GPU, LONGEST, 1, **ADAPTERS)
    more = replace(given, train=given.train.model_copy(update={"kept_attention_layers": 0}))
    shown = render_what_if(
        answer(given).content, answer(more).content, ["train.kept_attention_layers=0"]
    )
    assert "computed again, activations on the host" in shown


def test_where_all_layers_have_room_nothing_is_said() -> None:
    for tokens, cluster in ((LONGEST, {**ONE_GPU, "memory_gb": 512}), (8192, ONE_GPU)):
        found = answer(asked("Qwen3-8B", cluster, tokens, 1, method="lora"))
        assert found.content.chosen.kept_attention_layers == "auto"
        assert "attention kept" not in found.content.summary.way


def test_more_host_memory_never_keeps_the_attention_of_fewer_layers() -> None:
    train, found = Train.model_validate(ADAPTERS), []
    for memory_gb in range(80, 200, 4):
        way = best_way(setting_of("Qwen3-8B", LONGEST, "h100", 1, memory_gb).by(train))
        kept = way.train.kept_attention_layers
        found.append(36 if way.fits and kept == "auto" else kept if way.fits else -1)
    assert found == sorted(found)
    assert {-1, 0, 36} <= set(found)
    assert len(set(found)) > 20


SAMPLED = random.Random(0).sample(
    list(
        product(
            ("Qwen3-4B", "Qwen3-8B", "Qwen3-30B-A3B", "Qwen3.5-9B"),
            (32_768, 65_536, 131_072, 262_144),
            (("a10", 1), ("h100", 1), ("h200", 2)),
            (48, 64, 80, 96, 128, 192),
            ("ddp", "fsdp", "zero2"),
        )
    ),
    80,
)


def test_no_number_that_may_be_given_is_faster() -> None:
    """By trying every number, on the device and on the host."""
    outcomes = Counter[str]()
    for model, tokens, (gpu, ranks), memory_gb, strategy in SAMPLED:
        setting = setting_of(model, tokens, gpu, ranks, memory_gb)
        train = Train.model_validate({**ADAPTERS, "strategy": strategy})
        found = best_way(setting.by(train))
        numbers = range(setting.geometry.attention_layers + 1)
        tried = [
            best_way(setting.by(train.model_copy(update={"kept_attention_layers": number})))
            for number in numbers
        ]
        fitting_s = [way.step_s.value for way in tried if way.fits]
        kept = found.train.kept_attention_layers
        assert found.fits == bool(fitting_s)
        outcomes["none" if not fitting_s else "all" if kept == "auto" else "some"] += 1
        if fitting_s:
            assert found.step_s.value <= min(fitting_s) * (1 + AS_GOOD)
        else:
            assert kept == 0
    assert min(outcomes.values()) >= 5
    assert len(outcomes) == 3


def test_a_number_that_is_given_is_kept() -> None:
    given = best_way(
        setting_of("Qwen3-8B", LONGEST, "h100", 1, 512).by(
            Train(**ADAPTERS, kept_attention_layers=5)
        )
    )
    assert given.fits
    assert given.train.kept_attention_layers == 5


@pytest.mark.parametrize(("model", "layers"), [("Qwen3-8B", 36), ("Qwen3.5-9B", 8)])
def test_each_layer_with_attention_takes_its_time_once_more(model: str, layers: int) -> None:
    setting = setting_of(model, 65_536, "h100", 1, 512)
    again_s = [
        float(step_time(setting, Ways.one(train, setting.geometry), End.EXPECTED).recomputed_s[0])
        for train in (
            Train(**ADAPTERS, compile=True, kept_attention_layers=kept)
            for kept in range(layers + 1)
        )
    ]
    attention_s = again_s[0] - again_s[-1]
    channels = setting.geometry.heads * setting.geometry.head_dim
    rate = setting.machine.speeds_in(65_536.0).attention_flop_s
    assert attention_s == pytest.approx(layers * 2 * channels * 65_536**2 / rate)
    for kept, taken_s in enumerate(again_s):
        assert taken_s - again_s[-1] == pytest.approx(
            attention_s * (layers - kept) / layers, abs=1e-9
        )


@pytest.mark.parametrize(("model", "layers"), [("Qwen3-8B", 36), ("Qwen3.5-9B", 8)])
def test_more_layers_than_have_attention_are_refused(model: str, layers: int) -> None:
    geometry = geometry_in(published(f"Qwen/{model}") or {})
    found = [
        list(geometry.problems(Train(kept_attention_layers=count), 4096))
        for count in (layers, layers + 1)
    ]
    of_model = f"{layers + 1} are more than the model's {layers} layers with attention"
    assert found == [[], [f"train.kept_attention_layers: {of_model}"]]


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"router_aux_loss": 0.01}, {"Qwen3-8B": ["train.router_aux_loss"], "Qwen3-30B-A3B": []}),
        ({"optimizer": "muon"}, {"Qwen3-8B": [], "Qwen3-30B-A3B": ["train.optimizer"]}),
        ({"unit_layers": 37}, {"Qwen3-8B": ["train.unit_layers"], "Qwen3-30B-A3B": []}),
    ],
)
def test_keys_that_a_model_does_not_allow_are_refused(
    settings: dict[str, Any], refused: dict[str, list[str]]
) -> None:
    for model, keys in refused.items():
        geometry = geometry_in(published(f"Qwen/{model}") or {})
        found = geometry.problems(Train.model_validate(settings), 4096)
        assert [problem.partition(":")[0] for problem in found] == keys


def test_a_run_is_possible_if_it_is_without_any_results_kept() -> None:
    """The least host memory that is named is what the inputs of the layers need."""
    for memory_gb, is_enough in ((86, False), (87, True)):
        setting = setting_of("Qwen3-8B", LONGEST, "h100", 1, memory_gb)
        wanted = asking(
            setting, Train.model_validate({"method": "lora", "strategy": "auto"}), (), True
        )
        assert fits_somehow(wanted) == is_enough
        assert lean(wanted)[0].kept_attention_layers == 0
        named = replace(wanted, train=Train.model_validate(ADAPTERS | {"compile": True}))
        least = [remedy.memory_gb for remedy in remedies_of(named) if not remedy.keys]
        assert is_enough or least == [87]


@pytest.mark.parametrize("strategy", ["ddp", "auto"])
def test_where_a_given_number_is_too_large_fewer_are_offered(strategy: str) -> None:
    for memory_gb in (86, 128):
        train = Train.model_validate(
            {**ADAPTERS, "strategy": strategy, "kept_attention_layers": 30}
        )
        wanted = asking(setting_of("Qwen3-8B", LONGEST, "h100", 1, memory_gb), train, (), True)
        assert not fits_somehow(wanted)
        alone = [
            remedy
            for remedy in remedies_of(wanted)
            if remedy.keys.keys() == {"kept_attention_layers"} and remedy.memory_gb is None
        ]
        assert bool(alone) == (memory_gb == 128)


@pytest.mark.parametrize("strategy", ["ddp", "auto"])
def test_a_given_number_forces_no_full_checkpointing(strategy: str) -> None:
    """It has an effect with full checkpointing and long blocks alone, and is not said elsewhere."""
    for tokens in (8192, 32_768):
        setting = replace(setting_of("Qwen3-8B", tokens, "h200", 8, 2000), batch_blocks=16)
        train = Train.model_validate({"strategy": strategy, "method": "lora"})
        free = choose(asking(setting, train, (), True)).chosen
        held = train.model_copy(update={"kept_attention_layers": 0})
        found = choose(asking(setting, held, (), True)).chosen
        assert free.train.recompute != "full"
        assert found.train == free.train
        assert "attention" not in describe(found)


@pytest.mark.parametrize(
    ("recompute", "is_idle"),
    [("auto", True), ("full", False)],
    ids=["auto is none", "full is given"],
)
def test_a_number_that_does_nothing_is_named(recompute: str, is_idle: bool) -> None:
    cluster = {**ONE_GPU, "gpu": "h200", "memory_gb": 2000}
    train: dict[str, Any] = {"method": "lora", "strategy": "ddp", "recompute": recompute}
    found = answer(asked("Qwen3-8B", cluster, 32_768, 1, **train, kept_attention_layers=5)).content
    warnings = [text for text in found.words.warnings if "kept_attention_layers" in text]
    assert (found.chosen.recompute != "full") == is_idle
    assert len(warnings) == is_idle
    if is_idle:
        checkpointing = f"train.activation_checkpointing: auto is {found.chosen.recompute} here"
        assert warnings[0].startswith(
            f"train.kept_attention_layers: 5 has no effect, because {checkpointing}"
        )
        assert warnings[0] in " ".join(render(found, False).split())
    free = answer(asked("Qwen3-8B", cluster, 32_768, 1, **train)).content
    assert not any("kept_attention_layers" in text for text in free.words.warnings)


def test_a_short_run_is_compiled_if_only_that_fits() -> None:
    """Without compilation, which a run of one step does not save, not even no results fit."""
    setting = replace(setting_of("Qwen3-4B", LONGEST, "h100", 2, 256), steps=1)
    train = Train.model_validate({"strategy": "fsdp", "recompute": "full", "context_ranks": 1})
    found = best_way(setting.by(train))
    assert found.fits
    assert found.train.compile is True
    eager = train.model_copy(update={"compile": False, "kept_attention_layers": 0})
    assert not best_way(setting.by(eager)).fits


def test_what_lacks_memory_to_keep_all_is_a_near_miss() -> None:
    setting = setting_of("Qwen3-4B", 131_072, "h100", 1, 48)
    found = choose(
        asking(setting, Train.model_validate({"strategy": "ddp", "method": "lora"}), (), True)
    )
    assert isinstance(found.chosen.train.kept_attention_layers, int)
    assert found.near is not None
    kept = found.near.way.train.kept_attention_layers
    assert kept == "auto" or kept > found.chosen.train.kept_attention_layers
    assert found.near.way.step_s.value < found.chosen.step_s.value


def test_a_model_without_attention_is_planned() -> None:
    geometry = geometry_in({**(published("Qwen/Qwen3.5-9B") or {}), "num_hidden_layers": 3})
    assert geometry.attention_layers == 0
    setting = replace(setting_of("Qwen3-8B", LONGEST, "h100", 1, 512), geometry=geometry)
    assert best_way(setting.by(Train(**ADAPTERS))).step_s.value > 0


@pytest.mark.parametrize("kept", [0, 18, 36])
def test_layers_that_were_measured_kept_all_their_attention(kept: int) -> None:
    """What was measured as predicted leaves the prediction of layers that keep less as it is."""
    setting = setting_of("Qwen3-8B", 65_536, "h100", 1, 512)
    eager = layer_passes(setting.by(Train(**ADAPTERS, compile=False)), End.EXPECTED)
    variant = MeasuredPart(
        "layer",
        shape_of(setting.geometry),
        "ddp/lora/full",
        65_536.0,
        0.5,
        eager.forward,
        eager.backward,
    )
    calibrated = replace(setting, machine=replace(setting.machine, measured=(variant,)))
    for compiled in (False, True):
        train = Train(**ADAPTERS, compile=compiled, kept_attention_layers=kept)
        found, computed = (
            layer_passes(one.by(train), End.EXPECTED).backward for one in (calibrated, setting)
        )
        assert found.per_token_s == pytest.approx(computed.per_token_s)
