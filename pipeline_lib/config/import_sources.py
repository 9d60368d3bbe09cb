"""The data of Axolotl, ms-swift and TRL: from their entries to items of `data.train`."""

import glob
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline_lib.config.content import DATA_SUFFIXES
from pipeline_lib.config.import_datasets import CountRows, Source, hold_out
from pipeline_lib.config.import_draft import Draft, shown
from pipeline_lib.config.import_tools import AXOLOTL, SWIFT, Origin

_GENERIC = ("json", "csv", "parquet", "arrow")  # builders of `datasets`, given as a path
_OWN_TEMPLATE = "the model's own chat template is used"


@dataclass(frozen=True)
class _Data:
    """What is trained on and what is held out, and the keys, words, that say so."""

    train: list[Source]
    held_out: list[Source]
    keys: str
    keys_of_held_out: str


def convert_sources(draft: Draft, origin: Origin, count_rows: CountRows) -> None:
    """Convert the data, and what of them is held out; `origin` is of a whole training."""
    if origin.tool == SWIFT:
        data = _of_swift(draft, origin)
    elif draft.has("dataset_name"):
        data = _of_trl(draft, origin)
    else:
        data = _of_lists(draft, origin)
    if not data.train:
        return
    if origin.tool == SWIFT and data.held_out:
        draft.taken("val_size", why="without effect there, too: val_dataset decides")
    else:
        hold_out(draft, [str(one) for one in data.held_out], data.train, count_rows)
    if data.held_out:
        draft.taken(data.keys_of_held_out, {"data.validation": data.held_out})
    if origin.tool == SWIFT and any("max_rows" in source for source in data.train):
        why = "the rows of a set with a # are chosen at random there; here they are its first ones"
        draft.changed(data.keys, {"data.train": data.train}, why)
    draft.taken(data.keys, {"data.train": data.train})


def _place(name: str, origin: Origin, hub: str | None = None) -> Source:
    """Return where the rows called `name` lie: in files here, or on a hub."""
    path = Path(name).expanduser()
    places = (path, origin.folder / path)
    found = next((place for place in places if place.exists()), None)
    is_file = name.endswith(DATA_SUFFIXES) or name.startswith(("/", "~", "./", "../"))
    if found is None and not is_file:
        return {"source": hub or origin.hub, "name": name}
    found = found or path
    pattern = glob.escape(str(found))
    suffixes = [suffix for suffix in DATA_SUFFIXES if any(found.glob(f"*{suffix}"))]
    if found.is_dir() and suffixes and not (found / "state.json").exists():
        pattern += f"/*{suffixes[0]}"
    return {"source": "file", "path": pattern}


def _of_swift(draft: Draft, origin: Origin) -> _Data:
    draft.without("benchmarks", "no benchmark is run while a model is trained")
    draft.without("columns", "write them into data.train, each with our name first")
    return _Data(
        train=_sources(draft, "dataset", origin),
        held_out=_sources(draft, "eval_dataset", origin),
        keys="dataset",
        keys_of_held_out="eval_dataset",
    )


def _sources(draft: Draft, key: str, origin: Origin) -> list[Source]:
    return [_named(draft, key, text, origin) for text in draft.words(key)]


def _named(draft: Draft, key: str, text: str, origin: Origin) -> Source:
    """Return the source that ms-swift writes as `hub::name:subset#rows`."""
    hub_word, _, rest = text.rpartition("::")
    hub = {"hf": "huggingface", "ms": "modelscope"}.get(hub_word.lower())
    name, _, rows = rest.partition("#")
    name, _, subset = name.partition(":")
    source = _place(name, origin, hub)
    if subset and source["source"] != "file":
        source["subset"] = subset
    if rows.isdigit():
        source["max_rows"] = int(rows)
    elif rows:
        draft.problems.append(f"{key}: {text}: {rows} is not a number of rows")
    return source


def _of_trl(draft: Draft, origin: Origin) -> _Data:
    """Return the data of a TRL config with one data set: splits of a hub's."""
    return _Data(
        train=[_split(draft, origin, "dataset_train_split", "train")],
        held_out=_test_split(draft, origin),
        keys="dataset_name dataset_config dataset_train_split",
        keys_of_held_out="dataset_test_split",
    )


