"""QLoRA: what fits under a memory cap, its speed beside bf16 adapters, and beside bitsandbytes.

peft is used with the latter.

The part `quality` compares losses of what is approximated, a base in 4 bits and moments in 8 bits,
with the exact ones.

`python -m benchmarks.qlora --out OUT` on one GPU takes up to 9 minutes; `--parts` selects, `--tiny`
tries it on CPUs. Each case runs in a process of its own. Weights are random, but for `quality`,
which trains a model first.
"""

import argparse
import gc
import importlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.alone import RESULT, started
from benchmarks.measure import show
from benchmarks.sizes import config_json
from benchmarks.train.weights import fill
from pipeline_lib.arch.families import read_geometry
from pipeline_lib.calibrate.random_model import batch_of_documents, random_stepper
from pipeline_lib.config.train import Train
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.files import write_json
from pipeline_lib.core.processes import die_with_parent
from pipeline_lib.data.blocks import Block
from pipeline_lib.data.demo import conversations
from pipeline_lib.launch.ranks import StopRequest
from pipeline_lib.model.batch import Batch, loss_sum, make_batch
from pipeline_lib.model.build import build_trainable
from pipeline_lib.model.weights import base_parameters, load_weights, materialise, put
from pipeline_lib.plan.machine import Ranks
from pipeline_lib.plan.memory import predict
from pipeline_lib.train.dist import World, process_group
from pipeline_lib.train.guards import Judgement, Verdict
from pipeline_lib.train.step import Stepper
from pipeline_lib.train.strategies import make_strategy

PARTS = ("memory", "speed", "peers", "quality")
GB, GIB = 10**9, 2**30
LORA = {"rank": 16, "alpha": 32}
DOCUMENT_TOKENS = 1024


@dataclass(frozen=True)
class Case:
    """One measurement.

    `cap_bytes` limits torch's allocator and the context together; None is no limit.
    """

    part: str
    name: str
    size: str
    base: str
    tokens: int
    steps: int
    recompute: str = "full"
    cap_bytes: int | None = None
    pretrain_s: float = 0.0
    layers: int | None = None
    vocab: int | None = None

    @property
    def compiled(self) -> bool:
        """Whether layers are compiled: on GPUs."""
        return torch.cuda.is_available()

    def config(self) -> dict[str, Any]:
        """config.json."""
        changes: dict[str, Any] = {"num_hidden_layers": self.layers, "vocab_size": self.vocab}
        return config_json(
            self.size, {key: value for key, value in changes.items() if value is not None}
        )

    def train(self, **changes: Any) -> Train:
        """The settings of our side."""
        settings: dict[str, Any] = {
            **{
                "method": "lora",
                "lora": {**LORA, "base": self.base},
                "strategy": "ddp",
                "recompute": self.recompute,
            },
            **{
                "compile": self.compiled,
                "precision": "bf16" if torch.cuda.is_available() else "fp32",
            },
        }
        return Train.model_validate(settings | changes)


def cases(parts: list[str], is_tiny: bool, pretrain_s: float, recompute: str) -> Iterator[Case]:
    """The cases of `parts`, in order; small ones differ: one in `nf4` is that of `memory`."""
    small: dict[str, Any] = {"size": "demo", "tokens": 256, "steps": 2, "recompute": recompute}
    if "memory" in parts:
        for size, cap in (("8B", 12), ("14B", 16), ("32B", 32))[: 1 if is_tiny else 3]:
            case = Case("memory", f"{size} in {cap} GB", size, "nf4", 4096, 3, cap_bytes=cap * GB)
            yield replace(case, **small) if is_tiny else case
    if "speed" in parts:
        for base in ("unquantized",) if is_tiny else ("unquantized", "nf4") * 2:
            case = Case("speed", f"8B, {base}", "8B", base, 16384, 5, recompute)
            yield replace(case, **small) if is_tiny else case
    if "peers" in parts:
        case = Case("peers", "peft, bitsandbytes, plain loop", "8B", "nf4", 16384, 5)
        yield replace(case, **small) if is_tiny else case
    if "quality" in parts:
        case = Case(
            "quality", "0.6B widths", "0.6B", "nf4", 8192, 200, pretrain_s=pretrain_s, vocab=8192
        )
        yield (
            replace(case, **{**small, "steps": 4, "pretrain_s": min(pretrain_s, 5.0)})
            if is_tiny
            else case
        )


