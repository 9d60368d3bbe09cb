"""A held-out loss by layer: `python -m benchmarks.streaming evaluate --size 32B --layers 8`.

In full: `python -m benchmarks.streaming evaluate --size 32B --layers 8 --gpu-gb 16`. `evaluate`
writes a model of random weights, scores blocks as the evaluate stage does under a cap on GPU
memory, and compares loss, time and memory with the whole model's. `merge` folds adapters into such
a model and proves the result as the merge stage does, in a process whose peak memory it prints. On
CPUs: `--size demo`.
"""

import argparse
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.sizes import SIZES, model_config
from pipeline_lib.arch.families import read_geometry
from pipeline_lib.config.train import Lora, Train
from pipeline_lib.core.files import write_json
from pipeline_lib.data.blocks import Block
from pipeline_lib.evaluate.stage import score
from pipeline_lib.export.fold import plan_fold
from pipeline_lib.export.merge import export
from pipeline_lib.export.write import Buffers, Entry, write_files
from pipeline_lib.model.batch import make_batch, token_losses
from pipeline_lib.model.build import build_trainable, load_base
from pipeline_lib.model.streaming import StreamedModel
from pipeline_lib.plan.evaluation import BATCH_TOKENS
from pipeline_lib.train.optimizer import trainable
from pipeline_lib.train.saved_tensors import save_tensors

SHARD_BYTES = 4_000_000_000
DOCUMENT_TOKENS = 1000  # on average
METHODS = {
    "lora": Train(method="lora", lora=Lora(rank=16, alpha=32)),
    "full": Train(method="full"),
}


def device() -> torch.device:
    """The GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def write_model(folder: Path, size: str, layers: int | None) -> int:
    """Write a model of random weights in bf16, in shards; return its bytes."""
    folder.mkdir(parents=True)
    write_json(folder / "config.json", model_config(size, layers))
    files: list[list[Entry]] = [[]]
    for name, shape in read_geometry(folder).shapes().items():
        if sum(entry.size_bytes for entry in files[-1]) > SHARD_BYTES:
            files.append([])
        files[-1].append(Entry(name, shape, torch.bfloat16))
    torch.manual_seed(0)

    def value_of(entry: Entry, _: Buffers) -> Tensor:
        if len(entry.shape) == 1:
            return torch.ones(entry.shape, dtype=torch.bfloat16)
        values = torch.empty(entry.shape, dtype=torch.bfloat16, device=device())
        for rows in values.split(max(1, 2**26 // math.prod(entry.shape[1:]))):  # type: ignore[no-untyped-call]
            rows.normal_(std=0.02)
        return values.cpu()

    names = [
        f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)
    ]
    # one after the other, as values are drawn in order
    for name, entries in zip(names, files, strict=True):
        write_files(folder, {name: entries}, value_of)
    where = {
        entry.name: name for name, entries in zip(names, files, strict=True) for entry in entries
    }
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def blocks_of(count: int, length: int, vocabulary: int) -> list[Block]:
    """Packed blocks of random documents, half of each supervised."""
    random = np.random.default_rng(1)
    made = []
    for _ in range(count):
        cuts = np.sort(random.integers(1, length, max(1, length // DOCUMENT_TOKENS)))
        documents = np.searchsorted(np.unique(cuts), np.arange(length), side="right").astype(
            np.int32
        )
        tokens = random.integers(0, vocabulary, length).astype(np.int32)
        made.append(Block(tokens, random.random(length) < 0.5, documents))
    return made


def forget(folder: Path) -> None:
    """Drop the files from the page cache, so that they are read from the disk."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def whole_loss(folder: Path, blocks: Sequence[Block]) -> tuple[float, float]:
    """The mean loss of the model on the device, and the seconds of it without loading."""
    dtype = torch.bfloat16 if device().type == "cuda" else torch.float32
    model: Any = load_base(folder, dtype).to(device())  # type: ignore[arg-type]
    model.train(False)
    start_s, nats, tokens = time.monotonic(), 0.0, 0
    group = max(1, BATCH_TOKENS // len(blocks[0].tokens))
    with torch.no_grad():
        for first in range(0, len(blocks), group):
            batch = make_batch(blocks[first : first + group])
            nats += float(token_losses(model, batch.to(device())).double().sum())
            tokens += batch.supervised_tokens
    return nats / tokens, time.monotonic() - start_s


def evaluate(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Compare the streamed evaluation with the whole model's."""
    is_gpu, start_s = device().type == "cuda", time.monotonic()
    size_bytes = write_model(folder / "model", given.size, given.layers)
    found: dict[str, Any] = {"model_bytes": size_bytes, "write_s": time.monotonic() - start_s}
    vocabulary = read_geometry(folder / "model").vocab
    blocks = blocks_of(given.blocks, given.tokens, vocabulary)
    if given.cold:
        forget(folder / "model")
    if is_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, given.gpu_gb * 1e9 / total))
    start_s = time.monotonic()
    (losses,) = score(folder / "model", [blocks], print)
    found |= {"streamed_s": time.monotonic() - start_s, "streamed_loss": losses.mean}
    if is_gpu:
        found["streamed_gpu_bytes"] = torch.cuda.max_memory_allocated()
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.reset_peak_memory_stats()
    if given.whole:
        if given.cold:
            forget(folder / "model")
        start_s = time.monotonic()
        loss, computing_s = whole_loss(folder / "model", blocks)
        found |= {
            "whole_s": time.monotonic() - start_s,
            "whole_computing_s": computing_s,
            "whole_loss": loss,
        }
        found["time_ratio"] = found["streamed_s"] / found["whole_s"]
        found["relative_difference"] = abs(found["streamed_loss"] / loss - 1)
        if is_gpu:
            found["whole_gpu_bytes"] = torch.cuda.max_memory_allocated()
    return found


