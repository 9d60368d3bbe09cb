"""Files of weights are written by several threads, and are the same for any number of them."""

import multiprocessing
import shutil
from collections.abc import Mapping
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline_lib.config.section import settings_of
from pipeline_lib.config.train import PLACEMENT_KEYS, Lora, Train
from pipeline_lib.core.errors import TrainingError
from pipeline_lib.core.files import is_disk_full, list_files, sha256_file
from pipeline_lib.core.stage import run_stage
from pipeline_lib.core.store import Manifest, Spec, Store, describe_files, verify, write_manifest
from pipeline_lib.export import write
from pipeline_lib.export.adapter import export_adapter
from pipeline_lib.export.fold import plan_fold
from pipeline_lib.export.merge import export, run, unquantized
from pipeline_lib.export.write import Buffers, Entry, write_files
from pipeline_lib.model.build import build_trainable, load_base
from pipeline_lib.model.lora import add_adapters
from pipeline_lib.train.optimizer import trainable
from pipeline_lib.train.saved_tensors import save_tensors
from pipeline_lib.train.shard_files import bytes_of
from tests.export.test_fold import LORAS, leave_training, write_base
from tests.export.test_nf4 import TRAIN as NF4
from tests.export.test_nf4 import write_wide

EXPERTS = Lora(rank=4, alpha=8, targets=("q_proj", "experts.gate_up_proj", "experts.down_proj"))
FULL = Train(precision="fp32")


def lora(kind: Lora) -> Train:
    return Train(method="lora", precision="fp32", lora=kind)


# The kind of the base, its dtype, the training, whether the base in 4 bits is dequantized, and the
# dtype written.
CASES: Mapping[str, tuple[str, torch.dtype, Train, torch.dtype | None]] = {
    "full": ("qwen3-tied", torch.bfloat16, FULL, None),
    "full, experts": ("moe", torch.bfloat16, FULL, None),
    "full, fp32": ("qwen2", torch.bfloat16, FULL, torch.float32),
    "beside a model of pictures": ("qwen3.5", torch.bfloat16, FULL, torch.float32),
    "lora": ("qwen3-tied", torch.bfloat16, lora(LORAS["lora"]), None),
    "lora, fp32": ("qwen3-tied", torch.float32, lora(LORAS["rslora"]), None),
    "dora": ("qwen2", torch.bfloat16, lora(LORAS["dora"]), None),
    "experts": ("moe", torch.bfloat16, lora(EXPERTS), None),
    "fused experts": ("qwen3.5-moe", torch.bfloat16, lora(EXPERTS), None),
    "nf4": ("wide", torch.float32, NF4, None),
    "nf4, original base": ("wide", torch.float32, unquantized(NF4), torch.bfloat16),
}


@pytest.mark.parametrize("case", CASES)
def test_the_bytes_are_the_same_for_any_number_of_threads(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    kind, stored, train, dtype = CASES[case]
    base = tmp_path / "base"
    if kind == "wide":
        write_wide(base, "qwen3", tiny)
    else:
        write_base(base, kind, tiny, stored, size="12KB")
    (base / "chat_template.jinja").unlink()  # else each export starts an interpreter for it
    torch.manual_seed(3)
    shapes = {
        name: parameter.shape for name, parameter in trainable(build_trainable(base, train)).items()
    }
    save_tensors(
        tmp_path / "trained" / "weights",
        {name: torch.randn(shape) * 0.1 for name, shape in shapes.items()},
    )
    digests = []
    cpus = torch.get_num_threads()
    try:
        for files_at_once, threads in ((1, 1), (1, 4), (3, 3), (8, 16)):
            monkeypatch.setattr(write, "MERGED_AT_ONCE", files_at_once)
            torch.set_num_threads(threads)
            out = tmp_path / f"{files_at_once}-{threads}"
            out.mkdir()
            fold = plan_fold(base, tmp_path / "trained", train)
            hashes = export(fold, base, {}, out, dtype)
            if train.method == "lora":
                hashes |= export_adapter(fold.trained.adapters, train, {}, out)
            assert torch.get_num_threads() == threads
            assert hashes == {
                name: sha256_file(out / name)
                for name in list_files(out)
                if name.endswith(".safetensors")
            }
            digests.append(hashes)
    finally:
        torch.set_num_threads(cpus)
    assert len([name for name in digests[0] if "/" not in name]) > 2
    assert all(each == digests[0] for each in digests)


def ones(entry: Entry, buffers: Buffers) -> Tensor:
    return buffers.empty(entry.shape, entry.dtype).fill_(1)


FILES = {
    f"{letter}.safetensors": [
        Entry(f"{letter}{number}", (5, 7), torch.bfloat16) for number in range(3)
    ]
    for letter in "abc"
}


def test_an_error_of_a_thread_is_raised_as_it_is(tmp_path: Path) -> None:
    """Of several that of the first file by name."""

    def value_of(entry: Entry, buffers: Buffers) -> Tensor:
        if entry.name in ("b1", "c0"):
            raise TrainingError(f"{entry.name} is wrong")
        return ones(entry, buffers)

    torch_threads = torch.get_num_threads()
    for _ in range(5):
        with pytest.raises(TrainingError, match=r"^(b1|c0) is wrong$"):
            write_files(tmp_path, FILES, value_of)
        assert torch.get_num_threads() == torch_threads
    with pytest.raises(ValueError, match="is not what was announced"):
        write_files(tmp_path, FILES, lambda entry, buffers: ones(entry, buffers).float())


def test_a_full_disk_is_said_by_its_error(tmp_path: Path) -> None:
    (tmp_path / "b.safetensors").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as failure:
        write_files(tmp_path, FILES, ones)
    assert is_disk_full(failure.value)


def test_after_a_failure_no_further_tensors_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "MERGED_AT_ONCE", 1)
    made: list[str] = []

    def value_of(entry: Entry, buffers: Buffers) -> Tensor:
        made.append(entry.name)
        raise TrainingError(entry.name)

    with pytest.raises(TrainingError):
        write_files(tmp_path, FILES, value_of)
    assert made == ["a0"]


