import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from pipeline_lib.core.errors import DataError
from pipeline_lib.data.chat_template import ChatTemplate, special_tokens

SYSTEM = {"role": "system", "content": "Be brief.\n  <b>&\"'"}
USER = {"role": "user", "content": "héllo 你好 <b>&amp;</b> {{ 7 * 7 }} {% x %}\n\n"}
ANSWER = {"role": "assistant", "content": "\n hi \U0001f600 "}
THINKING = {"role": "assistant", "content": "<think>\nfirst\n</think>\n\nthen"}
REASONING = {"role": "assistant", "content": "then", "reasoning_content": "first"}
CALLING = {
    "role": "assistant",
    "content": "Let me see.",
    "reasoning_content": None,
    "tool_calls": [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "arguments": {"place": "北京 <b>\n", "days": [1, None]},
            },
        },
        {"type": "function", "function": {"name": "time", "arguments": {}}},
    ],
}
RESULT = {"role": "tool", "content": '{"sky": "clear"}'}
PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}}
TOOL: dict[Any, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "für <b>", "parameters": PARAMETERS},
}

CONVERSATIONS = [
    [SYSTEM, USER],
    [SYSTEM, USER, ANSWER, USER],
    [USER, THINKING, USER, ANSWER],
    [USER, ANSWER, USER, REASONING],
    [SYSTEM, USER, CALLING, RESULT, RESULT, REASONING, USER],
    [USER, CALLING, RESULT, THINKING],
]


@cache
def load_template(folder: Path) -> ChatTemplate:
    return ChatTemplate.load(folder)


@cache
def load_reference(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize(
    "tools", [None, [], [TOOL, TOOL]], ids=["tools not given", "no tools", "two tools"]
)
def test_it_renders_what_transformers_renders(
    folder: Path,
    messages: list[dict[str, Any]],
    variables: dict[str, bool],
    add_generation_prompt: bool,
    tools: list[dict[str, Any]] | None,
) -> None:
    reference = load_reference(folder).apply_chat_template(
        messages,
        tools=tools,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        **variables,
    )
    assert (
        load_template(folder).render(messages, tools, add_generation_prompt, **variables)
        == reference
    )


# The dialect of transformers: what templates in the wild use, one by one.
DIALECT = [
    "{% for m in messages %}\n  {% if m.role == 'user' %}\n[{{ m.content }}]\n  {% endif %}\n{% "
    "endfor %}\n",
    "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ {'b': 1, 'a': '<é>'} | "
    "tojson(sort_keys=true) }}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% "
    "endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}",
    "{% generation %}{% set x = 1 %}{% endgeneration %}{{ x is defined }}",
    "{% set ns = namespace(a=1) %}{% for m in messages %}{% set ns.a = ns.a + 1 %}{% endfor %}{{ "
    "ns.a }}",
    "{{ dict(a=1, b=2) }}{{ dict.fromkeys(['x'], 0) }}",
    "{% if tools %}t{% else %}no tools{% endif %}{{ documents is none }}",
    "{{ eos_token }}|{{ pad_token }}|{{ bos_token is defined }}",
    "{%- macro f(x) %}{{ x | upper }}{% endmacro %}{{ f(messages[0].content) }}{{ messages[::-1] | "
    "length }}",
    "{% for m in messages %}{{ m.thinking }}{{ m.reasoning_content is none }}{% endfor %}",
    "{% for m in messages %}{{ m.content.split(' ', maxsplit=1) }}{% endfor %}",
    "{{ messages[0].items() | list }}{{ messages[0].nothing is defined }}{{ "
    "messages[0].content.nothing is defined }}",
    "{% for m in messages %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{% "
    "endfor %}",
    "{% for m in messages %}{{ loop.length }}{{ loop.cycle('a', 'b') }}{% endfor %}",
    "{% for m in messages %}{{ loop.nothing }}{{ (loop.previtem or m).role }}{% endfor %}",
    "{% set n = namespace(b=true, t='x', d={'k': 1}) %}{{ n.b }}{{ n.t }}{{ n.d.k }}{{ n.missing "
    "is defined }}",
    "{{ 'a,b'.strip('a').upper().startswith(',') }}{{ (tools or [1])[0].type }}",
    "{{ '%s-%d' | format('a', 1) }}{{ '{}'.format('x') }}{{ 'abc'.endswith(('b', 'c')) }}{{ ' x "
    "'.lstrip().rstrip() }}",
]


@pytest.mark.parametrize("source", DIALECT)
def test_the_dialect_is_that_of_transformers(source: str) -> None:
    messages = [USER, ANSWER, REASONING]
    tokens: dict[str, Any] = {"eos_token": "<e>", "pad_token": "<p>"}
    every: tuple[Any, ...] = (None, [TOOL])
    for tools in every:
        rendered: Any = render_jinja_template(
            [messages], tools=tools, chat_template=source, **tokens
        )
        assert ChatTemplate(source, tokens, "x").render(messages, tools) == rendered[0][0]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "{{ raise_exception('roles must alternate') }}",
            "fails on messages of user: roles must alternate",
        ),
        ("{{ messages[0].nothing.more }}", "fails on messages of user"),
        ("{{ messages[0].content + 1 }}", "fails on messages of user"),
        ("{{ 1 // 0 }}", "fails on messages of user"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails on messages of user"),
    ],
)
def test_a_template_that_fails_is_a_data_error(source: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ChatTemplate(source, {}, "chat_template.jinja").render([USER])


@pytest.mark.parametrize("source", ["{% if %}", "{{ ", "{% unknown %}", "{% for m in messages %}"])
def test_a_text_that_is_no_template_is_a_data_error(source: str) -> None:
    with pytest.raises(DataError, match=r"chat_template\.jinja: not a chat template"):
        ChatTemplate(source, {}, "chat_template.jinja")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ ''.format.__globals__['os'] }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ ''.format_map.__self__.upper() }}",
        "{{ ''.split.__class__.__mro__ }}",
        "{{ ''.split.__self__.__class__.__mro__ }}",
        "{% set n = namespace(f=''.format) %}{{ n.f('{0.__class__.__mro__}', 1) }}{{ "
        "n.__class__.__mro__ }}",
        "{% for m in messages %}{{ loop.__class__.__mro__ }}{% endfor %}",
        "{{ messages[0].pop('role') }}",
        "{{ range(999999999) | list }}",
        "{{ namespace(_x=1) }}",
        "{{ dict.__class__.__mro__ }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(DataError):
        ChatTemplate(source, {}, "x").render([USER])


