"""Conversations for tests, templates like other models', and transformers as judge of both."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer

from pipeline_lib.config.schema import Tokenize
from pipeline_lib.core.files import read_json, write_json
from pipeline_lib.data import chat_template
from pipeline_lib.data.conversations import Conversation, Message
from pipeline_lib.data.encode import Encoder, Sample

Turn = tuple[list[int], list[int]]  # what the model is given, and what it writes

# Answers at once and knows nothing of thinking, as Qwen3-Instruct-2507.
INSTRUCT = """\
{%- set has_system = messages[0].role == 'system' %}
{%- if tools %}{{- '<|im_start|>system\n' + (messages[0].content if has_system else '') }}
{%- for tool in tools %}{{- '\n' + tool | tojson }}{% endfor %}{{- '<|im_end|>\n' }}{% endif %}
{%- for message in (messages[1:] if tools and has_system else messages) %}
    {{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\n<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""

# Thinks always: the prompt itself opens the thinking, as with Qwen3-Thinking-2507.
THINKING = """\
{%- for tool in tools or [] %}{{- tool | tojson + '\n' }}{% endfor %}
{%- for message in messages %}
    {%- set parts = message.content.split('</think>') %}
    {%- set thought = message.reasoning_content or (parts[0].split('<think>')[-1] if parts | length > 1 else '') %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' %}
        {%- if loop.last %}{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{% endif %}
        {{- (message.content if message.reasoning_content else parts[-1]).lstrip('\n') }}
        {%- if message.tool_calls %}{{- '<tool_call>\n' + message.tool_calls | tojson + '\n</tool_call>' }}{% endif %}
    {%- else %}{{- message.content }}{% endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{% endif %}"""

# As Qwen3.5, 3.6 and 3.8: the prompt opens the thinking block, or holds an empty one, and the
# arguments of calls are elements. Qwen3.5 and 3.6 leave out what earlier answers thought; 3.6 keeps
# it where it is told to, and 3.8 unless it is told not to. 3.8 reads thinking from
# reasoning_content alone, and begins the system message with the effort.
_EFFORT = """\
{%- if enable_thinking is undefined or enable_thinking %}
    {%- set effort = reasoning_effort | default('xhigh') %}
    {%- if effort not in ('xhigh', 'medium', 'low') %}{{- raise_exception('no effort ' ~ effort) }}{% endif %}
    {%- set system.text = '' if effort == 'medium' else 'Effort: ' + effort + '\n\n' %}
{%- endif %}
"""
_FAMILY = """\
{%- macro text_of(content) %}
    {%- if content is string %}{{- content }}{% else %}
        {%- for part in content or [] %}{{- part.text }}{% endfor %}
    {%- endif %}
{%- endmacro %}
{%- if tools %}{% set system.text = system.text + 'Tools: ' + tools | tojson + '\n\n' %}{% endif %}
{%- set about = text_of(messages[0].content) if messages[0].role == 'system' else '' %}
{%- set system.text = system.text + about | trim %}
{%- if system.text %}{{- '<|im_start|>system\n' + system.text + '<|im_end|>\n' }}{% endif %}
{%- set last = namespace(question=0) %}
{%- for message in messages if message.role == 'user' %}{% set last.question = loop.length %}{% endfor %}
{%- set now = namespace(question=0) %}
{%- for message in messages %}
    {%- set content, thought = text_of(message.content) | trim, (message.reasoning_content or '') | trim %}
    {%- if message.role == 'user' %}
        {%- set now.question = now.question + 1 %}
        {{- '<|im_start|>user\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- ('' if loop.previtem.role == 'tool' else '<|im_start|>user') + '\n<result>\n' + content + '\n</result>' }}
        {{- '' if loop.nextitem and loop.nextitem.role == 'tool' else '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- if message.reasoning_content is not string and splits_text and '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1] | trim %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if keeps_thinking or now.question == last.question %}
            {{- '<think>\n' + thought + '\n</think>\n\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- ('\n\n' if content else '') if loop.first else '\n' }}
            {{- '<tool_call>\n<function=' + call.function.name + '>\n' }}
            {%- for name, value in call.function.arguments | items %}
                {%- set value = value if value is string else value | tojson | safe %}
                {{- '<parameter=' + name + '>\n' }}{{ value }}{{- '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n<think>\n' + ('' if thinks else '\n</think>\n\n') }}
{%- endif %}"""


def _family(thinks: str, keeps: str, splits_text: str = "true", before: str = "") -> str:
    return f"""\
{{%- set system = namespace(text='') %}}
{{%- set thinks, keeps_thinking, splits_text = ({thinks}), ({keeps}), {splits_text} %}}
{before}{_FAMILY}"""


_UNLESS_OFF = "enable_thinking is undefined or enable_thinking"
FAMILIES = {
    "qwen3.5": _family(_UNLESS_OFF, "false"),
    "qwen3.5-2b": _family(
        "enable_thinking is defined and enable_thinking", "false"
    ),  # up to 2B: off by default
    "qwen3.6": _family(_UNLESS_OFF, "preserve_thinking is defined and preserve_thinking"),
    "qwen3.8": _family(
        _UNLESS_OFF, "preserve_thinking is undefined or preserve_thinking", "false", _EFFORT
    ),
}

# The manners of the published templates, written anew: what each renders of a conversation, not its
# words.
_TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' + (about + '\\n\\n' if about else '') + '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{% endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif about %}{{- '<|im_start|>system\\n' + about + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if content or not loop.first }}{{- '<tool_call>\\n{"name": "' + call.function.name }}
            {{- '", "arguments": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
_GIVEN = "{%- set about = messages[0].content if messages[0].role == 'system' else '' %}"
_BY_DEFAULT = (
    "{%- set about = messages[0].content if messages[0].role == 'system' else 'You help.' %}"
)
# Reads text as it stands, and neither calls nor tools. It writes `message['content']` as published
# ones do.
_EACH = """\
{% for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}"""
# Cuts what answers think, and opens a block itself; the arguments of calls have to be text, and
# their content null.
_R1 = """\
{%- set now = namespace(system='', is_tool=false, outputs=0) %}
{%- for message in messages if message['role'] == 'system' %}{% set now.system = message['content'] %}{% endfor %}
{{- bos_token }}{{- now.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- set now.is_tool = false %}{{- '<｜User｜>' + message['content'] }}
    {%- elif message['role'] == 'assistant' and message['content'] is none %}
        {%- set now.is_tool = false %}{{- '<｜Assistant｜>' }}
        {%- for call in message['tool_calls'] %}
            {{- '<call>' + call['function']['name'] + '\\n' + call['function']['arguments'] + '</call>' }}
        {%- endfor %}
        {{- '<｜end▁of▁sentence｜>' }}
    {%- elif message['role'] == 'assistant' %}
        {%- set now.is_tool = false %}
        {{- '<｜Assistant｜>' + message['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
    {%- elif message['role'] == 'tool' %}
        {%- set now.is_tool = true %}{{- '<output>' + message['content'] + '</output>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not now.is_tool %}{{- '<｜Assistant｜><think>\\n' }}{% endif %}"""
# the project's own, as Qwen3's
HYBRID = Path(chat_template.__file__).with_name("chat_template.jinja").read_text()
NO_TEMPLATE = "none"
TEMPLATES = {
    "hybrid": HYBRID,
    "instruct-2507": _GIVEN + _TOOLS,
    "thinking-2507": THINKING,
    "qwen2.5": _BY_DEFAULT + _TOOLS,
    "qwen3.5": FAMILIES["qwen3.5"],
    "r1-distill": _R1,
    "chatml": _EACH + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "no generation prompt": _EACH,
    NO_TEMPLATE: "",
}
# whether it is special
R1_TOKENS = {"<｜User｜>": False, "<｜Assistant｜>": False, "<｜end▁of▁sentence｜>": True}
TEXT_ONLY = ("r1-distill", NO_TEMPLATE)  # no answer can be rendered as it would be written


def say(role: str, content: str, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def call(name: str = "weather", **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def talk(
    *messages: Message, tools: list[dict[str, Any]] | None = None, supervised: tuple[int, ...] = ()
) -> Conversation:
    """A conversation in which all turns of the assistant are supervised, or those named."""
    answers = tuple(n for n, message in enumerate(messages) if message["role"] == "assistant")
    return Conversation(list(messages), tools, supervised or answers)


SYSTEM = say("system", "Be brief.")
QUESTION = say("user", "How are you?")
ANSWER = say("assistant", "Fine, 谢谢!")
THOUGHTFUL = say("assistant", "<think>\nThey ask.\n</think>\n\nFine.")
REASONED = say("assistant", "Fine.", reasoning_content="They ask.")
UNTHINKING = say("assistant", "<think>\n\n</think>\n\nFine.")
CALLING = say(
    "assistant",
    "",
    reasoning_content="Look it up.",
    tool_calls=[call(place="北京"), call(place="Bonn")],
)
SUNNY, RAINY = say("tool", "sunny"), say("tool", '{"sky": "rain"}')
PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "of a <place>", "parameters": PARAMETERS},
}


@cache
def judge(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@cache
def encoder(folder: Path, **settings: Any) -> Encoder:
    return Encoder(folder, Tokenize(**{"max_tokens": 100_000, **settings}))


def change_template(tiny_folder: Path, folder: Path, template: str) -> Path:
    """Fill `folder` with the tokenizer of the tiny model and another template."""
    folder.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny_folder / name).read_bytes())
    set_template(folder, template)
    return folder


def set_template(folder: Path, template: str) -> None:
    """Give the model in `folder` another template, or none, and its control tokens."""
    (folder / "chat_template.jinja").write_text(template)
    if not template:
        (folder / "chat_template.jinja").unlink()
    config = read_json(folder / "tokenizer_config.json")
    config.pop("chat_template", None)
    if tokens := {token: special for token, special in R1_TOKENS.items() if token in template}:
        add_tokens(folder, tokens)
        config.update(bos_token="<|endoftext|>", eos_token="<｜end▁of▁sentence｜>")  # noqa: S106 - no passwords
    write_json(folder / "tokenizer_config.json", config)


def add_tokens(folder: Path, tokens: Mapping[str, bool]) -> None:
    """Add control tokens to the tokenizer in `folder`: whether each is special."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for token, is_special in tokens.items():
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=is_special)])
    tokenizer.save(str(folder / "tokenizer.json"))


def is_thinking_on(messages: Sequence[Message], number: int) -> bool:
    """Whether the user, for whom `number` is a step towards an answer, ever gets thinking."""
    start = end = number
    while start and messages[start - 1]["role"] != "user":
        start -= 1
    while end < len(messages) and messages[end]["role"] != "user":
        end += 1
    said = [message["content"] for message in messages[start:end] if message["role"] == "assistant"]
    in_text = [
        text.removeprefix("<think>").split("</think>")[0]
        for text in said
        if text.startswith("<think>")
    ]
    return any(
        thought.strip()
        for thought in [*in_text, *(m.get("reasoning_content", "") for m in messages[start:end])]
    )


def thinking_apart(message: Message) -> Message:
    """`message` as a caller passes it who keeps thinking and answer apart."""
    before, end, after = message["content"].partition("</think>")
    if message["role"] != "assistant" or not end:
        return message
    return {
        **message,
        "reasoning_content": before.removeprefix("<think>").strip(),
        "content": after.lstrip("\n"),
    }


def expected_turns(folder: Path, conversation: Conversation) -> list[Turn | None]:
    """For each supervised turn, what inference gets and should write; None if unknown."""
    found: list[Turn | None] = []
    tokenizer = judge(folder)
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for number in conversation.supervised:
        messages = conversation.messages[: number + 1]
        if tokenizer.chat_template == FAMILIES["qwen3.8"]:
            messages = [thinking_apart(message) for message in messages]
        thinking = is_thinking_on(conversation.messages, number)
        options = {"tools": conversation.tools, "enable_thinking": thinking, "return_dict": False}
        prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, **options)
        if tokenizer.decode(prompt).endswith("<think>\n") and not is_thinking_on(messages[-1:], 0):
            options["enable_thinking"] = False
            prompt = tokenizer.apply_chat_template(
                messages[:-1], add_generation_prompt=True, **options
            )
        full = tokenizer.apply_chat_template(messages, **options)
        written, opens = full[len(prompt) :], tokenizer.decode(prompt).endswith("<think>\n")
        thought = conversation.messages[number].get("reasoning_content", "")
        is_lost = thought.strip() and "reasoning_content" not in tokenizer.chat_template
        if full[: len(prompt)] != prompt and (is_thinking_on(messages[-1:], 0) or not opens):
            # The model's answer begins with a token of its own, which may be a line end.
            before, whole = tokenizer.decode(prompt), tokenizer.decode(full)
            if (
                whole.startswith(before)
                and before.endswith("\n")
                and whole[len(before) :][:1].isspace()
            ):
                written = tokenizer.encode(whole[len(before) :], add_special_tokens=False)
                full = prompt + written
        fits = full[: len(prompt)] == prompt and not is_lost
        found.append(
            (prompt, written[: len(written) - written[::-1].index(end_of_turn)]) if fits else None
        )
    return found


def supervised_turns(sample: Any) -> list[Turn]:
    """The spans that are predicted, each with all that comes before it."""
    assert isinstance(sample, Sample)
    edges = np.flatnonzero(np.diff(sample.supervised, prepend=False, append=False)).tolist()
    tokens = sample.tokens.tolist()
    return [
        (tokens[:start], tokens[start:end])
        for start, end in zip(edges[::2], edges[1::2], strict=True)
    ]


def learned(folder: Path, samples: Sequence[Any]) -> list[list[str]]:
    """The supervised texts of each sample."""
    decode = judge(folder).decode
    return [[decode(written) for _, written in supervised_turns(sample)] for sample in samples]


texts = st.text(max_size=20) | st.sampled_from(
    [
        "\n\na",
        " \r\n",
        "<think>",
        "</think>\n",
        "e\u0301",
        "\u0301a",
        "١٢",
        "</tool_call>",
        "\U0001f1e9\U0001f1ea",
        "ő",
    ]
)
# others are refused as rows
untagged = texts.filter(lambda text: "<think>" not in text and "</think>" not in text)
calls = st.builds(
    lambda place, times: call(place=place, times=times), texts, st.none() | st.integers()
)


@st.composite
def _answers(draw: st.DrawFn, /, **more: Any) -> Message:
    thought, kind = draw(untagged), draw(st.sampled_from(["none", "field", "text"]))
    if kind == "field":
        more["reasoning_content"] = thought
    return say(
        "assistant",
        (f"<think>\n{thought}\n</think>\n\n" if kind == "text" else "") + draw(untagged),
        **more,
    )


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    """With system message or not, tools or not, thinking or not, calls in steps, any Unicode."""
    tools = draw(
        st.none() | st.just([TOOL]) | texts.map(lambda text: [TOOL, {**TOOL, "note": text}])
    )
    messages = draw(st.lists(texts.map(lambda text: say("system", text)), max_size=1))
    for _ in range(draw(st.integers(1, 3))):
        messages.append(say("user", draw(texts)))
        for _ in range(draw(st.integers(0, 2)) if tools else 0):
            made = draw(st.lists(calls, min_size=1, max_size=2))
            messages.append(draw(_answers(tool_calls=made)))
            messages += [say("tool", draw(texts)) for _ in made]
        messages.append(draw(_answers()))
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    chosen = draw(st.sets(st.sampled_from(answers), min_size=1))
    return Conversation(messages, tools, tuple(sorted(chosen)))
