"""The head for multi-token prediction in a model's own checkpoint: its tensors, by other names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tswift.models.architecture import has_mtp_head
from tswift.models.checkpoint import Checkpoint, StoredTensor, check_tensors
from tswift.speculators.drafter_files import SpeculatorFile, head_size
from tswift.speculators.layouts.layout import Shapes
from tswift.speculators.networks import shapes_of
from tswift.speculators.spec import MTP, SpeculatorSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

OWN_HEAD = "the model's own"
# how Qwen and Mellum name its parts; DeepSeek and GLM have it as a layer behind the model's last
_OF_QWEN = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "norm": "mtp.norm",
    "layer": "mtp.layers.0",
}
# of single experts, which are one tensor in a model
_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_PREDICTED = ("mtp_num_hidden_layers", "num_nextn_predict_layers")  # how many there are
_DRAFTED = 32_768  # tokens that it drafts from: the first rows of the LM head


def native_head(checkpoint: Checkpoint) -> SpeculatorFile | None:
    """The head for multi-token prediction in a model's own checkpoint;
    None if it has none that is served.

    Of a hub id, whose weights may not be here yet, and of a shape, the configuration alone says so.
    """
    text = checkpoint.config.get_text_config()
    if not has_mtp_head(checkpoint.config) or checkpoint.gguf is not None:
        return None
    layer = _own_layer(text)
    windowed = "sliding_attention" in (getattr(layer, "layer_types", None) or ())
    spec = SpeculatorSpec(
        kind=MTP,
        hidden_size=text.hidden_size,
        layers=1,
        kv_heads=text.num_key_value_heads,
        head_dim=head_size(text),
        vocab_size=text.vocab_size,
        eps=text.rms_norm_eps,
        tap_size=text.hidden_size,
        tap_count=1,
        draft_vocab=min(_DRAFTED, text.vocab_size),
        text=layer,
        window=text.sliding_window if windowed else 0,
    )
    folder = checkpoint.folder
    if folder is None:
        said = any(getattr(text, name, 0) for name in _PREDICTED)
        return SpeculatorFile(Path(checkpoint.name), OWN_HEAD, spec, {}, {}, ()) if said else None
    behind = _behind(text)
    stored = {
        name: each
        for name, each in checkpoint.tensors.items()
        if of_own_head(name, checkpoint.config)
    }
    if not stored:
        return None
    shapes = shapes_of(spec)
    of_qwen = next(iter(stored)).startswith("mtp.")
    parts = {
        name: _native_parts(name, shapes[name], behind * (not of_qwen), stored) for name in shapes
    }
    wanted = {each: size for part in parts.values() for each, size in part.items()}
    # copies of the model's own
    copies = dict.fromkeys(
        (f"{behind}embed_tokens.weight", f"{behind}shared_head.head.weight"),
        (spec.vocab_size, spec.hidden_size),
    )
    owner = "MTP head of the configuration"
    check_tensors(folder, stored, wanted | copies, copies, owner, "model")
    tensors = {
        name: _stacked(shapes[name], [stored[each] for each in part])
        for name, part in parts.items()
    }
    return SpeculatorFile(folder, OWN_HEAD, spec, tensors, {}, ())


def of_own_head(name: str, config: PreTrainedConfig) -> bool:
    """Whether a tensor is one of a model's own MTP head, of a kind that is served."""
    begins = ("mtp.", _behind(config.get_text_config()))
    return has_mtp_head(config) and name.startswith(begins)


def _behind(text: PreTrainedConfig) -> str:
    """How names in a layer behind the model's last begin."""
    return f"model.layers.{text.num_hidden_layers}."


def _own_layer(text: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of a model that is one layer, as an MTP head's is one of the model's."""
    made = copy(text)
    made.num_hidden_layers = 1
    made.vocab_size = 1  # nothing reads its embeddings
    made.pad_token_id = None
    usual = "sliding_attention" if text.model_type == "mellum" else "full_attention"
    kinds = {
        "layer_types": getattr(text, "mtp_layer_types", None) or [usual],
        "mlp_layer_types": ["sparse"],
        "first_k_dense_replace": 0,
    }
    for name, value in kinds.items():
        if hasattr(text, name):
            setattr(made, name, value)
    return made


def _native_parts(
    name: str, shape: tuple[int, ...], behind: str, stored: Mapping[str, StoredTensor]
) -> Shapes:
    """The tensors in a model's checkpoint that a parameter of its MTP head is made of.

    ``behind`` is what their names begin with in DeepSeek's layout, empty in Qwen's.
    """
    part, _, rest = name.partition(".")
    if behind:
        own = {"norm": "shared_head.norm.", "layer": ""}.get(part, f"{part}.")
        known = behind + own + rest
    else:
        known = f"{_OF_QWEN[part]}.{rest}"
    experts, _, kind = known.rpartition(".")
    if known in stored or kind not in _EXPERTS or not experts.endswith(".experts"):
        return {known: shape}
    joined = _EXPERTS[kind]
    return {
        f"{experts}.{expert}.{each}.weight": (shape[1] // len(joined), shape[2])
        for expert in range(shape[0])
        for each in joined
    }


@dataclass(frozen=True)
class _Stacked(StoredTensor):
    """Matrices of single experts, which are one tensor in a model."""

    parts: Sequence[StoredTensor] = ()

    def read(self) -> torch.Tensor:
        """The values."""
        return torch.cat([part.read() for part in self.parts]).view(self.shape)


def _stacked(shape: tuple[int, ...], parts: Sequence[StoredTensor]) -> StoredTensor:
    """Tensors behind each other as one of a shape; or the only one."""
    first = parts[0]
    return first if len(parts) == 1 else _Stacked(first.path, first.name, first.dtype, shape, parts)
