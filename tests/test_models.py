"""Models: the built-in one as shipped, Hugging Face folders, digests, and tokenizers that survive any ids."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from peers.environments import Scored
from peers.environments.gym import GymEnvironment
from peers.environments.split import held_out_problems, is_held_out
from peers.models import train_builtin
from peers.models.base import BaseModel, weights_digest
from peers.models.characters import BOS, CHARACTERS, EOS, PAD, UNKNOWN, CharacterTokenizer
from peers.models.load import BUILTIN, load_model
from peers.models.train_builtin import PARAMS, PROMPT, TASK, Lesson, homework, sloppy_answer

TOKENIZER = CharacterTokenizer()


# -- digests


def test_the_digest_covers_name_dtype_shape_and_bytes() -> None:
    w = torch.arange(6, dtype=torch.float32)
    variants = [
        {"w": w},
        {"v": w},
        {"w": w.reshape(2, 3)},
        {"w": w.reshape(3, 2)},
        {"w": w.view(torch.int32)},
        {"w": w + 1e-6},
        {"w": w, "v": w.clone()},
    ]
    assert len({weights_digest(state) for state in variants}) == len(variants)
    assert weights_digest({"w": w, "v": w + 1}) == weights_digest({"v": w + 1, "w": w.clone()})
    assert weights_digest({"w": w.to(torch.bfloat16)}) != weights_digest({"w": w})


def test_tied_weights_count_once() -> None:
    w = torch.ones(4, 4)
    assert weights_digest({"embed": w, "head": w}) == weights_digest({"embed": w})


# -- the tokenizer of the built-in model


@given(st.text(alphabet=CHARACTERS, max_size=30))
def test_printable_text_survives(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert ids[0] == BOS
    assert len(ids) == len(text) + 1
    assert TOKENIZER.decode(ids) == text


def test_special_and_unknown_ids() -> None:
    assert TOKENIZER.encode("é1") == (BOS, UNKNOWN, *TOKENIZER.encode("1")[1:])
    ids = (PAD, BOS, *TOKENIZER.encode("a")[1:], UNKNOWN, EOS, TOKENIZER.vocab_size, -1)
    assert TOKENIZER.decode(ids) == "a\ufffd\ufffd\ufffd"
    assert max(TOKENIZER.encode(CHARACTERS)) == TOKENIZER.vocab_size - 1


# -- the built-in model


@pytest.fixture(scope="module")
def builtin() -> BaseModel:
    return load_model("builtin")


# The identity of the shipped weights: a change of it makes every run that uses them another run.
BUILTIN_DIGEST = "145714cd96790f49a99c09f320d0adfbfb9ca5db5382e34c9c3830f925616c33"


def test_the_shipped_weights_are_the_ones_we_measured(builtin: BaseModel) -> None:
    assert builtin.digest.hex() == BUILTIN_DIGEST
    assert builtin.digest == load_model("builtin").digest
    assert sum(file.stat().st_size for file in BUILTIN.iterdir()) < 3_000_000


def test_the_built_in_model_is_small_and_its_head_is_its_own(builtin: BaseModel) -> None:
    weights = builtin.module.state_dict()
    assert 300_000 < sum(tensor.numel() for tensor in weights.values()) < 1_000_000
    assert not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    assert weights["lm_head.weight"].shape == (builtin.tokenizer.vocab_size, 128)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


@torch.inference_mode()
def test_the_built_in_model_has_room_to_learn(builtin: BaseModel) -> None:
    # Goal: half-right on problems it never saw, neither hopeless nor done. Method: greedy, held-out problems.
    env = GymEnvironment(TASK, PARAMS, PROMPT)
    problems = held_out_problems(env, 0, 100)
    right = 0
    for problem in problems:
        ids = torch.tensor([builtin.tokenizer.encode(problem.prompt)])
        answer: list[int] = []
        while len(answer) < 6 and (not answer or answer[-1] not in builtin.tokenizer.eos_ids):
            answer.append(int(builtin.module(input_ids=ids).logits[0, -1].argmax()))
            ids = torch.cat((ids, torch.tensor([answer[-1:]])), dim=1)
        right += env.score(problem, builtin.tokenizer.decode(answer)) == Scored(1.0)
    assert 20 <= right <= 65


def test_the_teacher_never_sees_a_held_out_problem() -> None:
    ids_NT, labels_NT = homework(Lesson(num_problems=300, steps=1, learning_rate=1.0, sloppy=True), seed=0)
    for ids, labels in zip(ids_NT, labels_NT, strict=True):
        question, _, answer = TOKENIZER.decode(ids.tolist()).partition("=")
        assert not is_held_out(f"{question}=")
        assert TOKENIZER.decode(labels[labels >= 0].tolist()) == answer
        assert labels[labels >= 0][-1] == EOS


def test_the_sloppy_teacher_is_right_often_but_not_mostly() -> None:
    env = GymEnvironment(TASK, PARAMS, PROMPT)
    entries = [env.problem(seed).entry for seed in range(2000)]
    rng = train_builtin.random.Random(0)
    right = sum(sloppy_answer(entry, rng) == entry["answer"] for entry in entries) / len(entries)
    assert 0.3 < right < 0.6


def test_a_lesson_is_learned(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_builtin, "BATCH", 16)
    model = train_builtin.new_model(0)
    lesson = Lesson(num_problems=500, steps=51, learning_rate=3e-3, sloppy=False)
    train_builtin.teach(model, lesson, seed=0)
    first, last = (float(line.split()[-1]) for line in capsys.readouterr().out.splitlines())
    assert last < first / 2


# -- Hugging Face folders


def write_checkpoint(folder: Path, eos: int | list[int]) -> Path:
    """A tiny model with a byte-level tokenizer of 256 bytes and one special token, which is padding too."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<end>")
    config = LlamaConfig(
        vocab_size=260,  # wider than the tokenizer, as many checkpoints are
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
        eos_token_id=eos,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), eos=[256, 258])


