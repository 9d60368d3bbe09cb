from pathlib import Path

import pytest

from pipeline_lib.config.load import load_configs
from pipeline_lib.config.warnings import warnings_of
from tests.config.test_load import ROOT, VALID, written


def found(folder: Path, text: str) -> list[str]:
    return warned(written(folder, VALID + text + "\n"))


def warned(path: Path) -> list[str]:
    """The warnings of the experiments of a file."""
    return [one.text for config in load_configs(path) for one in warnings_of(config)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train: {lr: 5}", ["train.lr: 5 is unusual; 5e-6 to 5e-5 is usual for all weights"]),
        ("train: {lr: 1e-300}", ["train.lr: 1e-300 is unusual; 5e-6 to 5e-5"]),
        ("train: {lr: 5, method: lora}", ["train.lr: 5 is unusual; 1e-4 to 4e-4"]),
        (
            "train: {global_batch_tokens: 1024000000000}",
            ["train.global_batch_tokens: 1.024e+12 is unusual"],
        ),
        ("train: {epochs: 5000}", ["train.epochs: 5000 is unusual; 1 to 5 are usual"]),
        (
            "train: {method: lora, lora: {rank: 2000, alpha: 1000000}}",
            ["train.lora.rank: 2000 is unusual", "train.lora.alpha: 1e+06 is unusual"],
        ),
        (
            "train: {weight_decay: 5, warmup_fraction: 0.9}",
            ["train.warmup_fraction: 0.9", "train.weight_decay: 5"],
        ),
        ("sweep: {train.lr: [1, 2]}", ["train.lr: 1 is unusual", "train.lr: 2 is unusual"]),
        ("train: {lr: 0.004, epochs: 20, method: lora, lora: {rank: 512, alpha: 1024}}", []),
    ],
)
def test_what_nobody_trains_with_is_warned_of(tmp_path: Path, text: str, said: list[str]) -> None:
    warnings = found(tmp_path, text)
    assert len(warnings) == len(said)
    assert all(warning.startswith(begins) for warning, begins in zip(warnings, said, strict=True))


@pytest.mark.parametrize(
    ("text", "idle"),
    [
        ("cluster: {gpu: h200, gpu_hour_price: 2}", ["cluster.gpu", "cluster.gpu_hour_price"]),
        (
            "train: {attention: flash, deterministic: true}",
            ["train.attention", "train.deterministic"],
        ),
        ("cluster: {gpus_per_node: 2, gpu: h200, cpu_ranks: 2}", ["cluster.cpu_ranks"]),
        (
            "train: {gradient_compression: bf16}\ncluster: {cpu_ranks: 1}",
            ["train.gradient_compression"],
        ),
        ("train: {local_sgd_steps: 4}\ncluster: {cpu_ranks: 1}", ["train.local_sgd_steps"]),
        ("tracking: {project: mine}", ["tracking.project"]),
        ("evaluate: {generations: 0, max_new_tokens: 9}", ["evaluate.max_new_tokens"]),
        ("evaluate: {generations: 0, max_new_tokens: 9, prompts: [Who?]}", []),
        (
            "train: {gradient_compression: bf16, deterministic: true}\ncluster: {gpus_per_node: 2, "
            "gpu: h200}",
            [],
        ),
    ],
)
def test_what_has_no_effect_here_is_warned_of(tmp_path: Path, text: str, idle: list[str]) -> None:
    assert [warning.partition(": ")[0] for warning in found(tmp_path, text)] == idle


def test_a_weight_far_from_one_is_warned_of(tmp_path: Path) -> None:
    [warning] = warned(written(tmp_path, VALID.replace("pydoc}", "pydoc, weight: 1000}")))
    assert warning.startswith("data.train[0].weight: 1000 is unusual")


@pytest.mark.parametrize(
    "path", sorted((ROOT / "config").rglob("*.yaml")), ids=lambda path: path.name
)
def test_the_shipped_configs_are_usual(path: Path) -> None:
    assert warned(path) == []
