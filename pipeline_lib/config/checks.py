"""Check values that are each legal: keys that exclude each other, unusual values."""

import math
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from pipeline_lib.config.deepspeed_json import json_problems
from pipeline_lib.config.optimizers import (
    ADAPTERS,
    DEEPSPEED,
    DEFAULT,
    LOCAL_SGD,
    OFFLOAD,
    OPTIMIZERS,
)
from pipeline_lib.config.schema import Cluster, Config, HubData, TinyModel
from pipeline_lib.config.strategies import STRATEGIES, with_key
from pipeline_lib.config.strict_yaml import Keys
from pipeline_lib.config.train import AUTO, RENAMED, Lora, Train
from pipeline_lib.core import units
from pipeline_lib.core.text import did_you_mean

Problem = tuple[Keys, str]  # the key to change, and what is wrong, with the values it may have

FP8_TILE = 16  # the sizes of fp8 matrix products are multiples of this
GROUPED_TILE = 8  # those of grouped products: their rows begin on multiples of 16 bytes
LEAST_KEPT_TOKENS = 16_384  # of the documents of which a layer may keep the attention's results
_DEFAULT = Train()
# keys of `train` that have no effect if nothing is held out
_OF_HELD_OUT = (
    "validate_every_steps",
    "early_stop_validations",
    "keep_best",
    "sample_every_steps",
)


def cross_check(config: Config) -> list[Problem]:
    """Return every problem, with the key to change."""
    problems = list(_data(config))
    problems += _batch(config)
    problems += _cluster(config)
    problems += _merge(config)
    problems += _ineffective(config)
    problems += _ship(config)
    return problems + train_problems(config.train, config.cluster)


def train_problems(train: Train, cluster: Cluster) -> list[Problem]:
    """Return the problems within `train`, on the ranks of `cluster`; the batch is not checked."""
    problems = list(_method(train))
    problems += _strategy(train, cluster)
    problems += _exchange(train)
    problems += _precision(train, cluster)
    problems += _optimizer(train)
    problems += _schedule(train)
    problems += _validation(train)
    return problems


def _ship(config: Config) -> Iterator[Problem]:
    """Yield the benchmarks that have one name, and those that `ship` names and nobody asks."""
    names = [benchmark.name for benchmark in config.evaluate.benchmarks]
    for number, name in enumerate(names):
        if name in names[:number]:
            text = f"{name!r} is the name of two benchmarks; give one of them another"
            yield ("evaluate", "benchmarks", number, "name"), text
    ship = config.ship
    for section, given in (("gain", ship.gain), ("keep", ship.keep)):
        for name in given:
            if name not in names:
                known = ", ".join(names) or "none"
                text = f"no benchmark of that name in evaluate.benchmarks, which has {known}"
                yield ("ship", section, name), f"{text}{did_you_mean(name, names)}"
    for name in ship.gain.keys() & ship.keep.keys():
        text = "has a rule of ship.gain too, and one benchmark has one rule; remove one of them"
        yield ("ship", "keep", name), text
    if not names and (ship.loops is not None or ship.unended is not None):
        key = "loops" if ship.loops is not None else "unended"
        yield ("ship", key), "counts answers to evaluate.benchmarks, of which there are none"


def _data(config: Config) -> Iterator[Problem]:
    if config.experiment == "current":
        yield ("experiment",), "results/current is the folder of DVC's record; choose another name"
    block = config.shard.block_tokens
    if config.tokenize.max_tokens > block:
        text = f"a sample of {config.tokenize.max_tokens} tokens does not fit a block of {block}"
        yield ("tokenize", "max_tokens"), f"{text}; lower it or raise shard.block_tokens"
    yield from _chosen_files("train", config.data.train)
    yield from _chosen_files("validation", config.data.validation)
    yield from _held_out(config)
    if config.tokenize.thinking == "mask" and config.tokenize.prompt_thinking == "on":
        text = (
            "'on' does not work with tokenize.thinking: mask, where the model would only learn "
            "not to think"
        )
        yield (
            ("tokenize", "prompt_thinking"),
            f"{text}; set it to off, or tokenize.thinking to keep or strip",
        )


