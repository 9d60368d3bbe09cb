"""Keys by other names: on public data sets' columns, which are refused and which only counted."""

from typing import Any

import pytest

from pipeline_lib.data.conversations import BadRow
from pipeline_lib.data.keys import KeyCounts, PreferenceData
from pipeline_lib.data.layouts import Layout, detect, to_content

ALPACA = {"instruction": "q", "output": "a"}
USER = {"role": "user", "content": "q"}
ASSISTANT = {"role": "assistant", "content": "a"}
MESSAGES = {"messages": [USER, ASSISTANT]}
SHAREGPT = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
SCHEMAS = '[{"name": "f", "parameters": {"type": "object", "properties": {}}}]'

OF_SYSTEM = (
    *(
        "systemPrompt",
        "system-prompt",
        "SystemPrompt",
        "SYSTEM PROMPT",
        "systemprompt",
        "system_prompts",
    ),
    *(
        "systemMessage",
        "system_msg",
        "system_instruction",
        "systemInstruction",
        "system_instructions",
    ),
    *(
        "meta_instruction",
        "metaPrompt",
        "sys",
        "sys_prompt",
        "Sys",
        "developer_message",
        "custom_instructions",
    ),
    *("default_system_prompt", "system_prompt_text", "systemContent", "系统提示词"),
)
OF_THINKING = (
    *(
        "CoT",
        "COT",
        "cot_text",
        "Complex_CoT",
        "chain_of_thought",
        "chainOfThought",
        "Chain-of-Thought",
    ),
    *(
        "reasoning_trace",
        "reasoningTrace",
        "reasoning_traces",
        "reasoning_steps",
        "thinking_trajectory",
    ),
    *(
        "think_content",
        "thinkContent",
        "thoughts",
        "thought_process",
        "thinking_process",
        "inner_monologue",
    ),
    *(
        "deepseek_thinking_trajectory",
        "deepseek_reasoning",
        "thinking_blocks",
        "scratchpad",
        "reasoningContent",
    ),
    *("rationales", "Reasoning_Content", "思考过程"),
)
OF_TOOLS = (
    *(
        "Tools",
        "available_tools",
        "availableTools",
        "tool_list",
        "tool_schemas",
        "tools_json",
        "toolDefinitions",
    ),
    *("function_descriptions", "functionDeclarations", "function_list", "toolset"),
)


@pytest.mark.parametrize("row", [ALPACA, MESSAGES, SHAREGPT, {"prompt": "q", "completion": "a"}])
@pytest.mark.parametrize(
    ("key", "value", "ours"),
    [
        *[(key, "be terse; because", "system") for key in OF_SYSTEM],
        *[(key, "be terse; because", "reasoning_content") for key in OF_THINKING],
        *[(key, SCHEMAS, "tools") for key in OF_TOOLS],
        ("thinking_blocks", [{"type": "thinking", "thinking": "because"}], "reasoning_content"),
        ("available_tools", [{"type": "function", "function": {"name": "f"}}], "tools"),
    ],
)
def test_what_is_learned_is_refused_in_every_spelling(
    row: dict[str, Any], key: str, value: Any, ours: str
) -> None:
    with pytest.raises(BadRow, match=f"^bad_value: {key}: not read") as caught:
        to_content({**row, key: value}, Layout(detect(row, {})))
    is_in_a_turn = ours == "reasoning_content" and ("messages" in row or "conversations" in row)
    can_be_named = not is_in_a_turn and (isinstance(value, str) or ours == "tools")
    assert (f"{{{ours}: {key}}}" if can_be_named else ours) in caught.value.detail
    ignored = Layout(detect(row, {}), {key: "ignore"})
    assert to_content({**row, key: value}, ignored) == to_content(row, Layout(detect(row, {})))


@pytest.mark.parametrize("key", [key for key in OF_THINKING if "思" not in key])
@pytest.mark.parametrize("form", ["messages", "sharegpt"])
def test_thinking_is_refused_in_every_spelling_in_a_turn(key: str, form: str) -> None:
    if form == "messages":
        row: dict[str, Any] = {"messages": [USER, {**ASSISTANT, key: "because"}]}
    else:
        row = {
            "conversations": [
                SHAREGPT["conversations"][0],
                {"from": "gpt", "value": "a", key: "because"},
            ]
        }
    with pytest.raises(BadRow, match=rf"\[1\]\.{key}: not read.*{{reasoning_content: {key}}}"):
        to_content(row, Layout(detect(row, {})))


