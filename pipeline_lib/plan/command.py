"""The command `plan`: a config's plan, what-if questions, and what later stages would refuse."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline_lib.config.findings import Finding
from pipeline_lib.config.load import FLAG, load_config, load_configs
from pipeline_lib.config.schema import Config
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.files import json_text
from pipeline_lib.core.language import _
from pipeline_lib.core.stage import Say
from pipeline_lib.core.store import Store
from pipeline_lib.core.text import cut
from pipeline_lib.plan.amounts import expected_workload
from pipeline_lib.plan.answer import Answer, answer, question_of
from pipeline_lib.plan.formulas import explain
from pipeline_lib.plan.known import learn_architecture
from pipeline_lib.plan.packed import before_packing
from pipeline_lib.plan.rent import read_offers, rows_of, table_of
from pipeline_lib.plan.show import render, render_what_if
from pipeline_lib.plan.steps import estimated_steps
from pipeline_lib.records.record import to_json

# A network is needed only for a hub model that is in no table, and only once: for its config.json.

DOCUMENTS = "workload.document_tokens"
FindingsOf = Callable[[Sequence[Config]], Iterable[Finding]]


def show_plan(
    path: Path,
    what_if: Sequence[str],
    is_detailed: bool,
    store: Store,
    findings_of: FindingsOf,
    say: Say,
) -> None:
    """Show the plan of the config at `path`; nothing is written.

    With `is_detailed` all figures and formulas follow. For a sweep, this is the plan of the first
    experiment. With `what_if`, texts KEY=VALUE, show it beside the plan with those keys changed;
    beside those of the config, DOCUMENTS is the mean length of a document, weighted by tokens.
    Raise ConfigError after the plan if the run is impossible, and DataError if the model's sizes
    are not known here.
    """
    configs = load_configs(path)
    config = configs[0]
    learn_architecture(config, store, say)
    found = _answer(path, config, store)
    if what_if:
        told = [text for text in what_if if text.partition("=")[0] == DOCUMENTS]
        now = found
        config = load_config(path, [text for text in what_if if text not in told])
        learn_architecture(config, store, say)
        found = _answer(path, config, store, _document_tokens(told[-1], config) if told else None)
        say(render_what_if(now.content, found.content, what_if, is_detailed))
    else:
        say(render(found.content, is_detailed))
    if not is_detailed:
        say("\n" + _("all figures and formulas: --details"))
    if len(configs) > 1:
        text = _(
            "this is the first of {number} experiments; `snakemake plan` makes the plans of all"
        )
        say("\n" + text.format(number=len(configs)))
    on_page = {found.refusal}
    if not what_if:
        on_page.update(found.content.words.warnings)
    for finding in findings_of([config] if what_if else configs):
        if finding.text not in on_page:
            say(f"\n{finding.line}")
    if is_detailed and found.case is not None and found.choice is not None:
        say(f"\n{explain(found.choice.chosen, found.case)}")
    if found.refusal is not None:
        raise ConfigError(str(path), [found.refusal])


def show_offers(path: Path, texts: Sequence[str], store: Store, say: Say) -> None:
    """Show what the config at `path` takes and costs on each of several machines.

    `texts` are as in `read_offers`. Of a sweep it is the first experiment. Raise ConfigError for
    what is no offer, and as `show_plan`.
    """
    offers = read_offers(texts)
    config = load_configs(path)[0]
    learn_architecture(config, store, say)
    rows = rows_of(config, offers, lambda there: _answer(path, there, store, is_explained=False))
    title = _("{experiment} on other machines, the cheapest first")
    say(f"{title.format(experiment=config.experiment)}\n\n{table_of(rows)}")


def show_plan_as_json(path: Path, store: Store, say: Say) -> None:
    """Show what plan.json would hold for the config at `path`, and nothing else.

    Raise as `show_plan`.
    """
    config = load_configs(path)[0]
    learn_architecture(config, store, lambda _: None)
    found = _answer(path, config, store)
    say(json_text(to_json(found.content)).rstrip("\n"))
    if found.refusal is not None:
        raise ConfigError(str(path), [found.refusal])


def _document_tokens(what_if: str, config: Config) -> float:
    """Return the value of DOCUMENTS=VALUE.

    Raise ConfigError if it is not a length that blocks have room for.
    """
    text = what_if.partition("=")[2]
    most = config.shard.block_tokens
    try:
        tokens = float(text)
    except ValueError:
        tokens = math.nan
    if not 1 <= tokens <= most:
        problem = (
            f"{cut(text, 20)!r} is not a number from 1 to {most:,}, which is shard.block_tokens"
        )
        raise ConfigError(f"{FLAG} {what_if}", [problem])
    return tokens


def _answer(
    path: Path,
    config: Config,
    store: Store,
    document_tokens: float | None = None,
    is_explained: bool = True,
) -> Answer:
    try:
        question = question_of(config, store)
        if document_tokens is not None:
            question = replace(question, workload=question.workload.with_documents(document_tokens))
        if question.blocks is None:
            estimated = estimated_steps(
                config, question.batch(config.train), question.geometry.vocab
            )
            question = replace(question, estimated=estimated)
        if problems := list(question.geometry.problems(config.train, config.shard.block_tokens)):
            raise ConfigError(str(path), problems)
        found = answer(question, is_explained)
    except ConfigError as error:
        raise ConfigError(str(path), error.problems) from error
    if not is_explained or document_tokens is not None:
        return found
    expected = expected_workload(config, question.geometry.vocab)
    words = replace(found.content.words, before_packing=before_packing(question, found, expected))
    return replace(found, content=replace(found.content, words=words))
