"""How often one run reads and hashes the bytes of its model: the road on two cores, in counts.

A LoRA training of a model of 155 MB goes through `qwen3 run` below strace. Mappings are counted
apart, as whole files: most are for a file's header alone.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.conversations import rows
from benchmarks.measure import show
from pipeline_lib.config.schema import TinyModel
from pipeline_lib.core.files import write_json, write_jsonl
from pipeline_lib.core.stage import say
from pipeline_lib.data.tiny_model import build_tiny

ROOT = Path(__file__).resolve().parents[1]
MODEL = TinyModel(source="tiny", vocab_tokens=2048, hidden_size=512, layers=12, heads=8)
CALLS = "read,pread64,readv,preadv,preadv2,mmap,write,pwrite64,writev,copy_file_range,sendfile"
KINDS = ("read", "mapped", "written")
_LEAST_MAPPED_BYTES = 1_000_000
_CALL = re.compile(r"^(?P<name>\w+)\((?P<text>.*)\) += (?P<result>-?\w+)")
_FILE = re.compile(r"\d+<(?P<path>/[^>]*)>")

# Python starts it in each process: it counts what is given to SHA-256.
HOOK = """
import atexit, hashlib, json, os, sys
counted = [0]
new, file_digest = hashlib.sha256, hashlib.file_digest
class Counting:
    def __init__(self, data=b""):
        self.own = new()
        self.update(data)
    def update(self, data):
        counted[0] += memoryview(data).nbytes
        self.own.update(data)
    def __getattr__(self, name):
        return getattr(self.own, name)
def counting_file_digest(file, name, **options):
    counted[0] += os.fstat(file.fileno()).st_size
    return file_digest(file, name, **options)
hashlib.sha256, hashlib.file_digest = Counting, counting_file_digest
def tell():
    if counted[0] > 1_000_000:
        with open(f"{os.environ['HASHED_FOLDER']}/{os.getpid()}.json", "w") as out:
            json.dump({"command": sys.orig_argv[1:4], "bytes": counted[0]}, out)
atexit.register(tell)
"""


def run() -> None:
    """Print, for each kind of file, how often its bytes were read, hashed and written."""
    if shutil.which("strace") is None:
        print("counts: needs strace (apt-get install strace)")
        return
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        config = write_config(root)
        size = sum(path.stat().st_size for path in (root / "base").glob("*.safetensors"))
        trace = travel(root, config)
        counted = Counter[tuple[str, str]]()
        for kind, path, moved in calls(trace):
            if what := kind_of(path, root):
                counted[what, kind] += moved
        table = []
        for what in ("base", "merged model"):
            row = [counted[what, kind] / size for kind in KINDS]
            table.append([what, *(f"{times:.2f}" for times in row)])
        title = f"times that the bytes of a model of {size / 1e6:.0f} MB are"
        show(title, ["files", *KINDS], table)
        found = [json.loads(path.read_text()) for path in (root / "hashed").iterdir()]
        hashed = [[" ".join(one["command"]), f"{one['bytes'] / size:.2f}"] for one in found]
        show("times that they are hashed, by process", ["process", "times"], sorted(hashed))


def write_config(root: Path) -> Path:
    """Write a base with random weights, rows and the config of a training; return its path."""
    for folder in ("base", "work", "hashed", "hook"):
        (root / folder).mkdir()
    (root / "hook" / "sitecustomize.py").write_text(HOOK)
    build_tiny(MODEL, root / "base", say)
    write_jsonl(root / "rows.jsonl", list(rows("essay", 64)))
    config = {
        "experiment": "counts",
        "model": {"source": "local", "path": str(root / "base")},
        "data": {
            "train": [{"source": "file", "path": str(root / "rows.jsonl")}],
            "validation_fraction": 0.1,
        },
        "tokenize": {"max_tokens": 2048},
        "shard": {"block_tokens": 2048},
        "cluster": {"cpu_ranks": 1},
        "train": {"method": "lora", "global_batch_tokens": 4096, "max_steps": 2, "lr": 1e-4},
        "evaluate": {"generations": 2, "max_new_tokens": 4},
    }
    path = root / "counts.yaml"
    write_json(path, config)  # which is YAML too
    return path


def travel(root: Path, config: Path) -> Path:
    """Run `qwen3 run` on the config below strace, and return the folder of what that wrote."""
    trace = root / "trace"
    trace.mkdir()
    environ = os.environ | {
        "PYTHONPATH": f"{root / 'hook'}:{ROOT}",
        "HASHED_FOLDER": str(root / "hashed"),
    }
    # a file for each thread: in one, calls of several would interrupt one another
    command = [
        "strace",
        "-ff",
        "-qq",
        "-y",
        "-s",
        "0",
        "-e",
        f"trace={CALLS}",
        "-o",
        str(trace / "of"),
    ]
    command += [sys.executable, "-m", "pipeline_lib", "run", str(config)]
    subprocess.run(command, cwd=root / "work", env=environ, check=True, stdout=subprocess.DEVNULL)
    return trace


def calls(trace: Path) -> Iterator[tuple[str, str, int]]:
    """Yield one of KINDS, the file and the bytes of each call in strace's output."""
    for path in trace.iterdir():
        for line in path.read_text(errors="replace").splitlines():
            match = _CALL.match(line)
            file = _FILE.search(line)
            if match is None or file is None:
                continue
            if match["name"] == "mmap":
                moved = int(match["text"].split(", ")[1])
                if moved >= _LEAST_MAPPED_BYTES and "PROT_EXEC" not in line:
                    yield "mapped", file["path"], moved
            elif match["result"].isdecimal():
                kind = "written" if "write" in match["name"] else "read"
                yield kind, file["path"], int(match["result"])


def kind_of(path: str, root: Path) -> str:
    """Return which weights the file `path` holds; empty for another file."""
    if not path.endswith(".safetensors") and ".safetensors" not in path:
        return ""
    if path.startswith(f"{root}/base/") or "/download/" in path:
        return "base"
    return "merged model" if "/merge/" in path else ""