@pytest.mark.parametrize(
    ("turn", "key"),
    [
        ({**ASSISTANT, "toolCalls": [{"name": "f"}]}, "toolCalls"),
        ({**ASSISTANT, "functionCall": {"name": "f"}}, "functionCall"),
        ({**ASSISTANT, "systemPrompt": "be terse"}, "systemPrompt"),
        ({**ASSISTANT, "Loss": False}, "Loss"),
        ({**ASSISTANT, "lossMask": 0}, "lossMask"),
        ({**ASSISTANT, "availableTools": SCHEMAS}, "availableTools"),
    ],
)
def test_other_keys_of_turns_are_refused_in_every_spelling(turn: dict[str, Any], key: str) -> None:
    with pytest.raises(BadRow, match=rf"messages\[1\]\.{key}: not read"):
        to_content({"messages": [USER, turn]}, Layout("messages"))


# Columns of public data sets beside those that are read, with values of their kinds.
PUBLIC: dict[str, dict[str, Any]] = {
    "HuggingFaceH4/no_robots": {"prompt_id": "7c3a", "category": "Open QA"},
    "allenai/tulu-3-sft-mixture": {"id": "personas_1", "source": "ai2-adapt-dev/personahub"},
    "open-r1/OpenR1-Math-220k": {
        **{
            "problem": "q",
            "solution": "s",
            "answer": "4",
            "problem_type": "Algebra",
            "question_type": "MCQ",
        },
        **{
            "uuid": "3c-1",
            "is_reasoning_complete": [True, True],
            "finish_reasons": ["stop", "length"],
        },
        **{
            "correctness_math_verify": [True, False],
            "correctness_count": 1,
            "generations": ["g", "h"],
        },
    },
    "simplescaling/s1K-1.1": {
        **{
            "cot_type": "math",
            "source_type": "qq8933/AIME",
            "metadata": "{'Year': 2001}",
            "cot": None,
        },
        **{"gemini_grade": "Yes", "gemini_grade_reason": "equal", "deepseek_attempt": "4"},
    },
    "Magpie-Align": {
        **{"gen_input_configs": {"temperature": 1.0}, "intent": "to learn", "difficulty": "easy"},
        **{
            "quality_explanation": "clear",
            "instruct_reward": -2.3,
            "reward_model": "sfairXC/FsfairX",
        },
        **{
            "instruction_length": 50,
            "response_length": 900,
            "language": "EN",
            "min_similar_uuid": None,
        },
    },
    "Agent-Ark/Toucan-1.5M": {
        **{"subset": "single-turn", "target_tools": "weather::get, weather::list", "question": "q"},
        **{"question_quality_assessment": '{"tool_selection_difficulty": {"reasoning": "none"}}'},
    },
    "nvidia/Llama-Nemotron": {
        "license": "cc-by-4.0",
        "generator": "DeepSeek-R1",
        "used_in_training": "yes",
    },
    "nvidia/OpenMathReasoning": {
        "inference_mode": "cot",
        "pass_rate_72b_tir": "0.9",
        "generation_model": "R1",
    },
    "lmsys/lmsys-chat-1m": {
        "conversation_id": "33",
        "model": "vicuna",
        "turn": 1,
        "redacted": False,
    },
    "tool logs": {
        **{
            "system_id": "sys-01",
            "system_fingerprint": "fp_44",
            "operating_system": "linux",
            "system_name": "alpha",
        },
        **{
            "prompt_tokens": 12,
            "completion_tokens": 3,
            "reasoning_tokens": 99,
            "tools_count": 2,
            "num_tools": 2,
        },
        **{
            "used_tools": ["search", "calculator"],
            "tool_name": "search",
            "thinking_time_s": 3.2,
            "has_cot": "yes",
        },
        **{
            "reasoning_effort": "high",
            "reasoning_model": "o3",
            "thinking_budget": 1024,
            "thinking": True,
        },
        **{
            "reasoning_steps": 4,
            "thought_signature": "AbC=",
            "enable_reasoning": "always",
            "chosen_score": 0.0,
        },
        **{
            "tool_results": [{"name": "f", "result": "1"}],
            "ecosystem": "npm",
            "message_id": "m1",
            "reward": 0.7,
        },
    },
}


@pytest.mark.parametrize("name", PUBLIC)
def test_ordinary_columns_of_public_data_sets_are_counted(name: str) -> None:
    columns = PUBLIC[name]
    for row in (MESSAGES, ALPACA):
        counts = KeyCounts()
        to_content({**row, **columns}, Layout(detect(row, {})), counts)
        assert set(counts.unread) == {key for key, value in columns.items() if value is not None}
    turn = {
        **ASSISTANT,
        "id": "m1",
        "model": "o3",
        "name": "ann",
        "usage": {"reasoning_tokens": 9},
        "reward": 0.0,
    }
    counts = KeyCounts()
    to_content({"messages": [USER, turn]}, Layout("messages"), counts)
    assert set(counts.unread) == {
        f"messages[].{key}" for key in ("id", "model", "name", "usage", "reward")
    }


