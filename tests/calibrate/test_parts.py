"""Parts of a model, measured by training: under each kind of strategy, in time and memory."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline_lib.arch.geometry import Geometry
from pipeline_lib.calibrate import parts
from pipeline_lib.calibrate.parts import Found, measure_parts
from pipeline_lib.calibrate.random_model import random_stepper
from pipeline_lib.calibrate.task import Task
from pipeline_lib.config.train import Train
from pipeline_lib.model.batch import Batch
from pipeline_lib.model.build import decoder_layers
from pipeline_lib.plan.machine import Pass
from pipeline_lib.records.plan import Workload
from pipeline_lib.train.dist import World, process_group
from pipeline_lib.train.step import Stepper
from tests.ranks import run_ranks

# Wide enough that a layer is more work than noise.
GEOMETRY = Geometry(
    vocab=1024,
    hidden=256,
    intermediate=768,
    layers=28,
    heads=4,
    kv_heads=2,
    head_dim=64,
    tied=True,
    max_positions=4096,
)
EXPERTS = replace(
    GEOMETRY,
    expert_layers=frozenset(range(28)),
    experts=4,
    experts_per_token=2,
    expert_intermediate=128,
)


def measure(environ: Mapping[str, str], task: Task, folder: Path) -> Found:
    world = World.from_env(environ, "cpu")
    with process_group(world, 60):
        return measure_parts(task, world, folder)


def found_for(
    folder: Path, geometry: Geometry = GEOMETRY, budget_s: float = 0.0, **train: Any
) -> Found:
    """What there is when the budget lasts for the first variant, the config's own."""
    settings = Train.model_validate({"precision": "fp32", **train})
    task = Task(geometry, settings, Workload(512, 1.0, 0.5, 128.0, None, None), "cpu", budget_s)
    found: Found = run_ranks(measure, 1, task, folder)[0]
    return found


@pytest.mark.measures
@pytest.mark.parametrize(
    ("train", "geometry", "variant"),
    [
        ({"strategy": "ddp", "method": "lora"}, GEOMETRY, "ddp/lora/none"),
        ({"strategy": "hsdp", "recompute": "selective"}, GEOMETRY, "fsdp/full/selective"),
        ({"strategy": "fsdp", "precision": "bf16"}, EXPERTS, "fsdp/full/none"),
        ({"strategy": "zero1"}, GEOMETRY, "zero1/full/none"),
        ({"strategy": "zero3", "recompute": "full"}, GEOMETRY, "zero3/full/full"),
    ],
    ids=["lora", "selective", "experts", "zero1", "zero3"],
)
def test_the_own_way_to_train_is_measured(
    tmp_path: Path, train: dict[str, Any], geometry: Geometry, variant: str
) -> None:
    if variant.startswith("zero"):
        pytest.importorskip("deepspeed")
    found = found_for(tmp_path, geometry, **train)
    assert [(part.part, part.variant) for part in found.parts] == [
        ("layer", variant),
        ("ends", variant),
    ]
    layer, _ = found.parts
    assert layer.forward.device_s(512) > 0
    assert layer.backward.device_s(512) > 0
    assert layer.document_tokens == pytest.approx(128)
    assert all("did not fit into 0 s" in line for line in found.left_out)
    assert not any(line.startswith(variant) for line in found.left_out)


LAYER = {"forward_s": Pass(1e-3, 2e-6, 4e-4), "backward_s": Pass(2e-3, 5e-6, 6e-4)}
ENDS = {"forward_s": Pass(3e-3, 7e-6, 1e-3), "backward_s": Pass(0.0, 1e-6, 2e-4)}


def test_parts_are_told_apart_by_models_that_take_exactly_so_long(tmp_path: Path) -> None:
    """The clock is made up, so the answer is known; the models, of 1 and 3 layers, are real."""
    found = run_ranks(measure_by_a_made_up_clock, 1, tmp_path)[0]
    for part, wanted in zip(found.parts, (LAYER, ENDS), strict=True):
        for name, measured in (("forward_s", part.forward), ("backward_s", part.backward)):
            assert measured.fixed_s == pytest.approx(wanted[name].fixed_s, abs=1e-9)
            assert measured.per_token_s == pytest.approx(wanted[name].per_token_s, rel=1e-6)
            assert measured.host_s == pytest.approx(
                wanted[name].device_s(parts.TINY_TOKENS), rel=1e-6
            )


@pytest.mark.parametrize("hidden", ["layer", "ends"])
@pytest.mark.parametrize("attempts", [1, parts.ATTEMPTS])
def test_a_disturbed_variant_is_measured_again(tmp_path: Path, hidden: str, attempts: int) -> None:
    """The clock is made up: in each disturbed attempt, a layer or the ends take no time."""
    found = run_ranks(measure_while_disturbed, 1, tmp_path, [hidden] * attempts)[0]
    is_seen = attempts < parts.ATTEMPTS
    backward_s = {
        part.part: part.backward.device_s(512)
        for part in found.parts
        if part.variant == "ddp/full/none"
    }
    left_out = [
        line
        for line in found.left_out
        if line.startswith("ddp/full/none") and "so much was disturbed" in line
    ]
    if hidden == "layer" and not is_seen:
        assert (len(left_out), backward_s) == (1, {})
    else:
        assert left_out == []
        assert backward_s["layer"] == pytest.approx(LAYER["backward_s"].device_s(512))
        assert backward_s["ends"] == (
            pytest.approx(ENDS["backward_s"].device_s(512)) if is_seen else 0
        )


