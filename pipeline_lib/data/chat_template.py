"""The model's own chat template: render it in a sandbox exactly as transformers does, and handle thinking."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from types import BuiltinMethodType
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from pipeline_lib.config.content import TEMPLATES_FOLDER, TEMPLATES_SUFFIX
from pipeline_lib.config.schema import SET_ELSEWHERE
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.files import read_json
from pipeline_lib.core.store import Manifest
from pipeline_lib.core.text import did_you_mean, shortened
from pipeline_lib.core.units import count
from pipeline_lib.data.conversations import OPENS_THINKING, Message
from pipeline_lib.lineage.record import settings_in
from pipeline_lib.records.results import Prompts

# The jinja2 sandbox for chat templates: transformers' dialect, and no access to Python or to files.
# It provides the same names as `transformers.utils.chat_template_utils`; a test compares the two.

_DICT_ATTRIBUTES = frozenset(dir(dict))
# `format` and `format_map` are left out, because format strings can access attributes of Python objects.
_HARMLESS: Mapping[type, frozenset[str]] = {
    str: frozenset({"split", "strip", "lstrip", "rstrip", "startswith", "endswith"}),
    LoopContext: frozenset({"first", "last", "index0", "index"}),
}


def template_environment() -> ImmutableSandboxedEnvironment:
    """Return an environment whose templates can access neither files nor Python and cannot modify their inputs."""
    # The output is a prompt, not HTML: escaping it would change the tokens.
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # noqa: S701
        finalize=_only_data,
        extensions=[_Generation, loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _TemplateDict()
    environment.globals["namespace"] = _TemplateNamespace
    return environment


def _only_data(value: Any) -> Any:
    """Raise TemplateError for functions and other objects: their text contains an address that differs between runs."""
    if value is None or isinstance(value, (str, int, float, list, tuple, dict, jinja2.Undefined)):
        return value
    raise jinja2.TemplateError(f"it writes a {type(value).__name__}, which is not text")


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox that is twice as fast at the most frequent operations; all others go through jinja2's checks."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if attribute in _HARMLESS.get(kind, ()):
            return getattr(obj, attribute)
        if kind is _TemplateNamespace and type(value := getattr(obj, attribute, None)) in (bool, int):
            return value
        return super().getattr(obj, attribute)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as in jinja2
        if type(__obj) is BuiltinMethodType and __obj.__name__ in _HARMLESS.get(type(__obj.__self__), ()):
            for name in ("_loop_vars", "_block_vars"):  # jinja2's own arguments, for functions that take its context
                kwargs.pop(name, None)
            return __obj(*args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)


class _Generation(Extension):
    """An extension that accepts `{% generation %}...{% endgeneration %}`, which marks the assistant's text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_unmarked"), [], [], body).set_lineno(line)

    def _unmarked(self, caller: Callable[[], str]) -> str:
        return caller()


class _TemplateDict:
    """The `dict` of templates: a callable with `fromkeys`, without the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _TemplateNamespace(Namespace):
    """The `namespace` of templates, which refuses names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: N805 - as in jinja2, so that namespace(self=...) works
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        Namespace.__setitem__(self, name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not store the private attribute {name!r}")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return `value` as JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> NoReturn:
    raise jinja2.TemplateError(
        f"it writes today's date (strftime_now({pattern!r:.40})), so that the same data would give other "
        "samples tomorrow; put a fixed date into the template"
    )


# Rendering of conversations through a model's own chat template, exactly as transformers does.
# Templates come with the model and are untrusted code: they run in the sandbox and see plain data only.

TEMPLATE_NAME = "chat_template.jinja"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# The errors that a template can raise on messages that it was not written for.
TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RecursionError,
)
# jinja2 writes Python, which has limits of its own on nesting and on the digits of a number.
COMPILE_FAILURES = (jinja2.TemplateError, SyntaxError, ValueError, RecursionError)


