"""Import a config from other tools: LLaMA-Factory, DeepSpeed, and transformers' Trainer.

It reads their files and arguments. The kind of a file is recognised by its content. Nothing in a
file is evaluated, and no key is left out in silence.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline_lib.config import strict_yaml
from pipeline_lib.config.deepspeed_json import REASONS
from pipeline_lib.config.import_arguments import Origin, convert_arguments
from pipeline_lib.config.import_datasets import (
    INFO_NAME,
    CountRows,
    Info,
    convert_datasets,
    is_dataset_info,
)
from pipeline_lib.config.import_deepspeed import account_for_placement, add_deepspeed, is_deepspeed
from pipeline_lib.config.import_draft import (
    DEFAULTS,
    AccountPart,
    Draft,
    Given,
    Row,
    shown,
    yaml_text,
)
from pipeline_lib.config.load import problems_of
from pipeline_lib.config.other_tools import spelled
from pipeline_lib.config.schema import NAME_PATTERN
from pipeline_lib.config.strict_yaml import Keys
from pipeline_lib.core.errors import ConfigError

LLAMA_FACTORY = "LLaMA-Factory"
DEEPSPEED = "DeepSpeed"
ARGUMENTS = "TrainingArguments"
DATASETS = INFO_NAME
PAGE = "docs/from-other-tools.md"

# Keys that only LLaMA-Factory has, and that its configs hold.
_OF_LLAMA_FACTORY = (
    *(
        "finetuning_type",
        "stage",
        "cutoff_len",
        "template",
        "dataset",
        "dataset_dir",
        "lora_target",
        "val_size",
    ),
    *("overwrite_cache", "plot_loss", "preprocessing_num_workers"),
)
_OF_ARGUMENTS = (
    *(
        "output_dir",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "learning_rate",
        "num_train_epochs",
    ),
    *(
        "max_steps",
        "lr_scheduler_type",
        "warmup_steps",
        "warmup_ratio",
        "weight_decay",
        "logging_steps",
        "save_steps",
    ),
    *(
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "max_grad_norm",
        "save_strategy",
        "eval_strategy",
        "optim",
        "seed",
    ),
)
# Files of tools that are not read, by keys that tell them.
_OTHERS = {
    "a config of Axolotl": (
        "base_model",
        "sequence_len",
        "micro_batch_size",
        "sample_packing",
        "val_set_size",
    ),
    "a config of ms-swift": (
        *("model", "train_type", "tuner_type", "split_dataset_ratio"),
        *("truncation_strategy", "agent_template"),
    ),
    "arguments of a TRL script": (
        "dataset_name",
        "use_peft",
        "dataset_text_field",
        "assistant_only_loss",
        "lora_r",
    ),
    "a config of accelerate": (
        "compute_environment",
        "distributed_type",
        "num_machines",
        "machine_rank",
    ),
    "peft's config of an adapter": (
        "peft_type",
        "base_model_name_or_path",
        "target_modules",
        "inference_mode",
    ),
}


@dataclass(frozen=True)
class Imported:
    """The config as YAML text, and what became of each key."""

    text: str
    rows: tuple[Row, ...]
    # sections that the files say nothing about and that a config has to have
    missing: tuple[str, ...]


@dataclass(frozen=True)
class _File:
    path: Path
    kind: str
    content: dict[str, Any]


def import_files(
    paths: Sequence[Path], hub: str, count_rows: CountRows, out: Path | None = None
) -> Imported:
    """Return the config that `paths` describe together; `hub` is where a name without one lies.

    `count_rows` counts the rows of the data files, where a number of them is held out. The
    experiment is named like the run; if no file names that, like the file `out` that the config is
    for.

    Also read are the dataset_info.json and the DeepSpeed JSON that a LLaMA-Factory YAML names, if
    they are here. Raises ConfigError with all problems: files that cannot be read, that are of no
    known kind, that contradict each other, or that hold what cannot be trained here.
    """
    files = _read_all(paths)
    draft = Draft()
    main = next((file for file in files if file.kind in (LLAMA_FACTORY, ARGUMENTS)), files[0])
    files += _referenced(files, main, draft)
    for file in files:
        _add(draft, file)
    kinds = {file.kind for file in files}
    origin = Origin(
        is_llama_factory=LLAMA_FACTORY in kinds,
        has_arguments=bool(kinds & {LLAMA_FACTORY, ARGUMENTS}),
        has_deepspeed=DEEPSPEED in kinds,
        folder=main.path.parent,
        hub=hub,
    )
    if origin.has_deepspeed or isinstance(draft.value("deepspeed"), dict):
        draft.taken("deepspeed", why="its keys are listed by themselves")
    elif draft.has("deepspeed"):
        draft.without(
            "deepspeed", "this file is not here: give it as another FILE, or set train.strategy"
        )
    _name(draft, out or main.path)
    infos = [
        Info(str(file.path), file.path.parent, file.content)
        for file in files
        if file.kind == DATASETS
    ]
    convert_arguments(draft, origin)
    convert_datasets(draft, infos[0] if infos else None, hub, count_rows)
    account_for_placement(draft)
    draft.account_for_the_rest(REASONS)
    _say_what_is_missing(draft)
    problems = draft.problems or _problems_of(draft)
    if problems:
        raise ConfigError(", ".join(str(path) for path in paths), problems)
    missing = tuple(
        key
        for key, prefix in (("model", "model"), ("data", "data.train"))
        if prefix not in draft.values
    )
    return Imported(yaml_text(draft, _head(files)), tuple(draft.rows), missing)


def _head(files: Sequence[_File]) -> str:
    names = ", ".join(f"{file.path} ({file.kind})" for file in files)
    return f"Imported from {names}. {PAGE} says what differs between the tools."


# Files: reading them, and telling their kind.


def _read_all(paths: Sequence[Path]) -> list[_File]:
    files, problems = [], []
    for path in paths:
        try:
            content = _read(path)
            files.append(_File(path, _kind(content), content))
        except ConfigError as error:
            problems += [f"{path}: {problem}" for problem in error.problems]
    for kind in (LLAMA_FACTORY, DEEPSPEED, ARGUMENTS, DATASETS):
        same = [str(file.path) for file in files if file.kind == kind]
        if len(same) > 1:
            problems.append(
                f"{' and '.join(same)} are both of the kind {kind}; import one of them at a time"
            )
    if not problems and all(file.kind == DATASETS for file in files):
        problems.append(f"{INFO_NAME} lists data sets only: give the YAML that uses them as well")
    if problems:
        raise ConfigError("import", problems)
    return files


def _read(path: Path) -> dict[str, Any]:
    """Return the keys of a JSON or YAML file. Raises ConfigError."""
    source = str(path)
    if path.is_dir():
        raise ConfigError(source, ["is a folder; name the YAML or JSON file in it"])
    try:
        with path.open("rb") as file:  # once, since it may be a pipe
            content = file.read(strict_yaml.MAX_BYTES + 1)
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(source, [f"cannot be read: {reason}"]) from error
    if len(content) > strict_yaml.MAX_BYTES:
        raise ConfigError(source, [f"larger than {strict_yaml.MAX_BYTES} bytes, so not a config"])
    if text.lstrip().startswith(("{", "[")):
        value = _json(text, source)
    else:
        document = strict_yaml.parse(text, source)
        if document.problems:
            raise ConfigError(source, document.problems)
        value = document.value
    if not isinstance(value, dict) or not value:
        raise ConfigError(source, ["holds no keys with values, so it is not a config"])
    return value


def _json(text: str, source: str) -> Any:
    def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if twice := [key for key in dict.fromkeys(keys) if keys.count(key) > 1]:
            raise ConfigError(source, [f"{key}: given twice; keep one of them" for key in twice])
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=without_repeats)
    except (ValueError, RecursionError) as error:
        where = (
            f"line {error.lineno}: {error.msg}"
            if isinstance(error, json.JSONDecodeError)
            else str(error)
        )
        raise ConfigError(
            source, [f"not JSON: {where}; JSON has no comments and no comma after the last item"]
        ) from None


def _kind(content: Mapping[str, Any]) -> str:
    """Return the kind of a file.

    Raises ConfigError for one that is not read, with what it looks like.
    """
    document = dict(content)
    if is_dataset_info(document):
        return DATASETS
    if isinstance(document.get("model"), dict) or "experiment" in document:
        raise ConfigError("", ["is a config of this project already: `qwen3 check` reads it"])
    told = {name: sum(key in document for key in keys) for name, keys in _OTHERS.items()}
    is_llama_factory = any(key in document for key in _OF_LLAMA_FACTORY)
    other = max(told, key=lambda name: told[name])
    if told[other] > sum(key in document for key in _OF_LLAMA_FACTORY):
        text = f"looks like {other}, which is not imported. Put its keys into a config and run"
        raise ConfigError("", [f"{text} `qwen3 check`: it names our key for each of them"])
    if is_llama_factory and ("model_name_or_path" in document or told[other] == 0):
        return LLAMA_FACTORY
    if is_deepspeed(document):
        return DEEPSPEED
    if any(key in document for key in _OF_ARGUMENTS):
        return ARGUMENTS
    if "model_name_or_path" in document:
        return LLAMA_FACTORY
    known = f"a LLaMA-Factory YAML, its {INFO_NAME}, a DeepSpeed JSON or TrainingArguments as JSON"
    found = ", ".join(list(document)[:5])
    raise ConfigError("", [f"unknown kind of file (it has the keys {found}); expected {known}"])


def _referenced(files: Sequence[_File], main: _File, draft: Draft) -> list[_File]:
    """Return the files here that the arguments name, unless one of their kind was given."""
    kinds = {file.kind for file in files}
    found = []
    named = main.content.get("deepspeed")
    if (
        main.kind in (LLAMA_FACTORY, ARGUMENTS)
        and isinstance(named, str)
        and DEEPSPEED not in kinds
    ):
        found += _named(main, Path(named), DEEPSPEED, draft)
    if main.kind == LLAMA_FACTORY and DATASETS not in kinds:
        folder = main.content.get("dataset_dir")
        places = [Path(folder if isinstance(folder, str) else "data") / INFO_NAME, Path(INFO_NAME)]
        for place in places:
            if not found or found[-1].kind != DATASETS:
                found += _named(main, place, DATASETS, draft)
    return found


def _named(main: _File, name: Path, kind: str, draft: Draft) -> list[_File]:
    """Return the file `name`, relative to here, to the file naming it or to a folder above."""
    folders = [Path(), main.path.parent, *main.path.absolute().parent.parents]
    path = next((folder / name for folder in folders if (folder / name).is_file()), None)
    if path is None:
        return []
    try:
        content = _read(path)
        if (found := _kind(content)) != kind:
            raise ConfigError("", [f"is not a {kind} file but {found}"])
    except ConfigError as error:
        draft.problems += [
            f"{path}, which {main.path} names: {problem}" for problem in error.problems
        ]
        return []
    return [_File(path, kind, content)]


def _add(draft: Draft, file: _File) -> None:
    """Add a file's keys to the draft; of dataset_info.json, once it is known which are used."""
    if file.kind == DEEPSPEED:
        add_deepspeed(draft, file.content, str(file.path))
    elif file.kind != DATASETS:
        for name, value in file.content.items():
            if name == "deepspeed" and isinstance(value, dict):
                add_deepspeed(draft, value, str(file.path), "deepspeed.")
            else:
                draft.add(spelled(name), Given(str(file.path), name, value))


