"""The evaluation's conclusion in words, for its record, the report and the terminal."""

from pipeline_lib.core.language import _
from pipeline_lib.records.evaluation import MIN_DOCUMENTS, Evaluation, EvaluationVerdict
from pipeline_lib.report.statistics import too_few


def conclusion(evaluation: Evaluation) -> str:
    """Return the conclusion in the language that is spoken; the record has it in English."""
    verdict = evaluation.verdict
    scores = evaluation.scores
    if scores is None or not isinstance(verdict, EvaluationVerdict):
        return not_judged()
    text = conclusion_of(
        tuned=scores.tuned.loss,
        base=scores.base.loss,
        unigram=scores.unigram.loss,
        has_enough=scores.tuned.documents >= MIN_DOCUMENTS,
        improved=verdict.improved,
        beats_unigram=verdict.beats_unigram,
        uses_prompt=verdict.uses_prompt,
    )
    if scores.last is None:
        return text
    is_told_apart = verdict.is_mean_told_apart
    return f"{text} {mean_against_last(scores.tuned.loss, scores.last.loss, is_told_apart)}"


def not_judged() -> str:
    """Return what is said where nothing was held out."""
    return _(
        "Nothing was held out, so nothing tells whether the tuned model is better than the base model."
    )


def conclusion_of(
    *,
    tuned: float,
    base: float,
    unigram: float,
    has_enough: bool,
    improved: bool,
    beats_unigram: bool,
    uses_prompt: bool,
) -> str:
    """Return a sentence on the tuned model, by the three models' losses in nats per token.

    `improved`, `beats_unigram` and `uses_prompt` are the verdict's, `has_enough` says whether the
    documents suffice.
    """
    known = _("Not proven better than the base model on held-out answers")
    if tuned >= base:
        known = _("Not better than the base model on held-out answers")
    if improved:
        known = _("Better than the base model on held-out answers")
    frequency = _("not better than guessing by frequency")
    if beats_unigram:
        frequency = _("better than guessing by frequency")
    question = _("nothing shows that it uses the question")
    if uses_prompt:
        question = _("it uses the question")
    sentence = _(
        "{known} ({tuned} against {base} nats a token{few}), {frequency} ({unigram}), and {question}."
    )
    return sentence.format(
        known=known,
        tuned=f"{tuned:.3f}",
        base=f"{base:.3f}",
        few="" if has_enough else f"; {too_few()}",
        frequency=frequency,
        unigram=f"{unigram:.3f}",
        question=question,
    )


def mean_against_last(mean: float, last: float, is_told_apart: bool) -> str:
    """Return which of the mean of checkpoints and the last one has the lower loss, by how much."""
    sentence = _(
        "The mean of the checkpoints is better than the last one: {low} against {high}{chance}."
    )
    if last < mean:
        sentence = _(
            "The last checkpoint is better than the mean of several: {low} against {high}{chance}."
        )
    return sentence.format(
        low=f"{min(mean, last):.4f}",
        high=f"{max(mean, last):.4f}",
        chance="" if is_told_apart else _(", which may be chance"),
    )
