"""Right and wrong merges compared: 28 small models with experts, a few without, trained and proven.

They are also merged. `python -m benchmarks.merges` trains each for a few steps on this machine's
CPUs. It prints what the proof says of the right merge, and of each wrong one
(benchmarks/wrong_merges.py) the least difference of its tensors and whether it is refused. `bf16
logits` is what the proof judged before: the exported model in its own dtype, by 3e-2.
"""

import argparse
import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from benchmarks.wrong_merges import FILES, PLANS
from pipeline_lib.config.train import Lora, Train
from pipeline_lib.core.errors import DataError, TrainingError
from pipeline_lib.core.spans import Spans
from pipeline_lib.data.blocks import Block
from pipeline_lib.export.fold import Fold, plan_fold
from pipeline_lib.export.merge import export
from pipeline_lib.export.proof import Reference, differences, prove
from pipeline_lib.model.batch import loss_sum, make_batch
from pipeline_lib.model.build import DTYPES, build_trainable, prepare_layers
from pipeline_lib.model.probe import load_probe, probe_logits, save_probe
from pipeline_lib.model.streaming import StreamedModel
from pipeline_lib.model.weights import load_weights
from pipeline_lib.records.merge import Parity
from pipeline_lib.train.optimizer import trainable
from pipeline_lib.train.saved_tensors import save_tensors

CPU = torch.device("cpu")
STEPS, TOKENS, VOCABULARY = 6, 256, 512


@dataclass(frozen=True)
class Case:
    """A model, and how it is trained and exported."""

    layers: int
    experts: int = 0
    chosen: int = 2
    hidden: int = 64
    tied: bool = False
    train: Train = field(default_factory=Train)
    stored: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        """Return the case as the table names it."""
        kind = "full"
        if self.train.method == "lora":
            kind = next(name for name, lora in LORAS.items() if lora == self.train.lora)
        experts = f"{self.chosen} of {self.experts} experts" if self.experts else "dense"
        return (
            f"{self.layers} layers of {self.hidden}, {experts}, {kind} in "
            f"{self.train.precision}, {NAMES[self.stored]}"
        )


LORAS = {
    "lora": Lora(rank=8, alpha=16),
    "lora of experts": Lora(
        rank=8, alpha=16, targets=("q_proj", "v_proj", "experts.gate_up_proj", "experts.down_proj")
    ),
    "dora": Lora(rank=8, alpha=16, dora=True),
}
# Layers, experts, chosen ones, and the hidden size.
SHAPES = (
    (2, 4, 1, 32),
    (4, 8, 2, 64),
    (6, 8, 4, 64),
    (12, 8, 2, 64),
    (20, 4, 2, 32),
    (3, 32, 8, 64),
    (3, 8, 3, 128),
)
STORED_IN_FP32 = (2, 6)  # of SHAPES
NAMES = {torch.float32: "stored in fp32", torch.bfloat16: "stored in bf16"}
FULL = {"method": "full", "lr": 1e-3}


def cases() -> Iterator[Case]:
    """Yield 28 models with experts, and four without."""
    for number, (layers, experts, chosen, hidden) in enumerate(SHAPES):
        for precision in ("fp32", "bf16"):
            lora = list(LORAS.values())[number % len(LORAS)]
            for settings in (FULL, {"method": "lora", "lr": 1e-2, "lora": lora}):
                train = Train.model_validate({**settings, "precision": precision})
                stored = torch.float32 if number in STORED_IN_FP32 else torch.bfloat16
                yield Case(
                    layers,
                    experts,
                    chosen,
                    hidden,
                    tied=number % 2 == 0,
                    train=train,
                    stored=stored,
                )
    for precision in ("fp32", "bf16"):
        for settings in (FULL, {"method": "lora", "lr": 1e-2, "lora": LORAS["lora"]}):
            yield Case(
                20, tied=True, train=Train.model_validate({**settings, "precision": precision})
            )


