"""Load a YAML file as checked `Config`s, or report all of its problems at once."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline_lib.config import strict_yaml
from pipeline_lib.config.axes import HALVING, line_of
from pipeline_lib.config.checks import cross_check, wanting_a_strategy
from pipeline_lib.config.findings import refusals
from pipeline_lib.config.halving import Halving, halving_problems
from pipeline_lib.config.schema import Config
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

    `name` is the file's; `halving_line` begins problems with `halving`.
    """

    name: str
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
) -> LoadedConfig:
    """Load as `load_configs`, and also return the name and the halving settings of the file.

    Each of `checks` finds further problems of a config. A problem is left out if its key already
    has one. A `document` is read in place of the file at `path`.
    """
    if document is None:
        document = strict_yaml.load(path)
    if document.value is None:
        raise ConfigError(str(path), ["holds no keys; config/config.yaml is an example"])
    problems = list(document.problems)
    sweep = read_sweep(document)
    problems += sweep.problems
    configs = []
    of_experiments = []
    for variant in sweep.variants:
        config, own = _checked(variant, sweep.halving, overrides, checks)
        of_experiments.append((variant.tag, own))
        if config is not None:
            configs.append(config)
    problems += collapsed(of_experiments)
    if problems:
        raise ConfigError(str(path), problems)
    tag = sweep.variants[0].tag
    name = configs[0].experiment.removesuffix(f"-{tag}" if tag else "")
    return LoadedConfig(name, tuple(configs), sweep.halving, line_of(document.lines, HALVING))


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


def _checked(
    variant: Variant, halving: Halving | None, overrides: Overrides, checks: Sequence[Check]
) -> tuple[Config | None, list[str]]:
    """Return one experiment's config and its problems; no config if it breaks the schema."""
    problems: list[str] = []
    places = {keys: f"line {line}" for keys, line in variant.lines.items()}
    for setting in overrides.settings:
        problems += _override(variant.value, places, overrides.flag, setting)
    problems += _repeated(overrides)
    if overrides.in_names and not problems:
        name_by(variant.value, variant.tag, overrides.settings)
    try:
        config = _config_of(variant.value)
    except ValidationError as error:
        return None, [*problems, *schema_problems(error, places)]
    wrong = list(cross_check(config))
    if halving:
        wrong += halving_problems(halving, config)
    problems += [with_place(keys, text, places) for keys, text in wrong]
    wrong_keys = {dotted(keys) for keys, _ in wrong}
    for check in checks:
        found = [one for one in refusals(check(config)) if one.key not in wrong_keys]
        for one in found:
            if one.key:
                wrong_keys.add(one.key)
                problems.append(with_place(undotted(one.key), one.sentence, places))
            else:
                problems.append(one.text)
    return config, problems


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
