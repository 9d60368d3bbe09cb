"""Publishing: the git-tracked record, links to results, and the summary table.

results/current/ is no Snakemake output. Every publish rewrites it, since DVC compares those files,
and removes the model that was added for the previously recorded experiment.
"""

import csv
import shlex
import sys
from collections.abc import Callable, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from rich.cells import set_cell_size
from rich.console import Console
from rich.table import Table
from ruamel.yaml import YAML

from pipeline_lib.config.compile import Experiment
from pipeline_lib.config.dag import Dag, link_results
from pipeline_lib.config.schema import Config
from pipeline_lib.config.train import CHOSEN_KEYS, RENAMED, fixed_keys
from pipeline_lib.core import units
from pipeline_lib.core.errors import IntegrityError
from pipeline_lib.core.files import json_text, read_json, remove_dir, write_text
from pipeline_lib.core.language import N_, _
from pipeline_lib.core.stage import open_sealed
from pipeline_lib.core.store import MANIFEST_NAME, Store, read_manifest, verify
from pipeline_lib.report.facts import read_facts
from pipeline_lib.report.outcomes import outcomes
from pipeline_lib.report.plan_check import tally
from pipeline_lib.report.ship import difference_words
from pipeline_lib.report.stage import CURVES_NAME, SUMMARY_NAME, metrics_of, settings_of_run
from pipeline_lib.report.wall_time import Span

CURRENT = Path("results/current")
RECORDING = Path("results/.recording")  # lock of the process that writes to CURRENT
MODEL_NAME = "model"
NOTABLE = 0.02  # of the time of all stages
# Every path that `publish` and `record` write or remove and that git may track; git ignores the
# model itself.
FOR_GIT = (
    CURRENT / "config.yaml",
    CURRENT / "metrics.json",
    CURRENT / "curves.csv",
    CURRENT / "held_out.csv",
    CURRENT / f"{MODEL_NAME}.dvc",
    CURRENT / ".gitignore",
    Path("dvc.lock"),  # DVC updates it with every record
)


def best_of(dag: Dag) -> Experiment:
    """Return the experiment; of a sweep, the finished one with the lowest held-out loss.

    Of a chain it is the last one. Raise IntegrityError if no experiment of the sweep is finished.
    """
    if len(dag.last) == 1:
        return dag.last[0]
    last = {one.name: one for one in dag.last}
    best = next(one for one in outcomes(dag) if one.name in last)
    if not best.is_done:
        raise IntegrityError(
            _("no experiment of the sweep is finished; run `snakemake` with the same config first")
        )
    return last[best.name]


def publish(experiment: Experiment, store: Store, target: Path = CURRENT) -> dict[Path, str]:
    """Rewrite config.yaml, metrics.json and two files of curves in `target`; return their texts.

    Each is written atomically. held_out.csv has the steps of curves.csv after which it was
    measured: DVC draws an empty value as 0.

    The caller holds the lock RECORDING. Raise IntegrityError if the experiment's report is not
    sealed, or is damaged.
    """
    report = sealed_part(experiment, store, "report")
    head = f"# Experiment {experiment.name}"
    ran = settings_of_run(experiment.config)
    curves = (report / CURVES_NAME).read_text(encoding="utf-8")
    texts = {
        "config.yaml": f"{head} as resolved, defaults included; every publish rewrites this file.\n"
        + yaml_of(resolved(experiment.config)),
        "metrics.json": json_text({**metrics_of(read_json(report / SUMMARY_NAME)), "ran": ran}),
        "curves.csv": curves,
        "held_out.csv": held_out_csv(curves),
    }
    drop_model(target)
    published = {target / name: text for name, text in texts.items()}
    for path, text in published.items():
        write_text(path, text)
    return published


def held_out_csv(curves: str) -> str:
    """Return the steps and the held-out losses of the CSV `curves`, where there are any."""
    lines = ["step,held_out_loss"]
    for row in csv.DictReader(StringIO(curves)):
        if loss := row.get("held_out_loss"):
            lines.append(f"{row['step']},{loss}")
    return "".join(f"{line}\n" for line in lines)


def resolved(config: Config) -> dict[str, Any]:
    """Return the config with defaults, without keys left to `strategy: auto`, as in a file.

    It compiles to the same stages.
    """
    return in_one_file(config, _resolved)


def in_one_file(config: Config, keys_of: Callable[[Config], dict[str, Any]]) -> dict[str, Any]:
    """Return the keys of a file with `config` and the experiments that it goes on from.

    `keys_of` returns those of one of them, by the names of the schema.
    """
    if config.parent is None:
        return as_in_a_file(keys_of(config))
    experiments = {}
    for one in config.chain:
        keys = as_in_a_file(keys_of(one))
        del keys["experiment"]
        if one.parent is not None:
            kept = keys["model"].keys() - {"parent", "config"}
            model = {key: keys["model"][key] for key in sorted(kept)}
            keys["model"] = {**model, "name": one.parent.experiment}
        experiments[one.experiment] = keys
    return {"experiments": experiments}


def _resolved(config: Config) -> dict[str, Any]:
    left = set[str]()
    if config.train.strategy == "auto":
        left = set(CHOSEN_KEYS) - set(fixed_keys(config.train))
    idle = {"validation_fraction"} if config.data.validation else set()
    return config.model_dump(mode="json", exclude_none=True, exclude={"train": left, "data": idle})


