"""Chat with a model folder in the terminal: the answers, printed as they come, and the commands.

The model is asked as it was trained: by its own chat template, with the system prompt, the tools
and the thinking mode that its lineage records. An answer is printed as it is generated.
"""

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from pipeline_lib.arch.families import read_geometry
from pipeline_lib.core.errors import ERROR, DataError, PipelineError
from pipeline_lib.core.stage import Say
from pipeline_lib.core.store import Store
from pipeline_lib.core.text import did_you_mean
from pipeline_lib.core.units import compact, count
from pipeline_lib.data.chat_template import has_template
from pipeline_lib.data.conversations import ENDS_THINKING, OPENS_THINKING, Message
from pipeline_lib.data.encode import load_tokenizer
from pipeline_lib.data.thinking import opens_thinking
from pipeline_lib.evaluate.answers import GREEDY, Context, generate, modes_of, render, stops_of
from pipeline_lib.evaluate.chat_model import Place, load_base_of, load_to_chat, place_for

_INCOMPLETE = "\ufffd"
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class AnswerStreamer(BaseStreamer):
    """Passes an answer on by token, in whole characters and without terminal control characters.

    transformers' TextStreamer would wait for the next space, which text in Chinese or Japanese does
    not have.
    """

    def __init__(self, tokenizer: Tokenizer, write: Callable[[str], None]) -> None:
        """Pass the text on to `write`."""
        self._tokenizer, self._write = tokenizer, write
        self._is_prompt = True
        self._begun: list[int] = []  # tokens whose last character is not complete
        self.text = ""

    def put(self, value: Tensor) -> None:
        """Take the prompt's tokens at the first call, and then the answer's, one by one."""
        if self._is_prompt:
            self._is_prompt = False
            return
        self._begun += value.tolist()
        if not self._decoded().endswith(_INCOMPLETE):
            self._pass_on()

    def end(self) -> None:
        """Pass on what is incomplete too, and end the line."""
        self._pass_on()
        self._write("\n")

    def _pass_on(self) -> None:
        text = self._decoded()
        self._begun = []
        self.text += text
        self._write(text.translate(_CONTROLS))

    def _decoded(self) -> str:
        return str(self._tokenizer.decode(self._begun, skip_special_tokens=True))