def peak_bytes() -> int:
    """The most memory that this process ever held, without files in the page cache."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def merge_once(folder: Path, method: str) -> dict[str, Any]:
    """Merge, write, and compute the probe's logits from that; both times, and peak memory."""
    start_s, base_bytes = time.monotonic(), peak_bytes()
    (folder / "out").mkdir()
    export(
        plan_fold(folder / "model", folder / "trained", METHODS[method]),
        folder / "model",
        {},
        folder / "out",
        None,
    )
    merged_s, merged_bytes = time.monotonic() - start_s, peak_bytes()
    length = 1024
    block = Block(
        np.arange(length, dtype=np.int32), np.ones(length, np.bool_), np.zeros(length, np.int32)
    )
    logits = StreamedModel(folder / "out", torch.bfloat16, torch.device("cpu")).probe_logits(block)[
        0
    ]
    return {
        "merge_s": merged_s,
        "proof_s": time.monotonic() - start_s - merged_s,
        "before_bytes": base_bytes,
        "merge_bytes": merged_bytes,
        "peak_bytes": peak_bytes(),
        "finite": bool(torch.isfinite(logits).all()),
    }


def merge(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure a merge and its proof in a process of their own."""
    size_bytes = write_model(folder / "model", given.size, given.layers)
    shapes = {
        name: tuple(each.shape)
        for name, each in trainable(
            build_trainable(folder / "model", METHODS[given.method])
        ).items()
    }

    def values() -> Iterator[tuple[str, Tensor]]:
        for name, shape in shapes.items():
            yield name, torch.full(shape, 0.01)

    save_tensors(folder / "trained" / "weights", dict(values()))
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return {"model_bytes": size_bytes, **pool.submit(merge_once, folder, given.method).result()}


def arguments(texts: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.streaming", description=__doc__)
    parser.add_argument("what", choices=["evaluate", "merge"])
    parser.add_argument(
        "--size", choices=[*SIZES, "14B", "32B", "30B-A3B", "235B-A22B", "demo", "demo-moe"]
    )
    parser.add_argument("--layers", type=int, help="so many layers instead of all")
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4096, help="of a block")
    parser.add_argument(
        "--gpu-gb", type=float, default=16.0, help="cap on what torch allocates while streaming"
    )
    parser.add_argument(
        "--cold", action="store_true", help="read from the disk, not from the page cache"
    )
    parser.add_argument(
        "--whole",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare with all at once",
    )
    parser.add_argument("--method", choices=list(METHODS), default="lora", help="of the merge")
    parser.add_argument(
        "--folder", type=Path, help="on the disk to measure; a temporary one by default"
    )
    parser.add_argument("--out", type=Path, help="write JSON here")
    parser.set_defaults(size="demo" if device().type == "cpu" else "32B")
    return parser.parse_args(texts)


def main() -> None:
    """Measure what the command line names."""
    given = arguments()
    if given.folder is not None:
        given.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="streaming-", dir=given.folder))
    try:
        found = {"evaluate": evaluate, "merge": merge}[given.what](given, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for name, value in found.items():
        shown = f"{value / 1e9:.2f} GB" if name.endswith("_bytes") else f"{value:.6g}"
        print(f"{name:<20} {shown}")
    if given.out is not None:
        write_json(
            given.out,
            {"size": given.size, "layers": given.layers, "torch": torch.__version__, **found},
        )


if __name__ == "__main__":
    main()