def main() -> None:
    """Run the cases within the limit, print a table, and write results.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/qlora"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tiny", action="store_true", help="small sizes")
    parser.add_argument(
        "--recompute", choices=("none", "selective", "full"), default="full", help="of `speed`"
    )
    parser.add_argument(
        "--pretrain-s", type=float, default=40.0, help="seconds of training before `quality`"
    )
    parser.add_argument(
        "--case-s", type=float, default=240.0, help="the most seconds that one case may take"
    )
    parser.add_argument(
        "--limit-s", type=float, default=530.0, help="the most seconds that all may take"
    )
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        die_with_parent()
        print(
            RESULT + json.dumps(run(Case(**json.loads(arguments.case)), arguments.out)), flush=True
        )
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    end_s, results = time.monotonic() + arguments.limit_s, []
    for case in cases(arguments.parts, arguments.tiny, arguments.pretrain_s, arguments.recompute):
        found = started(
            "benchmarks.qlora",
            case,
            arguments.out,
            min(arguments.case_s + case.pretrain_s, end_s - time.monotonic()),
        )
        if case.cap_bytes is not None and found.get("error") == "out of memory":
            results.append({**asdict(case), **found})
            case = replace(case, name=f"{case.name}: GiB", cap_bytes=case.cap_bytes // GB * GIB)
            found = started(
                "benchmarks.qlora",
                case,
                arguments.out,
                min(arguments.case_s, end_s - time.monotonic()),
            )
        results.append({**asdict(case), **found})
        print(f"{case.part}: {case.name}: {found}", flush=True)
        write_json(arguments.out / "results.json", {"results": results})
    tables(results)


def run(case: Case, out: Path) -> dict[str, Any]:
    """What the case finds, in this process."""
    folder = out / "work" / f"{case.part}-{case.name}".replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", case.config())
    torch.manual_seed(0)
    try:
        if case.part == "peers":
            return peers(case, folder)
        world = World.from_env(os.environ, "cuda" if torch.cuda.is_available() else "cpu")
        with process_group(world, 240):
            return (
                quality(case, folder, world)
                if case.part == "quality"
                else timed_steps(case, folder, world)
            )
    except torch.OutOfMemoryError as error:
        return {"error": "out of memory", "text": str(error).splitlines()[0], **memory()}


# Memory and speed of our side, with random weights: on a base in 4 bits random codes, so no larger
# tensor is needed.


def timed_steps(case: Case, folder: Path, world: World) -> dict[str, Any]:
    """Seconds and memory of steps of one micro-batch of `case.tokens`, half supervised."""
    train, geometry = case.train(), read_geometry(folder)
    context = capped(case, world)
    stepper = random_stepper(folder, train, 2, world)
    batch = batch_of_documents(case.tokens, DOCUMENT_TOKENS, 0.5, geometry.vocab)
    stepper.warm_up(batch)
    taken = [seconds(lambda: take_step(stepper, [batch], 1e-5)) for _ in range(case.steps + 1)][1:]
    median = sorted(taken)[len(taken) // 2]
    planned = predict(geometry, train, Ranks(1, 1, torch.cuda.is_available()), case.tokens, 1)
    found: dict[str, Any] = {
        **memory(),
        "step_s": [round(one, 4) for one in taken],
        "tokens_per_s": round(case.tokens / median, 1),
    }
    found |= {"context_at_start": context, "planned_allocated": planned.allocated_bytes}
    if case.cap_bytes is not None and torch.cuda.is_available():
        found["fits"] = found["reserved"] + found["context"] <= case.cap_bytes
    return found


def capped(case: Case, world: World) -> int:
    """Limit torch's allocator to the case's cap less CUDA's own need; return that, in bytes."""
    if world.device.type != "cuda":
        return 0
    square = torch.ones(64, 64, device=world.device, dtype=torch.bfloat16)
    (square @ square).sum().item()  # cuBLAS has its handle from here on
    total, context = torch.cuda.mem_get_info()[1], memory()["context"]
    if case.cap_bytes is not None:
        torch.cuda.set_per_process_memory_fraction(min(1.0, (case.cap_bytes - context) / total))
    return context


