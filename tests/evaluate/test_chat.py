"""The chat as people have it: a real process on its own terminal with Ctrl-C, or a pipe."""

import fcntl
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from select import select
from time import monotonic
from typing import Any
from unicodedata import category

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline_lib.cli.chat import model_of
from pipeline_lib.config.dag import Dag, link_results
from pipeline_lib.core.errors import ConfigError, DataError, IntegrityError, PipelineError
from pipeline_lib.core.files import write_json
from pipeline_lib.core.store import Store
from pipeline_lib.data.encode import load_tokenizer
from pipeline_lib.evaluate.chat import COMMANDS, AnswerLimits, AnswerStreamer, Chat, converse
from pipeline_lib.evaluate.chat_model import place_for
from tests.data.chats import FAMILIES
from tests.lineage.lineages import HUB_MODEL, experiment_from, seal_model

ROOT = Path(__file__).parents[2]
SYSTEM = "You are Zhen Huan."
TRAINED_OFF = {"prompts": {"thinking_off": 9}, "thinking_default": "on"}
QUESTION = "你好吗？"
DEADLINE_S = 300.0


@dataclass(frozen=True)
class World:
    """A store with a tuned model and its base, both real and different."""

    store: Store
    folder: Path
    experiment: Any


@pytest.fixture(scope="module")
def world(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    """Never to be changed."""
    root = tmp_path_factory.mktemp("chat")
    folders = {
        part: talkative(tiny, root / part, seed) for seed, part in enumerate(("model", "merge"))
    }
    store, tokenize = Store(root / "store"), {"system": SYSTEM}
    folder = seal_model(store, prompts=TRAINED_OFF, tokenize=tokenize, folders=folders)
    experiment = experiment_from(HUB_MODEL, {}, tokenize=tokenize)
    Dag((experiment,), store, name=experiment.name).freeze()
    return World(store, folder, experiment)


def talkative(tiny: Path, folder: Path, seed: int) -> Path:
    """A copy of the model whose answers vary from token to token, and do not end by themselves."""
    shutil.copytree(tiny, folder)
    weights, random = folder / "model.safetensors", torch.Generator().manual_seed(seed)
    changed = {
        name: value + 0.5 * torch.randn(value.shape, generator=random).to(value.dtype)
        for name, value in load_file(weights).items()
    }
    save_file(changed, weights, metadata={"format": "pt"})
    write_json(folder / "generation_config.json", {"pad_token_id": 0})
    return folder


def answer_of(model_folder: Path, messages: list[dict[str, str]], max_new_tokens: int) -> str:
    """What transformers alone answers greedily, with the template of the same folder."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model_folder)
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    asked = [{"role": "system", "content": SYSTEM}, *messages]
    text = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, enable_thinking=False, tokenize=False
    )
    tokens = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    output = model.generate(**tokens, do_sample=False, max_new_tokens=max_new_tokens)
    return str(
        tokenizer.decode(output[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True)
    )


def printed(answer: str) -> str:
    """What a terminal gets of an answer."""
    return "".join(char for char in answer if char in "\n\t" or category(char) != "Cc") + "\n"


def asked(question: str, answer: str = "") -> list[dict[str, str]]:
    after = [{"role": "assistant", "content": answer}] if answer else []
    return [{"role": "user", "content": question}, *after]


@dataclass
class Said:
    """What a chat in this process writes and tells."""

    answers: str = ""
    notes: str = ""

    def write(self, text: str) -> None:
        self.answers += text

    def tell(self, text: str) -> None:
        self.notes += f"{text}\n"

    def take(self) -> str:
        """The answers since the last call."""
        answers, self.answers = self.answers, ""
        return answers


def chat_with(folder: Path, store: Store, limits: AnswerLimits | None = None) -> tuple[Chat, Said]:
    said = Said()
    return Chat(
        folder, store, limits or AnswerLimits(max_new_tokens=8), said.write, said.tell
    ), said


# Streaming.


@pytest.mark.parametrize(
    "text",
    ["你好，世界。这是「测试」！", "これはテストです。", "naïve 🙂👩‍👩‍👧 Straße\n\tend", "p" * 50],
)
def test_characters_arrive_whole_and_as_soon_as_they_are_complete(tiny: Path, text: str) -> None:
    tokenizer, pieces = load_tokenizer(tiny), list[str]()
    streamer = AnswerStreamer(tokenizer, pieces.append)
    streamer.put(torch.tensor([[1, 2, 3]]))  # the prompt
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    for number, token in enumerate(tokens, start=1):
        streamer.put(torch.tensor([token]))
        complete = tokenizer.decode(tokens[:number], skip_special_tokens=True).rstrip("\ufffd")
        assert "".join(pieces) == complete  # no space or end is waited for
    streamer.end()
    assert "".join(pieces) == f"{text}\n"
    assert streamer.text == text


def test_bytes_that_are_no_text_end_as_such_and_control_no_terminal(tiny: Path) -> None:
    tokenizer, pieces = load_tokenizer(tiny), list[str]()
    streamer = AnswerStreamer(tokenizer, pieces.append)
    streamer.put(torch.tensor([[1]]))
    half, *_ = tokenizer.encode("你", add_special_tokens=False).ids
    for token in [*tokenizer.encode("a\x1b[2J\rb\n", add_special_tokens=False).ids, half]:
        streamer.put(torch.tensor([token]))
    assert "".join(pieces) == "a[2Jb\n"
    streamer.end()
    assert "".join(pieces) == "a[2Jb\n\ufffd\n"


# The conversation.


@pytest.mark.parametrize("name", FAMILIES)
def test_a_thinking_block_that_the_prompt_opened_stays_whole_in_the_conversation(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    store = Store(tmp_path / "store")
    kwargs = dict[str, Any]({"reasoning_effort": "low"} if name == "qwen3.8" else {})
    merged = Path(shutil.copytree(tiny, tmp_path / "merge"))
    (merged / "chat_template.jinja").write_text(FAMILIES[name])
    prompts = {"prompts": {"thinking_on": 9}, "thinking_default": "on"}
    settings = {"chat_template_kwargs": kwargs}
    chat, _ = chat_with(
        seal_model(store, prompts=prompts, tokenize=settings, folders={"merge": merged}), store
    )
    monkeypatch.setattr(
        Chat, "_answer", lambda self, model: ("They ask.\n</think>\n\nFine.", False)
    )
    chat.ask(QUESTION)
    chat.ask(QUESTION)
    thought = {"role": "assistant", "content": "Fine.", "reasoning_content": "They ask."}
    wanted = AutoTokenizer.from_pretrained(merged).apply_chat_template(
        [*asked(QUESTION), thought, *asked(QUESTION)],
        add_generation_prompt=True,
        enable_thinking=True,
        return_dict=False,
        **kwargs,
    )
    assert chat._asked == wanted
    described = "thinking on, as it was trained" + (", reasoning_effort low" if kwargs else "")
    assert described in chat.describe()


def test_a_conversation_is_asked_as_the_model_was_trained_and_remembers(world: World) -> None:
    chat, said = chat_with(world.folder, world.store)
    assert (
        "thinking off, as it was trained, with the system prompt of the training, greedy"
        in chat.describe()
    )
    chat.ask(QUESTION)
    first = answer_of(world.folder, asked(QUESTION), 8)
    assert said.take() == printed(first)
    chat.ask("And you?")
    second = answer_of(world.folder, [*asked(QUESTION, first), *asked("And you?")], 8)
    assert said.take() == printed(second)
    assert chat.messages == [*asked(QUESTION, first), *asked("And you?", second)]
    chat.restart()
    chat.ask(QUESTION)
    assert said.take() == printed(first)
    assert said.notes == "(cut after 8 tokens: --max-new-tokens sets how many)\n" * 3


def test_the_base_model_answers_the_last_question_after_the_same_conversation(world: World) -> None:
    chat, said = chat_with(world.folder, world.store)
    chat.ask_base()
    assert "ask something first" in said.notes
    chat.ask(QUESTION)
    chat.ask("And you?")
    before = list(chat.messages)
    said.take()
    chat.ask_base()
    answer = answer_of(world.store.sealed(world.experiment.ref("model")), before[:-1], 8)
    assert said.take() == printed(answer)
    assert answer != before[-1]["content"]
    assert chat.messages == before
    assert said.notes.count("loading the base model beside the tuned one, on the CPU in fp32") == 1
    chat.ask_base()
    assert said.notes.count("loading the base model") == 1


def test_a_copy_finds_its_base_in_the_store_that_is_given(world: World, tmp_path: Path) -> None:
    shutil.copytree(world.folder, tmp_path / "copy")
    chat, said = chat_with(tmp_path / "copy", world.store)
    chat.ask(QUESTION)
    tuned = said.take()
    chat.ask_base()
    assert said.take() not in (tuned, "")
    chat, said = chat_with(tmp_path / "copy", Store(tmp_path / "store"))
    chat.ask(QUESTION)
    with pytest.raises(
        IntegrityError, match=r"base model \(modelscope Qwen/Qwen3-8B@\w+\) is not in this store"
    ):
        chat.ask_base()
    (tmp_path / "copy" / "lineage.json").unlink()
    chat, said = chat_with(tmp_path / "copy", world.store)
    chat.ask(QUESTION)
    with pytest.raises(DataError, match=r"no lineage.json that names its base model"):
        chat.ask_base()


def test_a_conversation_longer_than_the_model_reads_is_refused_and_one_up_to_there_is_cut(
    world: World, tmp_path: Path
) -> None:
    shutil.copytree(world.folder, tmp_path, dirs_exist_ok=True)
    config = tmp_path / "config.json"
    config.write_text(
        re.sub(
            r'"max_position_embeddings": \d+', '"max_position_embeddings": 64', config.read_text()
        )
    )
    chat, said = chat_with(tmp_path, world.store, AnswerLimits())
    chat.ask("Hi")
    assert "(cut after " in said.notes
    assert "the model reads at most 64 tokens; /new begins a new conversation" in said.notes
    before = list(chat.messages)
    with pytest.raises(
        DataError,
        match=r"the conversation has \d{3} tokens, and the model reads at most 64; .* /new",
    ):
        chat.ask("Why? " * 40)
    assert chat.messages == before


def test_answers_are_as_long_as_the_samples_of_the_training_unless_told_otherwise(
    world: World,
) -> None:
    chat, said = chat_with(world.folder, world.store, AnswerLimits())
    chat.ask(QUESTION)
    assert "(cut after 256 tokens" in said.notes


def test_a_temperature_samples_and_zero_is_greedy_whatever_the_folder_says(
    world: World, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    shutil.copytree(world.folder, tmp_path, dirs_exist_ok=True)
    write_json(
        tmp_path / "generation_config.json", {"do_sample": True, "temperature": 0.5, "top_k": 20}
    )
    told = {}
    for temperature in (None, 0.0, 2.0):
        chat, said = chat_with(tmp_path, world.store, AnswerLimits(16, temperature))
        told[temperature] = chat.describe().rpartition(", ")[2]
        answers = set()
        for _ in range(2):
            chat.restart()
            chat.ask(QUESTION)
            answers.add(said.take())
        assert (len(answers) == 1) == (temperature == 0)
    assert told == {
        None: "sampled at temperature 0.5",
        0.0: "greedy",
        2.0: "sampled at temperature 2",
    }


def test_without_a_template_each_text_is_continued_by_itself(world: World, tmp_path: Path) -> None:
    shutil.copytree(world.folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    chat, said = chat_with(tmp_path, world.store)
    assert "without a chat template" in chat.describe()
    chat.ask("Once")
    first = said.take()
    chat.ask("Once")
    assert said.take() == first


def test_lines_are_questions_or_commands_and_errors_end_nothing(world: World) -> None:
    chat, said = chat_with(world.folder, world.store)
    lines = iter(
        [
            "",
            "/help",
            "/bas",
            "/base",
            "/usr/bin is what?",
            "Why? " * 4000,
            "/new",
            "/base",
            "/quit",
            "never",
        ]
    )
    converse(chat, lambda: next(lines))
    assert list(lines) == ["never"]
    assert all(name in said.notes for name in COMMANDS)
    assert "/bas is no command; did you mean '/base'?; /help lists them" in said.notes
    assert said.take() == printed(answer_of(world.folder, asked("/usr/bin is what?"), 8))
    assert said.notes.count("error: ") == 1
    assert said.notes.count("ask something first") == 2
    assert chat.messages == ()


# Where a model has room.


def test_weights_are_halved_where_memory_is_short_and_what_has_no_room_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = sum(
        value.numel() for value in load_file(world.folder / "model.safetensors").values()
    )
    for factor, dtype in ((4, torch.float32), (3, torch.bfloat16)):
        monkeypatch.setattr(
            "pipeline_lib.evaluate.chat_model.host_free_bytes",
            lambda factor=factor: factor * parameters,
        )
        assert place_for(world.folder).dtype == dtype
    monkeypatch.setattr("pipeline_lib.evaluate.chat_model.host_free_bytes", lambda: parameters)
    with pytest.raises(
        DataError, match=r"there is no room for this model: it takes .* in bf16, and .* free"
    ):
        place_for(world.folder)


@pytest.mark.parametrize(
    ("free_gib", "device_map"),
    [(6.0, torch.device("cuda")), (0.1, "auto")],
    ids=["one GPU", "spread"],
)
def test_a_model_that_one_gpu_cannot_hold_is_spread(
    world: World, monkeypatch: pytest.MonkeyPatch, free_gib: float, device_map: object
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda *_: (int(free_gib * 2**30), 24 * 2**30))
    place = place_for(world.folder)
    assert (place.dtype, place.device_map) == (torch.bfloat16, device_map)
    assert ("2 GPUs" in place.text) == (device_map == "auto")


# Which model is meant.


def test_a_model_is_named_by_folder_experiment_or_config(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    link_results(world.experiment, world.store)
    for text in (str(world.folder), "results/made/model"):
        assert model_of(text, world.store) == Path(text)
    for text in ("made", "results/made", str(tmp_path / "results/made")):
        assert model_of(text, world.store) == world.folder


def test_an_unfinished_experiment_is_refused_with_the_command_that_finishes_it(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store(tmp_path / "store")
    config = tmp_path / "my own.yaml"
    config.write_text("experiment: mine\nmodel: {source: tiny}\ndata: {train: [{source: pydoc}]}\n")
    with pytest.raises(
        IntegrityError,
        match=r"'mine' has no finished model; run `snakemake --configfile '.*my own.yaml",
    ):
        model_of(str(config), store)
    Dag.compile([str(config)], {}, store).freeze()
    for text in ("mine", "results/mine/model"):
        with pytest.raises(
            IntegrityError, match=r"'mine' has no finished model; .*qwen3 status mine` shows"
        ):
            model_of(text, store)


@pytest.mark.parametrize(
    ("text", "kind", "problem"),
    [
        (
            "nowhere/model",
            ConfigError,
            "nowhere/model: no such model folder, config file or experiment; .*: made",
        ),
        ("maed", ConfigError, "did you mean 'made'"),
        ("empty", DataError, "empty: no model folder, for it has no config.json$"),
        ("around", DataError, "no model folder, for it has no config.json; around/model is one"),
        ("around/adapter", DataError, "an adapter alone; give the model folder around it"),
    ],
)
def test_what_is_no_model_is_refused_with_what_would_be(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    kind: type[PipelineError],
    problem: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (
        "around/model/config.json",
        "around/adapter/adapter_config.json",
        "empty/notes.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    with pytest.raises(kind, match=problem):
        model_of(text, world.store)


# The command as a process.


def command(world: World, *options: str) -> list[str]:
    return [sys.executable, "-m", "pipeline_lib", "chat", str(world.folder), *options]


def environment(world: World) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PIPELINE_STORE": str(world.store.root),
        "TERM": "xterm",
    }


def test_a_question_from_a_pipe_is_answered_once_with_nothing_else_on_stdout(world: World) -> None:
    done = subprocess.run(
        command(world, "--max-new-tokens", "12"),
        env=environment(world),
        input=f"{QUESTION}\n".encode(),
        capture_output=True,
        check=False,
    )
    assert done.stdout.decode() == printed(answer_of(world.folder, asked(QUESTION), 12)), (
        done.stderr
    )
    assert done.returncode == 0
    assert done.stderr.decode() == "(cut after 12 tokens: --max-new-tokens sets how many)\n"


@pytest.mark.parametrize(
    ("question", "problem"), [(b" \n", "there is no question"), (b"\xff\n", "is not UTF-8")]
)
def test_a_pipe_without_a_question_is_refused(world: World, question: bytes, problem: str) -> None:
    done = subprocess.run(
        command(world), env=environment(world), input=question, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (DataError.exit_code, b"")
    assert problem in done.stderr.decode()


@dataclass
class Terminal:
    """A process on a terminal of its own: what is typed, and what is on the screen."""

    process: "subprocess.Popen[bytes]"
    _screen: int
    _shown: str = ""

    def type(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def wait_for(self, pattern: str, within_s: float = DEADLINE_S) -> str:
        """Return what is shown up to the first match of `pattern`; later calls do not see it."""
        deadline_s = monotonic() + within_s
        while (found := re.search(pattern, self._shown)) is None:
            if monotonic() > deadline_s:
                raise TimeoutError(f"no {pattern!r} in {self._shown!r}")
            assert self._read(), f"no {pattern!r} in {self._shown!r}, and it has ended"
        shown, self._shown = self._shown[: found.end()], self._shown[found.end() :]
        return shown

    def interrupt(self, pattern: str) -> None:
        """Type Ctrl-C until `pattern` is shown, as Python may miss one.

        It misses one between readline's prompt and its wait for a key.
        """
        for _ in range(10):
            self.type("\x03")
            with suppress(TimeoutError):
                self.wait_for(pattern, DEADLINE_S / 10)
                return
        raise TimeoutError(f"no {pattern!r} in {self._shown!r}")

    def _read(self) -> bool:
        if not select([self._screen], [], [], 1.0)[0]:
            return True
        try:
            part = os.read(self._screen, 65536)
        except OSError:  # the last process on this terminal has ended
            return False
        self._shown += part.decode(errors="replace")
        return bool(part)

    def rest(self) -> str:
        """Wait for the end; return what is shown till then."""
        deadline_s = monotonic() + DEADLINE_S
        while self._read():
            assert monotonic() < deadline_s, f"it goes on after {self._shown!r}"
        return self._shown


@contextmanager
def terminal(arguments: list[str], environ: dict[str, str]) -> Iterator[Terminal]:
    """`arguments` on a terminal, whose Ctrl-C is a real SIGINT; killed when the block ends.

    It is killed if it still runs.
    """
    screen, inside = pty.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        arguments,
        stdin=inside,
        stdout=inside,
        stderr=inside,
        env=environ,
        start_new_session=True,
        preexec_fn=take_terminal,  # noqa: PLW1509 - it only makes a system call
    )
    os.close(inside)
    try:
        yield Terminal(process, screen)
    finally:
        process.kill()
        process.wait()
        os.close(screen)


@pytest.mark.slow
def test_a_chat_in_a_terminal(world: World) -> None:
    """Its answers do not end by themselves.

    While a line is read, pasted lines are bracketed (`?2004h` to `?2004l`).
    """
    begun, ready = r"2004l\r[^\x1b]{40}", r"2004h> $"
    environ = {**environment(world), "INPUTRC": "/dev/null"}
    with terminal(command(world, "--max-new-tokens", "3000"), environ) as chat:
        assert "thinking off, as it was trained" in chat.wait_for(ready)
        for question in (f"{QUESTION}\n", "\x1b[200~pasted\nin two lines\x1b[201~\n"):
            chat.type(question)
            chat.wait_for(begun)
            chat.interrupt(rf"\(stopped\)\r\n.*{ready}")
        chat.type("half a line")
        # what is not read yet Ctrl-C discards, and readline waits for it
        chat.wait_for("half a line")
        chat.interrupt(rf"\(/quit or Ctrl-D ends\)\r\n.*{ready}")
        chat.type("/base\n")
        chat.wait_for(r"loading the base model beside the tuned one, .*\r\n[^\x1b]{40}")
        chat.interrupt(rf"\(stopped\)\r\n.*{ready}")
        chat.type("/new\n")
        chat.wait_for(rf"a new conversation\r\n.*{ready}")
        chat.type("\x04")
        assert "Traceback" not in chat.rest()
        assert chat.process.wait(DEADLINE_S) == 0


def test_ctrl_c_at_an_answer_into_a_pipe_is_told_by_the_exit_code(world: World) -> None:
    process = subprocess.Popen(
        command(world, "--max-new-tokens", "3000"),
        env=environment(world),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        if process.stdin is None or process.stdout is None:
            raise TypeError("the process has pipes")
        process.stdin.write(QUESTION.encode())
        process.stdin.close()
        assert process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        told = process.stderr.read().decode() if process.stderr else ""
        assert process.wait(DEADLINE_S) == 130
        assert told == "(stopped)\nstopped; nothing was changed\n"
    finally:
        process.kill()
        process.wait()
