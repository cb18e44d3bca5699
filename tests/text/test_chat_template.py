"""Chat templates give the prompts of transformers, and can do nothing else."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from specops.text.chat_template import ChatTemplate, ChatTemplateError, system_of, with_system
from specops.text.tools.formats import Tool
from tests.text.tools import scripts

MESSAGES = [
    {"role": "system", "content": "Be brief & <kind>."},
    {"role": "user", "content": "Größe?\nZwei Zeilen"},
    {"role": "assistant", "content": "42"},
    {"role": "user", "content": "  why \"that\"? "},
]  # fmt: skip
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
# As published templates: loops, namespaces, filters, white space, special tokens, refusals.
TEMPLATES = {
    "chatml": """{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}""",
    "zephyr": """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>
'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
    "llama": """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}
{% set system = messages[0]['content'] %}{% else %}{% set rest = messages %}{% endif %}
{% for message in rest %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}{% endif %}
{% if loop.index0 == 0 and system %}{{ '<<SYS>>' + system + '<</SYS>>' }}{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}
{% else %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}""",
    "namespace": """{% set ns = namespace(count=0, seen=dict(a=1)) %}{% for m in messages %}
{% if m.role == 'assistant' %}{% continue %}{% endif %}
{% set ns.count = ns.count + 1 %}{% endfor %}
{{ ns.count }}{{ ns.seen | tojson }}{{ messages | tojson(indent=2) }}""",
    "generation": """{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}
{% endgeneration %}{{ eos_token }}{% endfor %}""",
    "date": """{{ strftime_now('%Y') }} {{ tools is none }} {{ unknown is defined }}
{{ messages[0].content }}""",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_transformers(name: str) -> None:
    (theirs,), _ = render_jinja_template(
        [MESSAGES], chat_template=TEMPLATES[name], add_generation_prompt=True, **TOKENS
    )
    assert ChatTemplate(TEMPLATES[name], TOKENS).render(MESSAGES) == theirs


@pytest.mark.parametrize("name", ["chatml", "zephyr", "llama", "generation"])
@pytest.mark.parametrize("begun", ["The answer", "42", " so: \n"])
def test_a_begun_answer_is_continued_as_in_transformers(name: str, begun: str) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": begun}]
    (theirs,), _ = render_jinja_template(
        [messages], chat_template=TEMPLATES[name], continue_final_message=True, **TOKENS
    )
    assert ChatTemplate(TEMPLATES[name], TOKENS).render(messages) == theirs


def test_a_template_that_changes_a_begun_answer_is_refused() -> None:
    messages = [MESSAGES[1], {"role": "assistant", "content": "begun"}]
    with pytest.raises(ChatTemplateError, match="changes the answer"):
        ChatTemplate("{{ messages[-1].content | upper }}", {}).render(messages)


@pytest.mark.parametrize("last", [{"content": " "}, {"content": "", "tool_calls": []}])
def test_an_empty_answer_is_not_a_begun_one(last: dict[str, Any]) -> None:
    messages = [*MESSAGES, {"role": "assistant", **last}]
    text = ChatTemplate(TEMPLATES["chatml"], TOKENS).render(messages)
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_today_is_today() -> None:
    before = datetime.now().year
    written = int(ChatTemplate(TEMPLATES["date"], {}).render(MESSAGES).split()[0])
    assert before <= written <= datetime.now().year


def test_a_templates_own_refusal_is_reported() -> None:
    wrong = [{"role": "assistant", "content": "me first"}]
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        ChatTemplate(TEMPLATES["llama"], TOKENS).render(wrong)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ namespace(__class__=1) }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ dict.__mro__ }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content.missing.deeper }}",
        "{% include 'other' %}",
    ],
)
def test_a_template_cannot_reach_out_of_its_sandbox(source: str) -> None:
    try:
        text = ChatTemplate(source, {}).render(MESSAGES)
    except ChatTemplateError:
        return
    assert text == ""  # Jinja's undefined value


def write(folder: Path, config: Any = None, file: str | None = None) -> Path:
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if file is not None:
        (folder / "chat_template.jinja").write_text(file)
    return folder