@pytest.mark.parametrize(
    ("row", "key", "ours"),
    [
        (
            {"question": "q", "response": "a", "system_prompt": "s", "id": "f"},
            "system_prompt",
            "system",
        ),  # OpenOrca
        (
            {"Question": "q", "Response": "a", "Complex_CoT": "c"},
            "Complex_CoT",
            "reasoning_content",
        ),  # medical-o1
        (
            {"question": "q", "answer": "a", "deepseek_thinking_trajectory": "c"},
            "deepseek_thinking_trajectory",
            "",
        ),
        ({"question": "q", "answer": "a", "available_tools": SCHEMAS}, "available_tools", "tools"),
    ],
)
def test_columns_of_public_data_sets_that_are_to_be_read_are_named(
    row: dict[str, Any], key: str, ours: str
) -> None:
    question, answer, *_ = row
    layout = Layout("alpaca", {"instruction": question, "output": answer})
    with pytest.raises(BadRow, match=f"{{{ours or 'reasoning_content'}: {key}}}"):
        to_content(row, layout)
    assert to_content(row, Layout("alpaca", {**layout.columns, ours or "reasoning_content": key}))


@pytest.mark.parametrize(
    "outcome",
    [
        *[{"reward": value} for value in (0, 0.0, False, "0.0", -1)],
        *(
            {"resolved": 0},
            {"success": False},
            {"Success": "false"},
            {"is_correct": False},
            {"passed": False},
        ),
    ],
)
def test_failed_trajectories_are_refused_as_bad_examples(outcome: dict[str, Any]) -> None:
    with pytest.raises(PreferenceData, match=f"by its {next(iter(outcome))}:"):
        to_content({**MESSAGES, **outcome}, Layout("messages"))
    ignored = Layout("messages", dict.fromkeys(outcome, "ignore"))
    assert to_content({**MESSAGES, **outcome}, ignored) == to_content(MESSAGES, Layout("messages"))


@pytest.mark.parametrize(
    "outcome", [{"reward": 1.0}, {"reward": -0.4}, {"correct": 0}, {"resolved": True}]
)
def test_other_outcomes_are_counted(outcome: dict[str, Any]) -> None:
    counts = KeyCounts()
    to_content({**MESSAGES, **outcome}, Layout("messages"), counts)
    assert set(counts.unread) == set(outcome)


def test_keys_are_counted_at_every_depth() -> None:
    part = {"type": "text", "text": "q", "cache_control": {"type": "ephemeral"}, "annotations": []}
    call = {
        "id": "c1",
        "index": 0,
        "type": "function",
        "status": "done",
        "function": {"name": "f", "strict": True},
    }
    plain = {"name": "g", "arguments": "{}", "id": "c2", "latency_s": 2}
    row = {
        "messages": [
            {"role": "user", "content": [part, part]},
            {**ASSISTANT, "tool_calls": [call, plain]},
            {"role": "tool", "content": "1", "tool_call_id": "c1"},
            ASSISTANT,
        ]
    }
    counts = KeyCounts()
    to_content(row, Layout("messages"), counts)
    assert counts.unread == {
        "messages[].content[].cache_control": 2,
        "messages[].tool_calls[].status": 1,
        "messages[].tool_calls[].function.strict": 1,
        "messages[].tool_calls[].latency_s": 1,
    }
    counts = KeyCounts()
    calls = '[{"name": "f", "arguments": {}, "cost": 1}]'
    turns = [{"from": "human", "value": "q"}, {"from": "function_call", "value": calls}]
    to_content({"conversations": turns}, Layout("sharegpt", {"latency": "ignore"}), counts)
    assert counts.unread == {"conversations[].value[].cost": 1}
    to_content({"conversations": turns}, Layout("sharegpt", {"cost": "ignore"}), counts)
    assert counts.unread == {"conversations[].value[].cost": 1}


def test_thinking_in_a_call_is_refused() -> None:
    call = {"function": {"name": "f", "arguments": {}}, "thought": "because"}
    with pytest.raises(
        BadRow, match=r"messages\[1\]\.tool_calls\[0\]\.thought: not read here: write it as reas"
    ):
        to_content({"messages": [USER, {**ASSISTANT, "tool_calls": [call]}]}, Layout("messages"))