def as_in_a_file(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config's `keys` by their names in a file: both names of one would be refused."""
    if "train" not in keys:
        return dict(keys)
    return {**keys, "train": {RENAMED.get(key, key): value for key, value in keys["train"].items()}}


def model_pointer(target: Path) -> Path:
    """Return the path of the DVC file that tracks the model folder in `target`."""
    return target / f"{MODEL_NAME}.dvc"


def drop_model(target: Path) -> None:
    """Remove the copy of a sealed model from `target`, but keep a folder that the user made."""
    model = target / MODEL_NAME
    if model_pointer(target).exists() or (model / MANIFEST_NAME).exists():
        model_pointer(target).unlink(missing_ok=True)
        remove_dir(model)


def print_summary(experiment: Experiment, store: Store, *, is_linked: bool = True) -> None:
    """Print results, stage durations, links, and the command that starts a chat with the model.

    Unless `is_linked`, as for another store's experiment, no link is made and the paths are those
    in `store`. Raise IntegrityError if the experiment is not finished.
    """
    sealed_part(experiment, store, "report")
    console = Console(highlight=False)
    console.print(summary_table(experiment, store))
    report = experiment.ref("report")
    merged = experiment.ref("merge")
    paths = {
        N_("report"): store.sealed(report) / "report.html",
        N_("model"): store.sealed(merged),
    }
    if is_linked:
        paths = link_results(experiment, store)
    elif not store.is_sealed(merged):
        del paths["model"]
    lines = [(_(name), str(path)) for name, path in paths.items()]
    if model := paths.get("model"):
        lines.append((_("chat"), f"{_program()} chat {shlex.quote(str(model))}"))
    for name, text in lines:
        console.print(f"{set_cell_size(name, 6)}  {text}", markup=False, soft_wrap=True)


def _program() -> str:
    """Return how to call the program here: `make demo` leaves `.venv`, its own, not activated."""
    path = Path(sys.executable).with_name("qwen3")
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else "qwen3"


def summary_table(experiment: Experiment, store: Store) -> Table:
    """Return a table of base and tuned losses, tokens, speed, and seconds of each stage."""
    parts = [part for part in experiment.specs if part not in ("plan", "report")]
    inputs = {part: open_sealed(experiment.ref(part), store) for part in parts}
    facts = read_facts(experiment.name, inputs, experiment.config.ship)
    scores = facts.scores
    training = facts.training
    table = Table(
        title=_("Experiment {name}").format(name=experiment.name),
        title_justify="left",
        show_header=False,
        pad_edge=False,
    )
    table.add_column()
    table.add_column(justify="right")
    if scores is None:
        table.add_row(_("held-out loss"), _("nothing was held out"))
    models = {}
    if scores is not None:
        models = {
            _("held-out loss, base"): scores.base,
            _("held-out loss, tuned"): scores.tuned,
        }
        if scores.last is not None:
            models[_("held-out loss, last checkpoint alone")] = scores.last
    for name, score in models.items():
        text = _("{loss}, perplexity {perplexity}").format(
            loss=units.real(score.loss, "nats/token"), perplexity=units.rounded(score.perplexity)
        )
        table.add_row(name, text)
    for name, found in facts.benchmarks.compared.items() if facts.benchmarks else ():
        fractions = f"{units.percent(found.base.fraction)}, {units.percent(found.tuned.fraction)}"
        table.add_row(_("{name}, right, base and tuned").format(name=name), fractions)
        table.add_row(_("difference"), difference_words(found))
        if name in facts.clean:
            without = facts.clean[name]
            touched = found.tuned.questions - without.tuned.questions
            label = _("without {count} trained on").format(count=touched)
            table.add_row(label, difference_words(without))
    table.add_row(_("trained"), units.count(training.tokens, "tokens"))
    table.add_row(_("of them supervised"), units.count(training.supervised_tokens, "tokens"))
    table.add_row(_("speed"), units.count(facts.tokens_per_s, "tokens/s"))
    if compared := facts.compared:
        table.add_row(_("as predicted"), tally(compared))
    table.add_section()
    all_s = 0.0
    for part, spec in experiment.specs.items():
        manifest = read_manifest(store.sealed(spec.ref))
        spans = [span for span in facts.spans if span.part == part]
        if not spans:
            spans = [Span(part, "", manifest.duration_s)]
        took_s = sum(span.duration_s for span in spans)
        all_s += took_s
        table.add_row(part, units.seconds(took_s))
        for span in spans:
            if span.name and span.duration_s > NOTABLE * facts.total_s:
                table.add_row(f"  {span.name}", units.seconds(span.duration_s))
    table.add_row(_("all stages"), units.seconds(all_s))
    return table


def sealed_part(experiment: Experiment, store: Store, part: str) -> Path:
    """Return the verified directory of a part.

    Raise IntegrityError if it is not finished, or is damaged.
    """
    path = store.sealed(experiment.ref(part))
    if not store.is_sealed(experiment.ref(part)):
        raise IntegrityError(
            _(
                "{path}: experiment {name!r} has no finished {part}; run `snakemake` with the same "
                "config first"
            ).format(path=path, name=experiment.name, part=part)
        )
    verify(path, store.verified)
    return path


def yaml_of(values: Any) -> str:
    """Return `values` as YAML, in their order."""
    text = StringIO()
    writer = YAML()
    writer.width = 100
    writer.dump(values, text)
    return text.getvalue()