# The result.


def _name(draft: Draft, path: Path) -> None:
    """Name the experiment like the run, or like the file, in the letters that a name may have."""
    key = next((key for key in ("run_name", "swanlab_run_name") if draft.has(key)), None)
    wanted = str(draft.value(key)) if key else path.stem
    name = re.sub(r"[^A-Za-z0-9._=-]+", "-", wanted).strip("-._=")[:128]
    values = {
        "experiment": name if re.match(NAME_PATTERN, name) and name != "current" else "imported"
    }
    if key:
        draft.taken(key, values)
    else:
        draft.values.update(values)
        draft.origins.update(dict.fromkeys(values, str(path)))
        draft.rows.append(
            Row(AccountPart.TAKEN, (), "the file's name", f"experiment: {values['experiment']}", "")
        )


_OF_A_RUN = (
    "model",
    "data.train",
    "tokenize.max_tokens",
    "train.epochs",
    "train.lr",
    "train.global_batch_samples",
)


def _say_what_is_missing(draft: Draft) -> None:
    """Account for what no file says and a run needs: the defaults of this project."""
    others = {
        "train.epochs": "train.max_steps",
        "train.global_batch_samples": "train.global_batch_tokens",
    }
    missing = [
        key for key in _OF_A_RUN if key not in draft.values and others.get(key) not in draft.values
    ]
    defaults = [f"{key} {shown(DEFAULTS[key])}" for key in missing if DEFAULTS.get(key) is not None]
    needed = [key for key in missing if key in ("model", "data.train")]
    if defaults:
        text = f"no file says it: our defaults are {', '.join(defaults)}"
        draft.rows.append(Row(AccountPart.CHANGED, (), "what else a run needs", "", text))
    if needed:
        text = "no file says it, and it has no default: write it yourself"
        draft.rows.append(Row(AccountPart.NONE, (), " and ".join(needed), "", text))


def _problems_of(draft: Draft) -> list[str]:
    """Return what the schema and the checks say against the values, with their keys."""
    value: dict[str, Any] = {"model": {"source": "tiny"}, "data": {"train": [{"source": "pydoc"}]}}
    places: dict[Keys, str] = {}
    for ours, item in draft.values.items():
        keys = strict_yaml.undotted(ours)
        place = value
        for key in keys[:-1]:
            place = place.setdefault(str(key), {})
        place[str(keys[-1])] = item
        places[keys] = draft.origins[ours]
    return problems_of(value, places)
