"""Problems between keys that are each right: each is told of the key to change, with what would be legal there."""

import math
from collections.abc import Iterator
from pathlib import Path

from pipeline_lib.config.deepspeed_json import json_problems
from pipeline_lib.config.schema import Cluster, Config, Lora, Tokenize, Train
from pipeline_lib.config.sources import HubData
from pipeline_lib.config.strict_yaml import Keys

Problem = tuple[Keys, str]

OFFLOADS = {
    "auto": ("none", "optimizer", "optimizer+params"),
    "ddp": ("none",),
    "fsdp": ("none", "optimizer+params"),
    "hsdp": ("none", "optimizer+params"),
    "zero1": ("none", "optimizer"),
    "zero2": ("none", "optimizer"),
    "zero3": ("none", "optimizer", "optimizer+params"),
}
FP8_TILE = 16  # of products in fp8: what their sizes are multiples of
_DEFAULT = Train()


def cross_check(config: Config) -> list[Problem]:
    """Every problem, with the key to change."""
    train, cluster = config.train, config.cluster
    return [
        *_names_and_sizes(config),
        *_thinking(config.tokenize),
        *_batch(config),
        *_cluster(config),
        *train_problems(train, cluster),
    ]


def train_problems(train: Train, cluster: Cluster) -> list[Problem]:
    """Those within `train`, on the ranks of `cluster`; its batch is not looked at."""
    return [
        *_method(train),
        *_strategy(train, cluster),
        *_exchange(train),
        *_precision(train, cluster),
        *_schedule(train),
        *_validation(train),
    ]


def _names_and_sizes(config: Config) -> Iterator[Problem]:
    if config.experiment == "current":
        yield ("experiment",), "results/current is DVC's record; choose another name"
    block = config.shard.block_tokens
    if config.tokenize.max_tokens > block:
        text = f"a sample of {config.tokenize.max_tokens} tokens does not fit a block of {block}"
        yield ("tokenize", "max_tokens"), f"{text}; lower it or raise shard.block_tokens"
    for index, source in enumerate(config.data.train):
        if isinstance(source, HubData) and source.files and (source.subset, source.split) != (None, "train"):
            text = "given with `files`, which chooses by name instead of by subset and split; keep one of them"
            yield ("data", "train", index, "files"), text


def _thinking(tokenize: Tokenize) -> Iterator[Problem]:
    if tokenize.thinking == "mask" and tokenize.prompt_thinking == "on":
        text = "not 'on' with tokenize.thinking mask, where the default prompt would teach only not to think"
        yield ("tokenize", "prompt_thinking"), f"{text}; set it to off, or tokenize.thinking to keep or strip"