def write_config(folder: Path, **config: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "value",
    [
        "old {{ eos_token }}",
        [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "old <e>"}],
    ],
)
def test_older_models_keep_the_template_in_their_config(tmp_path: Path, value: Any) -> None:
    write_config(tmp_path, chat_template=value, eos_token={"content": "<e>", "lstrip": False})
    assert ChatTemplate.load(tmp_path).render([USER]) == "old <e>"
    (tmp_path / "chat_template.jinja").write_text("new")
    assert ChatTemplate.load(tmp_path).render([USER]) == "new"


def test_some_models_have_another_template_for_tools(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | length }}"},
    ]
    write_config(tmp_path, chat_template=named)
    template = ChatTemplate.load(tmp_path)
    assert (template.render([USER]), template.render([USER], [TOOL])) == ("plain", "1")
    write_config(tmp_path, chat_template=named[:1])
    assert ChatTemplate.load(tmp_path).render([USER], [TOOL]) == "plain"


def test_a_model_without_a_template_is_a_data_error(tmp_path: Path) -> None:
    write_config(tmp_path, eos_token="<e>")
    with pytest.raises(DataError, match="has no chat template"):
        ChatTemplate.load(tmp_path)


def test_a_damaged_tokenizer_config_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json: cannot read"):
        ChatTemplate.load(tmp_path)


def test_special_tokens_are_texts() -> None:
    config = {
        "eos_token": {"content": "<e>"},
        "pad_token": "<p>",
        "bos_token": None,
        "unk_token": 3,
    }
    assert special_tokens(config) == {"eos_token": "<e>", "pad_token": "<p>"}


def test_a_template_that_writes_the_date_is_refused() -> None:
    """The store keeps what was made under the digest of its recipe, and the day is in no recipe."""
    template = ChatTemplate("{{ strftime_now('%d %b') }}{{ messages[0].content }}", {}, "m")
    with pytest.raises(DataError, match="writes today's date.*put a fixed date into the template"):
        template.render([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception }}",
        "{{ messages[0].content.upper }}",
        "{{ namespace(a=1) }}",
        "{{ range }}",
        "{{ cycler }}",
    ],
)
def test_a_template_that_writes_what_is_no_text_is_refused(template: str) -> None:
    """Its text would hold an address of this very process."""
    with pytest.raises(DataError, match="it writes a .*, which is not text"):
        ChatTemplate(template, {}, "m").render([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ '\\ud800' }}", "fails on messages of user: .*surrogate"),
        (3000 * "{{ (" + 3000 * ") }}", "not a chat template"),
        (40 * "{% for a in b %}" + 40 * "{% endfor %}", "not a chat template"),
        ("{% set number = 9 ** 99999 %}", "not a chat template"),
    ],
)
def test_a_template_that_makes_no_text_is_refused(template: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        ChatTemplate(template, {}, "m").render([{"role": "user", "content": "a"}])


def test_a_template_in_another_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes("{{ messages }}".encode("utf-16"))
    with pytest.raises(DataError, match="cannot read the chat template"):
        ChatTemplate.load(tmp_path)


def test_what_a_template_says_of_itself_moves_no_cursor() -> None:
    with pytest.raises(DataError) as caught:
        ChatTemplate("{{ raise_exception('no\\nway \\x1b[31mred') }}", {}, "m").render([])
    assert "no way [31mred" in str(caught.value)
