"""The merge stage: base and trained weights become one Hugging Face folder, proven equal to the trained model.

The folder follows the base's: file by file, tensor by tensor, so that no file has to fit in memory. It is then read
again from disk, layer by layer, and has to reproduce the logits that training left behind; otherwise the stage fails
and nothing is published.
"""

import shutil
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline_lib.base.errors import TrainingError
from pipeline_lib.base.fsio import read_json, require_space, write_json, write_text
from pipeline_lib.base.manifest import describe_file
from pipeline_lib.base.run_folder import SUMMARY_NAME
from pipeline_lib.base.spec import Ref
from pipeline_lib.base.stage import Job
from pipeline_lib.base.store import Store
from pipeline_lib.config.content import GENERATION_NAME, TOKENIZER_FILES
from pipeline_lib.config.schema import Merge, Train, read_settings
from pipeline_lib.data.chat.template import TOKENIZER_CONFIG_NAME, has_template, read_tokenizer_config
from pipeline_lib.data.tokenize.rendering import end_of_turn
from pipeline_lib.data.tokenize.worker import Limits
from pipeline_lib.model.generation import read_object
from pipeline_lib.model.weights import INDEX_NAME, SINGLE_NAME
from pipeline_lib.publish.adapter import export_adapter, finite
from pipeline_lib.publish.ancestry import LINEAGE_NAME, Record, parse_manifest, record_of
from pipeline_lib.publish.card import model_card
from pipeline_lib.publish.facts import read_one
from pipeline_lib.publish.fold import Fold, plan_fold
from pipeline_lib.publish.generation import generation_config_of
from pipeline_lib.publish.replay import replayed_logits
from pipeline_lib.publish.results import Ledger, Training
from pipeline_lib.publish.weight_files import KINDS, Entry, write_tensors
from pipeline_lib.train.model import DTYPES
from pipeline_lib.train.model_files import find_tensors
from pipeline_lib.train.probe import load_probe

LEDGER_NAME = "ledger.json"
CODE_KEYS = frozenset({"auto_map", "custom_pipelines"})  # where the base keeps code of its own, which is not taken
# Relative difference of logits that rounding explains: fp32 sums in another order; weights and products in bf16.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def run(job: Job) -> dict[str, Any]:
    """Merge, export, read again and compare. Raises TrainingError if the exported model is another one."""
    base, trained = job.inputs["model"].folder(), job.inputs["train"].folder()
    generation = generation_config_of(job.inputs)
    merge = read_settings(Merge, job.spec.settings)
    train = read_settings(Train, job.inputs["train"].manifest.spec["settings"])
    fold = plan_fold(base, trained, train)
    export(fold, base, generation, job.out, None if merge.dtype == "auto" else DTYPES[merge.dtype])
    if train.method == "lora":
        export_adapter(fold.trained, train, job.inputs["model"].manifest.spec["settings"], job.out)
    if code := sorted(CODE_KEYS & (read_object(base / "config.json").keys() | read_tokenizer_config(base).keys())):
        job.say(
            f"merge: the base model's own code ({', '.join(code)}) is no part of the merged one; transformers' is used"
        )
    parity = compare_with_trained(job.out, trained, train)
    write_json(job.out / "parity.json", parity)
    tell_origin(job, train, parity)
    job.say(
        f"merge: exported logits differ by {parity['relative_difference']:.1e} of their size from the trained model's "
        f"(tolerance {parity['tolerance']:.0e}, {parity['compared_logits']:,} compared)"
    )
    return parity


