"""Why the plan of packed data is another than the one from before it was packed."""

from dataclasses import replace

from pipeline_lib.core.errors import PipelineError
from pipeline_lib.core.units import brief, count
from pipeline_lib.plan.answer import Answer, Question, answer
from pipeline_lib.plan.words import describe
from pipeline_lib.records.plan import Workload

_NOTABLE = 0.05  # of the seconds of a step


def before_packing(question: Question, found: Answer, before: Workload) -> str:
    """Return how the plan was before there were blocks, what it went by, and what is known now.

    `before` is what was expected of the data. The text is empty if there are no blocks, or if the
    plan was much the same.
    """
    if question.blocks is None or found.choice is None or found.case is None:
        return ""
    asked = replace(question, blocks=None, workload=before)
    try:
        earlier = answer(asked, is_explained=False).choice
    except PipelineError:  # it was refused, and the packed data is not
        return ""
    if earlier is None:
        return ""
    then = earlier.chosen
    now = found.choice.chosen
    is_as_long = abs(then.step_s.value / now.step_s.value - 1) <= _NOTABLE
    if is_as_long and describe(then) == describe(now):
        return ""
    source = "expected by the first rows" if before.is_estimated else "assumed"
    steps = f", {count(found.case.steps, 'steps')}" if found.case.steps else ""
    return (
        f"{describe(then)}, {brief(then.step_s.value)} a step, for {_in_words(before)}, as "
        f"{source}; the packed data has {_in_words(question.workload)}{steps}"
    )


def _in_words(workload: Workload) -> str:
    return (
        f"documents of {workload.document_tokens:,.0f} tokens, "
        f"{workload.supervised_fraction:.0%} supervised in blocks {workload.real_fraction:.0%} full"
    )
