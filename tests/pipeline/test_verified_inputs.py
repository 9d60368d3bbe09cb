"""A stage refuses each input that it reads with other content; others mean nothing to it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch

from pipeline_lib.config.compile import Experiment
from pipeline_lib.config.content import TOKENIZER_FILES
from pipeline_lib.core.errors import IntegrityError
from pipeline_lib.core.files import sha256_file
from pipeline_lib.core.lock import locked
from pipeline_lib.core.stage import Job, StageFunction, open_sealed
from pipeline_lib.core.store import Store, read_manifest
from pipeline_lib.data import shard, tokenize
from pipeline_lib.evaluate import stage as evaluate
from pipeline_lib.export import merge
from pipeline_lib.launch.stage import launcher
from pipeline_lib.plan import stage as plan
from pipeline_lib.report import stage as report
from tests.pipeline.conftest import Project

pytestmark = pytest.mark.slow

EVERYTHING = ("*",)
READS: dict[str, dict[str, tuple[str, ...]]] = {
    "tokenize": {"model": TOKENIZER_FILES, "data.0": EVERYTHING},
    "shard": {"tokenize": ("*.npy",)},
    "plan": {"model": ("config.json",), "shard": ("*/index.json", "*/costs.npy")},
    "train": {"model": EVERYTHING, "shard": EVERYTHING},
    "merge": {"model": EVERYTHING, "train": EVERYTHING},
    "baseline": {"model": EVERYTHING, "shard": EVERYTHING},
    "evaluate": {
        "model": ("*.json", "*.jinja"),  # of the base only what texts need
        "merge": EVERYTHING,
        "shard": EVERYTHING,
        "baseline": ("metrics.json", "scores.jsonl", "generations.jsonl"),
    },
    "report": {
        "tokenize": ("ledger.json", "preview.json"),
        "shard": ("*/index.json",),
        "train": ("plan.json", "summary.json", "metrics.jsonl", "events.jsonl"),
        "merge": ("parity.json",),
        "evaluate": ("metrics.json", "scores.jsonl", "generations.jsonl"),
    },
}


@pytest.fixture(scope="module")
def done(small: Project, tmp_path_factory: pytest.TempPathFactory) -> tuple[Experiment, Store]:
    """An experiment that all stages have done."""
    project = small.copy_to(tmp_path_factory.mktemp("done") / "project")
    return project.experiment(), project.store


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the stages had it: sums of several threads may differ in their last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def function_of(part: str, experiment: Experiment, store: Store) -> StageFunction:
    if part == "train":
        return launcher(store.sealed(experiment.ref("plan")), dict(os.environ))
    modules = {"tokenize": tokenize, "shard": shard, "plan": plan}
    modules |= {"merge": merge, "baseline": evaluate, "evaluate": evaluate, "report": report}
    function: StageFunction = modules[part].run
    return function


@contextmanager
def other_content(paths: list[Path]) -> Iterator[None]:
    """The files have their sizes and no byte of theirs."""
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(bytes(byte ^ 0x55 for byte in content))
    try:
        yield
    finally:
        for path, content in zip(paths, contents, strict=True):
            path.write_bytes(content)


@pytest.mark.parametrize("part", READS)
def test_a_stage_uses_no_byte_that_it_did_not_check(
    done: tuple[Experiment, Store], tmp_path: Path, part: str
) -> None:
    experiment, store = done
    spec, function = experiment.specs[part], function_of(part, experiment, store)
    files = [
        (name, file, store.sealed(ref) / file)
        for name, ref in spec.inputs.items()
        for file, entry in read_manifest(store.sealed(ref)).files.items()
        if entry.bytes
    ]
    read = [
        path
        for name, file, path in files
        if any(fnmatchcase(file, one) for one in READS[part].get(name, ()))
    ]
    left = [path for _, _, path in files if path not in read]

    def run() -> Path:
        out = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        out.mkdir()
        with locked(tmp_path.parent / f"{part}.lock", print) as lock:
            inputs = {name: open_sealed(ref, store) for name, ref in spec.inputs.items()}
            function(Job(spec, store, inputs, out, lambda text: None, lock))
        return out

    assert read
    for path in read:
        with (
            other_content([path]),
            pytest.raises(IntegrityError, match="content differs") as raised,
        ):
            run()
        assert str(path) in str(raised.value)
    if left:
        with other_content(left):
            out = run()
        for name, entry in read_manifest(store.sealed(spec.ref)).files.items():
            assert sha256_file(out / name) == entry.sha256, name
