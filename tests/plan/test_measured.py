"""cluster.json is read as it was written, and what is wrong with one is named."""

import copy
import json
import math
from typing import Any

import pytest

from pipeline_lib.core.errors import ConfigError
from pipeline_lib.plan.machine import Pass
from pipeline_lib.plan.measured import read_measured
from pipeline_lib.records.plan import Rate

CONTENT: dict[str, Any] = {
    "schema": 1,
    "measured_at": "2026-10-01T12:00:00Z",
    "host": "2 x NVIDIA H200",
    "gpu": "NVIDIA H200",
    "gpu_memory_bytes": 150_121_000_000,
    "ranks": 2,
    "nodes": 1,
    "torch": "2.11.0",
    "model": "Qwen3-0.6B",
    "precision": "bf16",
    "rates": {
        "matmul_flop_s": {"value": 6.9e14, "low": 6.7e14, "high": 7.1e14},
        "launch_s": {"value": 2e-5, "low": 1.9e-5, "high": 2.1e-5},
    },
    "parts": [
        {
            "part": "layer",
            "shape": [151936, 1024, 3072, 16, 8, 128, 0, 0, 0],
            "variant": "ddp/full/none",
            "document_tokens": 512.5,
            "supervised_fraction": 0.5,
            "forward": {"fixed_s": 0.0, "per_token_s": 2e-7, "host_s": 1.6e-3},
            "backward": {"fixed_s": 1e-4, "per_token_s": 4e-7, "host_s": 2.8e-3},
        }
    ],
}


def changed(path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    content = copy.deepcopy(CONTENT)
    place: Any = content
    for key in path[:-1]:
        place = place[key]
    if value is KeyError:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return content


def test_everything_is_read() -> None:
    measured = read_measured(json.loads(json.dumps(CONTENT)))
    assert measured.rates == {
        "matmul_flop_s": Rate(6.9e14, 6.7e14, 7.1e14, "measured"),
        "launch_s": Rate(2e-5, 1.9e-5, 2.1e-5, "measured"),
    }
    assert (measured.gpu, measured.gpu_memory_bytes) == ("NVIDIA H200", 150_121_000_000)
    assert (measured.ranks, measured.nodes, measured.precision) == (2, 1, "bf16")
    part = measured.parts[0]
    assert (part.part, part.variant, part.document_tokens, part.supervised_fraction) == (
        "layer",
        "ddp/full/none",
        512.5,
        0.5,
    )
    assert part.shape == (151936, 1024, 3072, 16, 8, 128, 0, 0, 0)
    assert (part.forward, part.backward) == (Pass(0.0, 2e-7, 1.6e-3), Pass(1e-4, 4e-7, 2.8e-3))


def test_cpus_have_no_gpu_and_nothing_need_have_been_measured() -> None:
    content = {**CONTENT, "gpu": None, "gpu_memory_bytes": None, "rates": {}, "parts": []}
    measured = read_measured(content)
    assert (measured.gpu, measured.gpu_memory_bytes, measured.rates, measured.parts) == (
        None,
        None,
        {},
        (),
    )


BROKEN: list[tuple[tuple[str | int, ...], Any, str]] = [
    (("schema",), 2, "schema 2, and this version reads 1"),
    (("schema",), True, "schema True"),
    (("gpu",), None, "gpu is None and gpu_memory_bytes is 150121000000: both are null, or none"),
    (("gpu",), 5, "gpu: 5 is not the name of a GPU"),
    (("gpu_memory_bytes",), 0, "gpu_memory_bytes: 0 is no positive integer"),
    (("ranks",), 0, "ranks: 0 is no positive integer"),
    (("nodes",), True, "nodes: True is no positive integer"),
    (("precision",), "fp4", "precision: 'fp4' is not one of bf16, fp8, fp16, fp32"),
    (("precision",), ["bf16"], r"precision: \['bf16'\] is not one of"),
    (("rates",), [], r"rates: \[\] is no mapping"),
    (
        ("rates", "matmul_flops"),
        {},
        "rates.matmul_flops: no such rate; there are matmul_flop_s, attention_flop_s",
    ),
    (("rates", "launch_s"), 2e-5, "rates.launch_s: 2e-05 is no mapping"),
    (
        ("rates", "launch_s", "low"),
        3e-5,
        "rates.launch_s: low 3e-05, value 2e-05 and high 2.1e-05 are not in this",
    ),
    (("rates", "launch_s", "low"), 0, "rates.launch_s.low: 0 is not above 0"),
    (("rates", "launch_s", "high"), math.inf, "rates.launch_s.high: inf is no finite number"),
    (("rates", "launch_s", "value"), "2e-5", "rates.launch_s.value: '2e-5' is no finite number"),
    (("parts",), KeyError, "parts: None is no list"),
    (("parts", 0), "layer", r"parts\[0\]: 'layer' is no mapping"),
    (("parts", 0, "part"), "head", r"parts\[0\].part: 'head' is not one of layer, ends"),
    (("parts", 0, "shape"), [], r"parts\[0\].shape: \[\] is no list of sizes"),
    (("parts", 0, "shape"), [-1], r"parts\[0\].shape: \[-1\] is no list"),
    (("parts", 0, "variant"), "", r"parts\[0\].variant: '' is not the name"),
    (("parts", 0, "supervised_fraction"), 1.1, r"parts\[0\].supervised_fraction: 1.1 is above 1"),
    (("parts", 0, "forward"), KeyError, r"parts\[0\].forward: None is no mapping"),
    (
        ("parts", 0, "backward", "fixed_s"),
        -1e-6,
        r"parts\[0\].backward.fixed_s: -1e-06 is not at least 0",
    ),
    (
        ("parts", 0, "backward"),
        {"fixed_s": 0, "per_token_s": 0.0, "host_s": 0},
        r"parts\[0\].backward: fixed_s, per_token_s, host_s are all 0, and every pass of a layer takes",
    ),
    (
        ("parts", 0, "backward", "per_token_s"),
        False,
        r"parts\[0\].backward.per_token_s: False is no finite number",
    ),
]


@pytest.mark.parametrize(("path", "value", "said"), BROKEN)
def test_what_is_wrong_is_named(path: tuple[str | int, ...], value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        read_measured(changed(path, value))
    assert "cluster.measured" in str(raised.value)
    assert "`qwen3 calibrate CONFIG`" in str(raised.value)


def test_the_ends_may_take_no_time() -> None:
    """A first layer under LoRA may save as much as they take."""
    none = {"fixed_s": 0.0, "per_token_s": 0.0, "host_s": 0.0}
    ends = {**CONTENT["parts"][0], "part": "ends", "backward": none}
    assert read_measured(changed(("parts", 0), ends)).parts[0].backward == Pass(0.0, 0.0, 0.0)


def test_a_rate_without_a_band_is_legal() -> None:
    """Equal ends are in order."""
    measured = read_measured(
        changed(("rates", "launch_s"), {"value": 1e-5, "low": 1e-5, "high": 1e-5})
    )
    assert measured.rates["launch_s"].value == 1e-5
