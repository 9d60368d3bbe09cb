"""The data sets of LLaMA-Factory: from entries of dataset_info.json to items of `data.train`."""

import glob
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline_lib.config.content import DATA_SUFFIXES, data_files
from pipeline_lib.config.import_draft import AccountPart, Draft, Given, Row, shown
from pipeline_lib.config.section import flat
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.text import did_you_mean

# of a data file, given the keys of rows that the config names
CountRows = Callable[[Path, Collection[str]], int]
Source = dict[str, Any]  # an item of data.train

INFO_NAME = "dataset_info.json"
DEFAULT_SHARE = 0.05  # held out, where the number of rows there is no share that is known
_HUB_KEYS = {"modelscope": "ms_hub_url", "huggingface": "hf_hub_url"}
_OTHER_PLACES = ("om_hub_url", "script_url", "cloud_file_name")  # which are not read
_PLACES = ("file_name", *_HUB_KEYS.values(), *_OTHER_PLACES)
_FORMATS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "openai": "messages"}
# By their name in `columns` and `tags`: our name of the key, by format.
_COLUMNS: dict[str, dict[str, str]] = {
    "alpaca": {
        "prompt": "instruction",
        "query": "input",
        "response": "output",
        "history": "history",
        "system": "system",
        "tools": "tools",
    },
    "sharegpt": {
        "messages": "conversations",
        "role_tag": "from",
        "content_tag": "value",
        "system": "system",
        "tools": "tools",
    },
    "messages": {
        "messages": "messages",
        "role_tag": "role",
        "content_tag": "content",
        "system": "system",
        "tools": "tools",
    },
    "text": {"prompt": "text"},
}
_ROLES = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": "function_call",
    "system_tag": "system",
}
# Roles that our layouts know by these names.
_KNOWN_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "observation": "tool",
    "function_call": "function_call",
}
_MEDIA = ("images", "videos", "audios")
_COMPARED = ("chosen", "rejected", "kto_tag")


@dataclass(frozen=True)
class Info:
    """A dataset_info.json: its entries, and the folder that the files in it are relative to."""

    file: str
    folder: Path
    entries: dict[str, Any]


def is_dataset_info(document: dict[str, Any]) -> bool:
    """Return whether `document` has the form of a dataset_info.json."""
    return bool(document) and all(_is_entry(one) for one in document.values())


def _is_entry(value: Any) -> bool:
    return isinstance(value, dict) and any(key in value for key in _PLACES)


def convert_datasets(draft: Draft, info: Info | None, hub: str, count_rows: CountRows) -> None:
    """Convert `dataset`, and what is held out; `hub` is where a name without one lies.

    `count_rows` raises DataError or OSError for a file that it cannot read.
    """
    names = draft.words("dataset")
    held_out = draft.words("eval_dataset")
    if not names:
        return
    where = draft.text("dataset_dir", "data")
    is_online = where == "ONLINE"
    if info is None and not is_online:
        why = (
            f"no {INFO_NAME} is in {where} or beside the file: give it as another FILE, or write "
            "data.train"
        )
        draft.without("dataset eval_dataset dataset_dir", f"{why}; the config has no data yet")
        hold_out(draft, held_out, [], count_rows)
        return
    if is_online:
        info = None
    if info is not None:
        unknown = _unknown_names(info, "dataset", names)
        unknown += _unknown_names(info, "eval_dataset", held_out)
        draft.problems += unknown
        if unknown:
            return
    every = {name: _source_of(draft, info, name, hub) for name in dict.fromkeys(names + held_out)}
    sources = [every[name] for name in names]
    hold_out(draft, held_out, sources, count_rows)
    if held_out:
        draft.taken("eval_dataset", {"data.validation": [every[name] for name in held_out]})
    if info is not None:
        _account_for_others(draft, info, every)
    why = _mixing(draft, names)
    if why:
        draft.changed("dataset dataset_dir max_samples", {"data.train": sources}, why)
    draft.taken("dataset dataset_dir max_samples", {"data.train": sources})


def _unknown_names(info: Info, key: str, names: Sequence[str]) -> list[str]:
    """Return a problem for each of `names`, the value of `key`, that `info` has no entry for."""
    problems = []
    for name in names:
        if name not in info.entries:
            hint = did_you_mean(name, info.entries)
            problems.append(f"{key}: {name} is not in {info.file}{hint}")
    return problems


def _account_for_others(draft: Draft, info: Info, used: Collection[str]) -> None:
    others = [name for name in info.entries if name not in used]
    if others:
        given = tuple(Given(info.file, name, None) for name in others)
        text = f"{len(others)} other data sets of {info.file}"
        why = "used by neither `dataset` nor `eval_dataset`"
        draft.rows.append(Row(AccountPart.NONE, given, text, "", why))


