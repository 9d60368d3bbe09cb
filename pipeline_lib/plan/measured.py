"""Read cluster.json: what `qwen3 calibrate CONFIG` measured on the machines that will train."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from pipeline_lib.config.content import measured_content
from pipeline_lib.config.schema import Config
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.text import cut
from pipeline_lib.plan.machine import MeasuredPart, Pass, Speeds
from pipeline_lib.records.plan import Rate

SCHEMA = 1
AGAIN = "make it again with `qwen3 calibrate CONFIG`"
RATES = tuple(field.name for field in fields(Speeds))
PARTS = ("layer", "ends")
PRECISIONS = ("bf16", "fp8", "fp16", "fp32")


@dataclass(frozen=True)
class Measured:
    """A model's rates and parts, measured in one precision on `nodes` nodes with `ranks` ranks.

    `gpu` is the name that the driver gives the GPUs, or None on CPUs.
    """

    rates: dict[str, Rate]
    parts: tuple[MeasuredPart, ...]
    gpu: str | None
    gpu_memory_bytes: int | None
    ranks: int
    nodes: int
    precision: str


def measured_of(config: Config) -> Measured | None:
    """Return the content of the config's cluster.json; None if it names none.

    Raise ConfigError, naming the file.
    """
    content = measured_content(config)
    try:
        return None if content is None else read_measured(content)
    except ConfigError as error:
        where = f"cluster.measured: {config.cluster.measured!r}"
        raise ConfigError(
            "the config", [f"{where}: {problem}" for problem in error.problems]
        ) from error


def read_measured(content: Mapping[str, Any]) -> Measured:
    """Read the content of a cluster.json.

    Raise ConfigError with the problem and how to make the file again.
    """
    schema = content.get("schema")
    if schema != SCHEMA or isinstance(schema, bool):
        _refuse(f"schema {schema!r}, and this version reads {SCHEMA}")
    rates = _mapping(content, "rates")
    unknown = sorted(set(rates) - set(RATES))
    if unknown:
        _refuse(f"rates.{unknown[0]}: no such rate; there are {', '.join(RATES)}")
    gpu = content.get("gpu")
    memory = content.get("gpu_memory_bytes")
    if not (gpu is None or (isinstance(gpu, str) and gpu)):
        _refuse(f"gpu: {gpu!r} is not the name of a GPU, or null")
    if (gpu is None) != (memory is None):
        _refuse(f"gpu is {gpu!r} and gpu_memory_bytes is {memory!r}: both are null, or none")
    parts = content.get("parts")
    if not isinstance(parts, list):
        _refuse(f"parts: {_short(parts)} is no list")
    return Measured(
        rates={name: _rate(rates, name) for name in rates},
        parts=tuple(_part(part, f"parts[{index}]") for index, part in enumerate(parts)),
        gpu=gpu,
        gpu_memory_bytes=None if memory is None else _count(content, "gpu_memory_bytes"),
        ranks=_count(content, "ranks"),
        nodes=_count(content, "nodes"),
        precision=_one_of(content, "precision", PRECISIONS),
    )


def _rate(rates: Mapping[str, Any], name: str) -> Rate:
    where = f"rates.{name}"
    rate = _mapping(rates, name, where)
    value, low, high = (
        _number(rate, key, f"{where}.{key}", is_positive=True) for key in ("value", "low", "high")
    )
    if not low <= value <= high:
        _refuse(f"{where}: low {low:g}, value {value:g} and high {high:g} are not in this order")
    return Rate(value, low, high, "measured")


def _part(part: Any, where: str) -> MeasuredPart:
    if not isinstance(part, Mapping):
        _refuse(f"{where}: {_short(part)} is no mapping")
    shape = part.get("shape")
    variant = part.get("variant")
    if (
        not isinstance(shape, list)
        or not shape
        or not all(_is_integer(size) and size >= 0 for size in shape)
    ):
        _refuse(f"{where}.shape: {_short(shape)} is no list of sizes")
    if not isinstance(variant, str) or not variant:
        _refuse(
            f"{where}.variant: {_short(variant)} is not the name of a variant, as 'ddp/full/none'"
        )
    kind = _one_of(part, "part", PARTS, f"{where}.part")
    supervised = _number(part, "supervised_fraction", f"{where}.supervised_fraction")
    if supervised > 1:
        _refuse(f"{where}.supervised_fraction: {supervised:g} is above 1")
    return MeasuredPart(
        part=kind,
        shape=tuple(shape),
        variant=variant,
        document_tokens=_number(
            part, "document_tokens", f"{where}.document_tokens", is_positive=True
        ),
        supervised_fraction=supervised,
        forward=_pass(part, "forward", where, may_be_zero=kind == "ends"),
        backward=_pass(part, "backward", where, may_be_zero=kind == "ends"),
    )


def _pass(part: Mapping[str, Any], key: str, where: str, may_be_zero: bool) -> Pass:
    times = _mapping(part, key, f"{where}.{key}")
    found = {
        field.name: _number(times, field.name, f"{where}.{key}.{field.name}")
        for field in fields(Pass)
    }
    if not any(found.values()) and not may_be_zero:
        _refuse(
            f"{where}.{key}: {', '.join(found)} are all 0, and every pass of a layer takes some "
            "time"
        )
    return Pass(**found)


def _mapping(content: Mapping[str, Any], key: str, where: str | None = None) -> Mapping[str, Any]:
    value = content.get(key)
    return (
        value
        if isinstance(value, Mapping)
        else _refuse(f"{where or key}: {_short(value)} is no mapping")
    )


def _number(content: Mapping[str, Any], key: str, where: str, is_positive: bool = False) -> float:
    value = content.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        _refuse(f"{where}: {_short(value)} is no finite number")
    if value < 0 or (is_positive and value == 0):
        _refuse(f"{where}: {value:g} is not {'above' if is_positive else 'at least'} 0")
    return float(value)


def _count(content: Mapping[str, Any], key: str) -> int:
    value: Any = content.get(key)
    return (
        int(value)
        if _is_integer(value) and value > 0
        else _refuse(f"{key}: {_short(value)} is no positive integer")
    )


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _one_of(
    content: Mapping[str, Any], key: str, valid: tuple[str, ...], where: str | None = None
) -> str:
    value = content.get(key)
    if not isinstance(value, str) or value not in valid:
        _refuse(f"{where or key}: {_short(value)} is not one of {', '.join(valid)}")
    return value


def _short(value: Any) -> str:
    return cut(repr(value), 60)


def _refuse(problem: str) -> NoReturn:
    raise ConfigError("cluster.measured", [f"{problem}; {AGAIN}"])
