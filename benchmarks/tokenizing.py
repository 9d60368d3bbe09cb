"""The tokenize stage against `datasets.map(batched=True)` with `apply_chat_template`.

Masks are equal. Both start from a .jsonl file and end with tokens and masks on disk; wall time, processes' start
included. The stage also checks every row, books it and hashes what it writes. Same tokenizer, same
template, same samples: the number of supervised tokens is compared.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import numpy as np
from transformers import AutoTokenizer

from benchmarks.conversations import rows
from benchmarks.measure import seconds, show, spread
from pipeline_lib.config.compile import open_experiment
from pipeline_lib.core.stage import run_stage
from pipeline_lib.core.store import Store
from pipeline_lib.data import download, tokenize
from pipeline_lib.data.documents import Samples
from pipeline_lib.data.thinking import thinking_of

SHARED = Path(__file__).resolve().parents[2] / "shared"
MAX_TOKENS = 8192
REPEATS = 3
Messages = list[dict[str, str]]


def conversations() -> Iterator[tuple[str, list[Messages]]]:
    """The inputs, by name: short and long rows in two languages, and turns that think."""
    yield "English, one turn", [_messages(row) for row in rows("plain", 40_000)]
    yield "English, long answer", [_messages(row) for row in rows("essay", 10_000)]
    yield "English, three turns, thinking", [_messages(row) for row in rows("thinking", 10_000)]
    huanhuan = SHARED / "data" / "huanhuan.json"
    if huanhuan.is_file():
        turns = json.loads(huanhuan.read_text(encoding="utf-8"))
        yield "Chinese, one turn (huanhuan)", [_messages(row) for row in turns * 8]
        prose = "".join(row["output"] for row in turns)
        starts = range(0, len(prose) - 450, 450)
        answers = [
            [_turn("user", f"{start}?"), _turn("assistant", prose[start : start + 450])]
            for start in starts
        ]
        yield "Chinese, long answer", answers * 40


def run() -> None:
    """Print a line for each input and number of processes."""
    datasets.disable_progress_bars()
    table = []
    for name, inputs in conversations():
        with tempfile.TemporaryDirectory() as folder:
            measured = _Inputs(Path(folder), inputs)
            for cores in (1, 2):
                table.append([name, *measured.compare(cores)])
    columns = [
        "rows",
        "tokens a row",
        "cores",
        "stage",
        "Mtokens/s",
        "datasets.map",
        "times faster",
    ]
    show("tokenize: the whole stage against datasets.map", columns, table)


class _Inputs:
    """One input as a file, and both ways to tokenize it."""

    def __init__(self, folder: Path, inputs: Sequence[Messages]) -> None:
        self.folder = folder
        self.rows = len(inputs)
        self.path = folder / "rows.jsonl"
        self.path.write_text(
            "".join(json.dumps({"messages": messages}) + "\n" for messages in inputs)
        )
        self._numbers = count()
        self.model = self._model()

    def compare(self, cores: int) -> list[str]:
        """The row of the table for this number of processes."""
        with _only(cores):
            ours, theirs = [], []
            for _ in range(REPEATS):  # in turns, so that a slower minute of the machine is shared
                ours += self._stage()
                theirs += seconds(partial(self._map, cores), repeats=1)
        mapped_supervised = sum(
            sum(label != -100 for label in labels) for labels in self.mapped["labels"]
        )
        if self.supervised != mapped_supervised:
            raise SystemExit(
                f"{self.supervised} and {mapped_supervised} supervised tokens: not the same samples"
            )
        speed = self.tokens / statistics.median(ours) / 1e6
        ratio = statistics.median(theirs) / statistics.median(ours)
        length = f"{self.tokens / self.rows:.0f}"
        return [length, str(cores), spread(ours), f"{speed:.2f}", spread(theirs), f"{ratio:.1f}"]

    def _model(self) -> Path:
        tokenizer = SHARED / "qwen3-tokenizer"
        given = {"tokenizer": str(tokenizer)} if tokenizer.is_dir() else {}
        store, specs = self._compile(
            {"source": "tiny", "hidden_size": 16, "layers": 1, "heads": 2, **given}
        )
        run_stage(download.run, specs["model"], store, _silent)
        return store.sealed(specs["model"].ref)

    def _compile(self, model: dict[str, Any]) -> tuple[Store, Any]:
        config = self.folder / "config.yaml"
        data = {"train": [{"source": "file", "path": str(self.path)}]}
        sizes = {"tokenize": {"max_tokens": MAX_TOKENS}, "shard": {"block_tokens": MAX_TOKENS}}
        batch = {"train": {"global_batch_tokens": 2 * MAX_TOKENS}}
        config.write_text(
            json.dumps({"experiment": "bench", "model": model, "data": data, **sizes, **batch})
        )
        store = Store(self.folder / f"store-{next(self._numbers)}")
        return store, open_experiment(config, store).specs

    def _stage(self) -> list[float]:
        store, specs = self._compile({"source": "local", "path": str(self.model)})
        for part in ("model", "data.0"):
            run_stage(download.run, specs[part], store, _silent)
        taken = seconds(
            lambda: run_stage(tokenize.run, specs["tokenize"], store, _silent), repeats=1
        )
        samples = Samples(store.sealed(specs["tokenize"].ref))
        self.tokens, self.supervised = len(samples.tokens), int(np.sum(samples.supervised))
        return taken

    def _map(self, processes: int) -> None:
        cache = self.folder / f"cache-{next(self._numbers)}"
        loaded = datasets.load_dataset(
            "json", data_files=str(self.path), split="train", cache_dir=str(cache)
        )
        mapped = loaded.map(
            _mapper(AutoTokenizer.from_pretrained(self.model)),
            batched=True,
            num_proc=processes if processes > 1 else None,
            remove_columns=["messages"],
            # else it hashes the pickled tokenizer first, which takes long
            new_fingerprint=f"bench{time.time_ns()}",
        )
        self.mapped = mapped


def _mapper(tokenizer: Any) -> Callable[[Any], Any]:
    """What a careful user writes: a sample for each answer, its prompt masked."""
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def encode(batch: Any) -> dict[str, list[list[int]]]:
        texts = []
        for messages in batch["messages"]:
            messages = [
                {key: text for key, text in message.items() if text is not None}
                for message in messages
            ]
            for number in [
                number for number, message in enumerate(messages) if message["role"] == "assistant"
            ]:
                thinking = bool(thinking_of(messages[number]))
                render = partial(
                    tokenizer.apply_chat_template, tokenize=False, enable_thinking=thinking
                )
                texts += [
                    render(messages[:number], add_generation_prompt=True),
                    render(messages[: number + 1]),
                ]
        ids = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        samples: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
        for prompt, whole in zip(ids[::2], ids[1::2], strict=True):
            stop = len(whole) - whole[::-1].index(end)
            samples["input_ids"].append(whole[:stop])
            samples["labels"].append([-100] * len(prompt) + whole[len(prompt) : stop])
        return samples

    return encode


def _messages(row: dict[str, Any]) -> Messages:
    if "messages" in row:
        messages: Messages = row["messages"]
        return messages
    asked = "\n".join(text for text in (row["instruction"], row["input"]) if text)
    return [_turn("user", asked), _turn("assistant", row["output"])]


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@contextmanager
def _only(cores: int) -> Iterator[None]:
    """Let this process and its children use that many cores."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:cores])
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def _silent(text: str) -> None:
    """Say nothing."""
