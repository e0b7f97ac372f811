"""Networks whose matrices are packed: codes of a GGUF file,
codes made of any checkpoint (``--weights``), or floats.

A network is made without weights and filled tensor by tensor. So its weights are never in memory as
a whole but packed. What was made of a checkpoint is kept in the user's cache folder, and mapped
into memory by later processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from functools import cache
from hashlib import sha256
from math import prod
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from tswift.errors import InputError
from tswift.files import cache_folder, put
from tswift.forward.cpu.products import PackedEmbedding, PackedFloats, PackedLinear, as_packed
from tswift.forward.cuda import coded
from tswift.machine import return_free_memory
from tswift.models import codes
from tswift.models.architecture import class_of
from tswift.models.checkpoint import Checkpoint, StoredTensor
from tswift.models.codes import BLOCK, Codes, CodesOnDevice, Packed, PackedCodes, quantize
from tswift.models.config import BITS
from tswift.models.shapes import Noise

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from tswift.models.gguf import GGUFFile

_END_BITS = 8  # of embeddings and LM head, at least: files of 4 bits have them in 6 or 8, too
_FLOAT = torch.float32.itemsize
_PIECE = 1 << 24  # weights that are rounded at a time
_APART = 1e-3  # most that products in C may be from PyTorch's, in units of the largest
_CPU = torch.device("cpu")
# names in GGUF files: of embeddings, and of an LM head that is not the first of these
_TABLES, _OUTPUT = ("token_embd.weight", "per_layer_token_embd.weight"), "output.weight"
_KEPT = "weights"  # how the files of codes in the cache folder begin
_ON_DEVICE = Lock()  # a matrix that is packed there takes four times as much on the way

Matrix = Codes | Packed | Tensor


def packed_on(given: Codes, device: torch.device) -> Packed:
    """Codes as what multiplies them on a device reads them."""
    if not coded.by_kernels(device):
        return PackedCodes(given)
    with _ON_DEVICE:
        codes, scale, minimum = (
            part.to(device) for part in (given.codes, given.scale, given.minimum)
        )
        return CodesOnDevice(Codes(codes, scale, minimum, given.bits))


def _filled(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    read: Callable[[str], Matrix],
    device: torch.device = _CPU,
) -> PreTrainedModel:
    """A network with the weights that a function reads by name; matrices may be codes.

    Those are packed for the C program, or for the kernels of a device, where all other weights go,
    too.
    """
    with no_init_weights():  # memory that is never written takes none
        network = class_of(config)._from_config(deepcopy(config), dtype=dtype)
    network.tie_weights()  # left out with the initialisation
    embeddings = network.get_input_embeddings()
    tied = embeddings.weight is network.get_output_embeddings().weight
    layer: type[Any] = coded.CodedLinear if coded.by_kernels(device) else PackedLinear
    # the largest first, while there is most room
    for name, _ in sorted(network.named_parameters(), key=lambda named: -named[1].numel()):
        path, _, kind = name.rpartition(".")
        owner = network.get_submodule(path)
        weight = read(name)
        if isinstance(weight, Tensor):
            setattr(owner, kind, nn.Parameter(weight.to(device, dtype), requires_grad=False))
        elif owner is embeddings and (
            type(owner) is nn.Embedding or hasattr(owner, "scalar_embed_scale")
        ):
            linear = layer(weight)
            scale = float(getattr(owner, "scalar_embed_scale", 1))
            network.set_submodule(path, PackedEmbedding(linear.packed, scale, dtype))
            if tied:
                network.set_output_embeddings(linear)
        elif type(owner) is nn.Linear:
            network.set_submodule(path, layer(weight, owner.bias))
        else:
            plain = as_packed(weight).whole().to(device, dtype)
            owner.weight = nn.Parameter(plain, requires_grad=False)
    if tied and type(network.get_input_embeddings()) is not PackedEmbedding:
        network.tie_weights()
    return_free_memory()  # before the matrices are moved together
    return network.eval().requires_grad_(False)


def gguf_bytes(file: GGUFFile, dtype: torch.dtype = torch.float32, read: bool = False) -> int:
    """Bytes of a file's weights in memory, but for the padding of its matrices;
    those that are no codes become a dtype: one of 16 bits on a device, where scales without minima
    are float32.

    Args:
        file: its headers are read.
        dtype: of the model.
        read: leave out embeddings, of which a pass reads a few rows, unless they are the LM head.
    """
    total = 0
    unread = _TABLES if _OUTPUT in file.tensors else _TABLES[1:]
    for name, stored in file.tensors.items():
        count = prod(stored.shape)
        if read and name in unread:
            continue
        if stored.quantised:
            form = stored.form
            each = _FLOAT if form.numbers == 1 and dtype != torch.float32 else form.bytes
            total += _packed_bytes(count, form.bits, form.block, form.numbers * each)
        else:
            total += count * dtype.itemsize
    return total


def rounded_bytes(
    network: PreTrainedModel, kind: str, dtype: torch.dtype = torch.float32, read: bool = False
) -> int:
    """As :func:`gguf_bytes`, of a checkpoint that is rounded; its network may have no weights."""
    bits = rounded_bits(network, kind)
    tables = {each.weight for each in network.modules() if isinstance(each, nn.Embedding)}
    unread = tables - {network.get_output_embeddings().weight} if read else set()
    return sum(
        _packed_bytes(weight.numel(), bits[name], BLOCK, 2 * torch.float16.itemsize)
        if name in bits
        else weight.numel() * dtype.itemsize
        for name, weight in network.named_parameters()
        if weight not in unread
    )


def _packed_bytes(weights: int, bits: int, block: int, factors: int) -> int:
    """Bytes of codes, and of the scale and perhaps minimum of each block: ``factors``."""
    return weights * bits // 8 + weights // block * factors


def load_gguf(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device = _CPU
) -> PreTrainedModel:
    """The network of a GGUF file; its matrices on a device."""
    file, config = checkpoint.gguf, checkpoint.config
    assert file is not None
    parameters = dict(checkpoint.skeleton.named_parameters())
    named = file.names(parameters)
    # as in :func:`_filled`
    stored = dict(sorted(named.items(), key=lambda item: -prod(item[1].shape)))
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}

    def read(name: str) -> Matrix:
        weight = file.read(stored[name], heads.get(name.split(".")[-2]))
        return packed_on(weight, device) if isinstance(weight, Codes) else weight

    weights: dict[str, Matrix] = {
        name: torch.zeros(parameters[name].shape) for name in parameters.keys() - stored.keys()
    }
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        weights |= zip(stored, pool.map(read, stored), strict=True)
    return _filled(config, dtype, weights.pop, device)


def missing_names(checkpoint: Checkpoint, stored: Mapping[str, StoredTensor]) -> list[str]:
    """The parameters of a model that a checkpoint does not have by the
    names of the modeling code.
    """
    return [name for name, _ in checkpoint.skeleton.named_parameters() if name not in stored]


def load_floats(
    checkpoint: Checkpoint, stored: Mapping[str, StoredTensor], dtype: torch.dtype
) -> PreTrainedModel:
    """The network of a checkpoint, its matrices packed as floats.

    Args:
        checkpoint: where it lies.
        stored: its tensors by name, all of them.
        dtype: of the matrices.

    Raises:
        InputError: the C products come to something else than PyTorch's here.
    """
    matrices = _matrices(checkpoint.skeleton)

    def read(name: str) -> Matrix:
        weight = stored[name].read().to(dtype)
        if name not in matrices:
            # a part of a file would keep all of it mapped into memory
            return weight.float().clone()
        packed = PackedFloats(weight)
        row = torch.linspace(-1, 1, packed.inputs)
        wanted = nn.functional.linear(row, weight.float())
        ours = PackedLinear(packed)(row)
        # False where ours are NaN
        near = (ours - wanted).abs().max() <= _APART * wanted.abs().max()
        if not near and wanted.isfinite().all():
            advice = "--attention sdpa does without C"
            raise InputError(
                f"{checkpoint.name}: products in C are wrong on this machine, as of {name}; "
                f"{advice}",
                "attention",
            )
        return packed

    return _filled(checkpoint.config, torch.float32, read)


def load_rounded(
    checkpoint: Checkpoint,
    stored: Mapping[str, StoredTensor],
    kind: str,
    by_transformers: Callable[[], PreTrainedModel],
    dtype: torch.dtype,
    device: torch.device,
) -> PreTrainedModel:
    """The network of a checkpoint, its matrices rounded to codes, on a device.

    Args:
        checkpoint: where it lies.
        stored: its tensors, by name.
        kind: a key of :data:`~tswift.models.config.BITS`.
        by_transformers: reads the network as it is, where the checkpoint has other names for some.
        dtype: of what is not rounded.
        device: on which it is rounded, and stays.

    Raises:
        InputError: the checkpoint lacks a weight, or has a matrix without whole blocks.
    """
    renamed = bool(missing_names(checkpoint, stored))

    @cache
    def whole() -> dict[str, nn.Parameter]:
        return dict(by_transformers().named_parameters())

    def plain(name: str) -> Tensor:
        return (whole()[name].data if renamed else stored[name].read()).to(device)

    read = _rounding(checkpoint, plain, kind)
    path = None if coded.by_kernels(device) else _kept_path(stored, kind)
    known = {} if path is None else _read_kept(path)
    made: dict[str, PackedCodes] = {}

    def fetch(name: str) -> Matrix:
        if name in known:
            return known[name]
        weight = read(name)
        if isinstance(weight, Tensor) or path is None:
            return weight
        made[name] = PackedCodes(weight)
        return made[name]

    network = _filled(checkpoint.config, dtype, fetch, device)
    if made and path is not None:
        _keep(path, made)
    return network


def _kept_path(stored: Mapping[str, StoredTensor], kind: str) -> Path | None:
    """Where the codes of a checkpoint are kept; None where nothing can be.

    The name is a hash of the files: their places, sizes and times of change; and of how codes are
    made and packed.
    """
    folder = cache_folder()
    if folder is None:
        return None
    digest = sha256(Path(codes.__file__).read_bytes() + Path(__file__).read_bytes())
    digest.update(kind.encode())
    for path in sorted({tensor.path.resolve() for tensor in stored.values()}):
        status = path.stat()
        digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ino}\0".encode())
    return folder / f"{_KEPT}-{digest.hexdigest()[:20]}.safetensors"


def _read_kept(path: Path) -> dict[str, PackedCodes]:
    """The codes in a file, which stay there until they are used; none if there is no such file,
    or it is broken.
    """
    try:
        with safe_open(path, framework="pt") as file:
            forms = json.loads(file.metadata()["forms"])
            return {
                name: PackedCodes.kept(file.get_tensor(name), form) for name, form in forms.items()
            }
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError):
        return {}


def _keep(path: Path, made: Mapping[str, PackedCodes]) -> None:
    """Keep codes for later processes."""
    held = {name: packed.bytes for name, packed in made.items()}
    forms = json.dumps({name: packed.form for name, packed in made.items()})
    with suppress(OSError, SafetensorError):  # a full disk, say
        put(path, lambda beside: save_file(held, beside, {"forms": forms}))


def random_rounded(
    checkpoint: Checkpoint, kind: str, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """The network of a shape, its random matrices rounded to codes, on a device."""
    shapes = {name: weight.shape for name, weight in checkpoint.skeleton.named_parameters()}
    noise = Noise(device, torch.float32)

    def draw(name: str) -> Tensor:
        weight = torch.empty(shapes[name], device=device)
        noise.fill(name, weight)
        return weight

    return _filled(checkpoint.config, dtype, _rounding(checkpoint, draw, kind), device)


def _rounding(
    checkpoint: Checkpoint, read: Callable[[str], Tensor], kind: str
) -> Callable[[str], Codes | Tensor]:
    """A function that reads as ``read`` does, and rounds what is a matrix."""
    bits = rounded_bits(checkpoint.skeleton, kind)

    def rounded(name: str) -> Codes | Tensor:
        weight = read(name)
        if name not in bits:
            return weight
        try:
            return _rounded(weight, bits[name])
        except ValueError as error:
            reason = f"cannot be rounded: {name} has {error}"
            raise InputError(f"{checkpoint.name} {reason}", "weights") from None

    return rounded


def rounded_bits(network: PreTrainedModel, kind: str) -> dict[str, int]:
    """The bits of a code, by the name of each matrix that is rounded."""
    return {
        name: max(BITS[kind], _END_BITS if at_end else 0)
        for name, at_end in _matrices(network).items()
    }


def _matrices(network: PreTrainedModel) -> dict[str, bool]:
    """By name, the weights that are matrices of linear layers or embeddings;
    whether of embeddings or LM head.
    """
    ends = (network.get_input_embeddings(), network.get_output_embeddings())
    owners = {
        name: network.get_submodule(name.rpartition(".")[0])
        for name, _ in network.named_parameters()
    }
    return {name: owner in ends for name, owner in owners.items() if _is_matrix(name, owner)}


def _is_matrix(name: str, owner: nn.Module) -> bool:
    embeds = type(owner) is nn.Embedding or hasattr(owner, "scalar_embed_scale")
    return name.endswith(".weight") and (type(owner) is nn.Linear or embeds)


def _rounded(weight: Tensor, bits: int) -> Codes:
    """A matrix rounded in pieces, as what is computed on the way takes several times its memory."""
    pieces = [quantize(rows, bits) for rows in weight.split(max(1, _PIECE // weight.shape[1]))]
    codes, scale, minimum = (
        torch.cat([getattr(piece, name) for piece in pieces])
        for name in ("codes", "scale", "minimum")
    )
    return Codes(codes, scale, minimum, bits)
