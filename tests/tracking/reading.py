"""What the trackers' own files hold, read back with their own libraries."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

Point = tuple[int, float]


@dataclass(frozen=True)
class Shown:
    """One run: its config by YAML keys as text, each metric's points, the last numbers, the page.

    `warnings` are the texts of all warnings.
    """

    config: dict[str, str]
    points: dict[str, list[Point]]
    final: dict[str, float]
    page: str
    warnings: tuple[str, ...] = ()


def only(found: Iterator[Path]) -> Path:
    """The one path there is."""
    [path] = found
    return path


def flat_text(value: Any, name: str = "") -> dict[str, str]:
    """The leaves of `value` as text, by their keys."""
    if not isinstance(value, dict) or not value:
        return {name: str(value)}
    return {
        key: text
        for part, item in value.items()
        for key, text in flat_text(item, f"{name}.{part}").items()
    }


def config_of(value: dict[str, Any]) -> dict[str, str]:
    return {name.lstrip("."): text for name, text in flat_text(value).items()}


def last(points: dict[str, list[Point]]) -> dict[str, float]:
    return {name: found[-1][1] for name, found in points.items() if name.startswith("eval/")}


def tensorboard(folder: Path) -> Shown:
    accumulator = import_module("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder), purge_orphaned_data=True)
    events.Reload()
    tags = events.Tags()
    points = {
        name: [(one.step, one.value) for one in events.Scalars(name)] for name in tags["scalars"]
    }
    texts = {
        name: events.Tensors(name)[-1].tensor_proto.string_val[0].decode()
        for name in tags["tensors"]
    }
    warned = [
        one.tensor_proto.string_val[0].decode()
        for name in tags["tensors"]
        if name.startswith("warning")
        for one in events.Tensors(name)
    ]
    page = texts.get("report", texts.get("report/text_summary"))
    config = config_of(json.loads(texts["config"]))
    return Shown(
        config, points, last(points), Path(page.strip()).read_text() if page else "", tuple(warned)
    )


def mlflow(folder: Path) -> Shown:
    client = import_module("mlflow").MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    [run] = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    points: dict[str, list[Point]] = {
        name: [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }
    page = next(iter(folder.glob("artifacts/*/artifacts/report.html")), None)
    whole = json.loads(only(folder.glob("artifacts/*/artifacts/config.json")).read_text())
    assert {name: text[:500] for name, text in config_of(whole).items()} == run.data.params
    warned = [text for name, text in run.data.tags.items() if name.startswith("warning")]
    return Shown(
        dict(run.data.params), points, last(points), page.read_text() if page else "", tuple(warned)
    )


def wandb(folder: Path) -> Shown:
    records = import_module("wandb.proto.wandb_internal_pb2")
    file = only(folder.glob("wandb/offline-run-*/*.wandb"))
    config: dict[str, Any] = {}
    points: dict[str, list[Point]] = {}
    final: dict[str, float] = {}
    warned = []
    for record in (records.Record.FromString(each) for each in log_records(file)):
        warned += [record.alert.text] if record.WhichOneof("record_type") == "alert" else []
        config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        values = {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for name, value in values.items():
            points.setdefault(name, []).append((values["_step"], value))
        for item in record.summary.update:
            final["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
    # when it was written
    points = {name: found for name, found in points.items() if not name.startswith("_")}
    final = {name: value for name, value in final.items() if name.startswith("eval/")}
    page = next(iter(file.parent.glob("files/report.html")), None)
    config.pop("_wandb")
    return Shown(config_of(config), points, final, page.read_text() if page else "", tuple(warned))


def swanlab(folder: Path) -> Shown:
    records = import_module("swanlab.proto.swanlab.record.v1.record_pb2")
    file = only(folder.glob("run-*/*.swanlab"))
    points: dict[str, list[Point]] = {}
    pages, warned = [], []
    for record in (records.Record.FromString(each) for each in log_records(file)):
        kind = record.WhichOneof("record_type")
        if kind == "scalar":
            points.setdefault(record.scalar.key, []).append(
                (record.scalar.step, record.scalar.value.number)
            )
        elif kind == "media" and record.media.key.startswith("warning"):
            names = [item.filename for item in record.media.value.items]
            warned += [path.read_text() for name in names for path in folder.rglob(name)]
        elif kind == "save" and record.save.name == "report.html":
            pages.append(Path(record.save.target_path).read_text())
    config = import_module("yaml").safe_load(
        only(folder.glob("run-*/files/config.yaml")).read_text()
    )
    found = config_of({name: item["value"] for name, item in config.items()})
    return Shown(found, points, last(points), pages[-1] if pages else "", tuple(warned))


def log_records(path: Path) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format behind a head of 7 bytes."""
    data, position, record = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""
