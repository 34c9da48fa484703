"""LoRA adapters on a base model: attach, read, write.

    base module --attach_lora--> peft model --read_adapter--> {name: Tensor}   what a trainer has, in F32
                                     ^------ write_adapter <-- {name: Tensor}  what a peer received

Adapter names are the base model's own module paths, so they mean the same to every engine:
`model.layers.0.self_attn.q_proj.lora_A` has shape [r, in], `...lora_B` has shape [out, r]. The effective
weight is `W + alpha / r * B @ A` (LoRA, arXiv 2106.09685, section 4.1).
"""

import copy
import math
from collections.abc import Mapping

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn

from protocols.adapters import Adapter, Tensor
from protocols.faults import LocalFault, PeerFault
from protocols.manifest import LoraSpec

_SLOT = "default"  # peft names its adapters; we keep one
_WRITABLE = {"F32": torch.float32, "BF16": torch.bfloat16}  # what an adapter may be published in


def attach_lora(module: nn.Module, spec: LoraSpec, seed: int) -> PeftModel:
    """A peft model around a copy of `module` that shares its weights; only the LoRA matrices train.

    The caller's module keeps its structure, so several adapters may stand on one base without a second
    copy of it. Its parameters are frozen (requires_grad off), because they are shared.
    `A` is uniform in +-1/sqrt(in) (peft's own default) from a generator seeded with `seed`, the same on
    every machine; `B` is 0, so version 0 is the base model. The global random state is left as it was.
    Raises ValueError for a target that cannot be adapted.
    """
    targets = linear_targets(module, spec.targets)
    module.requires_grad_(False)
    shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    config = LoraConfig(r=spec.r, lora_alpha=spec.alpha, target_modules=sorted(targets), lora_dropout=0.0, bias="none")
    with torch.random.fork_rng(devices=[]):  # peft draws its own initial values, on the CPU
        peft_model = get_peft_model(copy.deepcopy(module, shared), config)
    peft_model.eval()  # no dropout anywhere: the trainer must see the policy that generated
    _initialise(peft_model, seed)

    expected = sum(spec.r * (linear.in_features + linear.out_features) for linear in targets.values())
    trainable = sum(p.numel() for p in peft_model.parameters() if p.requires_grad)
    adapted = len(lora_parameters(peft_model)) // 2
    if (adapted, trainable) != (len(targets), expected):
        raise LocalFault(
            f"peft adapted {adapted} modules with {trainable} trainable parameters, "
            f"expected {len(targets)} with {expected}"
        )
    return peft_model


def lora_parameters(peft_model: PeftModel) -> dict[str, nn.Parameter]:
    """The trainable matrices by canonical name, sorted by it."""
    parameters = {}
    for path, layer in peft_model.get_base_model().named_modules():
        if isinstance(layer, LoraLayer):
            parameters[f"{path}.lora_A"] = layer.lora_A[_SLOT].weight
            parameters[f"{path}.lora_B"] = layer.lora_B[_SLOT].weight
    return dict(sorted(parameters.items()))


def read_adapter(peft_model: PeftModel) -> dict[str, Tensor]:
    """The adapter as it stands, float32, sorted by name."""
    return to_adapter(lora_parameters(peft_model))


def to_adapter(tensors: Mapping[str, torch.Tensor]) -> dict[str, Tensor]:
    """These tensors as an F32 adapter, in their order."""
    adapter = {}
    for name, tensor in tensors.items():
        array = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
        adapter[name] = Tensor("F32", tuple(array.shape), array.astype("<f4", copy=False).tobytes())
    return adapter


@torch.no_grad()
def write_adapter(peft_model: PeftModel, adapter: Adapter) -> None:
    """Replace the whole adapter. Raises PeerFault, and has then changed nothing, as `adapter_values` does."""
    values = adapter_values(peft_model, adapter)
    for name, parameter in lora_parameters(peft_model).items():
        parameter.copy_(values[name])


def adapter_values(peft_model: PeftModel, adapter: Adapter) -> dict[str, torch.Tensor]:
    """The adapter's matrices in float32, by name, as `fitting_values` gives them for this model."""
    return fitting_values({name: tuple(p.shape) for name, p in lora_parameters(peft_model).items()}, adapter)


def fitting_values(shapes: Mapping[str, tuple[int, ...]], adapter: Adapter) -> dict[str, torch.Tensor]:
    """The adapter's matrices in float32, by name. Tensors are F32 or BF16; the latter are widened, which is exact.

    Names and shapes must be exactly these and every value finite, otherwise PeerFault("adapter does not fit").
    """
    if adapter.keys() != shapes.keys():
        raise PeerFault("adapter does not fit", _name_difference(set(adapter), set(shapes)))
    return {name: _values(name, adapter[name], shape) for name, shape in shapes.items()}


def _values(name: str, tensor: Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    dtype = _WRITABLE.get(tensor.dtype)
    if dtype is None or tuple(tensor.shape) != shape:
        detail = f"{name} is {tensor.dtype} {list(tensor.shape)}, expected F32 or BF16 {list(shape)}"
        raise PeerFault("adapter does not fit", detail)
    if len(tensor.data) != dtype.itemsize * math.prod(shape):
        raise PeerFault("adapter does not fit", f"{name} has {len(tensor.data)} bytes")
    values = torch.frombuffer(bytearray(tensor.data), dtype=dtype).reshape(shape).float()
    if not values.isfinite().all():
        raise PeerFault("adapter does not fit", f"{name} has values that are not finite")
    return values


def _name_difference(got: set[str], expected: set[str]) -> str:
    """A few names of each kind: enough to see a wrong prefix, bounded because a peer chose them."""
    missing, unknown = sorted(expected - got), sorted(got - expected)
    shown = [name[:128] for name in unknown[:3]]
    return f"{len(missing)} missing {missing[:3]}, {len(unknown)} unknown {shown}"


def linear_targets(module: nn.Module, targets: tuple[str, ...]) -> dict[str, nn.Linear]:
    """The modules to adapt, by full path: for each target all linear modules of that name."""
    embedding = module.get_input_embeddings()
    linears = {path: layer for path, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    found: dict[str, nn.Linear] = {}
    for target in targets:
        matches = {p: layer for p, layer in linears.items() if p == target or p.endswith(f".{target}")}
        if not matches:
            names = ", ".join(sorted({path.rpartition(".")[2] for path in linears}))
            raise ValueError(f"lora.targets: {target!r} is no linear module of this model; it has: {names}")
        for path, layer in matches.items():
            if layer.weight is embedding.weight:
                raise ValueError(
                    f"lora.targets: {path!r} shares its weight with the input embedding (tied), so an adapter "
                    f"on it could not be merged; leave {target!r} out of the targets for this model"
                )
        found |= matches
    return found


@torch.no_grad()
def _initialise(peft_model: PeftModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in lora_parameters(peft_model).items():
        if name.endswith(".lora_A"):
            bound = 1.0 / math.sqrt(parameter.shape[1])
            parameter.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator))
        else:
            parameter.zero_()
