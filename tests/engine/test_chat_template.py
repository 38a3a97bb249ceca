"""Chat templates render as transformers renders them, and fail as ChatTemplateError."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import jinja2
import pytest
import tokenizers
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from engine.chat_template import ChatTemplate, ChatTemplateError
from engine.tokenizer import tokenizer_from_gguf
from models.default import default_model_path

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

# Each in the style of a family: what its template relies on, shortened.
TEMPLATES = {
    "chatml": tokenizer_from_gguf(default_model_path()).chat_template,
    "llama3": """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "qwen": """{%- macro show(tool) %}{{ tool | tojson }}{% endmacro -%}
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" }}{{ show(tool) }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{% set content = message.content %}{% else %}{% set content = '' %}{% endif %}
    {%- if message.tool_calls %}
        {{- '<|im_start|>' + message.role + content }}
        {%- for call in message.tool_calls %}
            {%- if call.function %}{% set call = call.function %}{% endif %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}{{ call.arguments | tojson }}{{ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content.split('</think>')[-1].lstrip('\\n') }}
    {%- if loop.index0 == ns.last %}{{ '<!-- last -->' }}{% endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
""",
    "gemma": """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '
' + message['content'] | trim + '<end_of_turn>
' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model
'}}{% endif %}""",
    "mistral": """{{ bos_token }}
{% for message in messages %}
    {% if message['role'] == 'user' %}
        {{ '[INST] ' + message['content'] + ' [/INST]' }}
    {% elif message['role'] == 'assistant' %}
        {% generation %}
        {{ message['content'] + eos_token }}
        {% endgeneration %}
    {% else %}
        {% break %}
    {% endif %}
{% endfor %}
""",
}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "question": [{"role": "user", "content": "  What is 1 < 2 & 'so'?  "}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    "turns": [
        {"role": "user", "content": "Hé 你好 👍"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"},
        {"role": "user", "content": "<b>bold</b>\n{{ not_jinja }} {% raw %}"},
    ],
    "tools": [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "n": 1}}}
            ],
        },
        {"role": "tool", "content": "sunny"},
    ],
    "answered": [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "one, two, "}],
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"b": 1, "a": ["<é>"]}}}]


def reference(template: str, messages: list[dict[str, Any]], **settings: Any) -> str:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"<s>": 0, "</s>": 1}, merges=[]))
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **TOKENS)
    return fast.apply_chat_template(messages, tokenize=False, **settings)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize(
    "settings",
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False, "tools": TOOLS},
        {"add_generation_prompt": True, "enable_thinking": False, "date_string": "1 Jan 2030"},
        {"add_generation_prompt": False, "continue_final_message": True},
    ],
    ids=["plain", "tools", "variables", "continued"],
)
def test_renders_as_transformers_does(family: str, conversation: str, settings: dict[str, Any]) -> None:
    template, messages = TEMPLATES[family], CONVERSATIONS[conversation]
    ours = ChatTemplate(template, TOKENS)
    try:
        expected = reference(template, messages, **settings)
    except (jinja2.TemplateError, TypeError, ValueError):
        assert conversation != "question" or "continue_final_message" in settings
        with pytest.raises(ChatTemplateError):
            ours.render(messages, **settings)
        return
    assert ours.render(messages, **settings) == expected


def test_a_refusal_carries_the_template_s_words() -> None:
    with pytest.raises(ChatTemplateError, match="System role not supported"):
        ChatTemplate(TEMPLATES["gemma"], TOKENS).render(CONVERSATIONS["system"])


def test_content_parts_reach_the_template() -> None:
    template = ChatTemplate(
        "{% for part in messages[-1].content %}[{{ part.type }}:{{ part.text }}]{% endfor %}"
    )
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]}]
    assert template.render(messages) == "[text:a][text:b ]"
    open_ended = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert open_ended == "[text:a][text:b "


def test_the_date_is_today_s() -> None:
    before = datetime.now().strftime("%Y-%m-%d")
    rendered = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render([])
    assert rendered in (before, datetime.now().strftime("%Y-%m-%d"))


def test_the_caller_s_messages_are_left_as_they_were() -> None:
    messages = [{"role": "assistant", "content": "a", "tool_calls": None}]
    ChatTemplate("{{ messages[0].content }}").render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert messages == [{"role": "assistant", "content": "a", "tool_calls": None}]


def test_variables_of_a_request_cannot_replace_the_conversation() -> None:
    template = ChatTemplate("{{ messages[0].content }}", TOKENS)
    assert template.render([{"role": "user", "content": "mine"}], documents=[], eos_token="x") == "mine"
    assert ChatTemplate("{{ bos_token }}", TOKENS).render([], bos_token="[B]") == "[B]"


@pytest.mark.parametrize(
    "source",
    ["{% if %}", "{{ messages", "{% generation %}unclosed", "{% unknown_tag %}"],
)
def test_a_template_that_does_not_compile(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="cannot be compiled"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].missing.deeper }}",
        "{{ 'a' + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ range(10 ** 9) | list }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages[0] | tojson(indent='x', separators=3) }}",
        "{{ undefined_function() }}",
    ],
)
def test_a_template_that_fails_or_reaches_out_of_the_sandbox(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="failed"):
        ChatTemplate(source).render([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        ("{{ messages[0].content }}", []),
        ("{{ messages[0].content }}", [{"role": "assistant", "content": None}]),
        ("{{ messages[0].content }}", [{"role": "assistant", "content": []}]),
        ("nothing of it", [{"role": "assistant", "content": "a"}]),
    ],
)
def test_a_final_message_that_cannot_be_continued(source: str, messages: list[dict[str, Any]]) -> None:
    with pytest.raises(ChatTemplateError, match="continue_final_message"):
        ChatTemplate(source).render(messages, add_generation_prompt=False, continue_final_message=True)


def test_continuing_and_prompting_exclude_each_other() -> None:
    with pytest.raises(ChatTemplateError, match="exclude each other"):
        ChatTemplate("x").render(CONVERSATIONS["answered"], continue_final_message=True)


@pytest.mark.parametrize(
    ("source", "reads"),
    [
        ("{% for tool in tools %}{{ tool }}{% endfor %}", True),
        ("{% if messages[-1].role == 'user' and tools %}{{ tools | tojson }}{% endif %}", True),
        ("{% if tools is not defined %}{% set tools = none %}{% endif %}", True),
        ("{% macro show() %}{{ tools }}{% endmacro %}{{ show() }}", True),
        ("{% for m in messages %}{{ m.tools }}{{ m['tools'] }}tools{% endfor %}", False),
    ],
)
def test_a_template_is_known_by_what_it_reads(source: str, reads: bool) -> None:
    assert ("tools" in ChatTemplate(source).free_variables) == reads
