"""Whether several nodes train faster than one of them alone, by the plan's own arithmetic."""

from dataclasses import replace

from pipeline_lib.config.checks import cross_check
from pipeline_lib.config.schema import Config
from pipeline_lib.core.errors import PipelineError
from pipeline_lib.core.store import Store
from pipeline_lib.core.units import rounded
from pipeline_lib.plan.answer import Question, answer, question_of
from pipeline_lib.plan.predict import Prediction
from pipeline_lib.plan.words import describe

_WORTH_SAYING = 1.05  # the least speedup worth more than the errors of a prediction


def way_on_one_node(config: Config, question: Question) -> Prediction | None:
    """Return how `question`, that of `config`, would be trained on one node; None if it cannot."""
    one_node = config.model_copy(update={"cluster": config.cluster.model_copy(update={"nodes": 1})})
    return (
        None if cross_check(one_node) else fitting_way(replace(question, cluster=one_node.cluster))
    )


def fitting_way(question: Question) -> Prediction | None:
    """Return the chosen way to train; None if nothing fits, or if the GPUs are not named.

    Raises as `answer`.
    """
    found = answer(question, is_explained=False)
    way = found.choice.chosen if found.choice is not None else None
    return way if found.refusal is None and way is not None and way.fits else None


def compare_with_one_node(config: Config, nodes: int, internode_gbit_s: float, store: Store) -> str:
    """Return a sentence: whether one node would train `config` faster than `nodes` nodes.

    These have that bandwidth.
    """
    changes = {"nodes": nodes, "internode_gbit_s": internode_gbit_s}
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update=changes)})
    unknown = "whether one node alone would be faster cannot be told"
    if problems := cross_check(config):
        keys, text = problems[0]
        return f"{unknown}: on {nodes} nodes, {'.'.join(map(str, keys))}: {text}"
    try:
        question = question_of(config, store)
        if question.machine is None:
            return f"{unknown}: set cluster.gpu, by which the plan knows the speed of the GPUs"
        together = fitting_way(question)
        alone = way_on_one_node(config, question)
    except PipelineError as error:
        return f"{unknown}: {error}"
    if together is None:
        return (
            f"{unknown}: this training does not fit on these {nodes} nodes; run `qwen3 plan CONFIG`"
        )
    if alone is None:
        return f"this training does not fit on one of these nodes, so it needs all {nodes}"
    return _compared(together, alone, config, internode_gbit_s)


def _compared(
    together: Prediction, alone: Prediction, config: Config, internode_gbit_s: float
) -> str:
    cluster = config.cluster
    both, one = (
        way.tokens_per_s_per_rank.value * ranks
        for way, ranks in ((together, cluster.ranks), (alone, cluster.ranks_per_node))
    )
    figures = (
        f"{rounded(one, 'tokens/s')} are predicted on one ({describe(alone)}), and "
        f"{rounded(both, 'tokens/s')} on all"
        f" {cluster.nodes} at {internode_gbit_s:.3g} Gbit/s ({describe(together)})"
    )
    if one > _WORTH_SAYING * both:
        return (
            f"one node alone would be {one / both:.2f} times as fast as all {cluster.nodes}: "
            f"{figures};"
            + (
                " set cluster.nodes: 1, or see `qwen3 plan CONFIG` for what would "
                "make the nodes worth it"
            )
        )
    if both > _WORTH_SAYING * one:
        return (
            f"all {cluster.nodes} nodes are {both / one:.2f} times as fast as one alone: {figures}"
        )
    return f"all {cluster.nodes} nodes are no faster than one alone: {figures}"
