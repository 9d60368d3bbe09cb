"""Values that are legal, and beyond what anybody trains with: each is a warning, with what is usual."""

from collections.abc import Iterator, Sequence

from pipeline_lib.config.schema import Config
from pipeline_lib.config.strict_yaml import Keys, dotted
from pipeline_lib.config.sweep import collapsed


def warnings_of(configs: Sequence[Config]) -> list[str]:
    """A line for each such value, which begins with its key; of a sweep each once, with the experiments it is of."""
    return collapsed([(config.experiment, list(_warnings(config))) for config in configs])


def _warnings(config: Config) -> Iterator[str]:
    for keys, value, is_unusual, usual in (*_of_data(config), *_of_training(config)):
        if is_unusual:
            yield f"{dotted(keys)}: {value:g} is beyond what anybody trains with; {usual}"


_Look = tuple[Keys, float, bool, str]


def _of_data(config: Config) -> Iterator[_Look]:
    for index, source in enumerate(config.data.train):
        weight = source.weight
        text = "each sample is used that often in an epoch, and 0.1 to 10 is usual"
        yield ("data", "train", index, "weight"), weight, weight > 100 or weight < 1e-4, text
    held_out = config.data.validation_fraction
    yield ("data", "validation_fraction"), held_out, held_out > 0.5, "0.01 to 0.1 is usual"


def _of_training(config: Config) -> Iterator[_Look]:
    train, lora = config.train, config.train.lora
    usual_lr = (
        "1e-4 to 4e-4 is usual for adapters" if train.method == "lora" else "5e-6 to 5e-5 is usual for all weights"
    )
    yield ("train", "lr"), train.lr, train.lr > 0.05 or train.lr < 1e-9, usual_lr
    yield ("train", "epochs"), train.epochs, train.epochs > 100, "1 to 5 are usual"
    batch = train.global_batch_tokens
    yield ("train", "global_batch_tokens"), batch, batch > 100_000_000, "16,384 to 4,194,304 is usual"
    yield ("train", "warmup_fraction"), train.warmup_fraction, train.warmup_fraction > 0.5, "0.01 to 0.1 is usual"
    yield ("train", "weight_decay"), train.weight_decay, train.weight_decay > 1, "0 to 0.1 is usual"
    yield ("train", "router_aux_loss"), train.router_aux_loss, train.router_aux_loss > 1, "0.001 is usual"
    yield ("train", "lora", "rank"), lora.rank, lora.rank > 1024, "8 to 256 is usual"
    text = f"alpha / rank is {lora.alpha / lora.rank:g}, and 1 to 4 is usual"
    yield ("train", "lora", "alpha"), lora.alpha, lora.alpha > 100 * lora.rank, text
    yield ("train", "lora", "dropout"), lora.dropout, lora.dropout > 0.5, "0 to 0.1 is usual"
    yield ("train", "lora", "lr_ratio"), lora.lr_ratio, lora.lr_ratio > 100, "16 is its authors' choice"
