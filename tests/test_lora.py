"""LoRA on a tiny random model: what is attached, read and written is exactly what was meant."""

import random

import pytest
import torch
from peft import PeftModel
from transformers import LlamaConfig, LlamaForCausalLM

from peers.models.lora import attach_lora, lora_parameters, read_adapter, write_adapter
from protocols.adapters import Tensor, adapter_digest, decode_adapter, encode_adapter
from protocols.codecs import rounded, widened
from protocols.faults import PeerFault
from protocols.manifest import LoraSpec

SPEC = LoraSpec(r=4, alpha=8.0)
HIDDEN, INNER, LAYERS, VOCAB = 32, 48, 2, 64


def tiny_model(seed: int = 0, tied: bool = False) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=VOCAB,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def random_adapter(peft_model: PeftModel, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: Tensor("F32", t.shape, (0.1 * torch.randn(t.shape, generator=generator)).numpy().tobytes())
        for name, t in read_adapter(peft_model).items()
    }


IDS = torch.arange(12).reshape(2, 6)


def test_the_adapter_covers_every_target_under_the_base_models_own_names() -> None:
    adapter = read_adapter(attach_lora(tiny_model(), SPEC, seed=0))
    linears = [
        *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
        *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
    ]
    paths = ["lm_head", *(f"model.layers.{layer}.{linear}" for layer in range(LAYERS) for linear in linears)]
    assert list(adapter) == sorted(f"{path}.{matrix}" for path in paths for matrix in ("lora_A", "lora_B"))
    assert adapter["model.layers.0.mlp.down_proj.lora_A"].shape == (SPEC.r, INNER)
    assert adapter["model.layers.0.mlp.down_proj.lora_B"].shape == (HIDDEN, SPEC.r)
    assert adapter["lm_head.lora_B"].shape == (VOCAB, SPEC.r)
    assert {tensor.dtype for tensor in adapter.values()} == {"F32"}


def test_b70_trainable_parameters_are_the_lora_matrices_and_nothing_else() -> None:
    peft_model = attach_lora(tiny_model(), SPEC, seed=0)
    per_layer = 4 * (HIDDEN + HIDDEN) + 3 * (HIDDEN + INNER)
    expected = SPEC.r * (LAYERS * per_layer + HIDDEN + VOCAB)
    trainable = [p for p in peft_model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trainable) == expected
    assert {id(p) for p in trainable} == {id(p) for p in lora_parameters(peft_model).values()}


def test_initialisation_follows_from_the_seed_alone_and_leaves_the_global_dice_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    python_before = random.getstate()
    first = adapter_digest(read_adapter(attach_lora(tiny_model(), SPEC, seed=7)))
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == python_before
    torch.manual_seed(2)
    assert adapter_digest(read_adapter(attach_lora(tiny_model(), SPEC, seed=7))) == first
    assert adapter_digest(read_adapter(attach_lora(tiny_model(), SPEC, seed=8))) != first


def test_a_fresh_adapter_is_the_base_model() -> None:
    base = tiny_model()
    peft_model = attach_lora(base, SPEC, seed=0)
    assert torch.equal(peft_model(IDS).logits, base(IDS).logits)


def test_the_callers_module_keeps_its_structure_and_shares_its_weights() -> None:
    base = tiny_model()
    names = [name for name, _ in base.named_modules()]
    logits = base(IDS).logits
    one, other = attach_lora(base, SPEC, seed=0), attach_lora(base, SPEC, seed=1)
    write_adapter(one, random_adapter(one))
    assert [name for name, _ in base.named_modules()] == names
    assert torch.equal(base(IDS).logits, logits)
    assert torch.equal(other(IDS).logits, logits)
    assert not torch.allclose(one(IDS).logits, logits)
    base_ids = {id(p) for p in base.parameters()}
    assert {id(p) for p in one.parameters() if not p.requires_grad} == base_ids


def test_the_scale_is_alpha_over_r() -> None:
    base = tiny_model()
    peft_model = attach_lora(base, LoraSpec(r=4, alpha=8.0, targets=("lm_head",)), seed=0)
    write_adapter(peft_model, random_adapter(peft_model))
    a_RH, b_VR = (lora_parameters(peft_model)[f"lm_head.lora_{matrix}"] for matrix in "AB")
    hidden = base.model(IDS).last_hidden_state
    expected = base.lm_head(hidden) + 8.0 / 4 * hidden @ a_RH.T @ b_VR.T
    torch.testing.assert_close(peft_model(IDS).logits, expected)