def test_a_folder_without_a_template_has_none(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    assert ChatTemplate.load(write(tmp_path, {"bos_token": "<s>"})) is None


def test_a_template_is_in_its_file_or_in_the_configuration(tmp_path: Path) -> None:
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}
    config = {"chat_template": "config {{ bos_token }}{{ eos_token }}", **tokens}
    loaded = ChatTemplate.load(write(tmp_path, config))
    assert loaded.render(MESSAGES[1:]) == "config <s></s>"
    loaded = ChatTemplate.load(write(tmp_path, config, "file {{ eos_token }}"))
    assert loaded.render(MESSAGES[1:]) == "file </s>"


def test_a_template_may_be_in_the_file_of_a_processor_or_beside_the_weights(
    tmp_path: Path,
) -> None:
    write(tmp_path, TOKENS)
    beside = tmp_path / "beside"
    beside.mkdir()
    write(beside, file="beside {{ eos_token }}")
    assert ChatTemplate.load(tmp_path, beside).render(MESSAGES[1:]) == "beside </s>"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "json {{ bos_token }}"}')
    assert ChatTemplate.load(tmp_path, beside).render(MESSAGES[1:]) == "json <s>"


def test_a_role_of_a_client_reaches_a_template_that_shows_it() -> None:
    asked = [*MESSAGES[:1], {"role": "critic", "content": "Too long."}, *MESSAGES[1:2]]
    assert "<|im_start|>critic\nToo long.<|im_end|>" in ChatTemplate(
        TEMPLATES["chatml"], TOKENS
    ).render(asked)
    with pytest.raises(ChatTemplateError, match="does not show the role 'critic'"):
        ChatTemplate(TEMPLATES["zephyr"], TOKENS).render(asked)


FUNCTIONS = """{% for m in messages %}
[{{ m.role }}]{% if loop.first %}{{ functions }} Today is {{ datetime }}.{% endif %}{{ m.content }}
{% if m.tool_calls %} functools[{% for c in m.tool_calls %}
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
{%- if not loop.last %}, {% endif %}{% endfor %}]{% endif %}{% endfor %}[assistant]"""


def test_a_template_may_want_its_tools_as_a_text_called_functions() -> None:
    """As Firefunction's does."""
    template = ChatTemplate(FUNCTIONS, {})
    tool = Tool("f", "does it", {"type": "object", "properties": {}})
    shown = template.render(MESSAGES[1:2], [tool])
    assert json.loads(shown[shown.index("[user]") + 6 : shown.index(" Today is")]) == [
        tool.for_template()
    ]
    assert "[user] Today is" in template.render(MESSAGES[1:2])


def test_of_several_templates_tools_have_their_own(tmp_path: Path) -> None:
    tools = scripts.TEMPLATES["hermes"]
    several = [{"name": "tool_use", "template": tools}, {"name": "default", "template": "plain"}]
    loaded = ChatTemplate.load(write(tmp_path, {"chat_template": several}))
    assert loaded.render(MESSAGES[1:]) == "plain"
    assert '"name": "f"' in loaded.render(MESSAGES[1:], [Tool("f")])
    assert loaded.calls == scripts.BY_NAME["hermes"]


