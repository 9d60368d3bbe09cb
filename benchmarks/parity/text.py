"""Real text in packed blocks, by the pipeline's data stages, in a file for GPU machines."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from pipeline_lib.config.compile import open_experiment
from pipeline_lib.core.files import write_json
from pipeline_lib.core.stage import run_stage
from pipeline_lib.core.store import Store
from pipeline_lib.data import download, shard, tokenize
from pipeline_lib.data.blocks import Block, BlockReader

STAGES = {"download": download.run, "tokenize": tokenize.run, "shard": shard.run}
LONGEST = 1024  # tokens of a document; longer ones are cut there
DOCUMENTATION_ROWS = 30_000  # more than there are
VALIDATION_FRACTION = 0.01


def make_blocks(shared: Path, block_tokens: int, out: Path) -> dict[str, int]:
    """Write Chinese dialogues of `shared`, and Python's documentation, as blocks to `out`.

    Their ids are those of Qwen3's tokenizer, which is in `shared` too. Returns what the blocks
    hold.
    """
    model = {
        "source": "tiny",
        "hidden_size": 16,
        "layers": 1,
        "heads": 2,
        "tokenizer": str(shared / "qwen3-tokenizer"),
    }
    config: dict[str, Any] = {
        "experiment": "parity",
        "model": model,
        "data": {
            "train": [
                {"source": "file", "path": str(shared / "data" / "huanhuan.json")},
                {"source": "pydoc", "max_rows": DOCUMENTATION_ROWS},
            ],
            "validation_fraction": VALIDATION_FRACTION,
        },
        "tokenize": {
            "max_tokens": min(LONGEST, block_tokens),
            "over_long": "truncate",
            "max_dropped_fraction": 1.0,
        },
        "shard": {"block_tokens": block_tokens},
        "cluster": {"cpu_ranks": 1},
        "train": {"global_batch_tokens": block_tokens},
    }
    with tempfile.TemporaryDirectory() as folder:
        path, store = Path(folder) / "config.yaml", Store(Path(folder) / "store")
        write_json(path, config)  # JSON is YAML
        experiment = open_experiment(path, store)
        specs = [spec for spec in experiment.specs.values() if spec.stage in STAGES]
        store.write_specs(specs)
        for spec in specs:
            run_stage(STAGES[spec.stage], spec, store, lambda text: print(text, flush=True))
        reader = BlockReader(store.sealed(experiment.ref("shard")) / "train")
        save_blocks(out, [reader[number] for number in range(len(reader))])
        index = reader.index
    return {"blocks": index.blocks, "documents": index.documents, "tokens": index.tokens}


def save_blocks(out: Path, blocks: list[Block]) -> None:
    """Write `blocks`, all of one length, to the file `out`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        out,
        tokens=np.stack([block.tokens for block in blocks]),
        supervised=np.stack([block.supervised for block in blocks]),
        documents=np.stack([block.documents for block in blocks]).astype(np.int16),
    )


def read_blocks(path: Path) -> list[Block]:
    """What `save_blocks` wrote."""
    with np.load(path, allow_pickle=False) as arrays:
        tokens, supervised = arrays["tokens"], arrays["supervised"]
        documents = arrays["documents"].astype(np.int32)
    return [Block(*parts) for parts in zip(tokens, supervised, documents, strict=True)]


def steps_of(blocks: list[Block], per_step: int, steps: int) -> list[list[Block]]:
    """Each step's blocks in an order drawn anew for each pass over the text; by a seed."""
    random = np.random.default_rng(0)
    passes = -(-per_step * steps // len(blocks))
    order = np.concatenate([random.permutation(len(blocks)) for _ in range(passes)])
    return [
        [blocks[number] for number in order[step * per_step :][:per_step]] for step in range(steps)
    ]