def test_a_usable_measurement_is_kept_if_the_next_is_disturbed_more(tmp_path: Path) -> None:
    found = run_ranks(measure_while_disturbed, 1, tmp_path, ["ends", "layer"])[0]
    layer, ends = [
        part.backward.device_s(512) for part in found.parts if part.variant == "ddp/full/none"
    ]
    assert (layer, ends) == (pytest.approx(LAYER["backward_s"].device_s(512)), 0)


def measure_while_disturbed(environ: Mapping[str, str], folder: Path, hidden: list[str]) -> Found:
    built = 0

    def count_builds(model: Path, train: Train, accumulation: int, world: World) -> Stepper:
        nonlocal built
        built += 1
        return random_stepper(model, train, accumulation, world)

    def take_step_on_paper(stepper: Stepper, batches: list[Batch]) -> Any:
        layers, tokens = len(decoder_layers(stepper.wrapped)), batches[0].real_tokens
        phases = {
            name: layers * LAYER[name].device_s(tokens) + ENDS[name].device_s(tokens)
            for name in LAYER
        }
        if built <= 2 * len(hidden):
            is_layer = hidden[(built - 1) // 2] == "layer"
            layers, ends = (1, ENDS["backward_s"]) if is_layer else (layers, Pass(0.0, 0.0, 0.0))
            phases["backward_s"] = layers * LAYER["backward_s"].device_s(tokens) + ends.device_s(
                tokens
            )
        return SimpleNamespace(phases=phases)

    train = Train.model_validate({"precision": "fp32"})
    task = Task(GEOMETRY, train, Workload(512, 1.0, 0.5, 128.0, None, None), "cpu", 0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "random_stepper", count_builds)
        patch.setattr(parts, "take_step", take_step_on_paper)
        return measure(environ, task, folder)


def measure_by_a_made_up_clock(environ: Mapping[str, str], folder: Path) -> Found:
    steps = 0

    def take_step_on_paper(stepper: Stepper, batches: list[Batch]) -> Any:
        nonlocal steps
        steps += 1
        disturbed_s = 1.0 if steps % 4 == 0 else 0.0
        layers, tokens = len(decoder_layers(stepper.wrapped)), batches[0].real_tokens
        phases = {
            name: layers * LAYER[name].device_s(tokens) + ENDS[name].device_s(tokens)
            for name in LAYER
        }
        return SimpleNamespace(
            phases={name: seconds + disturbed_s for name, seconds in phases.items()}
        )

    train = Train.model_validate({"precision": "fp32"})
    task = Task(GEOMETRY, train, Workload(512, 1.0, 0.5, 128.0, None, None), "cpu", 0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "take_step", take_step_on_paper)
        return measure(environ, task, folder)


def test_what_does_not_fit_into_memory_is_left_out_and_said(tmp_path: Path) -> None:
    huge = replace(GEOMETRY, vocab=2**28)
    found = found_for(tmp_path, huge, budget_s=100.0, strategy="ddp")
    assert found.parts == []
    assert len(found.left_out) == 4
    assert all("GB of memory, and" in line for line in found.left_out), found.left_out
    assert found.left_out[0].startswith("ddp/full/none: needs ")


@pytest.mark.measures
def test_a_variant_that_fails_does_not_take_the_others_along(tmp_path: Path) -> None:
    found = run_ranks(measure_with_a_failure, 1, tmp_path)[0]
    assert found.left_out[0] == "ddp/full/none: the device has gone"
    # noise may hide one
    assert {part.variant for part in found.parts} & {"fsdp/full/none", "fsdp/full/full"}


def measure_with_a_failure(environ: Mapping[str, str], folder: Path) -> Found:
    def fail_under_ddp(model: Path, train: Train, accumulation: int, world: World) -> Stepper:
        if train.strategy == "ddp":
            raise RuntimeError("the device has gone\nand more")
        return random_stepper(model, train, accumulation, world)

    train = Train.model_validate({"precision": "fp32"})
    task = Task(GEOMETRY, train, Workload(512, 1.0, 0.5, 128.0, None, None), "cpu", 0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "random_stepper", fail_under_ddp)
        return measure(environ, task, folder)


def test_ways_that_the_precision_does_not_allow_are_not_measured() -> None:
    task = Task(GEOMETRY, Train(), Workload(512, 1.0, 0.5, 128.0, None, None), "cuda", 0.0)
    strategies = {
        precision: {
            way.strategy for way in parts.variants(replace(task, train=Train(precision=precision)))
        }
        for precision in ("bf16", "fp8")
    }
    assert strategies == {
        "bf16": {"ddp", "fsdp", "zero1", "zero2", "zero3"},
        "fp8": {"ddp", "fsdp"},
    }
