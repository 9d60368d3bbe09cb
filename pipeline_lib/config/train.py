"""Every key of the section `train`: strategy, checkpoints, batch, optimizer and adapters.

Validation has its keys there too.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, FiniteFloat, PlainSerializer

from pipeline_lib.config.optimizers import DEFAULT, OPTIMIZERS, OptimizerName
from pipeline_lib.config.rope import ROPE
from pipeline_lib.config.section import (
    Fraction,
    LocalPath,
    Positive,
    Seconds,
    Section,
    Seed,
    read_settings,
)
from pipeline_lib.config.strategies import STRATEGIES, StrategyName
from pipeline_lib.core.units import count

EPOCH = "epoch"  # in place of a number of steps: at the end of every epoch
Interval = Positive | Literal["epoch"]
AUTO = "auto"  # the plan chooses the value; in a DeepSpeed JSON: ours is kept


def interval_steps(interval: int | str, epoch_steps: int) -> int:
    """Return the steps from one turn to the next, where an epoch has `epoch_steps` of them."""
    return epoch_steps if interval == EPOCH else int(interval)


# The linear modules of a layer, of one with a gated delta rule, and the matrices of experts, by
# peft's names.
LinearName = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TargetName = Literal[
    LinearName, "in_proj_qkv", "in_proj_z", "out_proj", "experts.gate_up_proj", "experts.down_proj"
]


class Lora(Section):
    """Low-rank adapters, used with `train.method: lora`."""

    rank: Annotated[int, Field(ge=1, le=16_384)] = Field(
        16, description="rank r of the update of each matrix"
    )
    alpha: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        32, description="the update is scaled by alpha / rank"
    )
    dropout: Annotated[FiniteFloat, Field(ge=0.0, lt=1.0)] = Field(
        0.0, description="dropout on the adapter's input"
    )
    targets: Annotated[tuple[TargetName, ...], Field(min_length=1)] | Literal["all-linear"] = Field(
        "all-linear",
        description="linear modules that get an adapter in each layer, or all of them; in MoE "
        "models `all-linear` is those of the attention, and `experts.gate_up_proj` and "
        "`experts.down_proj` give each expert an adapter",
    )
    rslora: bool = Field(
        False, description="rank-stabilized LoRA: the update is scaled by alpha / sqrt(rank)"
    )
    dora: bool = Field(
        False,
        description="weight-decomposed LoRA: a magnitude is trained for each row of the matrix",
    )
    base: Literal["unquantized", "nf4"] = Field(
        "unquantized",
        description="frozen weights of the layers; `nf4` keeps them in 4 bits (QLoRA); not for "
        "models with experts",
    )
    lr_ratio: Annotated[FiniteFloat, Field(ge=1.0, le=10_000.0)] = Field(
        1.0, description="LoRA+: learning rate of B divided by that of A; its authors use 16"
    )

    @property
    def of_experts(self) -> tuple[str, ...]:
        """The `targets` that are matrices of experts."""
        if self.targets == "all-linear":
            return ()
        return tuple(name for name in self.targets if "." in name)


class Guards(Section):
    """What happens to a step whose loss or gradient is not finite or is a spike.

    All ranks decide alike.
    """

    spike_deviations: Annotated[FiniteFloat, Field(gt=0.0)] | None = Field(
        20.0,
        description="a loss is a spike if it is this many median absolute deviations above the "
        "median of the last accepted steps; null checks only whether it is finite",
    )
    window_steps: Annotated[int, Field(ge=10)] = Field(
        64,
        description="a loss is compared with those of this many accepted steps; `max_skips` "
        "applies to the same number of steps",
    )
    max_skips: Positive = Field(
        3,
        description="steps that may be skipped within `window_steps`; one more goes back to the "
        "last multiple of `rollback_every_steps`, and if that happens again, the run ends",
    )
    rollback_every_steps: Positive = Field(
        100,
        description="steps to which the guards can go back: the multiples of this, which are saved "
        "whatever `save_every_steps` is, and step 0, the model as it was",
    )

    def step_before(self, refused: int) -> int:
        """Return the step to which the guards go back if `refused` is the first refused step."""
        return (refused - 1) // self.rollback_every_steps * self.rollback_every_steps


# Keys of `train` whose name in a config file (right) differs from that in specs, plans and results,
# which keep their digests by it (left).
RENAMED = {"recompute": "activation_checkpointing", "reshard": "reshard_after_forward"}


def _integral(value: float) -> float:
    """Return `value`, 2.0 as 2: specs hash what is written, and both mean the same."""
    return int(value) if value == int(value) else value


class Train(Section):
    """Strategy, checkpoints, batch, optimizer and validation of the training."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    strategy: Literal["auto", StrategyName] = Field(
        "ddp",
        description="with `auto` the plan chooses the fastest that fits in memory, and also "
        "`shard_ranks`, `micro_batch_blocks` and `offload` unless they are set; `ddp` replicates "
        "the model, `fsdp` shards it (FSDP2), `hsdp` shards it within groups of ranks and "
        "replicates the groups, `zero1` to `zero3` use DeepSpeed. Left out, it is `auto` where "
        "the plan knows the GPU (`cluster.gpu` or `cluster.measured`) and no other key wants a "
        "named strategy, else `ddp`",
    )
    shard_ranks: Positive | None = Field(
        None,
        description="ranks that share one copy of the model under `hsdp`; default: all ranks of "
        "one node",
    )
    context_ranks: Literal["auto"] | Positive = Field(
        "auto",
        description="ranks that share each block, for long blocks: each rank holds an equal part "
        "of the tokens and so that part of the activations, and all exchange queries, keys and "
        "values in every layer (Ulysses); with `ddp`, `fsdp` and `hsdp`. `auto` is 1, unless "
        "nothing fits with 1, more ranks are faster, or a step has fewer blocks than the ranks "
        "process at a time (`micro_batch_blocks` each)",
    )
    unit_layers: Positive = Field(
        1, description="decoder layers that `fsdp` and `hsdp` gather at a time"
    )
    offload: Literal["none", "optimizer", "optimizer+params"] = Field(
        "none",
        description="state kept in host memory: `zero1` and `zero2` can offload the optimizer, "
        "`fsdp` and `hsdp` only both together, `zero3` either",
    )
    recompute: Literal["auto", "none", "selective", "full"] = Field(
        "auto",
        validation_alias=RENAMED["recompute"],
        description="activations to recompute in the backward pass: `full` keeps the input of each "
        "layer and, for documents from 16,384 tokens on, the attention's results, and computes "
        "the MLP of longer micro-batches in chunks of at most 16,384 tokens; `selective` keeps "
        "the results of matrix products and attention too; `auto` is the fastest that fits in "
        "memory",
    )
    offload_activations: Literal["auto"] | bool = Field(
        "auto",
        description="on GPUs with `activation_checkpointing: full`: what is kept of the layers "
        "waits in page-locked host memory, and is copied while layers compute; `auto` does so if "
        "only then the run fits in memory",
    )
    kept_attention_layers: Literal["auto"] | Annotated[int, Field(ge=0)] = Field(
        "auto",
        description="with `activation_checkpointing: full`: layers that keep the attention's "
        "results of documents from 16,384 tokens on, the last ones of the model; the others "
        "compute their attention again, which takes time and no memory. `auto` is all, or as "
        "many as fit in memory",
    )
    reshard: Literal["auto"] | bool = Field(
        "auto",
        validation_alias=RENAMED["reshard"],
        description="`true`: `fsdp` and `hsdp` free the gathered weights of a layer after its "
        "forward pass and gather them again for the backward pass; `auto` keeps them if there is "
        "memory for the whole model",
    )
    compile: Literal["auto"] | bool = Field(
        "auto",
        description="compile each decoder layer with torch.compile; not with `zero3`. `auto` "
        "compiles on GPUs under"
        " `ddp`, `fsdp` and `hsdp`, if that saves more than the half minute that it takes",
    )
    attention: Literal["auto", "flash"] = Field(
        "auto",
        description="attention kernel on GPUs: `auto` is cuDNN's on a Hopper GPU with the extra "
        "`cudnn`, else torch's flash kernel; `flash` is always torch's",
    )
    deepspeed_json: LocalPath | None = Field(
        None,
        description="path of a DeepSpeed config; its keys for memory and speed, such as bucket"
        " sizes and prefetch, are merged over the generated one",
    )
    micro_batch_blocks: Positive = Field(1, description="blocks in a micro-batch of one rank")
    save_every_steps: Positive | Literal["epoch", "auto"] = Field(
        "auto",
        description="optimizer steps between checkpoints, or `epoch` for one at the end of each; "
        "`auto` is once a minute, or so seldom that writing them takes a tenth of the time (a "
        "twentieth without `save_async`); `guards.rollback_every_steps` adds some",
    )
    save_async: Literal["auto"] | bool = Field(
        "auto",
        description="write checkpoints in the background, from a copy in host memory, for which "
        "the training waits; `false` copies and writes them part by part while the training "
        "waits; `auto` is `false` if state is offloaded, or the host lacks the memory for the "
        "copy",
    )
    keep_last: Annotated[int, Field(ge=1, le=100_000)] = Field(
        2,
        description="checkpoints to keep while training, beside the best: the last ones, and the "
        "one to which the guards would go back",
    )
    timeout_s: Seconds = Field(
        300,
        description="seconds that a rank waits for another, after the first step, before the run "
        "is given up",
    )
    start_timeout_s: Seconds = Field(
        900,
        description="the same until the end of the first step, and wherever ranks read or write "
        "whole models",
    )
    sample_every_steps: Positive | None = Field(
        None, description="steps between answers, of up to 48 tokens, to two held-out prompts"
    )
    profile_every_steps: Positive | None = Field(
        None,
        description="steps between profiled steps, which record compute, communication, copies and "
        "idle time",
    )
    deterministic: bool = Field(
        False, description="on GPUs: use algorithms that give the same bits each time; slower"
    )
    method: Literal["full", "lora"] = Field(
        "full",
        description="`full` trains all weights, `lora` trains adapters beside frozen weights",
    )
    precision: Literal["bf16", "fp8", "fp16", "fp32"] = Field(
        "bf16",
        description="compute precision; trained weights and sums of gradients are fp32. `fp8` is "
        "bf16 with the layers'"
        " matrix products in 8 bits, for `method: full` on GPUs from Ada on; needs the extra `fp8`",
    )
    optimizer: OptimizerName = Field(
        DEFAULT,
        description="; ".join(f"`{name}` {row.summary}" for name, row in OPTIMIZERS.items()),
    )
    gradient_compression: Literal["none", "bf16", "powersgd"] = Field(
        "none",
        description="approximation for slow networks, applied to the gradients that ranks "
        "exchange: `bf16` halves their size, `powersgd` sends low-rank factors and works with "
        "`ddp` only, and its result depends on the number of ranks",
    )
    powersgd_rank: Annotated[int, Field(ge=1, le=16_384)] = Field(
        4, description="rank of the factors with `gradient_compression: powersgd`"
    )
    local_sgd_steps: Positive = Field(
        1,
        description="updates that each rank makes alone before `ddp` averages the models; an "
        "approximation, whose result depends on the number of ranks",
    )
    global_batch_tokens: Positive = Field(
        65536,
        description="tokens of an optimizer step over all ranks; a multiple of "
        "`shard.block_tokens`",
    )
    global_batch_samples: Positive | None = Field(
        None,
        description="samples of an optimizer step over all ranks, instead of "
        "`global_batch_tokens`; a step takes as many blocks as hold that many samples on average",
    )
    epochs: Annotated[
        FiniteFloat,
        Field(gt=0, le=10_000),
        AfterValidator(_integral),
        PlainSerializer(_integral, return_type=Any),
    ] = Field(
        1,
        description="passes over the training data, in which each source is used `weight` times; "
        "may be a fraction",
    )
    max_steps: Positive | None = Field(
        None,
        description="optimizer steps of the run, instead of `epochs`; the learning rate schedule "
        "ends there",
    )
    until_step: Positive | None = Field(
        None,
        description="stop at this step and continue later; the schedule still spans the whole run",
    )
    lr: Annotated[FiniteFloat, Field(gt=0.0, le=1e30)] = Field(
        1e-5, description="peak learning rate"
    )
    lr_schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine",
        description="after the warm-up; `wsd` stays at `lr`, then falls linearly in the last "
        "`decay_fraction`",
    )
    warmup_fraction: Fraction = Field(
        0.03,
        description="fraction of all steps in which the learning rate rises linearly from 0 to "
        "`lr`",
    )
    warmup_steps: Annotated[int, Field(ge=0)] | None = Field(
        None, description="the same in steps, instead of `warmup_fraction`"
    )
    decay_fraction: Fraction = Field(
        0.1, description="fraction of all steps in which a `wsd` schedule falls, at the end"
    )
    min_lr_fraction: Fraction = Field(
        0.0,
        description="the learning rate at the end of the run, as a fraction of `lr`: an update "
        "after the last would have it, so that the last one learns, too",
    )
    weight_decay: Annotated[FiniteFloat, Field(ge=0.0, le=100.0)] = Field(
        0.01, description="weight decay, applied to matrices only"
    )
    beta1: Annotated[FiniteFloat, Field(ge=0.0, lt=1.0)] = Field(0.9, description="AdamW's beta1")
    beta2: Annotated[FiniteFloat, Field(ge=0.0, lt=1.0)] = Field(0.95, description="AdamW's beta2")
    adam_eps: Annotated[FiniteFloat, Field(gt=0.0, le=1.0)] = Field(
        1e-8, description="AdamW's epsilon"
    )
    max_grad_norm: Annotated[FiniteFloat, Field(gt=0.0)] = Field(
        1.0, description="gradients are clipped to this norm"
    )
    freeze: tuple[str, ...] = Field(
        (),
        description="globs of the parameters that are not trained: `model.embed_tokens.*`, "
        "`model.layers.[0-3].*`",
    )
    router_aux_loss: Annotated[FiniteFloat, Field(ge=0.0, le=1000.0)] = Field(
        0.001, description="weight of the load-balancing loss of a MoE model; 0 leaves it out"
    )
    validate_every_steps: Interval | None = Field(
        None,
        description="steps between measurements of the held-out loss, or `epoch` for one at the "
        "end of each; default: none while training",
    )
    early_stop_validations: Positive | None = Field(
        None, description="stop after this many validations in a row without a lower held-out loss"
    )
    keep_best: bool = Field(
        False, description="the result is the step with the lowest held-out loss, not the last one"
    )
    guards: Guards = Guards()
    seed: Seed = Field(
        0, description="seed of the sample order, of new adapter weights and of dropout"
    )
    replica: str | None = Field(
        None,
        description="any name; runs that differ only in it are trained separately, to repeat a run",
    )
    lora: Lora = Lora()

    @property
    def uses_deepspeed(self) -> bool:
        """Whether DeepSpeed's engine trains, and not torch's own strategies."""
        return self.strategy != AUTO and STRATEGIES[self.strategy].uses_deepspeed

    @property
    def checkpoints_on_disk(self) -> int:
        """The most checkpoints on the disk at once: those kept, and the one being written."""
        return self.keep_last + self.keep_best + self.keeps_one_for_guards + 1

    @property
    def keeps_one_for_guards(self) -> bool:
        """Whether only the last is kept, and the guards may go back to another checkpoint."""
        own = self.save_every_steps
        may_be_another = own in (EPOCH, AUTO) or int(own) % self.guards.rollback_every_steps != 0
        return self.keep_last == 1 and may_be_another

    @property
    def kept_in_words(self) -> str:
        """What `checkpoints_on_disk` counts, in words: `2 kept, the best and one being written`."""
        beside = (
            (self.keep_best, "the best"),
            (self.keeps_one_for_guards, "one that the guards may need"),
        )
        kept = [f"{self.keep_last} kept", *(name for is_kept, name in beside if is_kept)]
        return f"{', '.join(kept)} and one being written"

    @property
    def intervals_in_words(self) -> str:
        """How often a run is saved, in words; the guards count only if they make more saves."""
        own = self.save_every_steps
        of_guards = self.guards.rollback_every_steps
        if own == EPOCH:
            every = "at the end of every epoch"
        elif own == AUTO:
            every = "as often as hardly costs time"
        else:
            every = f"every {count(int(own), 'steps')}"
        if own not in (EPOCH, AUTO) and of_guards % int(own) == 0:
            return every
        return f"{every} and, for the guards, every {count(of_guards, 'steps')}"

    def save_intervals(self, epoch_steps: int) -> dict[str, int]:
        """Return the steps between the saves that each key asks for; an epoch has `epoch_steps`.

        With `auto` the key is not among them: its saves depend on the time that they take.
        """
        intervals = {}
        if self.save_every_steps != AUTO:
            intervals["train.save_every_steps"] = interval_steps(self.save_every_steps, epoch_steps)
        intervals["train.guards.rollback_every_steps"] = self.guards.rollback_every_steps
        return intervals

    def saves(self, steps: int, epoch_steps: int) -> int:
        """Return how often a run of `steps` steps is saved, undisturbed: at multiples and the end.

        Saves by `auto` are not counted.
        """
        intervals = self.save_intervals(epoch_steps).values()
        before = steps - 1
        at_multiples = sum(before // interval for interval in intervals)
        at_both = before // math.lcm(*intervals) if len(intervals) > 1 else 0
        return at_multiples - at_both + 1

    @property
    def replaced_keys(self) -> frozenset[str]:
        """The keys that have no effect, because another key is given instead."""
        pairs = {
            "global_batch_samples": "global_batch_tokens",
            "max_steps": "epochs",
            "warmup_steps": "warmup_fraction",
        }
        return frozenset(old for new, old in pairs.items() if getattr(self, new) is not None)

    @property
    def depends_on_ranks(self) -> bool:
        """Whether each rank approximates by itself: then its blocks influence the result."""
        return self.local_sgd_steps > 1 or self.gradient_compression == "powersgd"

    def batch_blocks(self, block_tokens: int, samples_per_block: float) -> int:
        """Return the blocks of an optimizer step, given the mean number of samples in a block.

        It does not depend on the ranks, so that a run computes the same on any number of them.
        """
        if self.global_batch_samples is None:
            return self.global_batch_tokens // block_tokens
        return max(1, round(self.global_batch_samples / samples_per_block))

    def accumulation(self, batch_blocks: int, ranks: int) -> int:
        """Return a rank's micro-batches in a step of `batch_blocks`; the last may lack some."""
        return math.ceil(batch_blocks / self.blocks_at_once(ranks))

    def blocks_at_once(self, ranks: int) -> int:
        """Return the blocks that `ranks` ranks process at the same time."""
        return ranks // self.ranks_per_block * self.micro_batch_blocks

    @property
    def ranks_per_block(self) -> int:
        """The ranks that share each block. The plan resolves `auto`; before that it counts as 1."""
        return 1 if self.context_ranks == "auto" else self.context_ranks


# What the plan chooses: where the value is `auto`, and with `strategy: auto` whatever of it the
# file does not give.
CHOSEN_KEYS = (
    "shard_ranks",
    "context_ranks",
    "micro_batch_blocks",
    "recompute",
    "offload",
    "reshard",
    "compile",
    "save_async",
)


def fixed_keys(train: Train) -> list[str]:
    """Return the keys of CHOSEN_KEYS that the config file sets to a value other than `auto`."""
    given = [key for key in CHOSEN_KEYS if key in train.model_fields_set]
    return [key for key in given if getattr(train, key) != AUTO]


# Keys of `train` that say where and how often, not what is computed: recorded with the run, never
# in its key.
PLACEMENT_KEYS = frozenset(
    {
        "strategy",
        "shard_ranks",
        "unit_layers",
        "offload",
        "recompute",
        "reshard",
        "compile",
        "attention",
        "micro_batch_blocks",
        "save_every_steps",
        "save_async",
        "keep_last",
        "timeout_s",
        "start_timeout_s",
        "sample_every_steps",
        "profile_every_steps",
        "deterministic",
        "deepspeed_json",
        "offload_activations",
        "kept_attention_layers",
        "context_ranks",
    }
)


# In the spec of a training: the ranks and the blocks of their micro-batches, where the result
# depends on them.
DEALING = "dealing"


def read_train(settings: Mapping[str, Any]) -> Train:
    """Return the section `train` of the settings of a training's spec. Raises IntegrityError."""
    return read_settings(
        Train, {key: value for key, value in settings.items() if key not in (ROPE, DEALING)}
    )


def in_file(key: str) -> str:
    """Return the key `key` of `train` as a config file writes it, `train.reshard_after_forward`."""
    return f"train.{RENAMED.get(key, key)}"