def test_a_template_for_tools_may_be_a_file_of_its_own(tmp_path: Path) -> None:
    """As transformers 5 writes named templates."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel()))
    tokenizer.chat_template = {"default": "plain", "tool_use": scripts.TEMPLATES["hermes"]}
    tokenizer.save_pretrained(tmp_path)
    loaded = ChatTemplate.load(tmp_path)
    assert loaded.render(MESSAGES[1:]) == "plain"
    assert '"name": "f"' in loaded.render(MESSAGES[1:], [Tool("f")])
    (tmp_path / "chat_template.jinja").unlink()
    assert '"name": "f"' in ChatTemplate.load(tmp_path).render(MESSAGES[1:], [Tool("f")])


def test_the_demo_models_template_puts_messages_on_lines() -> None:
    folder = Path(__file__).parents[2] / "api/models/demo/target/onnx/int8-128"
    loaded = ChatTemplate.load(folder)
    assert loaded.render(MESSAGES[:2]) == "Be brief & <kind>.\nGröße?\nZwei Zeilen\n"
    assert not loaded.marks_turns()  # it continues texts


@pytest.mark.parametrize(
    ("source", "marks"),
    [
        ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}", True),
        ("{{ messages[0].content }}\n", False),
        ("{{ raise_exception('always') }}", False),
    ],
)
def test_a_template_that_says_who_speaks_belongs_to_a_chat_model(source: str, marks: bool) -> None:
    assert ChatTemplate(source, {}).marks_turns() is marks


WRONG = ["{", "7", "[]", '"x"', "\xff", '{"chat_template": [{"name": []}]}', '{"a":' * 100_000]


@pytest.mark.parametrize("text", WRONG, ids=range(len(WRONG)))
def test_a_wrong_configuration_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer_config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ChatTemplateError, match="its template cannot be read"):
        ChatTemplate.load(tmp_path)


def test_a_template_says_whether_its_prompts_open_thoughts() -> None:
    template = ChatTemplate("{# </think> #}", {})
    assert template.opens_reasoning("a<think>\n")
    assert not template.opens_reasoning("a<think>\n</think>")
    assert not ChatTemplate("<think>", {}).opens_reasoning("<think>")
    gemma = ChatTemplate("{# <channel|> #}", {})
    assert gemma.opens_reasoning("<tool_response|><|channel>thought\n")
    assert not gemma.opens_reasoning("<|turn>model\n<|channel>thought\n<channel|>")


@pytest.mark.parametrize("opens", [True, False])
@pytest.mark.parametrize(
    ("begun", "within"),
    [
        ("<think>\nThe user", True),
        ("<think>\nEasy.\n</think>\n\nThe answer", False),
        ("The answer", False),
    ],
)
def test_a_begun_thought_that_is_continued_stays_one(opens: bool, begun: str, within: bool) -> None:
    """Also where a template closes the reasoning of all answers that it is given."""
    closes = "{% if m.role == 'assistant' %}<think></think>{% endif %}"
    asks = f"{{% if add_generation_prompt %}}[assistant]{'<think>' if opens else ''}{{% endif %}}"
    turns = "{% for m in messages %}[{{ m.role }}]" + closes + "{{ m.content }}{% endfor %}"
    template = ChatTemplate(turns + asks, {})
    prompt = template.render([*MESSAGES[1:2], {"role": "assistant", "content": begun}])
    assert prompt.endswith(begun.removeprefix("<think>\n"))
    assert template.opens_reasoning(prompt, begun) is within
    assert prompt.count("<think>") == (1 if within else 1 + begun.count("<think>"))


@pytest.mark.parametrize("role", ["system", "user"])
def test_only_a_conversation_without_a_system_message_gets_the_models(role: str) -> None:
    messages = [{"role": role, "content": ""}, {"role": "user", "content": "a"}]
    expected = (
        messages if role == "system" else [{"role": "system", "content": "Be kind."}, *messages]
    )
    assert with_system(messages, "Be kind.") == expected
    assert with_system(messages, None) == messages
    assert len(with_system(messages, "")) == (2 if role == "system" else 3)


def test_a_models_system_message_is_the_settings_or_its_folders(tmp_path: Path) -> None:
    template = ChatTemplate(TEMPLATES["chatml"], {})
    assert system_of("", tmp_path, template) is None
    assert system_of("Be kind.", tmp_path, None) is None
    assert system_of("empty", tmp_path, template) == ""
    (tmp_path / "system.txt").write_text("\nBe brief.\n", "utf-8")
    assert system_of("", tmp_path, template) == "Be brief."
    assert system_of("Be kind.", tmp_path, template) == "Be kind."
    assert system_of("none", tmp_path, template) is None
    (tmp_path / "system.txt").write_text("", "utf-8")
    assert system_of("", tmp_path, template) == ""


@pytest.mark.parametrize("case", ["refused", "unreadable"])
def test_a_system_message_that_the_template_cannot_show_stops_nobody(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refuses = "{% if 'Be' in messages[0].content %}{{ raise_exception('no') }}{% endif %}"
    source = refuses if case == "refused" else TEMPLATES["chatml"]
    (tmp_path / "system.txt").write_bytes(b"\xff" if case == "unreadable" else b"Be brief.")
    template = ChatTemplate(f"{source}{{{{ messages[-1].content }}}}", {})
    assert system_of("", tmp_path, template) is None
    assert "conversations get no system message" in caplog.text