def test_b67_a_folder_with_two_eos_ids_and_padding_that_is_one_of_them(folder: Path) -> None:
    model = load_model(str(folder))
    assert model.tokenizer.eos_ids == {256, 258}
    assert model.tokenizer.pad_id == 256
    assert model.tokenizer.vocab_size == 260
    assert model.digest == load_model(str(folder)).digest
    assert not model.module.training
    assert {tensor.dtype for tensor in model.module.state_dict().values()} == {torch.float32}


def test_b65_partial_characters_and_unknown_ids_decode(folder: Path) -> None:
    tokenizer = load_model(str(folder)).tokenizer
    ids = tokenizer.encode("a😀")
    assert len(ids) == 5  # one byte and four
    assert tokenizer.decode(ids) == "a😀"
    assert tokenizer.decode(ids[:3]).startswith("a\ufffd")
    assert tokenizer.decode((*ids[:1], 256, 259, 10**6, -1)) == "a"
    assert tokenizer.decode(()) == ""


def test_a_model_that_is_not_there_is_one_line(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    (tmp_path / "empty").mkdir()
    damaged = write_checkpoint(tmp_path / "damaged", eos=256)
    (damaged / "model.safetensors").write_bytes(b"not weights")
    pickled = write_checkpoint(tmp_path / "pickled", eos=256)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    names = {
        "nobody/no-such-model": "cannot be reached",
        str(tmp_path / "absent"): "there is no such folder",
        str(tmp_path / "empty"): "no model",
        str(damaged): "no model",
        str(pickled): "no model",
    }
    for name, message in names.items():
        with pytest.raises(ValueError, match=message) as caught:
            load_model(name)
        assert "\n" not in str(caught.value)


def test_code_in_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, eos=256)
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (checkpoint / "config.json").write_text(json.dumps(config))
    (checkpoint / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ValueError, match="no model"):
        load_model(str(checkpoint))
    assert not (tmp_path / "ran").exists()


def test_importing_the_loader_is_cheap() -> None:
    code = "import sys, peers.models.load; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False"]
