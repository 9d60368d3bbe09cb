"""What each key of a config changes: the stages that compute anew, and whether the result differs.

docs/config.md shows this table, and tests/config/test_compile.py compares it with the digests of
compiled configs.
"""

from dataclasses import dataclass
from enum import StrEnum

from pipeline_lib.config.stages import onwards
from pipeline_lib.config.train import PLACEMENT_KEYS, in_file
from pipeline_lib.core.language import N_, _


class Result(StrEnum):
    """Whether another value of a key gives another result."""

    YES = N_("yes")
    ROUNDING = N_("up to rounding")  # sums in another order, or kernels that round otherwise
    NO = N_("no")
    CONTENT = N_("by content")  # a location: the files there decide, not their path


# Stages whose digests change together, because each reads the result of the one before it.
EVALUATE = onwards("evaluate")
MERGE = onwards("merge")
BENCHMARK = ("overlap", *onwards("benchmark"))
REPORT = onwards("report")
PLAN = onwards("plan")
TRAIN = PLAN + onwards("train")
SHARD = onwards("shard")
TOKENIZE = onwards("tokenize")
DOWNLOAD = onwards("download")
NOTHING = ()


@dataclass(frozen=True)
class Effect:
    """The stages whose digests another value changes, in order, and whether the result differs."""

    stages: tuple[str, ...]
    result: Result

    @property
    def anew(self) -> str:
        """The stages in words."""
        if not self.stages:
            return _("nothing")
        if len(self.stages) <= 2:
            return ", ".join(f"`{stage}`" for stage in self.stages)
        first = "train" if self.stages == TRAIN else self.stages[0]
        return _("from `{stage}` on").format(stage=first)


def _of(section: str, keys: str, stages: tuple[str, ...], result: Result) -> dict[str, Effect]:
    return {f"{section}{key}": Effect(stages, result) for key in keys.split()}


_SAME_BITS = {
    "save_every_steps",
    "save_async",
    "keep_last",
    "timeout_s",
    "start_timeout_s",
    "sample_every_steps",
    "profile_every_steps",
}
# By key, without the source of a model or of data unless these differ.
EFFECTS: dict[str, Effect] = {
    "experiment": Effect(("plan", "report"), Result.NO),
    **_of("model.", "tokenizer path", NOTHING, Result.CONTENT),
    **_of(
        "model.",
        "source vocab_tokens hidden_size layers heads seed name revision",
        DOWNLOAD,
        Result.YES,
    ),
    **_of("model(experiment).", "name config", NOTHING, Result.CONTENT),
    "model.adapter": Effect(TRAIN, Result.YES),
    "model.rope": Effect(TRAIN, Result.YES),
    **_of("data.train.", "source name revision subset files", DOWNLOAD, Result.YES),
    **_of("data.train(pydoc).", "max_rows", DOWNLOAD, Result.YES),
    **_of("data.train(file).", "split", NOTHING, Result.CONTENT),
    **_of("data.train(huggingface).", "split", DOWNLOAD, Result.YES),
    **_of("data.train.", "path", NOTHING, Result.CONTENT),
    **_of("data.train.", "format columns roles max_rows", TOKENIZE, Result.YES),
    "data.train.weight": Effect(SHARD, Result.YES),
    "data.validation": Effect(DOWNLOAD, Result.YES),
    "data.validation_fraction": Effect(SHARD, Result.YES),
    **_of("tokenize.", "max_tokens over_long thinking prompt_thinking", TOKENIZE, Result.YES),
    **_of("tokenize.", "chat_template_kwargs train_on system tools", TOKENIZE, Result.YES),
    **_of("tokenize.", "duplicates near_duplicates", TOKENIZE, Result.YES),
    **_of("tokenize.", "max_dropped_fraction max_quarantined_fraction", NOTHING, Result.NO),
    **_of("shard.", "block_tokens seed", SHARD, Result.YES),
    "shard.shards": Effect(NOTHING, Result.NO),
    **_of("cluster.", "nodes gpus_per_node gpu cpu_ranks cpus_per_rank", PLAN, Result.ROUNDING),
    **_of("cluster.", "internode_gbit_s intranode_gbyte_s memory_gb", PLAN, Result.ROUNDING),
    **_of("cluster.", "gpu_hour_price launcher runtime_minutes max_requeues", PLAN, Result.NO),
    "cluster.measured": Effect(NOTHING, Result.CONTENT),
    **{in_file(key): Effect(PLAN, Result.ROUNDING) for key in sorted(PLACEMENT_KEYS - _SAME_BITS)},
    **{in_file(key): Effect(PLAN, Result.NO) for key in sorted(_SAME_BITS)},
    **_of(
        "train.", "method precision optimizer gradient_compression powersgd_rank", TRAIN, Result.YES
    ),
    **_of("train.", "local_sgd_steps global_batch_tokens global_batch_samples", TRAIN, Result.YES),
    **_of(
        "train.",
        "epochs max_steps until_step lr lr_schedule warmup_fraction warmup_steps",
        TRAIN,
        Result.YES,
    ),
    **_of(
        "train.",
        "decay_fraction min_lr_fraction weight_decay beta1 beta2 adam_eps",
        TRAIN,
        Result.YES,
    ),
    **_of("train.", "max_grad_norm freeze router_aux_loss validate_every_steps", TRAIN, Result.YES),
    **_of("train.", "early_stop_validations keep_best seed guards lora", TRAIN, Result.YES),
    "train.replica": Effect(TRAIN, Result.NO),
    **_of("tracking.", "to project", PLAN, Result.NO),
    **_of("merge.", "dtype base average", MERGE, Result.YES),
    "export": Effect(("export",), Result.YES),
    **_of("evaluate.", "prompts generations max_new_tokens", EVALUATE, Result.YES),
    "evaluate.benchmarks": Effect(BENCHMARK, Result.YES),
    **_of("ship.", "gain keep loops unended", REPORT, Result.NO),
    **_of("push.", "huggingface modelscope", ("push",), Result.NO),
    "report.language": Effect(("report",), Result.NO),
}
