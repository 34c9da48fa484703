"""Prompts: chat templates as transformers renders them, in bounds, and one BOS where there is one."""

import shutil
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import peers.prompts
from peers.environments import Problem
from peers.environments.load import load_environment
from peers.ingest import Checker
from peers.models.characters import CharacterTokenizer
from peers.models.find import find_model
from peers.models.load import HuggingFaceTokenizer
from peers.prompts import Prompts, chat_frame, check_prompts
from protocols.envelopes import unseal
from protocols.faults import PeerFault
from protocols.manifest import EXAMPLES_MAX, EnvironmentSpec, Manifest
from protocols.messages import Sampling
from protocols.rollouts import PROMPT_TOKENS_MAX
from tests.hub import write_tiny_model
from tests.samples import envelope_of, manifest

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "[system]\n" }}
{{- "Today Date: " + date_string + "\n\n" }}
{{- system_message }}
{{- "[end]" }}
{%- for message in messages %}
    {{- '[' + message['role'] + ']\n\n'+ message['content'] | trim + '[end]' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '[assistant]\n\n' }}
{%- endif %}
"""
TURNS_ALTERNATE = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)
GENERATION = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content | tojson }}{% endgeneration %}"
    "{% else %}{{ m.role ~ ':' ~ m.content }}{% endif %}{% if loop.last %}{% break %}{% endif %}{% endfor %}"
)
EXAMPLES = (("1+1=", "2"), ("2+3=", "<5>"))


def raw_tokenizer(processor: processors.PostProcessor | None = None, template: str | None = None) -> Any:
    """Byte-level, 256 bytes and two special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: at for at, letter in enumerate(["<s>", "</s>", *letters])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    if processor is not None:
        core.post_processor = processor
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    made.chat_template = template
    return made


def tokenizer(processor: processors.PostProcessor | None = None, template: str | None = None) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(raw_tokenizer(processor, template), frozenset({1}), 258, b"")


BOS_ONLY = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
BOTH = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])


def ids(of: HuggingFaceTokenizer, spec: EnvironmentSpec, question: str) -> tuple[int, ...]:
    return Prompts(of, spec, "tiny").ids(Problem(question, None))


# -- plain prompts


@pytest.mark.parametrize(("processor", "before"), [(None, ()), (BOS_ONLY, (0,)), (BOTH, (0,))])
def test_a_plain_prompt_gets_what_the_checkpoint_puts_before_and_nothing_behind(
    processor: processors.PostProcessor | None, before: tuple[int, ...]
) -> None:
    raw = raw_tokenizer(processor)
    for text in ("1 + 2 =", "é\n", "", "written </s> out"):
        plain = tuple(raw.encode(text, add_special_tokens=False))
        assert ids(tokenizer(processor), EnvironmentSpec(), text) == before + plain
        assert tuple(raw.encode(text))[: len(before) + len(plain)] == before + plain


def test_the_built_in_models_prompts_are_as_before() -> None:
    characters = CharacterTokenizer()
    assert Prompts(characters, EnvironmentSpec(), "builtin").ids(Problem("1+2=", None)) == characters.encode("1+2=")


# -- chat


@pytest.mark.parametrize("template", [CHATML, LLAMA3, TURNS_ALTERNATE, GENERATION])
@pytest.mark.parametrize("question", ["1 + 2 =", "  two\nlines \n", "<a> & {{ b }} \"c\" 'd' é"])
def test_a_chat_is_what_transformers_makes_of_it(template: str, question: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.utils import chat_template_utils

    class Then(chat_template_utils.datetime):  # type: ignore[misc]
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return chat_template_utils.datetime(2024, 7, 26)

    system = "" if template == TURNS_ALTERNATE else " Be brief. "
    spec = EnvironmentSpec(chat=True, system=system, examples=EXAMPLES)
    conversation = [{"role": "system", "content": system}] if system else []
    for asked, answer in EXAMPLES:
        conversation += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    conversation.append({"role": "user", "content": question})
    ours = ids(tokenizer(BOTH, template), spec, question)

    raw = raw_tokenizer(BOTH, template)
    monkeypatch.setattr(chat_template_utils, "datetime", Then)
    theirs = raw.apply_chat_template(conversation, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert ours == tuple(theirs)
    assert ours.count(0) == ("bos_token" in template), "one BOS, where the template writes it"
    assert ours[-1] != 1


def test_the_runs_template_takes_the_place_of_the_models() -> None:
    mine = "{% for m in messages %}Q: {{ m.content }}\n{% endfor %}A:"
    spec = EnvironmentSpec(chat=True, template=mine)
    of = tokenizer(BOS_ONLY, CHATML)
    assert of.decode(ids(of, spec, "1+1")) == "Q: 1+1\nA:"
    assert ids(of, spec, "1+1")[0] != 0, "a template that writes no BOS gets none"
    characters = CharacterTokenizer()
    assert characters.decode(Prompts(characters, spec, "builtin").ids(Problem("1+1", None))) == "Q: 1+1\nA:"


def test_b105_a_base_model_without_a_template_is_refused_at_start() -> None:
    line = r"^model 'tiny' has no chat template: set environment\.template, or environment\.chat = false$"
    with pytest.raises(ValueError, match=line):
        Prompts(tokenizer(), EnvironmentSpec(chat=True), "tiny")
    with pytest.raises(ValueError, match="has no chat template"):
        Checker(
            manifest(environment=EnvironmentSpec(chat=True)), load_environment(EnvironmentSpec()), CharacterTokenizer()
        )


def test_a_templates_own_complaint_is_passed_on() -> None:
    with pytest.raises(ValueError, match=r"the chat template of model 'tiny': .*roles must alternate") as caught:
        Prompts(tokenizer(None, TURNS_ALTERNATE), EnvironmentSpec(chat=True, system="Be brief."), "tiny")
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"^environment\.template: .*unexpected 'end of template'"):
        Prompts(tokenizer(), EnvironmentSpec(chat=True, template="{% if"), "tiny")


# -- what a stranger's template may not do


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages.__class__.__mro__ }}", "is unsafe"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "is unsafe"),
        ("{{ raise_exception.__globals__['sys'] }}", "is unsafe"),
        ("{{ (strftime_now|attr('__globals__'))['sys'] }}", "is unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "is unsafe"),
        ("{% set _ = messages.append(1) %}", "is unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ messages[-1].content }}{{ range(100000000) }}", "[Rr]ange too big"),
        ("{{ 'x' * 10 ** 10 }}", "MemoryError"),
        ("{{ 'x'|center(10 ** 10) }}", "MemoryError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ messages|random }}", "No filter named 'random'"),
        ("{{ lipsum() }}", "undefined"),
        ("no question", "does not show a question exactly once"),
        ("{{ messages[-1].content }}{{ messages[-1].content }}", "does not show a question exactly once"),
        ("{{ messages[-1].content | upper }}", "does not show a question exactly once"),
        ("{{ messages[-1].content | escape }}", "does more with a question than to show it"),
        ("{{ messages[-1].content }}{{ messages[-1].content | length }}", "does more with a question"),
    ],
)
def test_a_template_in_its_sandbox(template: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        chat_frame(template, (), {})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) <= 200


