"""GGUF files of tiny random models, made by the writer of the package ``gguf`` as llama.cpp's
converter would.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.helpers import VOCAB

# one of each architecture; sizes are multiples of a block, and of 256 where a kind of codes wants
# that
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 16_384,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.3,
    "vocab_size": VOCAB,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
_OWN = {
    "mistral": {"sliding_window": None},
    "qwen3_5_text": {
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,  # as many as a block
        "partial_rotary_factor": 0.5,
    },
    "smollm3": {"num_hidden_layers": 4},  # the fourth one has no rotary embeddings
    "phi3": {"partial_rotary_factor": 0.5, "sliding_window": 24, "pad_token_id": 0},
    "gemma2": {
        "sliding_window": 24,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 2.0,  # or a token would only follow itself
        "query_pre_attn_scalar": 16,
    },
    "gemma3_text": {"sliding_window": 24, "num_hidden_layers": 6, "query_pre_attn_scalar": 16},
    "granite": {
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
}
ARCHITECTURES = {  # of transformers, of GGUF
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_5_text": "qwen35",
    "smollm3": "smollm3",
    "olmo2": "olmo2",
    "granite": "granite",
    "phi3": "phi3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}
PERMUTED = ("llama", "smollm3", "granite")
CENTRED = ("gemma2", "gemma3", "qwen35")  # norms with what they multiply by


def tiny_model(kind: str, **changes) -> PreTrainedModel:
    """A random model of an architecture of transformers; the same weights at every call."""
    always = {"tie_word_embeddings": True} if kind == "gemma2" else {}  # its files have no LM head
    sizes = {**_SIZES, "tie_word_embeddings": False, **_OWN.get(kind, {}), **changes, **always}
    config = AutoConfig.for_model(kind, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms would be ones, biases zeros
                parameter.data.add_(0.2 * torch.randn(len(parameter)))
        return model


def quantized(weight: np.ndarray, kind: Kind) -> np.ndarray:
    """The bytes of a matrix in a kind; of kinds that the package cannot make,
    random ones with scales that fit.
    """
    try:
        return gguf.quantize(np.ascontiguousarray(weight), kind)
    except NotImplementedError:
        return random_blocks(kind, weight.shape, seed=len(weight))


# where the numbers in float16 of a block are
_SCALES = {
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
}


def random_blocks(kind: Kind, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random bytes of a kind, all of whose bits are used,
    but scales of a size that weights have.
    """
    random = np.random.default_rng(seed)
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // elements, size), dtype=np.uint8)
    for at in _SCALES.get(kind, ()):
        scales = random.uniform(1e-4, 2e-3, blocks.shape[:-1]).astype(np.float16)
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write_one(path: Path, kind: Kind) -> np.ndarray:
    """Write a file with one tensor, ``one``, of 48 rows of 512; returns its blocks."""
    rows = random_blocks(kind, (48, 512), seed=1)
    scales = {Kind.Q4_0: 1, Kind.Q5_0: 1, Kind.Q8_0: 1, Kind.Q4_1: 2, Kind.Q5_1: 2}.get(kind, 0)
    blocks = rows.reshape(48, -1, gguf.GGML_QUANT_SIZES[kind][1])
    drawn = np.random.default_rng(2).normal(0, 0.01, (*blocks.shape[:2], scales)).astype(np.float16)
    blocks[..., : 2 * scales] = drawn.view(np.uint8).reshape(*blocks.shape[:2], -1)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("one", rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return rows


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys as llama.cpp has them: the halves of a head take turns."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def tiled(weight: np.ndarray, part: str, config, back: bool = False) -> np.ndarray:
    """A tensor of a gated delta net as llama.cpp has it, or as transformers does."""
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    sizes = (keys, heads // keys)[:: -1 if back else 1]
    if part == "ssm_a":
        weight = np.log(-weight) if back else -np.exp(weight)
    if part == "ssm_norm":
        return weight
    if part == "ssm_out":
        turned = weight.reshape(len(weight), *sizes, -1).swapaxes(1, 2)
        return turned.reshape(weight.shape)
    before = 2 * keys * config.linear_key_head_dim if part in ("attn_qkv", "ssm_conv1d") else 0
    own = weight[before:]
    turned = own.reshape(*sizes, -1, *own.shape[1:]).swapaxes(0, 1).reshape(own.shape)
    return np.concatenate([weight[:before], turned])


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: Kind = Kind.Q8_0,
    tokens: bool = True,
    extra: dict[str, np.ndarray] | None = None,
    sampling: dict[str, float] | None = None,
    **metadata: int | str,
) -> Path:
    """A GGUF file of a model: its matrices in a kind, norms in float32,
    and perhaps a tokenizer of bytes.
    """
    config = model.config
    name = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, name)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers + (name == "qwen35"))
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    writer.add_rope_freq_base(rope["rope_theta"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if name == "qwen35":
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        writer.add_full_attention_interval(4)
        writer.add_nextn_predict_layers(1)  # an MTP head, as a layer behind the others
        mtp = f"blk.{config.num_hidden_layers}.nextn.eh_proj.weight"
        extra = {mtp: np.zeros((64, 128), np.float32), **(extra or {})}
    if name == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    for key, value in metadata.items():
        own = f"{name}.{key.replace('__', '.')}"
        writer.add_string(own, value) if isinstance(value, str) else writer.add_uint32(own, value)
    for key, number in (sampling or {}).items():
        add = writer.add_int32 if isinstance(number, int) else writer.add_float32
        add(f"general.sampling.{key}", number)
    if tokens:
        _add_tokens(writer, config.vocab_size)
    for own, weight in _tensors(model, name).items():
        if weight.ndim == 2 and "conv1d" not in own and kind not in (Kind.F32, Kind.F16):
            writer.add_tensor(own, quantized(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(
                own, weight.astype(np.float16) if kind is Kind.F16 and weight.ndim == 2 else weight
            )
    for own, weight in (extra or {}).items():
        writer.add_tensor(own, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(model: PreTrainedModel, name: str) -> dict[str, np.ndarray]:
    """A model's weights by their names in GGUF, in llama.cpp's order."""
    config = model.config
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    known = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors = {}
    for own, parameter in model.named_parameters():
        module, _, kind = own.rpartition(".")
        weight = parameter.detach().numpy()
        if name in PERMUTED and module.split(".")[-1] in heads:
            weight = permuted(weight, heads[module.split(".")[-1]])
        stored = f"{known.get_name(module)}.{kind}"
        if "linear_attn" in own:
            stored = {
                "A_log": str(known.get_name(own)),
                "dt_bias": f"{known.get_name(f'{module}.dt_proj')}.bias",
            }.get(kind, stored)
            tensors[stored] = tiled(weight.squeeze(), part_of(stored), config)
            continue
        tensors[stored] = weight + 1 if name in CENTRED and weight.ndim == 1 else weight
    return tensors


def part_of(name: str) -> str:
    """Which part of a layer a tensor is."""
    return name.removesuffix(".weight").removesuffix(".bias").split(".")[-1]


def _add_tokens(writer: gguf.GGUFWriter, vocab_size: int):
    """A tokenizer of single letters: the first ones of GPT-2's alphabet of bytes, an end of text,
    and a template.
    """
    letters = [chr(code) for code in range(33, 124)][: vocab_size - 5]
    tokens = ["<|end|>", *letters, "\u0120", "\u010a", "th", "the"]
    tokens += [f"[{index}]" for index in range(vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (len(tokens) - 1)])
    # several, as transformers 5.17 reads an array of one as no array
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template(
        "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
    )


def dequantized(model: PreTrainedModel, path: Path) -> PreTrainedModel:
    """The model with the weights of its file, as the package ``gguf`` dequantises them."""
    name = ARCHITECTURES[model.config.model_type]
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    names = dict(zip(_tensors(model, name), dict(model.named_parameters()), strict=True))
    state = {}
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name not in names:
            continue
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if name in PERMUTED and part in heads:
            weight = (
                weight.reshape(heads[part], -1, 2, *weight.shape[1:])
                .swapaxes(1, 2)
                .reshape(weight.shape)
            )
        if "linear_attn" in names[tensor.name]:
            weight = tiled(weight, part_of(tensor.name), model.config, back=True)
            weight = weight[:, None] if "conv1d" in tensor.name else weight
        elif name in CENTRED and weight.ndim == 1:
            weight = weight - 1
        state[names[tensor.name]] = torch.from_numpy(np.array(weight))
    model.load_state_dict(state, strict=False)
    return model
