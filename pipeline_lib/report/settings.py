"""What an experiment was made with, in the words that people use: model, data, method, rates."""

from collections.abc import Sequence

from pipeline_lib.config.spec_settings import ADAPTER_PART
from pipeline_lib.config.train import Train, read_train
from pipeline_lib.core import units
from pipeline_lib.core.language import _
from pipeline_lib.lineage.record import origin_of, settings_in
from pipeline_lib.records.data import Source
from pipeline_lib.report.facts import ReportFacts

_MOST_NAMES = 3  # of sources; the section on data has all


def setting_rows(facts: ReportFacts) -> list[tuple[str, str]]:
    """Return the name and the value of each setting, for the top of the page."""
    train = read_train(settings_in(facts.manifests["train"]))
    training = facts.training
    model = origin_of(facts.manifests["model"])
    if ADAPTER_PART in facts.manifests:
        continued = origin_of(facts.manifests[ADAPTER_PART])
        model = _("{model}, with the adapters of {origin}").format(model=model, origin=continued)
    steps = units.count(training.steps, _("steps"))
    epochs = units.compact(training.epochs, _("epochs"))
    block = units.count(facts.train_index.block_tokens, "tokens")
    ranks = units.count(training.world_size, _("ranks"))
    return [
        (_("Model"), f"{model}, {units.compact(training.parameters, 'parameters')}"),
        (_("Data"), _data(facts.ledger.sources)),
        (_("Method"), method_words(train)),
        (_("Learning rate"), _rate(train)),
        (
            _("Batch"),
            _("{batch} a step, packed into blocks of {block}").format(
                batch=_batch(train), block=block
            ),
        ),
        (_("Length"), f"{steps}, {epochs}"),
        (_("Numbers"), f"{train.precision}, {train.optimizer}, seed {train.seed}"),
        (_("Machine"), _("{strategy} on {ranks}").format(strategy=training.strategy, ranks=ranks)),
        (_("Date"), date_of(facts)),
    ]


def date_of(facts: ReportFacts) -> str:
    """Return when the training began: `2026-11-30 10:36 UTC`; `n/a` if that is not recorded."""
    started_at = facts.manifests["train"].started_at
    return f"{started_at[:16].replace('T', ' ')} UTC" if started_at else units.NONE


def method_words(train: Train) -> str:
    """Return how the weights are trained: `all weights`, `LoRA, rank 16, alpha 32`."""
    if train.method == "full":
        return _("all weights")
    name = "QLoRA (base in 4 bits)" if train.lora.base == "nf4" else "LoRA"
    return f"{name}, rank {train.lora.rank}, alpha {train.lora.alpha}"


def _data(sources: Sequence[Source]) -> str:
    said = [f"{source.name} ({units.count(source.rows, 'rows')})" for source in sources]
    if len(said) > _MOST_NAMES:
        others = units.count(len(said) - _MOST_NAMES, "more")
        said = [*said[:_MOST_NAMES], others]
    return ", ".join(said)


def _rate(train: Train) -> str:
    warmup = units.percent(train.warmup_fraction)
    if train.warmup_steps is not None:
        warmup = units.count(train.warmup_steps, "steps")
    return f"{units.small(train.lr)}, {train.lr_schedule}, warm-up {warmup}"


def _batch(train: Train) -> str:
    if train.global_batch_samples is not None:
        return units.count(train.global_batch_samples, "samples")
    return units.count(train.global_batch_tokens, "tokens")