def test_a_template_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    monkeypatch.setattr(peers.prompts, "_TEMPLATE_S_MAX", 1.0)
    began_s = time.monotonic()
    with pytest.raises(ValueError, match="takes over 1 s to render"):
        chat_frame(loop, (), {})
    assert time.monotonic() - began_s < 20
    monkeypatch.undo()
    with pytest.raises(ValueError, match="takes too long to render"):  # by its own clock, whatever the machine does
        chat_frame(loop + " ", (), {})


# -- room


def test_prompts_without_room_are_told_before_the_run_begins(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny")
    files = find_model(str(tmp_path / "tiny"))
    spec = EnvironmentSpec(prompt="{expression}=")
    environment = load_environment(spec)
    check_prompts(manifest(environment=spec, sampling=Sampling(max_new_tokens=16)), environment, files)
    narrow = manifest(environment=spec, sampling=Sampling(group_size=2, max_new_tokens=2048))
    assert files.context == 2048
    with pytest.raises(ValueError, match=r"a prompt of \d+ tokens and .* = 2048 are over the 2048 that"):
        check_prompts(narrow, environment, files)
    prompts = Prompts(files.tokenizer, spec, "tiny")
    with pytest.raises(ValueError, match=f"is over the {PROMPT_TOKENS_MAX} that travel"):
        prompts.check([Problem("x" * (PROMPT_TOKENS_MAX + 1), None)], 1, None)
    prompts.check([Problem("x" * PROMPT_TOKENS_MAX, None)], 1, None)
    with pytest.raises(ValueError, match="a prompt is empty"):
        prompts.check([Problem("", None)], 1, None)


# -- the manifest


def test_chat_fields_go_together_and_are_bounded() -> None:
    with pytest.raises(ValueError, match=r"environment\.system is for chat prompts: set environment\.chat = true"):
        EnvironmentSpec(system="Be brief.")
    for fields in (
        {"examples": (("q", "a"),) * (EXAMPLES_MAX + 1)},
        {"examples": (("q", "a" * 1025),)},
        {"examples": (("q",),)},
        {"template": "x" * 8193},
        {"system": "x" * 2049},
        {"chat": False, "template": "x"},
    ):
        payload = msgspec.to_builtins(manifest())
        payload["environment"] |= {"chat": True} | fields
        with pytest.raises(PeerFault):
            unseal(envelope_of(Manifest, msgspec.msgpack.encode(payload)), Manifest)


def test_the_tokenizers_digest_is_of_what_turns_text_into_ids(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny")
    found = find_model(str(tmp_path / "tiny")).tokenizer.digest
    same = shutil.copytree(tmp_path / "tiny", tmp_path / "same")
    rules = msgspec.json.decode((same / "tokenizer.json").read_bytes())
    rules["truncation"] = {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}
    (same / "tokenizer.json").write_bytes(msgspec.json.format(msgspec.json.encode(rules)))
    again = find_model(str(same)).tokenizer
    assert again.digest == found, "layout of JSON, and a cut that we do not make, are no difference"
    assert len(again.encode("x" * 20)) == 20
    words = rules["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    (same / "tokenizer.json").write_bytes(msgspec.json.encode(rules))
    digests = {found, find_model(str(same)).tokenizer.digest, CharacterTokenizer().digest}
    digests |= {tokenizer(*each).digest for each in ((), (BOS_ONLY,), (None, CHATML), (BOS_ONLY, CHATML))}
    assert len(digests) == 7
