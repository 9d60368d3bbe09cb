"""Load a YAML file as checked `Config`s, or report all of its problems at once."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline_lib.config import strict_yaml
from pipeline_lib.config.axes import HALVING, line_of
from pipeline_lib.config.chains import Candidate, OtherFile, link_parents
from pipeline_lib.config.checks import cross_check, wanting_a_strategy
from pipeline_lib.config.experiments import NamedExperiment, entries_of
from pipeline_lib.config.findings import refusals
from pipeline_lib.config.halving import Halving, halving_problems
from pipeline_lib.config.schema import Config, ExperimentModel
from pipeline_lib.config.schema_problems import key_in_file, schema_problems, with_place
from pipeline_lib.config.strict_yaml import Keys, YamlDocument, as_written, dotted, undotted
from pipeline_lib.config.sweep import Variant, collapsed, name_by, put, read_sweep
from pipeline_lib.config.train import AUTO
from pipeline_lib.core.errors import ConfigError

# finds further problems of a config; each begins with its key
Check = Callable[[Config], list[str]]
FLAG = "--what-if"


@dataclass(frozen=True)
class Overrides:
    """Values `KEY=VALUE` in place of a file's, in each of its experiments.

    A key is dotted, and a value YAML. `flag` stands before each on the command line. If
    `in_names`, the experiments are others than those of the file, and their names say the values.
    """

    settings: Sequence[str] = ()
    flag: str = FLAG
    in_names: bool = False


NONE_OVERRIDDEN = Overrides()


@dataclass(frozen=True)
class LoadedConfig:
    """The experiments of a config file.

    `name` is the file's; `halving_line` begins problems with `halving`. `candidates` are the same
    experiments, as others may name them.
    """

    name: str
    candidates: Sequence[Candidate]
    configs: tuple[Config, ...]
    halving: Halving | None
    halving_line: str


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Load and check the config file at `path`; of a sweep, return the first experiment.

    Raises as `load_configs`.
    """
    return load_configs(path, overrides)[0]


def load_configs(path: Path, overrides: Sequence[str] = ()) -> tuple[Config, ...]:
    """Load and check the experiments of the config file at `path`: one, or all of its sweep.

    `overrides` are settings of the flag FLAG, see Overrides. Raises ConfigError with every problem.
    """
    return load_sweep(path, Overrides(overrides)).configs


def load_sweep(
    path: Path,
    overrides: Overrides = NONE_OVERRIDDEN,
    checks: Sequence[Check] = (),
    document: YamlDocument | None = None,
    read_for: Sequence[Path] = (),
) -> LoadedConfig:
    """Load as `load_configs`, and also return the name and the halving settings of the file.

    Each of `checks` finds further problems of a config. A problem is left out if its key already
    has one. A `document` is read in place of the file at `path`. The experiments of the files
    `read_for`, the first one first, go on from those of this one.
    """
    is_file = document is None
    if document is None:
        document = strict_yaml.load(path)
    if document.value is None:
        raise ConfigError(str(path), ["holds no keys; config/config.yaml is an example"])
    entries, wrong = entries_of(document)
    problems = [*document.problems, *wrong]
    halving = None
    halving_line = ""
    drafts: list[_Draft] = []
    for entry in entries:
        sweep = read_sweep(entry.document)
        problems += sweep.problems
        if sweep.halving and len(entries) == 1:
            halving = sweep.halving
            halving_line = line_of(entry.document.lines, HALVING)
        drafts += [_draft(entry, variant, overrides) for variant in sweep.variants]

    candidates = [draft.candidate for draft in drafts]
    link_parents(candidates, partial(_open_other, checks=checks, read_for=[*read_for, path]))
    of_experiments = []
    for draft in drafts:
        draft.problems += _problems_in(draft, halving, checks)
        label = draft.candidate.full_name if len(entries) > 1 else draft.candidate.tag
        of_experiments.append((label, draft.problems))
    problems += collapsed(of_experiments)
    if problems:
        raise ConfigError(str(path), list(dict.fromkeys(problems)))
    configs = [draft.candidate.config for draft in drafts if draft.candidate.config is not None]
    tag = candidates[0].tag
    name = configs[0].experiment.removesuffix(f"-{tag}" if tag else "")
    if len(entries) > 1:
        name = path.stem if is_file else configs[-1].experiment
    return LoadedConfig(name, candidates, tuple(configs), halving, halving_line)


def _open_other(path: Path, checks: Sequence[Check], read_for: Sequence[Path]) -> OtherFile:
    """Read the config file at `path` for the last of the files `read_for`. Raises ConfigError."""
    if path.resolve() in [above.resolve() for above in read_for]:
        files = " from ".join(str(each) for each in [*read_for, path])
        text = f"a cycle, {files}: each has an experiment that goes on from the next file's"
        raise ConfigError(str(path), [f"{text}; put the experiments into one file"])
    loaded = load_sweep(path, checks=checks, read_for=read_for)
    return OtherFile(loaded.candidates, is_halved=loaded.halving is not None)


