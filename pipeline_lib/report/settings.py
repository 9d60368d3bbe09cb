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
    block = units.count(facts.train_index.block_tokens, _("tokens"))
    ranks = units.count(training.world_size, _("ranks"))
    parameters = units.compact(training.parameters, _("parameters"))
    return [
        (_("Model"), f"{model}, {parameters}"),
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
        (_("Numbers"), _numbers(train)),
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
    name = _("QLoRA (base in 4 bits)") if train.lora.base == "nf4" else "LoRA"
    text = _("{name}, rank {rank}, alpha {alpha}")
    return text.format(name=name, rank=train.lora.rank, alpha=train.lora.alpha)


def _data(sources: Sequence[Source]) -> str:
    said = [f"{source.name} ({units.count(source.rows, _('rows'))})" for source in sources]
    if len(said) > _MOST_NAMES:
        others = _("{number} more").format(number=len(said) - _MOST_NAMES)
        said = [*said[:_MOST_NAMES], others]
    return ", ".join(said)


def _rate(train: Train) -> str:
    warmup = units.percent(train.warmup_fraction)
    if train.warmup_steps is not None:
        warmup = units.count(train.warmup_steps, _("steps"))
    return _("{rate}, {schedule}, warm-up {warmup}").format(
        rate=units.small(train.lr), schedule=train.lr_schedule, warmup=warmup
    )


def _numbers(train: Train) -> str:
    text = _("{precision}, {optimizer}, seed {seed}")
    return text.format(precision=train.precision, optimizer=train.optimizer, seed=train.seed)


def _batch(train: Train) -> str:
    if train.global_batch_samples is not None:
        return units.count(train.global_batch_samples, _("samples"))
    return units.count(train.global_batch_tokens, _("tokens"))
