"""The merge stage: base and trained weights become one Hugging Face folder, proven equal to the trained model.

The folder is loaded again from disk, as a user would, and has to reproduce the logits that training left
behind; otherwise the stage fails and nothing is published.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline_lib.base.errors import TrainingError
from pipeline_lib.base.fsio import read_json, write_json, write_text
from pipeline_lib.base.stage import Job
from pipeline_lib.config.content import TOKENIZER_FILES
from pipeline_lib.config.schema import Merge, Train, read_settings
from pipeline_lib.data.tokenize.rendering import end_of_turn
from pipeline_lib.data.tokenize.worker import Limits
from pipeline_lib.train.checkpoint import load_tensors
from pipeline_lib.train.model import DTYPES, add_adapters, load_base
from pipeline_lib.train.optimizer import trainable
from pipeline_lib.train.probe import load_probe, probe_logits
from pipeline_lib.train.rank import SUMMARY_NAME
from pipeline_lib.train.state import WEIGHTS

# Relative difference of logits that rounding explains: fp32 sums in another order; weights and products in bf16.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
MAX_SHARD_SIZE = "5GB"


def run(job: Job) -> dict[str, Any]:
    """Merge, export, load again and compare. Raises TrainingError if the exported model is another one."""
    base, trained = job.inputs["model"].path, job.inputs["train"].path
    merge = read_settings(Merge, job.spec.settings)
    train = read_settings(Train, job.inputs["train"].manifest.spec["settings"])
    model = merged_model(base, trained, train)
    dtype = stored_dtype(base) if merge.dtype == "auto" else DTYPES[merge.dtype]
    refuse_unfit_weights(model)
    model.to(dtype)  # type: ignore[arg-type]  # transformers wraps `to` and loses its signature
    export(model, base, job.out)
    del model
    parity = compare_with_trained(job.out, trained, dtype, train)
    write_json(job.out / "parity.json", parity)
    write_text(job.out / "README.md", model_card(job, train, parity))
    job.say(
        f"merge: exported logits differ by {parity['relative_difference']:.1e} of their size from the trained model's "
        f"(tolerance {parity['tolerance']:.0e}, {parity['compared_logits']:,} compared)"
    )
    return parity


def merged_model(base: Path, trained: Path, train: Train) -> PreTrainedModel:
    """The trained model in fp32 without adapters: trained weights loaded, or adapters folded into the base."""
    plain = load_base(base, torch.float32)
    model = add_adapters(plain, train.lora, train.seed) if train.method == "lora" else plain
    load_tensors(trained / WEIGHTS, {name: parameter.detach() for name, parameter in trainable(model).items()})
    if isinstance(model, PeftModel):
        plain = model.merge_and_unload()
    return plain


def stored_dtype(folder: Path) -> torch.dtype:
    """The precision that a model folder's config.json names; bf16, Qwen3's own, where it names none."""
    config = read_json(folder / "config.json")
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    return torch.float32 if name == "float32" else torch.bfloat16


def refuse_unfit_weights(model: nn.Module) -> None:
    """Raise TrainingError naming the first weight that is not finite."""
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise TrainingError(f"merged weight {name} is not finite; this model is not exported")


def export(model: PreTrainedModel, base: Path, out: Path) -> None:
    """Write the Hugging Face folder: weights by transformers, tokenizer files as the base has them."""
    model.config.use_cache = True
    model.save_pretrained(out, max_shard_size=MAX_SHARD_SIZE)
    for name in TOKENIZER_FILES:
        if (base / name).exists():
            shutil.copyfile(base / name, out / name)
    stop_at_end_of_turn(out)


def stop_at_end_of_turn(folder: Path, limits: Limits | None = None) -> None:
    """Let generation stop at the token that the model was trained to end its turns with.

    Base models name another one in generation_config.json, and would talk on. Raises DataError if there is none, or
    if the template outgrows its `limits`.
    """
    end = end_of_turn(folder, limits)
    path = folder / "generation_config.json"
    config = read_json(path) if path.exists() else {}
    named = config.get("eos_token_id")
    stops = named if isinstance(named, list) else [] if named is None else [named]
    if end not in stops:
        write_json(path, {**config, "eos_token_id": [end, *stops]})


def compare_with_trained(exported: Path, trained: Path, dtype: torch.dtype, train: Train) -> dict[str, Any]:
    """Load the exported folder as a user does and compare its logits with the probe of the trained model."""
    block, expected = load_probe(trained)
    model = load_base(exported, dtype)
    found = probe_logits(model, block, torch.device("cpu"))
    is_exact = dtype == torch.float32 and train.precision == "fp32"
    tolerance = TOLERANCES[torch.float32 if is_exact else torch.bfloat16]
    return judge(found, expected, tolerance)


def judge(found: Tensor, expected: Tensor, tolerance: float) -> dict[str, Any]:
    """Figures of the comparison; raises TrainingError beyond `tolerance` (of the norm of the logits)."""
    if found.shape != expected.shape:
        raise TrainingError(f"exported logits have shape {tuple(found.shape)}, trained ones {tuple(expected.shape)}")
    difference = found - expected
    relative = float(difference.norm() / expected.norm())
    agreement = float((found.argmax(-1) == expected.argmax(-1)).float().mean())
    if not relative <= tolerance:  # also when it is not a number
        raise TrainingError(
            f"the exported model is not the trained one: logits differ by {relative:.2e} of their size, "
            f"tolerance {tolerance:.0e}; nothing was published"
        )
    return {
        "compared_logits": expected.numel(),
        "max_abs_difference": float(difference.abs().max()),
        "relative_difference": relative,
        "tolerance": tolerance,
        "top1_agreement": agreement,
    }


def model_card(job: Job, train: Train, parity: Mapping[str, Any]) -> str:
    """The README.md of the model folder: what it was made from and how it was checked."""
    summary = read_json(job.inputs["train"].path / SUMMARY_NAME)
    lines = [
        "# Fine-tuned Qwen3",
        "",
        f"{train.method} fine-tuning, {summary['steps']:,} steps, {summary['supervised_tokens']:,} supervised tokens, "
        f"{train.precision}, peak learning rate {train.lr:g}.",
        "",
        f"The exported weights reproduce the trained model's logits within {parity['relative_difference']:.1e} "
        f"(tolerance {parity['tolerance']:.0e}).",
        "",
        "| made from | digest |",
        "|---|---|",
        *(f"| {name} ({ref.stage}) | `{ref.digest}` |" for name, ref in job.spec.inputs.items()),
        f"| this folder (merge) | `{job.spec.digest}` |",
        "",
    ]
    return "\n".join(lines)