def _split(draft: Draft, origin: Origin, split_key: str, split: str) -> Source:
    source = _place(draft.text("dataset_name") or "", origin)
    is_on_hub = source["source"] != "file"
    subset = draft.text("dataset_config")
    if subset is not None and is_on_hub:
        source["subset"] = subset
    split = draft.text(split_key, split) or split
    if split != "train" and is_on_hub:
        source["split"] = split
    text_key = draft.text("dataset_text_field", "text") or "text"
    if text_key != "text":
        source["columns"] = {"text": text_key}
    draft.taken("dataset_text_field", why="data.train, columns: text")
    return source


def _test_split(draft: Draft, origin: Origin) -> list[Source]:
    """Return what is validated on; nothing unless the files say when."""
    if str(draft.value("eval_strategy", "no")).lower() in ("no", "false"):
        draft.taken("dataset_test_split", why="without effect there, too: eval_strategy is no")
        return []
    return [_split(draft, origin, "dataset_test_split", "test")]


def _of_lists(draft: Draft, origin: Origin) -> _Data:
    """Return the data of Axolotl, or of a mixture in TRL: lists of entries."""
    return _Data(
        train=_entries(draft, "datasets", origin) + _entries(draft, "pretraining_dataset", origin),
        held_out=_entries(draft, "test_datasets", origin),
        keys=f"{_paths(draft, 'datasets')} {_paths(draft, 'pretraining_dataset')}",
        keys_of_held_out=_paths(draft, "test_datasets"),
    )


def _paths(draft: Draft, key: str) -> str:
    """Return the keys of the paths in the list `key`, as words."""
    paths = [name for name in draft.given if name.startswith(f"{key}[")]
    return " ".join(name for name in paths if name.endswith("].path"))


def _entries(draft: Draft, key: str, origin: Origin) -> list[Source]:
    sources: list[Source] = []
    for path in _paths(draft, key).split():
        sources += _entry(draft, path.removesuffix(".path"), origin)
    return sources


def _entry(draft: Draft, entry: str, origin: Origin) -> list[Source]:
    """Return the items of `data.train` for `entry`, and account for its keys."""
    path = draft.text(f"{entry}.path") or ""
    files = draft.words(f"{entry}.data_files")
    source = _place(path, origin)
    if files:
        source["files"] = files
    draft.taken(f"{entry}.data_files {entry}.ds_type", why="data.train")
    if source["source"] != "file" and not files:
        _subset_and_split(draft, entry, source)
    why = "files that are named have neither subsets nor splits here"
    draft.without(f"{entry}.name {entry}.split", why)
    if (revision := draft.text(f"{entry}.revision")) is not None and source["source"] != "file":
        source["revision"] = revision
        draft.taken(f"{entry}.revision", why="data.train, revision")
    if origin.tool == AXOLOTL:
        _layout(draft, entry, source)
    why = "shards are not read: max_rows takes the first rows"
    draft.without(f"{entry}.shards {entry}.shards_idx {entry}.fraction", why)
    if files and (path in _GENERIC or source["source"] == "file"):
        return [_of_file(source, name, origin) for name in files]
    return [source]


def _of_file(source: Source, name: str, origin: Origin) -> Source:
    """Return `source` with the file `name` as its place."""
    layout = {key: source[key] for key in ("format", "columns", "roles") if key in source}
    return _place(name, origin) | layout


def _subset_and_split(draft: Draft, entry: str, source: Source) -> None:
    if (subset := draft.text(f"{entry}.name")) is not None:
        source["subset"] = subset
        draft.taken(f"{entry}.name", why="data.train, subset")
    split = draft.text(f"{entry}.split", "train") or "train"
    word = re.match(r"\w+", split)
    if word and word[0] != split:
        why = f"slices are not read: all of {word[0]} is taken; max_rows takes the first"
        draft.changed(f"{entry}.split", None, why)
        split = word[0]
    if split != "train":
        source["split"] = split
    draft.taken(f"{entry}.split", why="data.train, split")