class ChatTemplate:
    """A compiled chat template with the special tokens that it may name."""

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str],
        where: str,
        source_with_tools: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Compile `source`; `where` names it in messages. Raises DataError if it is not a valid template.

        This runs untrusted code, because jinja2 computes constant expressions: only a limited process may do it.

        `source_with_tools` is the separate template that some models have for conversations with tools. `kwargs` are
        further variables of every rendering; one that no template reads raises DataError.
        """
        self._where = where
        environment = template_environment()
        sources = [source, source_with_tools] if source_with_tools else [source]
        try:
            self._plain, self._with_tools = (environment.from_string(sources[place]) for place in (0, -1))
            self._refuse_unread(kwargs or {}, [environment.parse(text) for text in sources] if kwargs else [])
        except COMPILE_FAILURES as error:
            raise DataError(f"{where}: not a chat template that can be used: {_one_line(error)}") from error
        # The variables of every rendering, built once.
        self._variables = {**self._plain.globals, "documents": None, **variables, **(kwargs or {})}

    def _refuse_unread(self, kwargs: Mapping[str, Any], trees: Sequence[nodes.Template]) -> None:
        read = {name for tree in trees for name in meta.find_undeclared_variables(tree)} - self._plain.globals.keys()
        if unread := [name for name in kwargs if name not in read]:
            # Names that the template sets itself on some paths are unlikely to be meant.
            own = {name.name for tree in trees for name in tree.find_all(nodes.Name) if name.ctx == "store"}
            free = sorted(read - own - SET_ELSEWHERE.keys())
            raise DataError(
                f"tokenize.chat_template_kwargs: {self._where} reads no variable {unread[0]!r}"
                f"{did_you_mean(unread[0], free)}; those that can be set are {', '.join(free) or 'none'}"
            )

    @classmethod
    def load(cls, folder: Path, kwargs: Mapping[str, Any] | None = None) -> "ChatTemplate":
        """Load the template of the model in `folder` from chat_template.jinja, else from tokenizer_config.json.

        `kwargs` are variables of every rendering. Raises DataError if there is no template, if it cannot be read, or
        if it reads one of `kwargs` nowhere.
        """
        config = read_tokenizer_config(folder)
        source, with_tools, where = _sources(folder, config)
        if not source:
            raise no_template(folder)
        return cls(source, special_tokens(config), where, with_tools, kwargs)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """Return `messages` as the text of `apply_chat_template(tokenize=False)`. Raises DataError if that fails.

        A `<think>` block at the start of an answer's text is passed as reasoning_content if the template (Qwen3.8's)
        would take it for a part of the answer.
        """
        if self._takes_thinking_apart:
            messages = [_with_thinking_apart(message) for message in messages]
        return self._render(messages, tools, {"add_generation_prompt": add_generation_prompt, **variables})

    @cached_property
    def _takes_thinking_apart(self) -> bool:
        """Whether the template renders reasoning_content, and a `<think>` block in the text in another way."""
        thought, question = "a thought", {"role": "user", "content": "?"}
        in_text = {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\n!"}
        try:
            in_text_too, apart = (
                self._render([question, answer], None, {"add_generation_prompt": False, "enable_thinking": True})
                for answer in (in_text, _with_thinking_apart(in_text))
            )
        except DataError:  # the template fails on this question
            return False
        return thought in apart and apart != in_text_too

    @cached_property
    def part_separator(self) -> str:
        """What the template writes between two text parts; if it reads no parts, the line end that servers write."""
        first, second = "first part", "second part"
        parts = [{"type": "text", "text": text} for text in (first, second)]
        try:
            text = self._write([{"role": "user", "content": parts}], None, {})
        except DataError:
            return "\n"
        _, has_first, rest = text.partition(first)
        between, has_second, _ = rest.partition(second)
        is_read = has_first and has_second and "type" not in between  # else Python's text of the list is written
        return between if is_read else "\n"

    @cached_property
    def _manner(self) -> "_Manner":
        """How the template wants messages that call a tool: the first manner in which it renders the call."""
        for manner in _MANNERS:
            call = {"type": "function", "function": {"name": "a_name", "arguments": {"a_key": "a_value"}}}
            message = manner.of({"role": "assistant", "content": "", "tool_calls": [call]})
            try:
                text = self._write([{"role": "user", "content": "?"}, message], None, {})
            except DataError:
                continue
            # With single quotes it is Python's text of a dict, and no JSON.
            if "a_name" in text and "a_value" in text and "'a_key'" not in text:
                return manner
        return _MANNERS[0]

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, variables: Mapping[str, Any]
    ) -> str:
        is_calling = any(message.get("tool_calls") for message in messages)
        made = [self._manner.of(message) for message in messages] if is_calling else messages
        return self._write(made, tools, variables)

    def _write(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, variables: Mapping[str, Any]
    ) -> str:
        template = self._plain if tools is None else self._with_tools
        cleaned = []
        for message in messages:
            # Without null values, and with `thinking`, which some templates read, as reasoning_content.
            values = {key: value for key, value in message.items() if value is not None}
            if "reasoning_content" in values:
                values = {"thinking": values["reasoning_content"], **values}
            cleaned.append(values)
        context = {**self._variables, "messages": cleaned, "tools": tools, **variables}
        try:
            text = "".join(template.root_render_func(template.new_context(context, shared=True)))
            text.encode()  # raises UnicodeEncodeError, a ValueError, for half a surrogate pair
        except TEMPLATE_FAILURES as error:
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(
                f"{self._where}: the chat template fails on messages of {roles}: {_one_line(error)}"
            ) from error
        return text


@dataclass(frozen=True)
class _Manner:
    """How a message with calls is given to a template.

    Without text its content may be null, which transformers leaves out; arguments may be JSON text.
    """

    is_content_null: bool
    are_arguments_text: bool

    def of(self, message: Message) -> Message:
        """Return `message` in this manner; one without calls stays as it is."""
        calls = message.get("tool_calls")
        if not calls:
            return message
        made = dict(message)
        if self.is_content_null and not message["content"]:
            made["content"] = None
        if self.are_arguments_text:
            made["tool_calls"] = [_with_text_arguments(call) for call in calls]
        return made


# OpenAI's servers give null and text; templates are written for what they read.
_MANNERS = [_Manner(is_null, is_text) for is_text in (False, True) for is_null in (False, True)]


def _with_text_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def no_template(folder: Path) -> DataError:
    """Return the error for conversations if the model in `folder` has no chat template."""
    return DataError(f"{folder}: has no chat template ({TEMPLATE_NAME}); take a model that has one, or add it")


def has_template(folder: Path) -> bool:
    """Return whether the model in `folder` has a chat template; raw text needs none. Raises DataError."""
    return bool(_sources(folder, read_tokenizer_config(folder))[0])


def _sources(folder: Path, config: Mapping[str, Any]) -> tuple[str, str | None, str]:
    """Return the template ("" if there is none), a separate one for tools or None, and the path of their file."""
    path = folder / TEMPLATE_NAME
    named = {file.stem: file for file in sorted((folder / TEMPLATES_FOLDER).glob(f"*{TEMPLATES_SUFFIX}"))}
    if path.is_file():
        named["default"] = path
    if named:  # as in transformers, files come before the other places
        texts = {name: _read_template(file) for name, file in named.items()}
        return texts.get("default", ""), texts.get("tool_use"), str(path)
    value = config.get("chat_template")  # a single text, or a list of named ones
    listed = {"default": value} if isinstance(value, str) else {}
    for item in value if isinstance(value, list) else ():
        if isinstance(item, dict) and isinstance(item.get("name"), str) and isinstance(item.get("template"), str):
            listed[item["name"]] = item["template"]
    return listed.get("default", ""), listed.get("tool_use"), str(folder / TOKENIZER_CONFIG_NAME)


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot read the chat template ({_one_line(error)})") from error


def _one_line(error: Exception) -> str:
    return shortened(str(error), 500)


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json of the model in `folder`, or {} if there is none. Raises DataError."""
    path = folder / TOKENIZER_CONFIG_NAME
    if not path.is_file():
        return {}
    try:
        config = read_json(path)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot read ({error})") from error
    if not isinstance(config, dict):
        raise DataError(f"{path}: expected an object")
    return config


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that a tokenizer_config.json names, by their role (`eos_token`, ...)."""
    tokens = {}
    for role in SPECIAL_TOKENS:
        token = config.get(role)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            tokens[role] = text
    return tokens


# The thinking of an assistant's message: in `reasoning_content`, or in one `<think>` block at the start of its text.
# `conversations.check` refuses rows with think tags anywhere else.

_BLOCK = re.compile(r"\s*<think>(.*?)</think>\n*", re.DOTALL)
_END = re.compile(r"</think>(?:\s*\n)?")
# The opening tag is optional, because the prompt may end with it.
_EMPTY_BLOCK = re.compile(r"(?:\s*<think>)?\s*</think>(?:\s*\n)?")


def thinking_of(message: Message) -> str:
    """Return the thinking of the assistant's `message`; the empty string if there is none."""
    if reasoning := message.get("reasoning_content"):
        return str(reasoning).strip()
    block = _BLOCK.match(message["content"])
    return block[1].strip() if block else ""