def _validated(value: Any) -> Config:
    """Return the config `value` of a file, whose keys go by their names in files alone."""
    config = Config.model_validate_json(json.dumps(value), by_alias=True, by_name=False)
    return _with_strategy(config)


def _with_strategy(config: Config) -> Config:
    """Leave the strategy to the plan if the file names none and the plan knows the GPUs."""
    if "strategy" in config.train.model_fields_set or not config.cluster.has_known_gpus:
        return config
    train = config.train.model_copy(update={"strategy": AUTO})
    if any(wanting_a_strategy(train)):
        return config
    return config.model_copy(update={"train": train})


def problems_of(value: Mapping[str, Any], places: Mapping[Keys, str]) -> list[str]:
    """Return the problems of the config `value`, each after the place of its key in `places`."""
    try:
        config = _validated(value)
    except ValidationError as error:
        return schema_problems(error, places)
    return [with_place(keys, text, places) for keys, text in cross_check(config)]


@dataclass
class _Draft:
    """An experiment of a file while it is loaded; the place of each of its keys, and problems."""

    candidate: Candidate
    places: dict[Keys, str]
    problems: list[str]


def _draft(entry: NamedExperiment, variant: Variant, overrides: Overrides) -> _Draft:
    """Return one experiment with `overrides`; without a config if it breaks the schema."""
    problems: list[str] = []
    places = {keys: f"line {line}" for keys, line in variant.lines.items()}
    name = entry.name or _name_in(variant)
    for setting in overrides.settings:
        problems += _override(variant.value, places, overrides.flag, setting)
    problems += _repeated(overrides)
    if overrides.in_names and not problems:
        name_by(variant.value, variant.tag, overrides.settings)
    candidate = Candidate(name, variant.tag, None)
    try:
        candidate.config = _config_of(variant.value)
    except ValidationError as error:
        problems += schema_problems(error, places)
    return _Draft(candidate, places, problems)


def _name_in(variant: Variant) -> str:
    """Return the name in a file without `experiments`; "" if it has none."""
    root = variant.value
    name = as_written(root.get("experiment")) if isinstance(root, dict) else None
    if not isinstance(name, str):
        return ""
    return name.removesuffix(f"-{variant.tag}") if variant.tag else name


def _problems_in(draft: _Draft, halving: Halving | None, checks: Sequence[Check]) -> list[str]:
    """Return what is wrong with a draft beyond its schema.

    One whose parent is not known is not given to `checks`, which need to know its model.
    """
    config = draft.candidate.config
    if config is None:
        return []
    wrong = [*draft.candidate.problems, *cross_check(config)]
    if halving:
        wrong += halving_problems(halving, config)
    problems = [with_place(keys, text, draft.places) for keys, text in wrong]
    if isinstance(config.root.model, ExperimentModel):
        return problems
    wrong_keys = {dotted(keys) for keys, _ in wrong}
    for check in checks:
        found = [one for one in refusals(check(config)) if one.key not in wrong_keys]
        for one in found:
            if one.key:
                wrong_keys.add(one.key)
                problems.append(with_place(undotted(one.key), one.sentence, draft.places))
            else:
                problems.append(one.text)
    return problems


def _config_of(value: Any) -> Config:
    """Return the config.

    Where text is wanted, a bare number is taken as it was written: `experiment: 007`. Raises
    ValidationError.
    """
    try:
        return _validated(value)
    except ValidationError as error:
        is_changed = False
        for detail in error.errors():
            if detail["type"] != "string_type":
                continue
            *above, last = key_in_file(detail["loc"])[0]
            section = value
            for part in above:
                section = section[part]
            number = section[last]
            section[last] = as_written(number)
            is_changed |= section[last] is not number
        if not is_changed:
            raise
    return _validated(value)


def _repeated(overrides: Overrides) -> list[str]:
    """Return a problem for each key that is given more than once, of which the last would count."""
    values: dict[str, list[str]] = {}
    for setting in overrides.settings:
        key, _, value = setting.partition("=")
        values.setdefault(key, []).append(value)
    return [
        f"{overrides.flag} {key}: given {len(given)} times ({' and '.join(given)}); give it once, "
        "and ask again for the other"
        for key, given in values.items()
        if len(given) > 1
    ]


def _override(root: Any, places: dict[Keys, str], flag: str, setting: str) -> list[str]:
    """Put the value of `setting` into `root` and its origin into `places`; return the problems."""
    key, equals, text = setting.partition("=")
    given_as = f"{flag} {setting}".strip()
    keys = undotted(key)
    if not equals or not keys:
        example = f"{flag} cluster.nodes=2".strip()
        return [f"{given_as}: not of the form KEY=VALUE, as in {example}"]
    try:
        given = strict_yaml.parse(text, given_as)
    except ConfigError as error:
        return [f"{given_as}: {problem}" for problem in error.problems]
    if problem := put(root, keys, given.value):
        return [f"{given_as}: {problem}"]
    for known in list(places):
        if known[: len(keys)] == keys:
            del places[known]
    for end in range(1, len(keys)):
        places.setdefault(keys[:end], given_as)
    places[keys] = given_as
    return [f"{given_as}: {problem}" for problem in given.problems]