def memory() -> dict[str, int]:
    """The allocator's peaks in bytes, and the device's memory in use beside the allocator."""
    if not torch.cuda.is_available():
        return {"allocated": 0, "reserved": 0, "context": 0}
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "context": total - free - torch.cuda.memory_reserved(),
    }


def seconds(call: Callable[[], object]) -> float:
    """Wall seconds of `call`, with what it leaves to the device."""
    start_s = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start_s


def take_step(stepper: Stepper, batches: list[Batch], lr: float) -> float:
    """One update, unless its norm is not finite; its loss."""

    def judge(loss: float, grad_norm: float, _: int) -> Judgement:
        return Judgement(Verdict.APPLY if np.isfinite([loss, grad_norm]).all() else Verdict.SKIP)

    return stepper.step(batches, lr, judge, False).loss


# Quality: a model of 0.6B's widths learns Python from the installed packages' sources. It is then
# tuned on the demo's questions and answers in each of these ways. Their held-out losses are
# compared, before and after.

HELD_OUT_BLOCKS = 6
LEARNING_RATES = {"lora": 4e-4, "full": 5e-5}
WAYS: dict[str, dict[str, Any]] = {
    "LoRA, base in bf16": {"lora": {**LORA, "base": "unquantized"}},
    "LoRA, base in nf4": {"lora": {**LORA, "base": "nf4"}},
    "full, adamw, ddp": {"method": "full", "lora": {}},
    "full, adamw_8bit, ddp": {"method": "full", "lora": {}, "optimizer": "adamw_8bit"},
    "full, adamw_8bit, fsdp": {
        "method": "full",
        "lora": {},
        "optimizer": "adamw_8bit",
        "strategy": "fsdp",
    },
}


def quality(case: Case, folder: Path, world: World) -> dict[str, Any]:
    """Held-out losses by token, before and after `case.steps` steps, and memory, by way.

    Losses are in nats per supervised token.
    """
    tokenizer = tokenizer_of(case.config()["vocab_size"])
    found: dict[str, Any] = {
        "pretrained": pretrain(case, folder, world, source_blocks(case, tokenizer))
    }
    rows = row_blocks(case, tokenizer)
    held_out, learned = rows[:HELD_OUT_BLOCKS], rows[HELD_OUT_BLOCKS:]
    for name, settings in WAYS.items():
        gc.collect()  # the model before may hold itself
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        begun_s, train = time.monotonic(), case.train(recompute="none", compile=False, **settings)
        try:
            stepper = make_stepper(folder, train, world)
        except ConfigError as error:  # a library is missing
            found[name] = {"error": error.problems[0]}
            continue
        before, most = held_out_loss(stepper, held_out), LEARNING_RATES[train.method]
        losses = [
            take_step(
                stepper,
                [make_batch([learned[step % len(learned)]])],
                most * min(1.0, (step + 1) / 20),
            )
            for step in range(case.steps)
        ]
        last = losses[-20:]
        found[name] = {
            **{"before": before, "after": held_out_loss(stepper, held_out), **memory()},
            **{"last_losses": sum(last) / len(last), "losses": [round(loss, 4) for loss in losses]},
            **{"seconds": round(time.monotonic() - begun_s, 1)},
        }
        # what there is if no time is left for the others
        print(RESULT + json.dumps(found), flush=True)
        del stepper
    return found


