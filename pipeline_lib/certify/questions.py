"""The questions of a certificate: conversations, with the prompts that the folder's template makes.

They cover what servers get wrong: one turn, several turns, tools, and each thinking mode.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline_lib.core.errors import DataError, IntegrityError, Unreadable
from pipeline_lib.core.stage import open_sealed
from pipeline_lib.core.store import Ref, Store, read_manifest
from pipeline_lib.data.chat_template import has_template, no_template
from pipeline_lib.data.conversations import Message
from pipeline_lib.data.encode import default_tools
from pipeline_lib.data.template_worker import render_prompts
from pipeline_lib.evaluate.answers import Context
from pipeline_lib.lineage.trace import store_of
from pipeline_lib.records.evaluation import GENERATIONS_NAME, Generation
from pipeline_lib.records.record import read_records
from pipeline_lib.status.catalog import Catalog

Kind = Literal["one turn", "several turns", "tools"]
KINDS: tuple[Kind, ...] = ("one turn", "several turns", "tools")
BUILT_IN = (
    "What is the capital of France? Answer with one word.",
    "Name three colours, separated by commas.",
    "用一句话解释什么是光合作用。",
    "Write a Python function that returns the sum of a list.",
)
_SWITCH = "enable_thinking"
_FUNCTION = {
    "name": "get_weather",
    "description": "The weather of a city now.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "Name of the city."}},
        "required": ["city"],
    },
}
_WEATHER = {"type": "function", "function": _FUNCTION}


@dataclass(frozen=True)
class ServerQuestion:
    """A conversation that is asked, and the prompt that the folder's template makes of it.

    `variables` are those of the template that a request has to set.
    """

    kind: Kind
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]
    prompt: str

    @property
    def request_messages(self) -> list[dict[str, Any]]:
        """The messages as a request has them: the arguments of calls as JSON text."""
        found = []
        for message in self.messages:
            one = dict(message)
            if calls := one.get("tool_calls"):
                one["tool_calls"] = [_with_text_arguments(call) for call in calls]
            found.append(one)
        return found


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def questions_of(folder: Path, store: Store, prompts: int) -> list[ServerQuestion]:
    """Return the questions for the model in `folder`: `prompts` of one turn in each thinking mode.

    Those are the evaluation's if `store` has it, followed by built-in ones. Tools are left out if
    the template does not render them. Raises DataError if the folder has no chat template that can
    be used.
    """
    if not has_template(folder):
        raise no_template(folder)
    context = Context.trained(folder)
    texts = [*evaluated_prompts(folder, store), *BUILT_IN]
    texts = list(dict.fromkeys(texts))[:prompts]
    system = [{"role": "system", "content": context.system}] if context.system else []
    plain: list[tuple[Kind, list[Message]]] = [
        ("one turn", [*system, {"role": "user", "content": text}]) for text in texts
    ]
    plain.append(("several turns", [*system, *_several_turns(texts[0])]))
    questions = _rendered(folder, context, plain, None)
    tools = default_tools(context.tools) or [_WEATHER]
    calling: list[tuple[Kind, list[Message]]] = [("tools", [*system, *_calling(tools[0])])]
    with suppress(DataError):  # the template takes no tools
        with_tools = _rendered(folder, context, calling, tools)
        name = tools[0]["function"]["name"]
        questions += [question for question in with_tools if name in question.prompt]
    return questions


def evaluated_prompts(folder: Path, store: Store) -> list[str]:
    """Return the questions of the evaluation of the model in `folder`; none if it is not there."""
    found: list[str] = []
    with suppress(IntegrityError, Unreadable, OSError):
        manifest = read_manifest(folder)
        home = store_of(folder, manifest, store)
        for frozen in Catalog(home).experiments(all_of_them=True):
            if frozen.parts.get("merge") == manifest.digest and "evaluate" in frozen.parts:
                sealed = open_sealed(Ref("evaluate", frozen.parts["evaluate"]), home)
                rows = read_records(Generation, sealed.file(GENERATIONS_NAME))
                found = [row.prompt for row in rows]
                break
    return found


def _several_turns(text: str) -> list[Message]:
    return [
        {"role": "user", "content": "Hello! Who are you?"},
        {"role": "assistant", "content": "I am an assistant. What would you like to know?"},
        {"role": "user", "content": text},
    ]


def _calling(tool: dict[str, Any]) -> list[Message]:
    function = {"name": tool["function"]["name"], "arguments": {"city": "Paris"}}
    call = {"id": "call_1", "type": "function", "function": function}
    return [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "18 degrees, sunny"},
    ]


def _rendered(
    folder: Path,
    context: Context,
    asked: Sequence[tuple[Kind, list[Message]]],
    tools: list[dict[str, Any]] | None,
) -> list[ServerQuestion]:
    """Return the questions in both thinking modes, or in one if the template has no switch."""
    kwargs = dict(context.chat_template_kwargs)
    conversations = [messages for _, messages in asked]
    prompts = {}
    for thinking in (False, True):
        prompts[thinking] = render_prompts(
            folder, conversations, kwargs=kwargs, tools=tools, enable_thinking=thinking
        )
    modes = [(prompts[False], kwargs)]
    if prompts[False] != prompts[True]:
        modes = [(prompts[mode], {_SWITCH: mode, **kwargs}) for mode in (False, True)]
    found = []
    for texts, variables in modes:
        for (kind, messages), text in zip(asked, texts, strict=True):
            found.append(ServerQuestion(kind, messages, tools, variables, text))
    return found
