"""One rank of a peer: Hugging Face's or TRL's Trainer on equal documents, as in tutorials."""

import importlib
import importlib.util
import os
import sys
import time
from functools import partial
from typing import Any

import torch
from torch.utils.data import SequentialSampler
from transformers import (
    DataCollatorWithFlattening,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from benchmarks.train.cases import Peer
from benchmarks.train.documents import documents_of
from benchmarks.train.rank import (
    WARM_UP_STEPS,
    Side,
    memory_fields,
    rank_arguments,
    say,
    start_fields,
)
from benchmarks.train.recipes import build, recipe
from benchmarks.train.rows import Rows, dealt, padded, row_of
from pipeline_lib.core.processes import die_with_parent
from pipeline_lib.data.documents import Document
from pipeline_lib.train.gpu_sampler import GpuSampler, gpu_sampler


class InOrder(Trainer):
    """A Trainer that does not shuffle, so that all sides see the same documents in a step."""

    def _get_train_sampler(self, *_: Any) -> torch.utils.data.Sampler[int]:
        return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]


class Clock(TrainerCallback):
    """Tells of each step: seconds since the last one, waiting for data included, and its loss."""

    def __init__(
        self, side: Side, device: torch.device, is_first: bool, sampler: GpuSampler
    ) -> None:
        """The first step begins when training does."""
        self._side, self._device, self._is_first, self._sampler = side, device, is_first, sampler
        self._since_s = self._step_s = 0.0
        self._steps = 0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self._since_s = self._now_s()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note the time of the step."""
        now_s = self._now_s()
        self._step_s, self._since_s = now_s - self._since_s, now_s
        self._steps += 1
        if self._steps == WARM_UP_STEPS:
            self._sampler.take()

    def on_log(self, *_: Any, **fields: Any) -> None:
        """Tell of it."""
        if self._is_first and "loss" in fields.get("logs", {}):
            say(self._side, "step", {"step_s": self._step_s, "loss": float(fields["logs"]["loss"])})

    def _now_s(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def hugging_face(
    side: Side, peer: Peer, of_ranks: list[list[list[Document]]], is_gpu: bool
) -> Trainer:
    """That recipe's Trainer; arguments come first, as ZeRO-3 spreads the model as it is made."""
    arguments = TrainingArguments(
        **recipe(side, peer, side.case.rank_documents // peer.documents, is_gpu)
    )
    rows = [
        [[row_of(document) for document in documents] for documents in steps] for steps in of_ranks
    ]
    collate: Any = partial(
        padded, length=side.case.max_tokens if peer.batches == "max_length" else None
    )
    if peer.batches == "flattened":
        collate = DataCollatorWithFlattening()  # type: ignore[no-untyped-call]
    return InOrder(
        model=build(side, peer, arguments.device),
        args=arguments,
        data_collator=collate,
        train_dataset=Rows(dealt(rows, peer.documents)),
    )


def trl(side: Side, peer: Peer, of_ranks: list[list[list[Document]]], is_gpu: bool) -> Trainer:
    """SFTTrainer with packing, without recomputation, which it would do unless told not to."""
    from datasets import Dataset  # type: ignore[import-untyped]
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found,unused-ignore]

    from benchmarks.train.trl_rows import packed_rows, tokenizer

    class InOrderSft(SFTTrainer):  # type: ignore[misc]
        _get_train_sampler = InOrder._get_train_sampler

    rows, accumulation = packed_rows(of_ranks, side.case.max_tokens, peer.documents)
    arguments = SFTConfig(
        **recipe(side, peer, accumulation, is_gpu),
        packing=True,
        packing_strategy="bfd",
        max_length=side.case.max_tokens,
        dataset_kwargs={"skip_prepare_dataset": True},  # the rows are packed
    )
    trainer: Trainer = InOrderSft(
        model=build(side, peer, arguments.device),
        args=arguments,
        train_dataset=Dataset.from_list(dealt(rows, peer.documents)),
        processing_class=tokenizer(),
    )
    return trainer


def main() -> None:
    """Take the steps, and tell of them on the first rank."""
    side = rank_arguments()
    peer = side.case.peer(side.name)
    die_with_parent()
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    is_gpu = torch.cuda.is_available()
    if is_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    elif peer.zero is not None:
        _let_deepspeed_use_cpus()
    device = torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("cpu")
    if is_gpu and importlib.util.find_spec("fla") is not None:
        _let_fla_use_hopper()
    of_ranks = [documents_of(side.case, each, side.steps) for each in range(size)]
    trainer = (trl if peer.batches == "trl" else hugging_face)(side, peer, of_ranks, is_gpu)
    trainer.remove_callback(PrinterCallback)
    with gpu_sampler(device if rank == 0 else None) as sampler:
        trainer.add_callback(Clock(side, device, rank == 0, sampler))
        if rank == 0:
            say(side, "start", start_fields(device, _attention(peer)))
        trainer.train()
        sampled, memory = sampler.take(), memory_fields(device)
    if rank == 0:
        say(side, "end", {**memory, **sampled})
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the engines' own ends take seconds, and are not measured


def _attention(peer: Peer) -> str:
    return "sdpa, T x T mask" if peer.batches in ("flattened", "trl") else "sdpa"


def _let_fla_use_hopper() -> None:
    """Lift the refusal of a kernel that Triton 3.4 to 3.7.0 compiles wrongly in tiles of 64.

    At Qwen3.5's widths of 128 its tiles on Hopper are 128, as ours are.
    """
    kernels: Any = importlib.import_module("fla.ops.common.chunk_o")
    kernels.TRITON_ABOVE_3_7_1 = True


def _let_deepspeed_use_cpus() -> None:
    """Without the extension it would compile; accelerate names the process group on GPUs only."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed: Any = importlib.import_module("deepspeed")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)


if __name__ == "__main__":
    main()