def thinking_modes(messages: Sequence[Message]) -> list[bool]:
    """Return for each message whether thinking is on for the question (user message) that it belongs to.

    A caller sets the thinking switch once for a question: it is on for all its tool-call steps if any of them thinks.
    """
    questions = list(accumulate(message["role"] == "user" for message in messages))
    thinking = {
        question
        for question, message in zip(questions, messages, strict=True)
        if message["role"] == "assistant" and thinking_of(message)
    }
    return [question in thinking for question in questions]


def without_thinking(message: Message) -> Message:
    """Return `message` without an assistant's thinking, neither in reasoning_content nor in the text."""
    if message["role"] != "assistant":
        return message
    kept = {key: value for key, value in message.items() if key != "reasoning_content"}
    block = _BLOCK.match(message["content"])
    return {**kept, "content": message["content"][block.end() :]} if block else kept


_USER_TURN = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.DOTALL)


def last_question(prompt: str) -> str:
    """Return the last user turn of a rendered prompt; the whole prompt if the template is of another kind."""
    turns = _USER_TURN.findall(prompt)
    return str(turns[-1]).strip() if turns else prompt


def opens_thinking(prompt: str) -> bool:
    """Return whether `prompt` ends within a thinking block, so that the model cannot choose not to think."""
    return prompt.rstrip().endswith(OPENS_THINKING)