def _mixing(draft: Draft, names: list[str]) -> str:
    if len(names) < 2 or draft.value("mix_strategy", "concat") == "concat":
        draft.taken("mix_strategy", why="every sample once an epoch, as here")
        return ""
    why = (
        "every sample is used once an epoch here; set `weight` in data.train to mix the sets "
        "otherwise"
    )
    draft.without("mix_strategy interleave_probs", why)
    return why


def holds_nothing_out(draft: Draft) -> bool:
    """Return whether the files name the data and hold none of it out."""
    names_data = draft.has("dataset") or draft.has("datasets[0].path")
    held_out = draft.has("eval_dataset") or draft.has("test_datasets[0].path")
    return names_data and not held_out and not draft.number("val_size", 0)


def hold_out(
    draft: Draft, held_out: Sequence[str], sources: Sequence[Source], count_rows: CountRows
) -> None:
    """Convert how much of `sources` is held out; `held_out` names data sets only for that."""
    size = draft.number("val_size", 0) or 0
    draft.taken("eval_on_each_dataset", why="the report shows the held-out loss of each source")
    if held_out:
        if size:
            keys = f"{draft.called('val_size')} and {draft.called('eval_dataset')}"
            draft.problems.append(f"{keys}: both say what is held out; keep one of them")
        return
    if 0 <= size < 1:
        draft.taken("val_size", {"data.validation_fraction": size})
        return
    try:
        rows = _rows_of_all(sources, count_rows)
    except (DataError, OSError) as error:
        why = (
            "a number of rows there, a share here. How many rows the data have is not known here "
            f"({error}), so that {DEFAULT_SHARE:.0%} is written, our default: set it to "
            f"{shown(size)} divided by the number of rows"
        )
        draft.changed("val_size", {"data.validation_fraction": DEFAULT_SHARE}, why)
        return
    if size >= rows:
        text = f"{draft.called('val_size')}: {shown(size)} rows, and the data have {rows}"
        draft.problems.append(f"{text}; none would be left to train on")
        return
    share = float(f"{size / rows:.6g}")
    why = (
        f"a number of rows there, a share here: {shown(size)} of the {rows:,} rows that the "
        "files have now"
    )
    draft.changed("val_size", {"data.validation_fraction": share}, why)


def _rows_of_all(sources: Sequence[Source], count_rows: CountRows) -> int:
    """Return the number of rows of `sources`.

    Raises DataError or OSError if they cannot be counted here.
    """
    if not sources:
        raise DataError("the data sets are not found")
    rows = 0
    for source in sources:
        if source["source"] != "file":
            raise DataError(f"{source['name']} is on {source['source']}")
        files = data_files(source["path"])
        if not files:
            raise DataError(f"no file matches {source['path']!r}")
        found = sum(count_rows(file, source.get("columns", {}).values()) for file in files)
        rows += min(found, source.get("max_rows", found))
    return rows


def _source_of(draft: Draft, info: Info | None, name: str, hub: str) -> Source:
    """Return the source of the data set `name`: an entry of `info`, or else a name on `hub`."""
    if info is None:
        return {"source": hub, "name": name, **_rows(draft, None)}
    return _source(draft, info, name, hub)


def _rows(draft: Draft, samples: int | None) -> dict[str, Any]:
    """Return `max_rows`, if the files limit the rows."""
    limits = [limit for limit in (draft.whole("max_samples"), samples) if limit]
    return {"max_rows": min(limits)} if limits else {}


def _source(draft: Draft, info: Info, name: str, hub: str) -> Source:
    """Return the item of `data.train` for the entry `name`, and account for the entry's keys."""
    entry: dict[str, Any] = info.entries[name]
    for key, value in flat(entry):
        draft.add(f"{name}.{key}", Given(info.file, f"{name}.{key}", value))
    named = entry.get("columns")
    has_compared = isinstance(named, dict) and any(key in named for key in _COMPARED)
    if entry.get("ranking") or has_compared:
        text = "preference data; take a data set of examples to follow"
        draft.problems.append(f"{info.file}: {name}: {text}")
    place = _place(draft, info, name, entry, hub)
    if place["source"] != "file":
        place.update(_part_of_hub(draft, name, entry))
    row_format, columns, roles = _layout(draft, name, entry)
    source = {**place, "format": row_format, "columns": columns, "roles": roles}
    number = draft.whole(f"{name}.num_samples")
    source.update(_rows(draft, number))
    if number is not None:
        why = "a random choice there; here the first rows, max_rows"
        draft.changed(f"{name}.num_samples", None, why)
    for kind in _MEDIA:
        why = "only text is supported: rows with pictures or sounds are refused"
        draft.without(f"{name}.columns.{kind}", why)
    draft.taken(f"{name}.ranking", why="examples to follow, as all data here")
    return {key: value for key, value in source.items() if value not in ({}, None)}