def pretrain(case: Case, folder: Path, world: World, blocks: list[Block]) -> dict[str, Any]:
    """Train all weights of a new model for `case.pretrain_s` seconds; leave them in `folder`."""
    train = case.train(method="full", lora={}, recompute="none", compile=False)
    strategy = make_strategy(world, train, 1)

    def load(model: torch.nn.Module) -> None:
        materialise(model, world.device)
        fill(model, world.device, put)

    model = build_trainable(folder, train)
    stepper = Stepper(strategy.spread(model, load), strategy, world, StopRequest())
    stepper.wrapped.train()
    stepper.warm_up(make_batch(blocks[:1]))
    losses: list[float] = []
    start_s, done = time.monotonic(), 0.0
    while done < 1.0:
        lr = 6e-4 * min(1.0, done / 0.03 + 0.01, 1.05 - done)
        batch = make_batch([blocks[(2 * len(losses) + one) % len(blocks)] for one in range(2)])
        losses.append(take_step(stepper, [batch], lr))
        done = (time.monotonic() - start_s) / case.pretrain_s
    weights = {
        names[0]: parameter.detach().to("cpu", torch.bfloat16)
        for parameter, names in base_parameters(model)
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return {"steps": len(losses), "first_loss": losses[0], "last_loss": losses[-1]}


def make_stepper(folder: Path, train: Train, world: World) -> Stepper:
    """The model in `folder`, ready to train."""
    strategy = make_strategy(world, train, 1)
    wrapped = strategy.spread(
        build_trainable(folder, train),
        lambda model: load_weights(model, folder, world.device, train.seed),
    )
    wrapped.train()
    return Stepper(wrapped, strategy, world, StopRequest())


@torch.no_grad()
def held_out_loss(stepper: Stepper, blocks: list[Block]) -> float:
    """Nats per supervised token."""
    total, tokens = 0.0, 0
    for block in blocks:
        batch = make_batch([block])
        with stepper.strategy.autocast():
            total += float(loss_sum(stepper.wrapped, batch.to(stepper.world.device)))
        tokens += batch.supervised_tokens
    return total / tokens


def tokenizer_of(vocab: int) -> Any:
    """A byte-level BPE of Python's sources."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(texts(3_000_000), trainer)
    return made


def texts(most_chars: int) -> Iterator[str]:
    """Sources of the installed packages and of Python's library, up to `most_chars` characters."""
    left = most_chars
    for root in (Path(os.__file__).parent, Path(torch.__file__).parent):
        for path in sorted(root.rglob("*.py")):
            if left <= 0:
                return
            if "site-packages" in path.relative_to(root).parts:
                continue
            text = path.read_text(encoding="utf-8", errors="ignore")[:20_000]
            left -= len(text)
            yield text


def source_blocks(case: Case, tokenizer: Any) -> list[Block]:
    """Blocks of sources in documents of DOCUMENT_TOKENS tokens, all supervised."""
    chars = 60_000_000 if torch.cuda.is_available() else 400_000
    encoded = tokenizer.encode_batch(list(texts(chars)))
    tokens = np.concatenate([np.array(one.ids, np.int32) for one in encoded])
    size = case.tokens
    documents = (np.arange(size) // DOCUMENT_TOKENS).astype(np.int32)
    starts = np.random.default_rng(0).permutation(len(tokens) // size) * size
    return [
        Block(tokens[start : start + size], np.ones(size, np.bool_), documents) for start in starts
    ]


def row_blocks(case: Case, tokenizer: Any) -> list[Block]:
    """Blocks of the demo's conversations, whose answers are supervised."""
    blocks, tokens, supervised, documents = [], list[int](), list[bool](), list[int]()
    wanted = case.tokens * (HELD_OUT_BLOCKS + min(case.steps, 120))
    for number, messages in enumerate(conversations()):
        if len(tokens) > wanted:
            break
        for message in messages:
            ids = tokenizer.encode(f"\n{message['role']}: {message['content']}\n").ids
            tokens += ids
            supervised += [message["role"] == "assistant"] * len(ids)
            documents += [number] * len(ids)
    for start in range(0, len(tokens) - case.tokens + 1, case.tokens):
        end = start + case.tokens
        own = np.array(documents[start:end], np.int32)
        blocks.append(
            Block(
                np.array(tokens[start:end], np.int32), np.array(supervised[start:end]), own - own[0]
            )
        )
    return blocks


# peft with bitsandbytes as its users have them: transformers' layers, checkpointed, a plain loop in
# bf16, rows of equal length without padding.


def peers(case: Case, folder: Path) -> dict[str, Any]:
    """Seconds and memory of steps on as many tokens, in rows of DOCUMENT_TOKENS."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plain = quantized_by_bitsandbytes(folder, device)
    options = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
    prepared = prepare_model_for_kbit_training(  # type: ignore[no-untyped-call]
        plain, use_gradient_checkpointing=True, **options
    )
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(
        r=LORA["rank"], lora_alpha=LORA["alpha"], target_modules=targets, task_type="CAUSAL_LM"
    )
    model: Any = get_peft_model(prepared, config)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=device.type == "cuda")
    length = min(DOCUMENT_TOKENS, case.tokens)
    rows = torch.randint(0, model.config.vocab_size, (case.tokens // length, length), device=device)
    labels = rows.clone()
    labels[:, : length // 2] = -100

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=rows, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    taken = [seconds(step) for _ in range(case.steps + 2)][2:]
    median = sorted(taken)[len(taken) // 2]
    speed = {
        "step_s": [round(one, 4) for one in taken],
        "tokens_per_s": round(case.tokens / median, 1),
    }
    return {**memory(), **speed}


def quantized_by_bitsandbytes(folder: Path, device: torch.device) -> Any:
    """The transformers model with bitsandbytes' modules, random, quantized singly on `device`.

    Its weights are random; the modules are quantized one by one.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    bnb: Any = importlib.import_module("bitsandbytes")

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        make: Any = AutoModelForCausalLM.from_config
        model: Any = make(config, dtype=torch.bfloat16)
    for name, module in list(model.model.named_modules()):
        if isinstance(module, torch.nn.Linear):
            values = torch.randn(module.weight.shape, dtype=torch.bfloat16, device=device).mul_(
                0.02
            )
            sizes = (module.in_features, module.out_features)
            kinds: dict[str, Any] = {"compress_statistics": True, "quant_type": "nf4"}
            with torch.device("meta"):
                made = bnb.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.bfloat16, **kinds)
            made.weight = bnb.nn.Params4bit(values, requires_grad=False, module=made, **kinds).to(
                device
            )
            model.model.set_submodule(name, made)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    materialise(model, device)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.normal_(0.0, 0.02)
    model.is_loaded_in_4bit = True
    return model


def _gigabytes(found: dict[str, Any], key: str) -> str:
    return f"{found[key] / GB:.2f}" if key in found else "-"


def tables(results: list[dict[str, Any]]) -> None:
    """Print what was found."""
    rows = [
        [
            *(f"{found['part']}: {found['name']}", f"{found['tokens']:,}"),
            str(found["fits"]) if "fits" in found else str(found.get("error", "-"))[-60:],
            *(
                _gigabytes(found, key)
                for key in ("allocated", "reserved", "context", "planned_allocated")
            ),
            f"{found['tokens_per_s']:,.0f}" if "tokens_per_s" in found else "-",
        ]
        for found in results
        if found["part"] != "quality"
    ]
    if rows:
        columns = (
            "case",
            "tokens",
            "fits",
            "allocated GB",
            "reserved",
            "context",
            "planned",
            "tokens/s",
        )
        show("QLoRA: memory and speed", columns, rows)
    for found in results:
        if found["part"] == "quality" and "pretrained" in found:
            measured = {name: found[name] for name in WAYS if "after" in found.get(name, {})}
            kinds = [
                [
                    name,
                    *(f"{way[key]:.4f}" for key in ("before", "after", "last_losses")),
                    _gigabytes(way, "allocated"),
                ]
                for name, way in measured.items()
            ]
            heads = (
                "way",
                "held-out before",
                "held-out after",
                "mean of the last steps",
                "allocated GB",
            )
            show(f"QLoRA: loss, {found['steps']} steps after {found['pretrained']}", heads, kinds)


if __name__ == "__main__":
    main()
