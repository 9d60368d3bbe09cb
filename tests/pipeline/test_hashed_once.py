"""Of a run on one machine one process reads a local model for its hash, each byte once."""

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline_lib.config.schema import TinyModel
from pipeline_lib.core.store import SETTLED_NS
from pipeline_lib.data.tiny_model import build_tiny
from tests.pipeline.conftest import SMALL, Project

pytestmark = pytest.mark.slow

# Counts every byte that hashlib hashes in large pieces, and the files that it hashes whole.
COUNTING = """
import atexit, hashlib, json, os, sys

LARGE = 1 << 20
found = []
file_digest, sha256 = hashlib.file_digest, hashlib.sha256

def digest_of_file(file, *arguments, **options):
    size = os.fstat(file.fileno()).st_size
    if size >= LARGE:
        found.append([os.path.realpath(file.name), size])
    return file_digest(file, *arguments, **options)

class Counted:
    def __init__(self, *arguments, **options):
        self.inner = sha256(*arguments, **options)

    def update(self, data):
        if memoryview(data).nbytes >= LARGE:
            found.append(["pieces", memoryview(data).nbytes])
        self.inner.update(data)

    def __getattr__(self, name):
        return getattr(self.inner, name)

def leave():
    if found:
        with open(f"{os.environ['COUNTED_IN']}/{os.getpid()}", "w") as file:
            json.dump({"command": sys.argv[:2], "hashed": found}, file)

hashlib.file_digest, hashlib.sha256 = digest_of_file, Counted
atexit.register(leave)
"""
CONFIG = (
    SMALL.replace(
        "{source: tiny, vocab_tokens: 512, hidden_size: 32, layers: 2}",
        "{source: local, path: base}",
    )
    .replace("max_rows: 400", "max_rows: 100")
    .replace("epochs: 2", "epochs: 1")
)


def in_a_hubs_cache(base: Path) -> None:
    """The weights as Hugging Face's cache has them, which are linked and not copied."""
    blobs = base.parent / "blobs"
    blobs.mkdir()
    blob = blobs / "hash"
    (base / "model.safetensors").rename(blob)
    blob.chmod(0o644)
    (base / "model.safetensors").symlink_to(blob)


def as_it_was_saved(_: Path) -> None:
    """Weights that people may edit, which are copied."""


@pytest.mark.parametrize("place", [as_it_was_saved, in_a_hubs_cache])
def test_a_local_model_is_hashed_once(tmp_path: Path, place: Callable[[Path], None]) -> None:
    project = Project(tmp_path / "project")
    base = project.root / "base"
    base.mkdir()
    build_tiny(TinyModel(source="tiny", vocab_tokens=2048, hidden_size=128, layers=4), base, print)
    place(base)
    project.config.write_text(CONFIG)
    counts = tmp_path / "counts"
    counts.mkdir()
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(COUNTING)
    project.environment |= {
        "PYTHONPATH": f"{tmp_path / 'site'}:{os.environ.get('PYTHONPATH', '')}",
        "COUNTED_IN": str(counts),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    # a model that was made just now could change unseen, and is not remembered
    time.sleep(SETTLED_NS / 1e9)

    project.run("snakemake", "--cores", "2", project.target("evaluate"))

    weights = base / "model.safetensors"
    size_bytes = weights.stat().st_size
    assert size_bytes > 1 << 22
    sealed = project.store.sealed(project.experiment().ref("model")) / "model.safetensors"
    assert sealed.samefile(weights) == weights.is_symlink()
    names = {str(weights.resolve()), str(sealed.resolve())}
    hashed: Counter[str] = Counter()
    for path in counts.iterdir():
        process = json.loads(path.read_text())
        for name, count in process["hashed"]:
            if name in names or (name == "pieces" and "download" in process["command"]):
                hashed[" ".join(process["command"])] += count
    assert sum(hashed.values()) == size_bytes, hashed
    assert [Path(command.split()[0]).name for command in hashed] == ["snakemake"], (
        "when the config is compiled"
    )
