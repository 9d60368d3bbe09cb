"""Which parts an experiment has: of each kind in config/stages.py none, one, or several."""

from collections.abc import Callable, Mapping

from pipeline_lib.config.content import Content
from pipeline_lib.config.exports import EXPORT_TYPES, Push
from pipeline_lib.config.schema import Config
from pipeline_lib.config.spec_settings import ADAPTER_PART, PARENT, PUSH, ROOT
from pipeline_lib.config.stages import BASE_BENCHMARK, LAST_MERGE

Condition = Callable[[Config, Content], bool]


def parts_of(kind: str, config: Config, content: Content) -> list[str]:
    """Return the parts of `kind`: `merge`, or numbered ones as `data.0` and `data.1`."""
    if kind in _NUMBERED:
        return [f"{kind}.{number}" for number in range(_NUMBERED[kind](config))]
    if kind in _CONDITIONS and not _CONDITIONS[kind](config, content):
        return []
    return [kind]


def _has_benchmarks(config: Config, _: Content) -> bool:
    return bool(config.evaluate.benchmarks)


def _has_generation(config: Config, content: Content) -> bool:
    """Return whether the model that is published has generation settings in a file of its own."""
    if config.continues and config.parent is not None and content.parent is not None:
        return _has_generation(config.parent, content.parent)
    return bool(content.generation)


def _is_exported(kind: str) -> Condition:
    return lambda config, _: kind in config.export


def _is_pushed(hub: str) -> Condition:
    return lambda config, _: getattr(config.push, hub) is not None


# Of these kinds an experiment has as many parts as that.
_NUMBERED: Mapping[str, Callable[[Config], int]] = {
    "data": lambda config: len(config.data.sources),
    "questions": lambda config: len(config.evaluate.benchmarks),
}
# Of these kinds it has a part only then; of every other kind it has one.
_CONDITIONS: Mapping[str, Condition] = {
    ROOT: lambda config, _: config.parent is not None,
    PARENT: lambda config, _: config.continues,
    ADAPTER_PART: lambda config, _: config.continues or config.starting_adapter is not None,
    "generation": _has_generation,
    LAST_MERGE: lambda config, _: config.merge.average is not None,
    "overlap": _has_benchmarks,
    "benchmark": _has_benchmarks,
    BASE_BENCHMARK: _has_benchmarks,
    **{kind: _is_exported(kind) for kind in EXPORT_TYPES},
    **{f"{PUSH}{hub}": _is_pushed(hub) for hub in Push.model_fields},
}