def _batch(config: Config) -> Iterator[Problem]:
    key = ("train", "global_batch_tokens")
    block, batch = config.shard.block_tokens, config.train.global_batch_tokens
    ranks, micro = config.cluster.ranks, config.train.micro_batch_blocks
    if batch % block:
        text = f"{batch} is not a multiple of shard.block_tokens ({block})"
        yield key, f"{text}; try {max(1, round(batch / block)) * block}"
    elif (batch // block) % (ranks * micro):
        text = f"{batch // block} blocks of {block} tokens cannot be shared by {ranks} ranks x {micro} blocks"
        yield key, f"{text}; try {math.ceil(batch / block / ranks / micro) * ranks * micro * block}"
    if config.train.precision == "fp8" and block % FP8_TILE:
        text = f"products in fp8 come in tiles of {FP8_TILE} tokens, and blocks have {block}"
        yield ("shard", "block_tokens"), f"{text}; try {math.ceil(block / FP8_TILE) * FP8_TILE}"


def _cluster(config: Config) -> Iterator[Problem]:
    """What the plan has to know of the machines, and cannot guess."""
    cluster = config.cluster
    if cluster.nodes > 1 and cluster.internode_gbit_s is None and cluster.measured is None:
        text = f"missing, and cluster.nodes is {cluster.nodes}: what a node sends to another decides the plan"
        how = "give what `python -m pipeline_lib doctor --profile slurm CONFIG` or iperf3 measures, in Gbit/s"
        yield ("cluster", "internode_gbit_s"), f"{text}; {how}"
    if cluster.nodes > 1 and cluster.launcher == "deepspeed":
        text = f"starts the ranks of one node, and cluster.nodes is {cluster.nodes}; leave it out, or set torchrun,"
        yield ("cluster", "launcher"), f"'deepspeed' {text} accelerate or srun: zero1 to zero3 train under each of them"
    if config.train.strategy == "auto" and cluster.gpus_per_node and cluster.gpu is None and cluster.measured is None:
        text = "missing, and train.strategy is auto, which goes by the GPU's memory and speed"
        yield ("cluster", "gpu"), f"{text}; name the GPU as `h200` or `a100 80gb`, or set cluster.measured"


def _method(train: Train) -> Iterator[Problem]:
    if train.method == "full" and train.lora != Lora():
        yield ("train", "lora"), "has values, and train.method is 'full'; set train.method: lora or remove them"
    if train.method == "lora" and train.freeze:
        text = "train.method is 'lora', which freezes every weight of the model; remove it"
        yield ("train", "freeze"), f"{text}, or choose train.lora.targets"
    if train.method == "lora" and train.lora.dora and train.strategy == "zero3":
        yield ("train", "lora", "dora"), f"not with train.strategy zero3, which hides the matrix; {_use(_OTHERS)}"


_OTHERS = ("ddp", "fsdp", "hsdp", "zero1", "zero2")


def _use(strategies: tuple[str, ...]) -> str:
    return f"train.strategy may be {_any_of(strategies)}"


def _any_of(values: tuple[object, ...]) -> str:
    words = [str(value) for value in values]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _strategy(train: Train, cluster: Cluster) -> Iterator[Problem]:
    strategy = train.strategy
    if strategy == "hsdp" or (strategy == "auto" and train.shard_ranks is not None):
        yield from _replicas(train, cluster)
    elif train.shard_ranks is not None:
        yield ("train", "shard_ranks"), f"belongs to train.strategy hsdp, and it is {strategy}; remove it"
    yield from _left_to_auto(train)
    if train.unit_layers != _DEFAULT.unit_layers and strategy not in ("auto", "fsdp", "hsdp"):
        yield ("train", "unit_layers"), f"nothing is gathered by train.strategy {strategy}; {_use(('fsdp', 'hsdp'))}"
    if train.offload not in OFFLOADS[strategy]:
        text = f"{train.offload} is not what train.strategy {strategy} can keep in host memory"
        yield ("train", "offload"), f"{text}; it may be {_any_of(OFFLOADS[strategy])}"
    if train.reshard is False and strategy not in ("auto", "fsdp", "hsdp"):
        yield ("train", "reshard"), f"nothing is gathered by train.strategy {strategy}; {_use(('fsdp', 'hsdp'))}"
    if train.compile is True and strategy == "zero3":
        yield (
            ("train", "compile"),
            f"not with train.strategy zero3, which changes weights within layers; {_use(_OTHERS)}",
        )
    if train.deepspeed_json is not None and not strategy.startswith(("auto", "zero")):
        text = f"train.strategy {strategy} is not DeepSpeed's"
        yield ("train", "deepspeed_json"), f"{text}; {_use(('zero1', 'zero2', 'zero3'))}"
    elif train.deepspeed_json is not None:
        for text in json_problems(Path(train.deepspeed_json), train.offload):
            yield ("train", "deepspeed_json"), text


def _left_to_auto(train: Train) -> Iterator[Problem]:
    """Keys of a few strategies: which of those it is to be, nobody but the user knows."""
    of_few = {
        "unit_layers": ("fsdp", "hsdp"),
        "deepspeed_json": ("zero1", "zero2", "zero3"),
        "gradient_compression": ("ddp",),
        "local_sgd_steps": ("ddp",),
    }
    for key, strategies in of_few.items():
        if train.strategy == "auto" and getattr(train, key) != getattr(_DEFAULT, key):
            text = f"train.strategy auto does not choose with it given; name the strategy ({_any_of(strategies)})"
            yield ("train", key), f"{text} or remove it"


_NO_REPLICAS = {"hsdp": "set train.strategy: fsdp or ddp", "auto": "remove it"}


def _replicas(train: Train, cluster: Cluster) -> Iterator[Problem]:
    """Hybrid sharding needs several replicas of several ranks each."""
    ranks = cluster.ranks
    shard_ranks = train.shard_ranks or ranks // cluster.nodes
    if ranks % shard_ranks == 0 and 1 < shard_ranks < ranks:
        return
    key = ("train", "strategy") if train.shard_ranks is None else ("train", "shard_ranks")
    text = f"hsdp with replicas of {shard_ranks} of the {ranks} ranks; it takes several replicas of several ranks"
    legal = tuple(size for size in range(2, ranks // 2 + 1) if ranks % size == 0)
    remedy = f"train.shard_ranks may be {_any_of(legal)}" if legal else _NO_REPLICAS[train.strategy]
    yield key, f"{text}; {remedy}"


def _exchange(train: Train) -> Iterator[Problem]:
    """What `ddp` exchanges, and when."""
    is_compressed, k = train.gradient_compression != "none", train.local_sgd_steps
    for key, is_used in (("gradient_compression", is_compressed), ("local_sgd_steps", k > 1)):
        if is_used and train.strategy not in ("auto", "ddp"):
            yield ("train", key), f"not with train.strategy {train.strategy}; {_use(('ddp',))}"
        if is_used and train.precision == "fp16":
            yield ("train", key), "not with train.precision fp16, whose overflows it would keep; it may be bf16 or fp32"
    if train.powersgd_rank != _DEFAULT.powersgd_rank and train.gradient_compression != "powersgd":
        yield ("train", "powersgd_rank"), "has a value, and train.gradient_compression is not 'powersgd'; remove it"
    if is_compressed and k > 1:
        text = f"ranks exchange no gradients with train.local_sgd_steps {k}"
        yield ("train", "gradient_compression"), f"{text}; keep one of them"
    if train.save_every_steps % k:
        text = f"{train.save_every_steps} is not a multiple of train.local_sgd_steps ({k})"
        yield ("train", "save_every_steps"), f"{text}; try {math.ceil(train.save_every_steps / k) * k}"
    if (train.until_step or 0) % k:
        text = f"{train.until_step} is not a multiple of train.local_sgd_steps ({k}), and would change the result"
        yield ("train", "until_step"), f"{text}; try {math.ceil((train.until_step or 0) / k) * k}"


def _precision(train: Train, cluster: Cluster) -> Iterator[Problem]:
    is_zero = train.uses_deepspeed
    if train.precision == "fp16" and is_zero and cluster.device == "cpu":
        text = f"DeepSpeed has no fp16 on CPUs, and train.strategy is {train.strategy}"
        yield ("train", "precision"), f"{text}; it may be bf16 or fp32"
    if train.precision == "fp8" and (is_zero or train.method != "full" or cluster.device == "cpu"):
        text = "fp8 is for full fine-tuning on GPUs, and not for DeepSpeed"
        yield ("train", "precision"), f"{text}; it may be bf16"
    if train.optimizer == "adamw_8bit" and (is_zero or train.offload != "none"):
        text = "adamw_8bit is not for DeepSpeed, nor for train.offload"
        yield ("train", "optimizer"), f"{text}; it may be adamw"


def _schedule(train: Train) -> Iterator[Problem]:
    if train.warmup_steps is not None and train.warmup_fraction != _DEFAULT.warmup_fraction:
        yield ("train", "warmup_steps"), "given beside train.warmup_fraction; keep one of them"
    if train.lr_schedule != "wsd":
        if train.decay_fraction != _DEFAULT.decay_fraction:
            yield ("train", "decay_fraction"), "has a value, and train.lr_schedule is not 'wsd'; remove it"
        return
    warmup = train.warmup_fraction if train.warmup_steps is None else 0.0
    if warmup + train.decay_fraction > 1.0:
        text = f"with train.warmup_fraction ({warmup}) that is more than all steps"
        yield ("train", "decay_fraction"), f"{text}; lower one of them"


def _validation(train: Train) -> Iterator[Problem]:
    if train.validate_every_steps is None:
        for key, is_used in (("early_stop_validations", train.early_stop_validations), ("keep_best", train.keep_best)):
            if is_used:
                yield ("train", key), "goes by validations, and there are none; set train.validate_every_steps"