def _place(draft: Draft, info: Info, name: str, entry: dict[str, Any], hub: str) -> dict[str, Any]:
    """Return where the rows lie: on a hub, before a script, before the cloud, before a file."""
    all_places = " ".join(f"{name}.{key}" for key in _PLACES)
    hubs = [one for one, key in _HUB_KEYS.items() if key in entry]
    if hubs:
        chosen = hub if hub in hubs else hubs[0]
        draft.taken(f"{name}.{_HUB_KEYS[chosen]}", why=f"data.train, source: {chosen}")
        why = f"the rows are taken from {chosen}; `source` may name the other hub"
        draft.changed(all_places, None, why)
        return {"source": chosen, "name": entry[_HUB_KEYS[chosen]]}
    is_file = not any(key in entry for key in _OTHER_PLACES)
    path = info.folder / str(entry.get("file_name"))
    if is_file and path.is_dir():
        found = [suffix for suffix in DATA_SUFFIXES if any(path.glob(f"*{suffix}"))]
        suffix = found[0] if found else ".json"
        draft.taken(all_places, why="data.train, all files of the folder")
        return {"source": "file", "path": f"{glob.escape(str(path))}/*{suffix}"}
    if is_file and path.name.endswith(DATA_SUFFIXES):
        draft.taken(all_places, why="data.train, source: file")
        return {"source": "file", "path": glob.escape(str(path))}
    why = "not read: data come from files (json, jsonl, csv, parquet), huggingface and modelscope"
    path = info.folder / f"{name}.jsonl"
    draft.without(all_places, f"{why}; put the rows into {path}, which the config names")
    return {"source": "file", "path": glob.escape(str(path))}


def _part_of_hub(draft: Draft, name: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Return which part of a hub's repository is taken."""
    part: dict[str, Any] = {}
    if (subset := draft.text(f"{name}.subset")) is not None:
        part["subset"] = subset
        draft.taken(f"{name}.subset", why="data.train, subset")
    split = draft.text(f"{name}.split", "train") or "train"
    if cut := re.fullmatch(r"(\w+)\[.*\]", split):
        part["split"] = cut[1]
        why = f"slices are not read: all of {cut[1]} is taken; max_rows takes the first"
        draft.changed(f"{name}.split", None, why)
    elif split != "train":
        part["split"] = split
    draft.taken(f"{name}.split", why="data.train, split")
    if (folder := draft.text(f"{name}.folder")) is not None:
        part = {"files": [f"{folder}/*"]}
        why = "data.train, files: they choose by name, instead of by subset and split"
        draft.changed(f"{name}.folder", None, why)
    return part


def _layout(
    draft: Draft, name: str, entry: dict[str, Any]
) -> tuple[str, dict[str, str], dict[str, str]]:
    """Return `format`, `columns` and `roles` of an entry."""
    formatting = draft.text(f"{name}.formatting", "alpaca") or "alpaca"
    if formatting not in _FORMATS:
        draft.problems.append(
            f"{name}.formatting: {shown(formatting)} is not one of {', '.join(_FORMATS)}"
        )
    row_format = _FORMATS.get(formatting, "alpaca")
    if draft.value("stage") == "pt" and row_format == "alpaca":
        row_format = "text"
    draft.taken(f"{name}.formatting", why=f"data.train, format: {row_format}")
    columns: dict[str, str] = {}
    roles: dict[str, str] = {}
    for full, theirs in flat(entry):
        section, _, key = full.partition(".")
        if section not in ("columns", "tags") or not isinstance(theirs, str) or not theirs:
            continue
        ours = _COLUMNS[row_format].get(key)
        if ours is not None:
            if theirs != ours:
                columns[ours] = theirs
            draft.taken(f"{name}.{full}", why=f"data.train, columns: {ours}")
        elif key in _ROLES:
            if _KNOWN_ROLES.get(theirs, theirs) != _ROLES[key]:
                roles[theirs] = _ROLES[key]
            draft.taken(f"{name}.{full}", why=f"data.train, roles: {_ROLES[key]}")
    if row_format == "text" and "text" not in columns and "columns" not in entry:
        columns["text"] = "instruction"  # LLaMA-Factory's own default of `prompt`
    return row_format, columns, roles