def _with_thinking_apart(message: Message) -> Message:
    """Return `message` with the `<think>` block of an assistant's text as reasoning_content."""
    block = _BLOCK.match(message["content"]) if message["role"] == "assistant" else None
    if block is None:
        return message
    return {**message, "reasoning_content": block[1].strip(), "content": message["content"][block.end() :]}


def end_of_thinking(message: Message, rendered: str, start: int) -> int | None:
    """Return the index in `rendered` after the thinking of `message`, which begins at `start`, and its line ends.

    Return 0 if `message` has no thinking and the template writes no empty block either, None if the end of the
    thinking cannot be determined.
    """
    thought = thinking_of(message)
    if not thought:
        block = _EMPTY_BLOCK.match(rendered, start)
        return block.end() if block else 0
    end = _END.search(rendered, start)
    return end.end() if end and rendered[start : end.start()].rstrip().endswith(thought) else None


# Instructions for calling a trained model: the chat template's variables have to be set as in training.

THINKING_OFF, THINKING_ON = "thinking_off", "thinking_on"  # names of prompt counts, also in ledgers
_SWITCH = "enable_thinking"


@dataclass(frozen=True)
class Mode:
    """A setting of the chat template's variables, the number of answers trained with it, and whether it is the default.

    `enable_thinking` is None if the template has no such switch; `kwargs` are the other variables.
    """

    enable_thinking: bool | None
    answers: int
    is_default: bool
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def variables(self) -> dict[str, Any]:
        """All variables that a prompt of this mode is rendered with."""
        return {**({} if self.enable_thinking is None else {_SWITCH: self.enable_thinking}), **self.kwargs}

    @property
    def code(self) -> str:
        """The Python call that renders a prompt in this mode."""
        return f"tokenizer.apply_chat_template(messages, add_generation_prompt=True, {self._arguments})"

    @property
    def request(self) -> str:
        """The part of a server request (vLLM, SGLang) that selects this mode."""
        return f'"chat_template_kwargs": {json.dumps(self.variables, ensure_ascii=False)}'

    @property
    def trained(self) -> str:
        """The number of answers trained in this mode, as a clause without a final period."""
        default = ", the chat template's default" if self.is_default else ""
        answers = "1 answer was" if self.answers == 1 else f"{self.answers:,} answers were"
        return f"{answers} trained with {self._arguments}{default}"

    @property
    def _arguments(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.variables.items())


