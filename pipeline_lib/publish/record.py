"""What a finished experiment leaves outside the store: the git-tracked record, links to look at, a table.

results/current/ is no output of Snakemake and is rewritten whenever it is asked for: DVC compares those files.
"""

from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.table import Table
from ruamel.yaml import YAML

from pipeline_lib.base.errors import IntegrityError
from pipeline_lib.base.fsio import write_text
from pipeline_lib.base.manifest import MANIFEST_NAME, read_manifest, verify
from pipeline_lib.base.stage import Sealed
from pipeline_lib.base.store import Store
from pipeline_lib.config.compile import Experiment
from pipeline_lib.config.dag import link_results
from pipeline_lib.config.schema import Config
from pipeline_lib.publish import units
from pipeline_lib.publish.facts import Facts, read_facts
from pipeline_lib.publish.report import CURVES_NAME, SUMMARY_NAME

CURRENT = Path("results/current")


def publish(experiment: Experiment, store: Store, target: Path = CURRENT) -> list[Path]:
    """Rewrite config.yaml, metrics.json and curves.csv in `target`, each atomically; returns their paths.

    Raises IntegrityError if the experiment's report is not sealed, or damaged.
    """
    report = _sealed(experiment, store, "report")
    texts = {
        "config.yaml": config_yaml(experiment.config),
        "metrics.json": (report / SUMMARY_NAME).read_text(encoding="utf-8"),
        "curves.csv": (report / CURVES_NAME).read_text(encoding="utf-8"),
    }
    for name, text in texts.items():
        write_text(target / name, text)
    return [target / name for name in texts]


def print_summary(experiment: Experiment, store: Store) -> None:
    """Print what came out and how long it took, and where to look. Raises IntegrityError if it is not finished."""
    _sealed(experiment, store, "report")
    console = Console(highlight=False)
    console.print(summary_table(experiment, store))
    for name, link in link_results(experiment, store).items():
        console.print(f"{name:6}  {link}", markup=False, soft_wrap=True)


def summary_table(experiment: Experiment, store: Store) -> Table:
    """Base against tuned, tokens, and seconds of each stage."""
    facts = _facts(experiment, store)
    scores, training = facts.evaluation.eval, facts.training
    table = Table(title=f"Experiment {experiment.name}", title_justify="left", show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    for name, score in (("base", scores.base), ("tuned", scores.tuned)):
        loss, perplexity = units.real(score.loss, "nats/token"), units.rounded(score.perplexity)
        table.add_row(f"held-out loss, {name}", f"{loss}, perplexity {perplexity}")
    table.add_row("trained", units.count(training.tokens, "tokens"))
    table.add_row("of them supervised", units.count(training.supervised_tokens, "tokens"))
    table.add_row("speed", units.count(facts.tokens_per_s, "tokens/s"))
    if compared := facts.compared:
        inside = sum(one.within for one in compared)
        table.add_row("as predicted", f"{inside} of {len(compared)} figures within their bands")
    table.add_section()
    took_s = {part: read_manifest(store.sealed(spec.ref)).duration_s for part, spec in experiment.specs.items()}
    for part, duration_s in took_s.items():
        table.add_row(part, units.seconds(duration_s))
    table.add_row("all stages", units.seconds(sum(took_s.values())))
    return table


def config_yaml(config: Config) -> str:
    """The resolved config, defaults included, as YAML that the loader reads back to the same config."""
    text = StringIO()
    writer = YAML()
    writer.width = 100
    writer.dump(config.model_dump(mode="json", exclude_none=True), text)
    head = f"# Experiment {config.experiment} as resolved, defaults included; every publish rewrites this file.\n"
    return head + text.getvalue()


def _sealed(experiment: Experiment, store: Store, part: str) -> Path:
    path = store.sealed(experiment.ref(part))
    if not (path / MANIFEST_NAME).exists():
        raise IntegrityError(
            f"{path}: experiment {experiment.name!r} has no finished {part}; run `snakemake` with the same config first"
        )
    verify(path)
    return path


def _facts(experiment: Experiment, store: Store) -> Facts:
    """What the report knows, read again without hashing the model."""
    parts = [part for part in experiment.specs if part not in ("plan", "report")]
    paths = {part: store.sealed(experiment.ref(part)) for part in parts}
    return read_facts(experiment.name, {part: Sealed(path, read_manifest(path)) for part, path in paths.items()})
