"""Warnings about values that are legal but unusual, and about keys without effect.

Unusual values come with the usual ones.
"""

from collections.abc import Iterator

from pipeline_lib.config.findings import Finding
from pipeline_lib.config.schema import Config, Evaluate, Tracking
from pipeline_lib.config.train import AUTO


def warnings_of(config: Config) -> Iterator[Finding]:
    """Yield the warnings about unusual values, and those about keys without effect."""
    yield from _unusual(config)
    yield from _idle(config)
    yield from _left_open(config)


def _idle(config: Config) -> Iterator[Finding]:
    """Yield keys that do or save nothing on these machines, or without trackers and prompts."""
    cluster = config.cluster
    train = config.train
    tracking = config.tracking
    evaluate = config.evaluate
    without_gpus = "has no effect without GPUs (cluster.gpus_per_node: 0)"
    on_one_rank = "saves nothing on one rank, which exchanges nothing"
    on_cpus = cluster.device == "cpu"
    is_alone = cluster.ranks == 1
    table: list[tuple[str, bool, str]] = [
        ("cluster.gpu", on_cpus and cluster.gpu is not None, without_gpus),
        ("cluster.gpu_hour_price", on_cpus and cluster.gpu_hour_price is not None, without_gpus),
        ("train.attention", on_cpus and train.attention != AUTO, without_gpus),
        (
            "train.deterministic",
            on_cpus and train.deterministic,
            f"{without_gpus}: sums on CPUs are always the same",
        ),
        (
            "cluster.cpu_ranks",
            not on_cpus and "cpu_ranks" in cluster.model_fields_set,
            "has no effect with GPUs",
        ),
        (
            "train.gradient_compression",
            is_alone and train.gradient_compression != "none",
            on_one_rank,
        ),
        ("train.local_sgd_steps", is_alone and train.local_sgd_steps > 1, on_one_rank),
        (
            "tracking.project",
            not tracking.to and tracking != Tracking(),
            "has no effect without tracking.to",
        ),
        (
            "evaluate.max_new_tokens",
            not evaluate.prompts
            and not evaluate.generations
            and evaluate.max_new_tokens != Evaluate().max_new_tokens,
            "has no effect without evaluate.prompts and evaluate.generations",
        ),
        (
            "tokenize.near_duplicates",
            config.tokenize.near_duplicates is not None and config.tokenize.duplicates == "keep",
            "only counts similar conversations; tokenize.duplicates: drop would leave them out",
        ),
        (
            "evaluate.generations",
            not config.data.held_out_sources
            and evaluate.generations not in (0, Evaluate().generations),
            "has no effect, because nothing is held out to take prompts from "
            "(data.validation_fraction: 0)",
        ),
    ]
    for key, is_idle, why in table:
        if is_idle:
            yield Finding("warning", key, why)


def _left_open(config: Config) -> Iterator[Finding]:
    """Yield a warning if neither the file nor the plan chooses how GPUs share the work."""
    given = config.train.model_fields_set
    is_open = "strategy" not in given and "micro_batch_blocks" not in given
    if is_open and config.cluster.device == "cuda" and not config.cluster.has_known_gpus:
        yield Finding(
            "warning",
            "cluster.gpu",
            "missing, so the plan cannot choose the strategy: it is ddp, one block at a time, which "
            "may be many times slower; name the GPU as `h200` or `a100 80gb`",
        )


def _unusual(config: Config) -> Iterator[Finding]:
    train = config.train
    lora = config.train.lora
    weights = "each sample is used this often per epoch; 0.1 to 10 is usual"
    all_weights = "5e-6 to 5e-5 is usual for all weights"
    rates = "1e-4 to 4e-4 is usual for adapters" if train.method == "lora" else all_weights
    scale = f"alpha / rank is {lora.alpha / lora.rank:g}, and 1 to 4 is usual"
    # Key, value, the least and the most that is no cause for a warning, and what is usual.
    table: list[tuple[str, float, float, float, str]] = [
        *(
            (f"data.train[{index}].weight", one.weight, 1e-4, 100, weights)
            for index, one in enumerate(config.data.train)
        ),
        (
            "data.validation_fraction",
            config.data.validation_fraction,
            0,
            0.5,
            "0.01 to 0.1 is usual",
        ),
        ("train.lr", train.lr, 1e-9, 0.05, rates),
        ("train.epochs", train.epochs, 0, 100, "1 to 5 are usual"),
        ("train.adam_eps", train.adam_eps, 1e-12, 1e-4, "1e-8 is usual"),
        (
            "train.global_batch_tokens",
            train.global_batch_tokens,
            0,
            100_000_000,
            "16,384 to 4,194,304 is usual",
        ),
        ("train.warmup_fraction", train.warmup_fraction, 0, 0.5, "0.01 to 0.1 is usual"),
        ("train.weight_decay", train.weight_decay, 0, 1, "0 to 0.1 is usual"),
        ("train.router_aux_loss", train.router_aux_loss, 0, 1, "0.001 is usual"),
        ("train.lora.rank", lora.rank, 0, 1024, "8 to 256 is usual"),
        ("train.lora.alpha", lora.alpha, 0, 100 * lora.rank, scale),
        ("train.lora.dropout", lora.dropout, 0, 0.5, "0 to 0.1 is usual"),
        ("train.lora.lr_ratio", lora.lr_ratio, 0, 100, "16 is its authors' choice"),
    ]
    for key, value, least, most, usual in table:
        if not least <= value <= most:
            numbers = {"value": value, "least": least, "most": most}
            yield Finding("warning", key, f"{value:g} is unusual; {usual}", numbers)