def _chosen_files(key: str, sources: Sequence[object]) -> Iterator[Problem]:
    """Yield the sources of `data.KEY` that choose the files of a hub twice."""
    for index, source in enumerate(sources):
        if not isinstance(source, HubData) or not source.files:
            continue
        if source.subset is not None or source.split != "train":
            text = "cannot be combined with `subset` or `split`: it chooses files by name"
            yield ("data", key, index, "files"), f"{text}; remove one of them"


def _held_out(config: Config) -> Iterator[Problem]:
    """Yield what contradicts what is held out, and what needs held-out data if there is none."""
    data = config.data
    train = config.train
    is_given = "validation_fraction" in data.model_fields_set
    if data.validation and data.validation_fraction and is_given:
        text = "cannot be combined with data.validation, whose sources are held out as a whole"
        yield ("data", "validation_fraction"), f"{text}; remove one of them"
    for index, source in enumerate(data.validation):
        if source.weight != 1:
            text = "has no effect here: it is for training, and held-out samples count once each"
            yield ("data", "validation", index, "weight"), f"{text}; remove it"
    if data.held_out_sources:
        return
    for key in _OF_HELD_OUT:
        if getattr(train, key) != getattr(_DEFAULT, key):
            text = "needs held-out data, and data.validation_fraction is 0: raise it, give"
            yield ("train", key), f"{text} data.validation instead, or remove this key"


