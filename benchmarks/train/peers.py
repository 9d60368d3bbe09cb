"""One rank of a peer: Hugging Face's Trainer on the same documents, as tutorials use it."""

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    PreTrainedModel,
    Qwen3Config,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from benchmarks.train.cases import CASES, LORA, Case, Peer, documents_of
from benchmarks.train.rank import peak_bytes, rank_arguments, report
from pipeline_lib.data.document import Document
from pipeline_lib.train.dist import die_with_parent

IGNORED = -100
ALL_LINEAR = "all-linear"


class Rows(Dataset[dict[str, list[int]]]):
    """Documents as Trainer wants them, in the order in which its ranks take them."""

    def __init__(self, documents: list[Document]) -> None:
        """Of all ranks and steps."""
        self._documents = documents

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        document = self._documents[index]
        tokens = document.tokens.tolist()
        labels = [token if used else IGNORED for token, used in zip(tokens, document.supervised.tolist(), strict=True)]
        return {"input_ids": tokens, "labels": labels}


class InOrder(Trainer):
    """A Trainer that does not shuffle, so that both sides see the same documents in a step."""

    def _get_train_sampler(self, *_: Any) -> torch.utils.data.Sampler[int]:
        return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]


class Clock(TrainerCallback):
    """Seconds from the end of one step to that of the next, waiting for data included; and the losses."""

    def __init__(self, device: torch.device) -> None:
        """The first step begins when training does."""
        self.device, self.steps, self._since_s = device, list[dict[str, Any]](), 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self._since_s = self._now_s()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note the step."""
        now_s = self._now_s()
        self.steps.append({"step_s": now_s - self._since_s, "loss": None})
        self._since_s = now_s

    def on_log(self, *_: Any, **fields: Any) -> None:
        """Note its loss."""
        if self.steps and "loss" in fields.get("logs", {}):
            self.steps[-1]["loss"] = fields["logs"]["loss"]

    def _now_s(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def padded(rows: list[dict[str, list[int]]], length: int | None) -> dict[str, torch.Tensor]:
    """A batch filled up to `length`, or to its longest row."""
    longest = length or max(len(row["input_ids"]) for row in rows)

    def fill(key: str, value: int) -> torch.Tensor:
        return torch.tensor([row[key] + [value] * (longest - len(row[key])) for row in rows])

    mask = [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows]
    return {"input_ids": fill("input_ids", 0), "labels": fill("labels", IGNORED), "attention_mask": torch.tensor(mask)}


def deepspeed_json(stage: int) -> dict[str, Any]:
    """What articles hand round."""
    zero = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
    auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    return {"zero_optimization": zero, "bf16": {"enabled": "auto"}, **dict.fromkeys(auto, "auto")}


def training_arguments(case: Case, peer: Peer, steps: int, folder: Path, is_gpu: bool) -> TrainingArguments:
    """The recipe."""
    return TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=steps,
        per_device_train_batch_size=peer.documents,
        gradient_accumulation_steps=case.rank_documents // peer.documents,
        learning_rate=1e-5,
        bf16=case.precision == "bf16",
        use_cpu=not is_gpu,
        gradient_checkpointing=peer.is_checkpointed,
        use_liger_kernel=peer.is_liger,
        deepspeed=deepspeed_json(peer.zero) if peer.zero is not None else None,
        optim="adamw_torch_fused",
        ddp_find_unused_parameters=False,
        dataloader_num_workers=2 if is_gpu else 0,
        dataloader_drop_last=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def build(case: Case, folder: Path) -> PreTrainedModel:
    """The model with random weights, in fp32 as Trainer expects of one that is trained whole."""
    config = Qwen3Config.from_pretrained(folder)
    dtype = torch.bfloat16 if case.method == "lora" else torch.float32
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    model.config.use_cache = False
    if case.method == "lora":
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(
            r=LORA["rank"], lora_alpha=LORA["alpha"], target_modules=ALL_LINEAR, task_type="CAUSAL_LM"
        )
        return get_peft_model(model, adapters)  # type: ignore[return-value]
    return model


def main() -> None:
    """Take the steps, and report them on the first rank."""
    arguments = rank_arguments()
    case, folder = CASES[arguments.case], Path(arguments.folder)
    peer = case.peers[arguments.peer]
    die_with_parent()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    is_gpu = torch.cuda.is_available()
    recipe = training_arguments(case, peer, arguments.steps, folder, is_gpu)  # before the model: ZeRO-3 spreads it
    of_ranks = [documents_of(case, each, arguments.steps) for each in range(size)]
    if peer.padding == "packed":
        collate: Any = DataCollatorWithFlattening()  # type: ignore[no-untyped-call]
    else:
        length = case.max_tokens if peer.padding == "max_length" else None
        collate = lambda rows: padded(rows, length)  # noqa: E731
    clock = Clock(recipe.device)
    InOrder(
        model=build(case, folder),
        args=recipe,
        data_collator=collate,
        train_dataset=Rows(_dealt(of_ranks, peer.documents)),
        callbacks=[clock],
    ).train()
    if rank == 0:
        print(json.dumps(report(case, peer.name, of_ranks, clock.steps, peak_bytes(recipe.device))), flush=True)


def _dealt(of_ranks: list[list[list[Document]]], micro: int) -> list[Document]:
    """In the order in which accelerate deals micro-batches to the ranks: in turns."""
    found = []
    for step in range(len(of_ranks[0])):
        for start in range(0, len(of_ranks[0][step]), micro):
            for of_rank in of_ranks:
                found += of_rank[step][start : start + micro]
    return found


if __name__ == "__main__":
    main()