def trained_modes(
    prompts: Mapping[str, int], thinking_default: str | None, kwargs: Mapping[str, Any] | None = None
) -> list[Mode]:
    """Return the modes of the counted `prompts`, the most frequent first; none if the template has no variables.

    `thinking_default` is None if the template has no switch. `kwargs` are its other variables, as training set them.
    """
    kwargs = kwargs or {}
    if thinking_default is None:
        answers = sum(prompts.values())
        return [Mode(None, answers, False, kwargs)] if kwargs and answers else []
    names = {THINKING_OFF: False, THINKING_ON: True}
    modes = [
        Mode(switch, prompts[name], name == f"thinking_{thinking_default}" and not kwargs, kwargs)
        for name, switch in names.items()
        if prompts.get(name)
    ]
    return sorted(modes, key=lambda mode: -mode.answers)


def warning_of(modes: Sequence[Mode]) -> str:
    """Return a warning about prompts without the variables if none of `modes` is the default, else the empty string."""
    if not modes or any(mode.is_default for mode in modes):
        return ""
    names = list(modes[0].variables)
    given = f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not given"
    return f"No answer was trained under the chat template's default, which holds where {given}."


def how_to_call(modes: Sequence[Mode]) -> list[str]:
    """Return a line for each mode with its Python call and server request, then the warning if there is one."""
    lines = [f"{mode.trained}: call {mode.code}, or a server with {mode.request}" for mode in modes]
    return [*lines, *filter(None, [warning_of(modes)])]


# The cost of templates that render earlier turns differently: each answer of a conversation needs its own sample.


def repetition(conversations: int | None, samples: int | None, tokens: int | None, repeated: int | None) -> str:
    """Return a message on how many times more tokens the samples have than one sample per conversation would have.

    Return the empty string if the factor is below 1.05 or unknown. `repeated` counts the tokens of all samples of a
    conversation but its longest.
    """
    if not conversations or not samples or not tokens or not repeated:
        return ""
    once = tokens - repeated
    if tokens < 1.05 * once:
        return ""
    return (
        f"{count(samples, 'samples')} of {count(conversations, 'conversations')} have {tokens / once:.1f} times the "
        f"tokens of one sample each ({tokens:,} against {once:,}): the chat template renders an earlier "
        "turn otherwise than the last, so each answer needs its own"
    )


def modes_in(tokenize: Manifest) -> list[Mode]:
    """Return the settings of the chat template's variables that were trained, from the manifest of the tokenize stage.

    Return no modes if the template has no variables, or if they are not known.
    """
    kwargs = settings_in(tokenize).get("chat_template_kwargs", {})
    found = Prompts.model_validate({**tokenize.counts, "chat_template_kwargs": kwargs})
    return trained_modes(found.prompts, found.thinking_default, found.chat_template_kwargs)