def _batch(config: Config) -> Iterator[Problem]:
    key = ("train", "global_batch_tokens")
    block = config.shard.block_tokens
    batch = config.train.global_batch_tokens
    ranks = config.cluster.ranks
    parts = config.train.ranks_per_block
    at_once = config.train.blocks_at_once(ranks)
    if ranks % parts:  # which is a problem by itself
        at_once = parts = 1
    if config.train.global_batch_samples is not None:
        if batch != _DEFAULT.global_batch_tokens:
            yield (
                ("train", "global_batch_samples"),
                "cannot be combined with train.global_batch_tokens; remove one of them",
            )
    elif batch % block:
        text = f"{batch} is not a multiple of shard.block_tokens ({block})"
        yield key, f"{text}; try {max(1, round(batch / block)) * block}"
    elif (batch // block) % at_once and not _a_count_fits_the_batch(config, batch // block):
        micro = config.train.micro_batch_blocks
        groups = units.count(at_once // micro, "ranks" if parts == 1 else "groups of ranks")
        text = f"it has {units.count(batch // block, 'blocks')} of {block} tokens, and that is"
        text += f" no multiple of {groups} x {units.count(micro, 'blocks')}"
        yield key, f"{text}; try {math.ceil(batch / block / at_once) * at_once * block}"
    tile = parts * _tile(config.train)
    if block % tile:
        keys = []
        if tile > parts:
            keys.append("train.precision: fp8")
        if parts > 1:
            keys.append(f"train.context_ranks: {parts}")
        text = f"{block} is not a multiple of {tile}, as {' and '.join(keys)} requires"
        yield ("shard", "block_tokens"), f"{text}; try {math.ceil(block / tile) * tile}"


def _tile(train: Train) -> int:
    """Return what the tokens of a rank's part of a block are a multiple of."""
    return FP8_TILE if train.precision == "fp8" else 1


def _a_count_fits_the_batch(config: Config, blocks: int) -> bool:
    """Return whether ranks may share a batch's blocks so that none idles; the plan knows heads."""
    train = config.train
    ranks = config.cluster.ranks
    if train.context_ranks != AUTO or not has_few_blocks(train, ranks, blocks):
        return False
    counts = more_than_one(train, ranks, config.shard.block_tokens)
    return any(blocks % (ranks // count * train.micro_batch_blocks) == 0 for count in counts)


def has_few_blocks(train: Train, ranks: int, blocks: int) -> bool:
    """Return whether a batch has fewer blocks than that many ranks process without sharing."""
    return blocks < ranks * train.micro_batch_blocks


def more_than_one(train: Train, ranks: int, block_tokens: int) -> Iterator[int]:
    """Yield the numbers of ranks, 2 or more, that may share each block, by the config alone."""
    for count in range(2, ranks + 1):
        if ranks % count == 0 and allows_count(train, block_tokens, count):
            yield count


def allows_count(train: Train, block_tokens: int, count: int) -> bool:
    """Return whether `train` and the length of a block allow `count` ranks to share each block."""
    if count == 1:
        return True
    return (
        not train.uses_deepspeed
        and not train.depends_on_ranks
        and block_tokens % (count * _tile(train)) == 0
    )


def _cluster(config: Config) -> Iterator[Problem]:
    """Yield what the plan needs to know about the machines and cannot guess."""
    cluster = config.cluster
    if cluster.nodes > 1 and cluster.internode_gbit_s is None and cluster.measured is None:
        yield (
            ("cluster", "internode_gbit_s"),
            f"missing, but cluster.nodes is {cluster.nodes}, and the plan needs the bandwidth "
            "between nodes; set what `qwen3 doctor --hosts A,B CONFIG`, in SLURM `qwen3 doctor "
            "--profile slurm CONFIG` or iperf3 measures, in Gbit/s",
        )
    if config.train.strategy == AUTO and cluster.gpus_per_node and not cluster.has_known_gpus:
        text = "missing, but train.strategy: auto needs to know the GPU's memory and speed"
        how = "name the GPU as `h200` or `a100 80gb`, or set cluster.measured"
        yield ("cluster", "gpu"), f"{text}; {how}"


def _merge(config: Config) -> Iterator[Problem]:
    train = config.train
    is_quantized = train.method == "lora" and train.lora.base != "unquantized"
    if config.merge.base == "original" and not is_quantized:
        text = "original has no effect, because train.lora.base is not nf4: the base is merged as"
        yield ("merge", "base"), f"{text} it is; remove it"
    if config.merge.average is not None:
        yield from _average(train, config.merge.average.last)


def _average(train: Train, last: int) -> Iterator[Problem]:
    """Yield why the checkpoints of a mean of the `last` ones may not be there."""
    place = ("merge", "average", "last")
    apart = train.save_every_steps
    if not isinstance(apart, int):
        text = f"needs checkpoints at known steps, and train.save_every_steps is {apart}"
        yield place, f"{text}; set that to a number of steps"
        return
    if train.keep_best:
        text = "is the mean of the last checkpoints, and train.keep_best asks for the best one"
        yield place, f"{text}; remove one of them"
    # beside them those that the guards save, and the one to which they would go back
    of_guards = train.guards.rollback_every_steps
    needed = last + 1
    if of_guards % apart:
        needed += (last - 1) * apart // of_guards + 1
    if train.keep_last < needed:
        text = f"{last} checkpoints are not kept until the merge: train.keep_last is"
        yield place, f"{text} {train.keep_last}; set that to {needed}, or lower this"


def _ineffective(config: Config) -> Iterator[Problem]:
    """Yield the keys that cannot do anything beside the other keys of the file."""
    model = config.model
    train = config.train
    if isinstance(model, TinyModel) and model.tokenizer is not None:
        yield from _vocabulary(model)
    if config.starting_adapter is not None and train.method != "lora":
        yield ("model", "adapter"), "is trained on only with train.method: lora"
    if config.parent is not None and config.continues:
        yield from _continued(config, config.parent)
    if model.rope is not None and config.parent is not None and config.parent.rope is not None:
        text = f"experiment {config.parent.experiment!r} or one before it stretches them already"
        yield ("model", "rope"), f"{text}; remove this one"
    if train.reshard is True and not _works("reshard", train):
        yield (
            ("train", RENAMED["reshard"]),
            f"has no effect with train.strategy: {train.strategy}; remove it",
        )
    # `_strategy` tells the rest
    can_keep = train.recompute in (AUTO, "full") and train.precision != "fp32"
    longest = config.tokenize.max_tokens
    if train.kept_attention_layers != AUTO and can_keep and longest < LEAST_KEPT_TOKENS:
        yield (
            ("train", "kept_attention_layers"),
            f"has no effect, because documents have up to {longest:,} tokens "
            f"(tokenize.max_tokens), and it is for documents from {LEAST_KEPT_TOKENS:,} on; "
            "remove it",
        )
    if train.lr_schedule == "constant" and train.min_lr_fraction != _DEFAULT.min_lr_fraction:
        yield (
            ("train", "min_lr_fraction"),
            "has no effect, because train.lr_schedule is 'constant'; remove it",
        )
    if train.guards.max_skips >= train.guards.window_steps:
        text = f"{train.guards.max_skips} steps cannot be exceeded within train.guards.window_steps"
        text += f" ({train.guards.window_steps}), so the guards would skip steps for ever; lower it"
        yield ("train", "guards", "max_skips"), text


# The keys of `train.lora` that decide which tensors adapters have, and what these stand for.
_OF_ADAPTERS = ("rank", "alpha", "targets", "rslora", "dora", "base")


def _continued(config: Config, parent: Config) -> Iterator[Problem]:
    """Yield why the adapters of `parent` cannot be trained on with `config`."""
    if parent.train.method != "lora":
        text = f"experiment {parent.experiment!r} trains all weights and has no adapters"
        yield ("model", "adapter"), f"{text}; remove this key, which trains its merged model"
        return
    if parent.model.rope is not None:
        text = f"continue does not work with the model.rope of experiment {parent.experiment!r}"
        yield ("model", "adapter"), f"{text}; remove this key, which trains its merged model"
    if config.train.method != "lora":
        yield ("model", "adapter"), "continue needs train.method: lora"
        return
    for key in _OF_ADAPTERS:
        wanted = getattr(parent.train.lora, key)
        if getattr(config.train.lora, key) != wanted:
            text = f"the adapters of experiment {parent.experiment!r} have {wanted}"
            yield ("train", "lora", key), f"{text}; write that, or let model.adapter be merge"


def _vocabulary(model: TinyModel) -> Iterator[Problem]:
    if model.vocab_tokens != TinyModel.model_fields["vocab_tokens"].default:
        text = "has no effect with model.tokenizer, which has a vocabulary; remove it"
        yield ("model", "vocab_tokens"), text


def _method(train: Train) -> Iterator[Problem]:
    if train.method == "full" and train.lora != Lora():
        yield (
            ("train", "lora"),
            "has values, but train.method is 'full'; set train.method: lora or remove them",
        )
    if train.method == "lora" and train.freeze:
        text = "has no effect with train.method: lora, which freezes every weight of the model"
        yield ("train", "freeze"), f"{text}; remove it, or choose train.lora.targets"
    if train.method == "lora" and train.lora.dora and not _works("lora.dora", train):
        text = f"does not work with train.strategy: {train.strategy}"
        yield ("train", "lora", "dora"), f"{text}; {_use_one_with('lora.dora')}"
    if train.method == "lora" and train.lora.of_experts:
        yield from _adapted_experts(train)
    if train.method == "lora" and train.lora.base == "nf4":
        yield from _quantized(train)


TORCH_CASTS_INTEGERS = (
    "needs torch 2.13 or later: an earlier one casts the 4-bit codes; set train.strategy: ddp"
)


@cache
def shards_integers() -> bool:
    """Return whether the FSDP2 of the installed torch leaves parameters of integers as they are."""
    try:
        major, minor = version("torch").split(".")[:2]
    except PackageNotFoundError:  # a machine that only submits jobs
        return True
    return (int(major), int(minor)) >= (2, 13)


def _adapted_experts(train: Train) -> Iterator[Problem]:
    """Yield what does not work with experts' adapters: peft has no dropout and no DoRA there."""
    lora = train.lora
    text = f"does not work with adapters of experts ({lora.of_experts[0]} in train.lora.targets)"
    if lora.dropout:
        yield ("train", "lora", "dropout"), f"{text}; set it to 0"
    if lora.dora:
        yield ("train", "lora", "dora"), f"{text}; remove one of them"
    if lora.rank % GROUPED_TILE:
        rank = math.ceil(lora.rank / GROUPED_TILE) * GROUPED_TILE
        yield (
            ("train", "lora", "rank"),
            f"{lora.rank} {text}, where it is a multiple of {GROUPED_TILE}; try {rank}",
        )
    if not _works("lora.targets: experts", train):
        may_be = _use_one_with("lora.targets: experts")
        yield ("train", "strategy"), f"{train.strategy} {text}; {may_be}"


def _quantized(train: Train) -> Iterator[Problem]:
    """Yield what does not work with a base in 4 bits."""
    key = ("train", "lora", "base")
    if not _works("lora.base: nf4", train):
        text = f"nf4 does not work with train.strategy: {train.strategy}"
        yield key, f"{text}; {_use_one_with('lora.base: nf4')}"
    if train.strategy in ("fsdp", "hsdp") and not shards_integers():
        yield key, f"nf4 with train.strategy: {train.strategy} {TORCH_CASTS_INTEGERS}"
    if train.lora.dora:
        text = "does not work with train.lora.base: nf4; remove it"
        yield ("train", "lora", "dora"), f"{text}, or set train.lora.base: unquantized"
    if train.offload != "none":
        text = f"{train.offload} does not work with train.lora.base: nf4"
        yield ("train", "offload"), f"{text}; set it to none, or train.lora.base to unquantized"


def _works(key: str, train: Train) -> bool:
    """Return whether `key`, of config/strategies.py, works with the strategy or with some other.

    The latter is for `auto`, which may choose it.
    """
    return train.strategy == AUTO or key in STRATEGIES[train.strategy].keys


def _use_one_with(key: str) -> str:
    return f"train.strategy may be {_any_of(with_key(key))}"


def _any_of(values: tuple[object, ...]) -> str:
    words = [str(value) for value in values]
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} or {words[-1]}"


def _strategy(train: Train, cluster: Cluster) -> Iterator[Problem]:
    """Yield what does not work with the strategy."""
    strategy = train.strategy
    if strategy == "hsdp" or (strategy == AUTO and train.shard_ranks is not None):
        yield from _replicas(train, cluster)
    elif train.shard_ranks is not None:
        yield (
            ("train", "shard_ranks"),
            f"works only with train.strategy: hsdp, but that is {strategy}; remove it",
        )
    yield from wanting_a_strategy(train)
    if train.ranks_per_block > 1:
        yield from _context(train, cluster)
    yield from _units(train)
    if train.offload_activations is True:
        yield from _activations(train, cluster)
    yield from _kept_attention(train)
    if train.compile is True and not _works("compile", train):
        text = f"does not work with train.strategy: {strategy}, which changes weights within layers"
        yield ("train", "compile"), f"{text}; {_use_one_with('compile')}"
    if train.deepspeed_json is not None and not _works("deepspeed_json", train):
        text = f"works only with DeepSpeed, but train.strategy is {strategy}"
        yield ("train", "deepspeed_json"), f"{text}; {_use_one_with('deepspeed_json')}"
    elif train.deepspeed_json is not None:
        for text in json_problems(train.deepspeed_json, strategy, train.offload):
            yield ("train", "deepspeed_json"), text


def _units(train: Train) -> Iterator[Problem]:
    """Yield what does not work in how weights are gathered, resharded and offloaded."""
    strategy = train.strategy
    if train.unit_layers != _DEFAULT.unit_layers and not _works("unit_layers", train):
        text = f"has no effect with train.strategy: {strategy}"
        yield ("train", "unit_layers"), f"{text}; {_use_one_with('unit_layers')}"
    if strategy != AUTO and train.offload not in STRATEGIES[strategy].offloads:
        text = f"{train.offload} does not work with train.strategy: {strategy}"
        legal = _any_of(STRATEGIES[strategy].offloads)
        yield ("train", "offload"), f"{text}; it may be {legal}"
    if train.reshard is False and not _works("reshard", train):
        text = f"has no effect with train.strategy: {strategy}; {_use_one_with('reshard')}"
        yield ("train", RENAMED["reshard"]), text


def _kept_attention(train: Train) -> Iterator[Problem]:
    if train.kept_attention_layers == AUTO:
        return
    key = ("train", "kept_attention_layers")
    if train.recompute not in (AUTO, "full"):
        text = f"has no effect with train.{RENAMED['recompute']}: {train.recompute}"
        yield key, f"{text}; set that to full, or remove this key"
    elif train.precision == "fp32":
        text = "has no effect with train.precision: fp32, in which no layer keeps them"
        yield key, f"{text}; remove it"


def _context(train: Train, cluster: Cluster) -> Iterator[Problem]:
    """Yield why ranks cannot share blocks."""
    key = ("train", "context_ranks")
    count = train.ranks_per_block
    if cluster.ranks % count:
        legal = tuple(size for size in range(1, cluster.ranks + 1) if cluster.ranks % size == 0)
        text = f"{count} does not divide {units.count(cluster.ranks, 'ranks')}"
        yield key, f"{text}; it may be {_any_of(legal)}"
    if not _works("context_ranks", train):
        text = f"does not work with train.strategy: {train.strategy}"
        yield key, f"{text}; {_use_one_with('context_ranks')}"
    if train.local_sgd_steps > 1:
        text = "does not work with train.local_sgd_steps, with which each rank makes updates alone"
        yield key, f"{text}; remove one of them"
    if train.gradient_compression == "powersgd":
        text = "does not work with train.gradient_compression: powersgd, whose result depends on"
        yield key, f"{text} which rank has a block; remove one of them"


def _activations(train: Train, cluster: Cluster) -> Iterator[Problem]:
    """Yield why activations cannot be kept on the host."""
    key = ("train", "offload_activations")
    if cluster.device == "cpu":
        yield (
            key,
            "has no effect without GPUs, whose memory it saves; remove it, or set "
            "cluster.gpus_per_node",
        )
    if train.recompute not in (AUTO, "full"):
        text = f"works only with train.{RENAMED['recompute']}: full, but that is {train.recompute}"
        yield key, f"{text}; set that, or remove one of them"
    if not _works("offload_activations", train):
        text = f"does not work with train.strategy: {train.strategy}"
        yield key, f"{text}; {_use_one_with('offload_activations')}"


def wanting_a_strategy(train: Train) -> Iterator[Problem]:
    """Yield a problem for each key that few strategies have: `auto` does not choose among them."""
    for key in ("unit_layers", "deepspeed_json", "local_sgd_steps"):
        if train.strategy == AUTO and getattr(train, key) != getattr(_DEFAULT, key):
            text = "does not work with train.strategy: auto; name the strategy"
            yield ("train", key), f"{text} ({_any_of(with_key(key))}) or remove it"


def _replicas(train: Train, cluster: Cluster) -> Iterator[Problem]:
    """Yield a problem unless hybrid sharding gets several replicas of several ranks each."""
    ranks = cluster.ranks
    shard_ranks = train.shard_ranks or ranks // cluster.nodes
    if ranks % shard_ranks == 0 and 1 < shard_ranks < ranks:
        return
    key = ("train", "strategy") if train.shard_ranks is None else ("train", "shard_ranks")
    sizes = f"a replica of {shard_ranks} and {units.count(ranks, 'ranks')} in all"
    text = f"hsdp needs several replicas of several ranks each, but this is {sizes}"
    legal = tuple(size for size in range(2, ranks // 2 + 1) if ranks % size == 0)
    if legal:
        remedy = f"train.shard_ranks may be {_any_of(legal)}"
    elif train.strategy == AUTO:
        remedy = "remove it"
    else:
        remedy = "set train.strategy: fsdp or ddp"
    yield key, f"{text}; {remedy}"


def _exchange(train: Train) -> Iterator[Problem]:
    """Yield the problems of what ranks exchange with `ddp`, and when."""
    is_compressed = train.gradient_compression != "none"
    k = train.local_sgd_steps
    is_power_sgd = train.gradient_compression == "powersgd"
    power_sgd = "gradient_compression: powersgd"
    if is_power_sgd and train.strategy not in with_key(power_sgd):
        text = f"powersgd does not work with train.strategy: {train.strategy}"
        may_be = _use_one_with(power_sgd)
        yield ("train", "gradient_compression"), f"{text}; {may_be}, or this key bf16"
    if k > 1 and not _works("local_sgd_steps", train):
        text = f"does not work with train.strategy: {train.strategy}"
        yield ("train", "local_sgd_steps"), f"{text}; {_use_one_with('local_sgd_steps')}"
    if train.precision == "fp16":
        text = "does not work with train.precision: fp16; that may be bf16 or fp32"
        if is_compressed:
            yield ("train", "gradient_compression"), text
        if k > 1:
            yield ("train", "local_sgd_steps"), text
    if train.powersgd_rank != _DEFAULT.powersgd_rank and not is_power_sgd:
        yield (
            ("train", "powersgd_rank"),
            "has no effect, because train.gradient_compression is not 'powersgd'; remove it",
        )
    if is_compressed and k > 1:
        text = f"has no effect with train.local_sgd_steps: {k}, because ranks exchange no gradients"
        yield ("train", "gradient_compression"), f"{text}; remove one of them"
    # Other saves wait for the next averaging, which for the save of an epoch may be in the one
    # after it.
    saves = train.save_every_steps if isinstance(train.save_every_steps, int) else 0
    intervals = (
        (("train", "save_every_steps"), saves, ""),
        (("train", "guards", "rollback_every_steps"), train.guards.rollback_every_steps, ""),
        (("train", "until_step"), train.until_step or 0, ", so stopping there changes the result"),
    )
    for place, steps, effect in intervals:
        if steps % k:
            text = f"{steps} is not a multiple of train.local_sgd_steps ({k}){effect}"
            yield place, f"{text}; try {math.ceil(steps / k) * k}"


def _precision(train: Train, cluster: Cluster) -> Iterator[Problem]:
    is_zero = train.uses_deepspeed
    if train.precision == "fp16" and is_zero and cluster.device == "cpu":
        text = f"DeepSpeed has no fp16 on CPUs, and train.strategy is {train.strategy}"
        yield ("train", "precision"), f"{text}; it may be bf16 or fp32"
    if train.precision == "fp8" and (is_zero or train.method != "full" or cluster.device == "cpu"):
        text = "fp8 works only for full fine-tuning on GPUs, without DeepSpeed"
        yield ("train", "precision"), f"{text}; it may be bf16"


def _optimizer(train: Train) -> Iterator[Problem]:
    """Yield what the optimizer does not work with."""
    is_used = {
        DEEPSPEED: train.uses_deepspeed,
        OFFLOAD: train.offload != "none",
        ADAPTERS: train.method == "lora",
        LOCAL_SGD: train.local_sgd_steps > 1,
    }
    for refused, why in OPTIMIZERS[train.optimizer].refuses.items():
        if is_used.get(refused, False):
            text = f"{train.optimizer} does not work with {refused}: {why}"
            yield ("train", "optimizer"), f"{text}; it may be {DEFAULT}"


def warmup_problem(train: Train, steps: int) -> str | None:
    """Return what is wrong with a warm-up as long as the run's `steps`; None if it is shorter."""
    if (train.warmup_steps or 0) < steps:
        return None
    text = (
        f"{train.warmup_steps} of the {units.count(steps, 'steps')} of the run, so the learning "
        "rate never falls"
    )
    return f"{text}; {max(1, steps // 10)} would be a tenth of them"


def _schedule(train: Train) -> Iterator[Problem]:
    if train.max_steps is not None and train.epochs != _DEFAULT.epochs:
        yield ("train", "max_steps"), "cannot be combined with train.epochs; remove one of them"
    if train.max_steps is not None and (problem := warmup_problem(train, train.max_steps)):
        yield ("train", "warmup_steps"), problem
    if train.warmup_steps is not None and train.warmup_fraction != _DEFAULT.warmup_fraction:
        yield (
            ("train", "warmup_steps"),
            "cannot be combined with train.warmup_fraction; remove one of them",
        )
    if train.lr_schedule != "wsd":
        if train.decay_fraction != _DEFAULT.decay_fraction:
            yield (
                ("train", "decay_fraction"),
                "has no effect, because train.lr_schedule is not 'wsd'; remove it",
            )
        return
    warmup = train.warmup_fraction if train.warmup_steps is None else 0.0
    if warmup + train.decay_fraction > 1.0:
        text = f"together with train.warmup_fraction ({warmup}) it is more than all steps"
        yield ("train", "decay_fraction"), f"{text}; lower one of them"


def _validation(train: Train) -> Iterator[Problem]:
    text = "needs validations; set train.validate_every_steps"
    if train.validate_every_steps is None and train.early_stop_validations:
        yield ("train", "early_stop_validations"), text
    if train.validate_every_steps is None and train.keep_best:
        yield ("train", "keep_best"), text