@dataclass(frozen=True)
class AnswerLimits:
    """The most tokens of an answer, by default the longest training sample's, and temperature.

    A temperature of 0 is greedy, None that of generation_config.json.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None

    @property
    def sampling(self) -> Mapping[str, Any]:
        """The options of `generate` for the temperature."""
        if self.temperature is None:
            return {}
        return {"do_sample": True, "temperature": self.temperature} if self.temperature else GREEDY


@dataclass
class Chat:
    """A conversation with the model in `folder`.

    `write` gets the text of answers, `tell` a line about them.
    """

    folder: Path
    store: Store
    limits: AnswerLimits
    write: Callable[[str], None]
    tell: Say
    messages: Sequence[Message] = ()
    _asked: Sequence[int] = ()  # the tokens of the last prompt
    _base: PreTrainedModel | None = field(default=None, repr=False)

    @cached_property
    def place(self) -> Place:
        """Where the model is."""
        return place_for(self.folder)

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model, which is loaded when it is first used."""
        return load_to_chat(self.folder, self.place)

    @cached_property
    def context(self) -> Context:
        """The system prompt, the tools and the thinking mode of the training."""
        return Context.trained(self.folder)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of both models."""
        return load_tokenizer(self.folder)

    @cached_property
    def max_positions(self) -> int:
        """The most tokens that the model can attend to, those of the answer included."""
        return read_geometry(self.folder).max_positions

    def ask(self, question: str) -> bool:
        """Answer `question` as the conversation's next; return False if Ctrl-C stopped it.

        A part of an answer belongs to the conversation too. Raises DataError if the conversation is
        longer than the model can read, or takes more memory than there is.
        """
        messages = [*self.messages, {"role": "user", "content": question}]
        self._asked, opened = self._prompt(messages)
        answer, is_stopped = self._answer(self.model)
        if answer:
            # the block begins in the prompt, and ends in the answer
            if opened and ENDS_THINKING in answer:
                answer = f"{OPENS_THINKING}\n{answer}"
            self.messages = [*messages, {"role": "assistant", "content": answer}]
        return not is_stopped

    def ask_base(self) -> None:
        """Answer the last question with the base model, without changing the conversation.

        The base model gets the same tokens.
        """
        if not self._asked:
            self.tell("ask something first: /base answers the last question")
            return
        if self._base is None:
            self._base = load_base_of(self.folder, self.store, self.tell)
        self._answer(self._base)

    def restart(self) -> None:
        """Begin a new conversation."""
        self.messages, self._asked = (), ()

    def describe(self) -> str:
        """Return a line on the model: its size and place, and how it is asked."""
        config: Any = self.model.generation_config
        temperature = config.temperature if config.do_sample else 0
        if self.limits.temperature is not None:
            temperature = self.limits.temperature
        parts = [f"{compact(self.model.num_parameters())} parameters", self.place.text]
        if not has_template(self.folder):
            parts.append("without a chat template: each text is continued, by itself")
        elif (modes := modes_of(self.folder)) and modes[0].enable_thinking is not None:
            of_both = (
                ", of both that it was trained in" if len(modes) > 1 else ", as it was trained"
            )
            parts.append(f"thinking {'on' if self.context.thinking else 'off'}{of_both}")
        parts += [f"{name} {value}" for name, value in self.context.chat_template_kwargs.items()]
        if self.context.system:
            parts.append("with the system prompt of the training")
        if self.context.tools:
            parts.append(f"with {count(len(self.context.tools), 'tools')} of the training")
        if temperature == 0:
            parts.append("greedy")
        else:
            parts.append(f"sampled at temperature {temperature or 1.0:g}")
        return f"{self.folder}: {', '.join(parts)}"

    def _prompt(self, messages: Sequence[Message]) -> tuple[list[int], bool]:
        """Return the tokens that the model is asked, and whether they open a thinking block."""
        if has_template(self.folder):
            with _ctrl_c_ignored():
                (text,) = render(self.folder, [messages], self.context)
        else:
            text = messages[-1]["content"]
        tokens = self.tokenizer.encode(text, add_special_tokens=False).ids
        if len(tokens) >= self.max_positions:
            raise DataError(
                f"{self.folder}: with this question the conversation has {len(tokens):,} tokens, "
                "and the model reads "
                f"at most {self.max_positions:,}; ask less, or begin a new conversation with /new"
            )
        return tokens, opens_thinking(text)

    def _answer(self, model: PreTrainedModel) -> tuple[str, bool]:
        """Return `model`'s answer after the asked tokens, and whether Ctrl-C stopped it."""
        room = self.max_positions - len(self._asked)
        most = min(self.limits.max_new_tokens or self.context.max_tokens, room)
        streamer = AnswerStreamer(self.tokenizer, self.write)
        try:
            (tokens,) = generate(
                model, [self._asked], most, streamer=streamer, **self.limits.sampling
            )
        except KeyboardInterrupt:
            streamer.end()
            self.tell("(stopped)")
            return streamer.text, True
        except torch.OutOfMemoryError as error:
            text = "the GPU's memory does not hold this conversation; begin a new one with /new"
            raise DataError(f"{self.folder}: {text}") from error
        if len(tokens) == most and tokens[-1] not in stops_of(model):
            full = (
                f"the model reads at most {room + len(self._asked):,} tokens; /new begins a new "
                "conversation"
            )
            self.tell(
                f"(cut after {most:,} tokens: "
                f"{full if most == room else '--max-new-tokens sets how many'})"
            )
        return streamer.text, False


@contextmanager
def _ctrl_c_ignored() -> Iterator[None]:
    """Ignore Ctrl-C, also in processes begun in this block, which might print a traceback.

    A process that is not yet set up would print it.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


COMMANDS = {
    "/base": "show the base model's answer to the last question",
    "/new": "begin a new conversation",
    "/help": "show these commands",
    "/quit": "end; Ctrl-D does so too",
}


def converse(chat: Chat, read_line: Callable[[], str]) -> None:
    """Answer what `read_line` returns, line by line, until it raises EOFError or returns /quit.

    Ctrl-C, a KeyboardInterrupt, ends an answer and no conversation.
    """
    while True:
        try:
            line = read_line().strip()
            if line == "/quit":
                return
            if line:
                _respond(chat, line)
        except EOFError:
            chat.write("\n")
            return
        except KeyboardInterrupt:
            chat.tell("\n(/quit or Ctrl-D ends)")
        except UnicodeDecodeError:
            chat.tell(f"{ERROR}this line is not UTF-8")
        except PipelineError as error:
            chat.tell(f"{ERROR}{error}")


def _respond(chat: Chat, line: str) -> None:
    is_command = line.startswith("/") and len(line.split()) == 1 and "/" not in line[1:]
    if not is_command:  # a question may begin with a path
        chat.ask(line)
    elif line == "/base":
        chat.ask_base()
    elif line == "/new":
        chat.restart()
        chat.tell("a new conversation")
    elif line == "/help":
        chat.tell("\n".join(f"{name:6} {text}" for name, text in COMMANDS.items()))
    else:
        chat.tell(f"{line} is no command{did_you_mean(line, COMMANDS)}; /help lists them")