def block(seed: int) -> Block:
    """Return a block of four documents of random tokens."""
    tokens = np.random.default_rng(seed).integers(3, VOCABULARY, TOKENS).astype(np.int32)
    return Block(
        tokens, np.ones(TOKENS, np.bool_), np.repeat(np.arange(4, dtype=np.int32), TOKENS // 4)
    )


def make_base(case: Case, folder: Path) -> None:
    """Write the base model, with matrices as large as those of trained models."""
    sizes: dict[str, Any] = {
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": case.hidden,
            "intermediate_size": 2 * case.hidden,
        },
        **{"num_hidden_layers": case.layers, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{
            "head_dim": case.hidden // 4,
            "max_position_embeddings": 512,
            "tie_word_embeddings": case.tied,
        },
        **{"initializer_range": 2 / math.sqrt(case.hidden) / 3},
    }
    experts: dict[str, Any] = {
        "num_experts": case.experts,
        "num_experts_per_tok": case.chosen,
        "moe_intermediate_size": case.hidden,
    }
    config = Qwen3MoeConfig(**sizes, **experts) if case.experts else Qwen3Config(**sizes)
    torch.manual_seed(case.layers)
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.to(case.stored).save_pretrained(folder)


def train_base(case: Case, base: Path, trained: Path) -> None:
    """Leave what a training stage leaves for the merge."""
    model = build_trainable(base, case.train)
    prepare_layers(model, case.train)
    load_weights(model, base, CPU, case.train.seed)
    optimizer = torch.optim.AdamW(trainable(model).values(), lr=case.train.lr)
    dtype = DTYPES[case.train.precision]
    autocast = nullcontext() if dtype == torch.float32 else torch.autocast("cpu", dtype)
    for step in range(STEPS):
        batch = make_batch([block(step)])
        with autocast:
            loss = loss_sum(model, batch) / batch.supervised_tokens
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    tensors = {name: parameter.detach().float() for name, parameter in trainable(model).items()}
    save_tensors(trained / "weights", tensors)
    with autocast:
        save_probe(trained, block(99), probe_logits(model, block(99), CPU))


@dataclass
class Merges:
    """The right merge of a case, in a folder, and the wrong ones made of it."""

    case: Case
    folder: Path
    fold: Fold

    @classmethod
    def of(cls, case: Case, folder: Path) -> "Merges":
        """Make and train the model in `folder`, and merge it rightly."""
        make_base(case, folder / "base")
        train_base(case, folder / "base", folder / "trained")
        merges = cls(case, folder, plan_fold(folder / "base", folder / "trained", case.train))
        merges.write("right", merges.fold)
        return merges

    def write(self, name: str, fold: Fold) -> None:
        """Export `fold` to the folder `name`."""
        (self.folder / name).mkdir()
        export(fold, self.folder / "base", {}, self.folder / name, None)

    def make_wrong(self, kind: str) -> bool:
        """Make the wrong merge of that kind in `wrong`; return whether this model has one."""
        shutil.rmtree(self.folder / "wrong", ignore_errors=True)
        if kind in FILES:
            shutil.copytree(self.folder / "right", self.folder / "wrong")
            return FILES[kind](self.folder / "wrong")
        fold = PLANS[kind](self.fold)
        if fold is not None:
            self.write("wrong", fold)
        return fold is not None

    def proven(self, name: str) -> Parity:
        """Return the figures of the proof of the folder `name`. Raises TrainingError."""
        base, trained = self.folder / "base", self.folder / "trained"
        return prove(
            self.folder / name, base, trained, self.case.train, CPU, lambda _: None, Spans()
        )

    def by_value(self, name: str) -> float:
        """Return by how much the tensors of the folder `name` differ at most."""
        reference = Reference(
            self.folder / name, self.folder / "base", self.folder / "trained", self.case.train
        )
        try:
            return max(difference for _, difference in differences(reference, CPU))
        except DataError:
            return math.inf

    def by_logits(self, name: str) -> float:
        """Return by how much the logits of the folder `name` differ in its own dtype."""
        probe, expected = load_probe(self.folder / "trained")
        exported = self.folder / name
        try:
            (found,) = StreamedModel(exported, self.case.stored, CPU).probe_logits(probe)
        except DataError:
            return math.inf
        return float((found - expected).norm() / expected.norm())


def main() -> None:
    """Print a line for each right merge, and the summary of the wrong ones."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.merges", description=__doc__)
    parser.add_argument(
        "--first", type=int, default=0, help="the number of the first case, counted from 0"
    )
    parser.add_argument("--cases", type=int, default=None, help="so many of the cases")
    parser.add_argument("--right", action="store_true", help="no wrong merges")
    given = parser.parse_args()
    kinds = () if given.right else (*PLANS, *FILES)
    chosen = list(cases())[given.first :][: given.cases]
    torch.set_num_threads(1)
    wrong: dict[str, list[tuple[float, float, bool]]] = {}
    published = 0
    print(
        f"{'right merges':<68} {'tensors':>8} {'logits':>8} {'allowed':>8} {'apart':>5} "
        f"{'bf16 logits':>11}  proof"
    )
    for case in chosen:
        with tempfile.TemporaryDirectory() as name:
            merges = Merges.of(case, Path(name))
            before = merges.by_logits("right")
            try:
                found = merges.proven("right")
                published += 1
                figures = f"{found.value_difference:8.1e} {found.relative_difference:8.1e} "
                figures += (
                    f"{found.tolerance:8.1e} {found.positions_apart:>5} {before:11.1e}  published"
                )
            except TrainingError as error:
                figures = f"REFUSED {merges.by_value('right'):.1e} {before:.1e} {error}"
            print(f"{case!s:<68} {figures}", flush=True)
            for kind in filter(merges.make_wrong, kinds):
                try:
                    merges.proven("wrong")
                    is_refused = False
                except TrainingError:
                    is_refused = True
                row = merges.by_value("wrong"), merges.by_logits("wrong"), is_refused
                wrong.setdefault(kind, []).append(row)
                if not is_refused:
                    print(
                        f"    PUBLISHED: {kind}, tensors {row[0]:.1e}, bf16 logits {row[1]:.1e}",
                        flush=True,
                    )
    print(f"\n{published} right merges published\n")
    if not wrong:
        return
    print(
        f"{'wrong merges':<24} {'refused':>9} {'least tensors':>14} {'least bf16 logits':>18} "
        f"{'within 3e-2':>12}"
    )
    for kind, rows in wrong.items():
        refused = f"{sum(is_refused for _, _, is_refused in rows)} of {len(rows)}"
        tensors, logits = (min(row[place] for row in rows) for place in (0, 1))
        passed = sum(row[1] <= 3e-2 for row in rows)
        print(f"{kind:<24} {refused:>9} {tensors:>14.1e} {logits:>18.1e} {passed:>12}")


if __name__ == "__main__":
    main()
