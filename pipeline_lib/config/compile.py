"""Compiles a config to specs: one per stage instance, each naming the digests of what it reads.

A pure function of the config and of the content hashes of the local files it names. The versions below
are bumped by hand when a stage's code begins to compute something else from the same settings.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline_lib.base.spec import Ref, Spec
from pipeline_lib.base.store import Store
from pipeline_lib.config.content import Content, HashCache, read_content
from pipeline_lib.config.load import load_config
from pipeline_lib.config.schema import PLACEMENT_KEYS, Config, settings_of

VERSIONS = {
    "download": 1,
    "tokenize": 1,
    "shard": 1,
    "plan": 1,
    "train": 1,
    "merge": 1,
    "evaluate": 1,
    "report": 1,
}


# Keys of a source that say where it lies: what lies there is hashed instead.
WHERE_KEYS = frozenset({"path", "tokenizer"})


@dataclass(frozen=True)
class Experiment:
    """A config and its specs, by the name of their part in it (`model`, `data.0`, `tokenize`, ..., `report`)."""

    config: Config
    specs: Mapping[str, Spec]

    @property
    def name(self) -> str:
        """The name the user gave it."""
        return self.config.experiment

    def ref(self, part: str) -> Ref:
        """The stage instance that plays `part`."""
        return self.specs[part].ref

    def by_digest(self, digest: str) -> Spec | None:
        """The spec with that digest, if it belongs to this experiment."""
        return next((spec for spec in self.specs.values() if spec.digest == digest), None)


def compile_config(config: Config, content: Content) -> Experiment:
    """The specs of `config`, given the hashes of the local files that it names."""
    specs: dict[str, Spec] = {}

    def add(part: str, stage: str, settings: Mapping[str, Any], reads: tuple[str, ...] = ()) -> None:
        specs[part] = Spec(stage, VERSIONS[stage], settings, {name: specs[name].ref for name in reads})

    def add_download(part: str, kind: str, source: Any, hashes: Mapping[str, str]) -> None:
        settings = {"kind": kind, **_keyed_source(source, hashes)}
        specs[part] = Spec("download", VERSIONS["download"], settings, where=_where(source))

    add_download("model", "model", config.model, content.model)
    data_parts = tuple(f"data.{index}" for index in range(len(config.data.train)))
    for part, source, hashes in zip(data_parts, config.data.train, content.data, strict=True):
        add_download(part, "data", source, hashes)
    add("tokenize", "tokenize", _tokenize_settings(config), ("model", *data_parts))
    split = {"validation_fraction": config.data.validation_fraction}
    add("shard", "shard", {**settings_of(config.shard), **split}, ("tokenize",))
    everything = {"cluster": settings_of(config.cluster), "train": settings_of(config.train)}
    add("plan", "plan", {"experiment": config.experiment, **everything}, ("model", "tokenize", "shard"))
    add("train", "train", settings_of(config.train, exclude=PLACEMENT_KEYS), ("model", "shard"))
    add("merge", "merge", settings_of(config.merge), ("model", "train"))
    add("evaluate", "evaluate", settings_of(config.evaluate), ("model", "merge", "shard"))
    report_reads = ("model", *data_parts, "tokenize", "shard", "train", "merge", "evaluate")
    add("report", "report", {"experiment": config.experiment}, report_reads)
    return Experiment(config, specs)


def run_digest(train: Spec) -> str:
    """Names the working directory of a training run: the same wherever it is told to stop meanwhile."""
    settings = {key: value for key, value in train.settings.items() if key != "until_step"}
    return Spec(train.stage, train.version, settings, train.inputs).digest


def open_experiment(config_path: Path, store: Store) -> Experiment:
    """Read, check and compile the config file at `config_path`. Raises ConfigError."""
    config = load_config(config_path)
    content = read_content(config, config_path, HashCache.load(store.root / "hashes.json"))
    return compile_config(config, content)


def _keyed_source(source: Any, hashes: Mapping[str, str]) -> dict[str, Any]:
    """A source's settings, its paths replaced by the hashes of what lies there."""
    settings: dict[str, Any] = source.model_dump(mode="json", exclude_defaults=True, exclude={*WHERE_KEYS, "format"})
    settings["source"] = source.source
    if hashes:
        settings["content"] = dict(sorted(hashes.items()))
    return settings


def _where(source: Any) -> dict[str, str]:
    """Absolute, since a store may be shared by several clones."""
    found = {key: getattr(source, key, None) for key in sorted(WHERE_KEYS)}
    return {key: str(Path(value).absolute()) for key, value in found.items() if value is not None}


def _tokenize_settings(config: Config) -> dict[str, Any]:
    formats = [getattr(source, "format", "auto") for source in config.data.train]
    settings = settings_of(config.tokenize)
    return {**settings, "formats": formats} if set(formats) != {"auto"} else settings