def sealed_inputs(store: Store, base: Path, trained: Path, train: Train) -> Spec:
    """The spec of a merge in `store`, which has copies of its inputs."""
    specs = {
        "model": Spec("download", 1, {"kind": "model", "source": "tiny"}),
        "train": Spec("train", 1, settings_of(train, PLACEMENT_KEYS)),
    }
    for name, folder in (("model", base), ("train", trained)):
        sealed = store.sealed(specs[name].ref)
        shutil.copytree(folder, sealed)
        about = {
            "stage": specs[name].stage,
            "digest": specs[name].digest,
            "spec": specs[name].to_json(),
        }
        write_manifest(sealed, Manifest(**about, files=describe_files(sealed)))
    return Spec("merge", 1, {}, {name: each.ref for name, each in specs.items()})


def say_nothing(text: str) -> None:
    """Say nothing."""


def merge_slowly(spec: Spec, store: Store) -> None:
    """The merge stage, with time to be killed between two tensors."""

    def slowly(tensor: Tensor) -> memoryview:
        sleep(0.5)
        return bytes_of(tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "bytes_of", slowly)
        run_stage(run, spec, store, say_nothing)


def begun(store: Store) -> int:
    return len(list(store.root.glob("merge/.stage-*/*.safetensors")))


def test_a_merge_that_is_killed_while_it_writes_is_made_anew(tmp_path: Path, tiny: Path) -> None:
    base = write_base(tmp_path / "base", "qwen3-tied", tiny, torch.bfloat16, size="12KB")
    train = lora(LORAS["lora"])
    model: Any = add_adapters(load_base(base, torch.float32), train.lora, seed=0)
    leave_training(model, tmp_path / "trained")
    store, other = Store(tmp_path / "killed" / "store"), Store(tmp_path / "undisturbed" / "store")
    for one in (store, other):
        spec = sealed_inputs(one, base, tmp_path / "trained", train)
    process = multiprocessing.get_context("spawn").Process(target=merge_slowly, args=(spec, store))
    process.start()
    try:
        while not begun(store):  # its imports take long on a machine under load
            assert process.is_alive(), "the merge ended before it wrote"
            sleep(0.01)
    finally:
        process.kill()
        process.join()
    assert begun(store) > 0 and not store.is_sealed(spec.ref)
    killed, undisturbed = (run_stage(run, spec, one, say_nothing) for one in (store, other))
    assert not list(store.root.glob("merge/.*"))
    assert verify(store.sealed(spec.ref)) == killed
    weights = [name for name in killed.files if name.endswith(".safetensors")]
    assert len(weights) > 3 and "adapter/adapter_model.safetensors" in weights
    assert {name: killed.files[name] for name in weights} == {
        name: undisturbed.files[name] for name in weights
    }