def test_what_is_written_is_read_back_bit_for_bit_through_the_wire_format() -> None:
    source, sink = attach_lora(tiny_model(), SPEC, seed=0), attach_lora(tiny_model(), SPEC, seed=1)
    adapter = random_adapter(source)
    write_adapter(source, adapter)
    write_adapter(sink, decode_adapter(encode_adapter(read_adapter(source))))
    assert read_adapter(sink) == adapter
    assert torch.equal(source(IDS).logits, sink(IDS).logits)


def test_bfloat16_is_widened_exactly() -> None:
    peft_model = attach_lora(tiny_model(), SPEC, seed=0)
    published = rounded(random_adapter(peft_model), "bfloat16")
    assert {tensor.dtype for tensor in published.values()} == {"BF16"}
    write_adapter(peft_model, published)
    assert read_adapter(peft_model) == widened(published)
    assert rounded(read_adapter(peft_model), "bfloat16") == published


def _renamed(adapter: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("model.layers", "model.language_model.layers"): t for name, t in adapter.items()}


def _replaced(adapter: dict[str, Tensor], tensor: Tensor) -> dict[str, Tensor]:
    return adapter | {"lm_head.lora_A": tensor}


NAN = torch.full((SPEC.r, HIDDEN), float("nan")).numpy().tobytes()
MISFITS = {
    "wrong prefix": _renamed,
    "missing tensor": lambda a: {name: t for name, t in a.items() if name != "lm_head.lora_A"},
    "extra tensor": lambda a: a | {"model.layers.2.mlp.up_proj.lora_A": a["lm_head.lora_A"]},
    "not a LoRA tensor": lambda a: a | {"lm_head.weight": a["lm_head.lora_A"]},
    "empty": lambda _: {},
    "transposed": lambda a: _replaced(a, a["lm_head.lora_A"]._replace(shape=(HIDDEN, SPEC.r))),
    "other rank": lambda a: _replaced(a, Tensor("F32", (8, HIDDEN), bytes(4 * 8 * HIDDEN))),
    "other dtype": lambda a: _replaced(a, Tensor("F16", (SPEC.r, HIDDEN), bytes(2 * SPEC.r * HIDDEN))),
    "short bfloat16": lambda a: _replaced(a, Tensor("BF16", (SPEC.r, HIDDEN), bytes(4 * SPEC.r * HIDDEN))),
    "short data": lambda a: _replaced(a, a["lm_head.lora_A"]._replace(data=b"1234")),
    "NaN": lambda a: _replaced(a, Tensor("F32", (SPEC.r, HIDDEN), NAN)),
    "infinity in bfloat16": lambda a: _replaced(a, Tensor("BF16", (SPEC.r, HIDDEN), b"\x80\x7f" * SPEC.r * HIDDEN)),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_b75_an_adapter_that_does_not_fit_exactly_changes_nothing(misfit: str) -> None:
    peft_model = attach_lora(tiny_model(), SPEC, seed=0)
    before = read_adapter(peft_model)
    with pytest.raises(PeerFault) as fault:
        write_adapter(peft_model, MISFITS[misfit](random_adapter(peft_model)))
    assert fault.value.reason == "adapter does not fit"
    assert fault.value.detail
    assert read_adapter(peft_model) == before


def test_an_unknown_target_is_named_with_the_modules_there_are() -> None:
    with pytest.raises(ValueError, match=r"'query' is no linear module.*down_proj.*lm_head.*q_proj"):
        attach_lora(tiny_model(), LoraSpec(targets=("q_proj", "query")), seed=0)


def test_an_embedding_is_no_target() -> None:
    with pytest.raises(ValueError, match="'embed_tokens' is no linear module"):
        attach_lora(tiny_model(), LoraSpec(targets=("embed_tokens",)), seed=0)


def test_a_tied_lm_head_is_refused_and_the_rest_of_such_a_model_is_not() -> None:
    with pytest.raises(ValueError, match=r"lm_head.*tied.*leave 'lm_head' out"):
        attach_lora(tiny_model(tied=True), SPEC, seed=0)
    adapter = read_adapter(attach_lora(tiny_model(tied=True), LoraSpec(targets=("q_proj",)), seed=0))
    assert len(adapter) == 2 * LAYERS