def export(fold: Fold, base: Path, generation: Mapping[str, Any], out: Path, dtype: torch.dtype | None) -> None:
    """Write the Hugging Face folder as the base is laid out, in `dtype`, or each tensor in its own in the base.

    `generation` is the base's generation_config.json. Raises TrainingError naming the first weight that is not finite,
    or that is not on disk as it should be.
    """
    files: dict[str, list[Entry]] = defaultdict(list)
    for name, recipe in sorted(fold.recipes.items(), key=lambda item: (item[1].trained or "", item[0])):
        stored = recipe.stored
        files[stored.path.name].append(Entry(name, stored.shape, dtype or KINDS[stored.kind]))
    sizes_bytes = sum(entry.size_bytes for entries in files.values() for entry in entries)
    require_space(out, sizes_bytes, "the merged model")
    for file_name, entries in sorted(files.items()):
        write_tensors(out / file_name, entries, lambda entry: finite(fold.value(entry.name, entry.dtype), entry))
    if SINGLE_NAME not in files:
        weight_map = {entry.name: file_name for file_name, entries in files.items() for entry in entries}
        index = {"metadata": {"total_size": sizes_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(out / INDEX_NAME, index)
    _refuse_other_content(out, {entry.name: entry for entries in files.values() for entry in entries})
    write_json(out / "config.json", _config(base, dtype))
    for name in TOKENIZER_FILES:
        if name != GENERATION_NAME and (base / name).exists():
            shutil.copyfile(base / name, out / name)
    _forget_code(out)
    if stopping := stop_at_end_of_turn(generation, out):
        write_json(out / GENERATION_NAME, stopping)


def _refuse_other_content(out: Path, entries: Mapping[str, Entry]) -> None:
    """Raise TrainingError unless the files on disk hold exactly `entries`."""
    found = {name: (stored.shape, KINDS.get(stored.kind)) for name, stored in find_tensors(out).items()}
    wanted = {name: (entry.shape, entry.dtype) for name, entry in entries.items()}
    if found != wanted:
        wrong = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
        raise TrainingError(f"{out}: was not written as planned: {', '.join(wrong[:5])}; run snakemake again")


def _config(base: Path, dtype: torch.dtype | None) -> dict[str, Any]:
    """The base's config.json, with the precision of the exported weights and without code, which is not exported."""
    config = {key: value for key, value in read_object(base / "config.json").items() if key not in CODE_KEYS}
    config["use_cache"] = True
    if dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
    return config


def _forget_code(folder: Path) -> None:
    """Take the names of code out of tokenizer_config.json; one without stays byte for byte."""
    config = read_tokenizer_config(folder)
    if config.keys() & CODE_KEYS:
        write_json(
            folder / TOKENIZER_CONFIG_NAME, {key: value for key, value in config.items() if key not in CODE_KEYS}
        )


def stored_dtype(folder: Path) -> torch.dtype:
    """The precision that a model folder's config.json names; bf16, Qwen3's own, where it names none."""
    config = read_json(folder / "config.json")
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    return {"float32": torch.float32, "float16": torch.float16}.get(name, torch.bfloat16)


def stop_at_end_of_turn(config: Mapping[str, Any], folder: Path, limits: Limits | None = None) -> dict[str, Any]:
    """The generation `config`, stopping at the token that the model in `folder` was trained to end its turns with.

    Base models name another one, and would talk on. Without a chat template there are no turns. Raises DataError if the
    template ends none, or outgrows its `limits`.
    """
    if not has_template(folder):
        return dict(config)
    end = end_of_turn(folder, limits)
    named = config.get("eos_token_id")
    stops = named if isinstance(named, list) else [] if named is None else [named]
    return dict(config) if end in stops else {**config, "eos_token_id": [end, *stops]}


def compare_with_trained(exported: Path, trained: Path, train: Train) -> dict[str, Any]:
    """Compare the logits of the exported folder, a layer at a time, with the probe of the trained model."""
    block, expected = load_probe(trained)
    dtype = stored_dtype(exported)
    found = replayed_logits(exported, dtype, block)
    is_exact = dtype == torch.float32 and train.precision == "fp32"
    return judge(found, expected, TOLERANCES[torch.float32 if is_exact else torch.bfloat16])


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


def tell_origin(job: Job, train: Train, parity: Mapping[str, Any]) -> None:
    """Write lineage.json and README.md: what the model folder was made from, and how it was checked."""
    record = record_of(job.inputs, job.store, job.say)
    write_json(job.out / LINEAGE_NAME, record.model_dump(mode="json"))
    training = read_one(Training, job.inputs["train"].file(SUMMARY_NAME))
    model_type = str(read_json(job.out / "config.json")["model_type"])
    ledger = ledger_of(record, job.store)
    write_text(job.out / "README.md", model_card(job.spec.ref, model_type, train, training, parity, record, ledger))


def ledger_of(record: Record, store: Store) -> Ledger:
    """The token ledger of the data, if it is still in the store as it was sealed."""
    if "tokenize" not in record.links:
        return Ledger()
    manifest = parse_manifest(record.links["tokenize"].manifest, "tokenize")
    path = store.sealed(Ref(manifest.stage, manifest.digest)) / LEDGER_NAME
    is_whole = path.is_file() and describe_file(path) == manifest.files.get(LEDGER_NAME)
    return read_one(Ledger, path) if is_whole else Ledger()