def _layout(draft: Draft, entry: str, source: Source) -> None:
    """Add `format`, `columns` and `roles` to `source`."""
    key = f"{entry}.type"
    kind = draft.value(key)
    word = kind.partition(".")[0].partition(":")[0] if isinstance(kind, str) else ""
    if entry.startswith("pretraining_dataset"):
        word = word or "pretrain"
    if draft.has(f"{key}.field_instruction") or draft.has(f"{key}.field_output"):
        source["format"] = "alpaca"
        _columns(draft, source, key, _ALPACA_FIELDS)
        draft.changed(f"{key}.format {key}.no_input_format", None, _OWN_TEMPLATE)
    elif word in ("chat_template", "sharegpt", ""):
        _conversations(draft, entry, source, word)
    elif word in ("completion", "pretrain"):
        source["format"] = "text"
        _columns(draft, source, entry, {"field": "text", "text_column": "text"})
        draft.taken(key, why="data.train, format: text")
    elif word in ("alpaca", "alpaca_chat"):
        source["format"] = "alpaca"
        draft.changed(key, None, f"data.train, format: alpaca; {_OWN_TEMPLATE}")
    else:
        why = f"this layout is not one of ours; `auto` looks at the rows, and {_OWN_TEMPLATE}"
        draft.without(key, why)
    draft.without(f"{entry}.conversation {entry}.chat_template", _OWN_TEMPLATE)


_ALPACA_FIELDS = {
    "field_instruction": "instruction",
    "field_input": "input",
    "field_output": "output",
    "field_system": "system",
}


def _columns(draft: Draft, source: Source, entry: str, ours_of: dict[str, str]) -> None:
    """Add the columns that `entry` calls otherwise."""
    for theirs, ours in ours_of.items():
        name = draft.text(f"{entry}.{theirs}")
        if name is not None and name != ours:
            source.setdefault("columns", {})[ours] = name
        draft.taken(f"{entry}.{theirs}", why=f"data.train, columns: {ours}")


def _conversations(draft: Draft, entry: str, source: Source, word: str) -> None:
    names: Any = draft.value(f"{entry}.message_property_mappings", {})
    if not isinstance(names, dict):
        draft.problems.append(f"{entry}.message_property_mappings: {shown(names)} is no mapping")
        return
    role = names.get("role", draft.text(f"{entry}.message_field_role"))
    content = names.get("content", draft.text(f"{entry}.message_field_content"))
    if word == "sharegpt" or role == "from":
        source["format"] = "sharegpt"
        turns = "conversations"
        names_there = {"from": role, "value": content}
    else:
        source["format"] = "messages"
        turns = "messages"
        names_there = {"role": role, "content": content}
    _columns(draft, source, entry, {"field_messages": turns, "field_tools": "tools"})
    _columns(draft, source, entry, {"field_system": "system", "field_thinking": _THINKING})
    for ours, theirs in names_there.items():
        if theirs not in (None, ours):
            source.setdefault("columns", {})[ours] = theirs
    draft.taken(f"{entry}.type", why=f"data.train, format: {source['format']}")
    keys = "message_property_mappings message_field_role message_field_content"
    draft.taken(_of(entry, keys), why="data.train, columns")
    _roles(draft, entry, source)
    trained = draft.words(f"{entry}.roles_to_train") or ["assistant"]
    if all(one in ("assistant", "gpt", "model") for one in trained):
        draft.taken(f"{entry}.roles_to_train", why="answers are trained on, as here")
    else:
        why = f"only the assistant's answers are trained on, not {', '.join(trained)}"
        draft.changed(f"{entry}.roles_to_train", None, why)
    why = "the end of each answer is trained on, as the model's template writes it"
    draft.changed(_of(entry, "train_on_eos train_on_eot"), None, why)
    why = "a turn is left out by its own key (docs/data.md)"
    draft.without(_of(entry, "message_field_training message_field_training_detail"), why)


_THINKING = "reasoning_content"
_KNOWN_ROLES = {"human": "user", "gpt": "assistant", "system": "system", "tool": "tool"}
_KNOWN_ROLES |= {"user": "user", "assistant": "assistant"}


def _roles(draft: Draft, entry: str, source: Source) -> None:
    key = f"{entry}.roles"
    roles = draft.value(key, {})
    if not isinstance(roles, dict) or not all(isinstance(one, list) for one in roles.values()):
        draft.problems.append(f"{key}: {shown(roles)} is not lists of names by role")
        return
    for ours, names in roles.items():
        for theirs in names:
            if _KNOWN_ROLES.get(str(theirs)) != ours:
                source.setdefault("roles", {})[str(theirs)] = ours
    draft.taken(key, why="data.train, roles")


def _of(entry: str, keys: str) -> str:
    return " ".join(f"{entry}.{key}" for key in keys.split())
