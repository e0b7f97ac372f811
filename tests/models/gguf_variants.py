"""Small random GGUF files of every architecture that is read, with changed keys or tensors, and the
ids that llama.cpp draws after the same prompt, in gguf_variants.json.

`python -m tests.models.gguf_variants` asks llama.cpp for what is not in that file; it needs the
packages xllamacpp, gguf and numpy alone. Each file gets the first seed whose ids are no near-ties.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np

ANSWERS = Path(__file__).with_suffix(".json")
VOCAB = 259
PROMPT = [int(token) for token in np.random.RandomState(5).randint(1, 256, 120)]
LENGTH = 6
NEAR = 0.3  # of two log-probabilities, what rounding could turn
_SEEDS = range(1, 60)
_VALUES = gguf.GGUFValueType
_TYPES = {bool: _VALUES.BOOL, int: _VALUES.UINT32, float: _VALUES.FLOAT32, str: _VALUES.STRING}

Change = dict[str, Any]

SIZES: Change = {
    "context_length": 512,
    "embedding_length": 64,
    "block_count": 4,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.dimension_count": 16,
    "rope.freq_base": 10_000.0,
}
ARCHITECTURES: dict[str, Change] = {
    **{name: {} for name in ("llama", "qwen2", "qwen3", "smollm3", "olmo2", "phi3")},
    "granite": {
        "attention.scale": 0.2,
        "embedding_scale": 3.0,
        "residual_scale": 0.5,
        "logit_scale": 2.0,
    },
    "gemma2": {
        "attention.sliding_window": 16,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 20.0,
    },
    "gemma3": {"attention.sliding_window": 16, "block_count": 6},
    "qwen35": {
        "rope.dimension_count": 8,
        "rope.dimension_sections": [2, 1, 1, 0],
        "ssm.conv_kernel": 4,
        "ssm.state_size": 16,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 4,
        "ssm.inner_size": 64,
    },
}
_FACTOR, _TYPE = "rope.scaling.factor", "rope.scaling.type"
_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
_YARN = {_TYPE: "yarn", _FACTOR: 8.0, "rope.scaling.original_context_length": 32}
_LINEAR = {_TYPE: "linear", _FACTOR: 3.0}
_TURNED = {"rope.scaling.attn_factor": 1.3}
_BY_LENGTH = {"tensors": "factors", **_TURNED}
# by name: values of keys, None for none; and under ``tensors`` what other tensors there are
CHANGES: dict[str, Change] = {
    "base": {},
    # sizes, and what follows from others
    "no base": {"rope.freq_base": None},
    "base 500": {"rope.freq_base": 500.0},
    "no KV heads": {"attention.head_count_kv": None},
    "no head size": {"attention.key_length": None, "attention.value_length": None},
    "head of 32": {
        **{"attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 32}
    },
    "no dimensions": {"rope.dimension_count": None},
    "half of a head": {"rope.dimension_count": 8},
    "a quarter": {"rope.dimension_count": 4, "rope.dimension_sections": [1, 1, 0, 0]},
    "values of 8": {"attention.value_length": 8},
    "KV heads of each layer": {"attention.head_count_kv": [2, 2, 2, 2]},
    "other KV heads": {"attention.head_count_kv": [2, 2, 4, 2]},
    "epsilon": {"attention.layer_norm_rms_epsilon": 0.1},
    "no epsilon": {"attention.layer_norm_rms_epsilon": None},
    "not causal": {"attention.causal": False},
    "experts": {"expert_count": 4, "expert_used_count": 2},
    "one more layer": {"nextn_predict_layers": 1},
    # rotary embeddings
    "linear": _LINEAR,
    "a factor alone": {_FACTOR: 2.5},
    "the old name": {"rope.scale_linear": 2.5},
    "both names": {_FACTOR: 2.0, "rope.scale_linear": 5.0},
    "a factor of 0": {_FACTOR: 0.0},
    "none": {_TYPE: "none", _FACTOR: 3.0},
    "longrope without factors": {_TYPE: "longrope", _FACTOR: 2.0},
    "another type": {_TYPE: "dynamic", _FACTOR: 2.0},
    "turned": _TURNED,
    "turned linear": {**_LINEAR, **_TURNED},
    "yarn": _YARN,
    "yarn turned": {**_YARN, **_TURNED},
    "yarn by 1": {_TYPE: "yarn"},
    "yarn by a half": {**_YARN, _FACTOR: 0.5},
    "yarn by the old name": {_TYPE: "yarn", "rope.scale_linear": 4.0},
    "yarn's own": {
        **{**_YARN, "rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.yarn_beta_slow": 2.0},
        **{"rope.scaling.yarn_ext_factor": 0.4, "rope.scaling.yarn_attn_factor": 0.7},
        "rope.scaling.yarn_log_multiplier": 0.7,
    },
    "frequencies": {"tensors": "freqs"},
    "frequencies linear": {"tensors": "freqs", _FACTOR: 2.0},
    "frequencies yarn": {"tensors": "freqs", **_YARN},
    "frequencies longrope": {"tensors": "freqs", _TYPE: "longrope"},
    "short factors": _BY_LENGTH,
    "long factors": {**_BY_LENGTH, "rope.scaling.original_context_length": 128},
    "long factors yarn": {**_BY_LENGTH, **_YARN},
    "longrope": {
        **{**_BY_LENGTH, _TYPE: "longrope"},
        "rope.scaling.original_context_length": 128,
    },
    "sections": {"rope.dimension_sections": [4, 2, 2, 0]},
    "not turned": {"rope.scaling.finetuned": False},
    # windows
    "window": {_WINDOW: 24},
    "window of 0": {_WINDOW: 0},
    "no window": {_WINDOW: None},
    "each second": {_WINDOW: 24, _PATTERN: 2},
    "in all": {_WINDOW: 24, _PATTERN: 0},
    "in some": {_WINDOW: 24, _PATTERN: [True, False, False, True]},
    "window linear": {_WINDOW: 24, **_LINEAR},
    "window yarn": {_WINDOW: 24, **_YARN},
    "window yarn turned": {_WINDOW: 24, **_YARN, **_TURNED},
    "base of windows": {_WINDOW: 24, "rope.freq_base_swa": 100.0},
    "dimensions of windows": {_WINDOW: 24, "rope.dimension_count_swa": 4},
    "size of windows": {_WINDOW: 24, "attention.key_length_swa": 8},
    # scales and caps
    "scale": {"attention.scale": 0.05},
    "no scale": {"attention.scale": None},
    "caps": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 9.0},
    "no caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    "logit scale": {"logit_scale": 0.25},
    "no logit scale": {"logit_scale": None},
    "embedding scale": {"embedding_scale": 1.5},
    "no embedding scale": {"embedding_scale": None},
    "residual scale": {"residual_scale": 0.2},
    "residual scale of 0": {"residual_scale": 0.0},
    # tensors
    "tied": {"tensors": "tied"},
    "biases": {"tensors": "attn_q attn_k attn_v"},
    "one bias": {"tensors": "attn_v"},
    "all biases": {"tensors": "attn_q attn_k attn_v attn_output ffn_gate ffn_up ffn_down"},
    "bias of outputs": {"tensors": "attn_output"},
    "a bias of the MLP": {"tensors": "ffn_down"},
    # what llama.cpp reads of other architectures, or of none
    "clamped": {"attention.clamp_kqv": 0.5},
    "parallel": {"use_parallel_residual": True},
    "interval": {"full_attention_interval": 2},
    "shared": {"attention.shared_kv_layers": 2},
    "harmless": {
        **{"vocab_size": 300, "pooling_type": 3, "expert_count": 0, "leading_dense_block_count": 1},
        **{"attention.layer_norm_epsilon": 0.1, "rope.scaling.finetuned": True},
    },
    "unknown": {"no.such.key": 3},
}


def write_variant(path: Path, architecture: str, change: Change, seed: int) -> Path:
    """A file of an architecture, its keys changed; weights are drawn by a seed."""
    keys = {**SIZES, **ARCHITECTURES[architecture], **change}
    more = keys.pop("tensors", "").split()
    writer = gguf.GGUFWriter(path, architecture)
    layers = keys["block_count"]
    for key, value in keys.items():
        name = f"{architecture}.{key}"
        if isinstance(value, list):
            long = value if key == "rope.dimension_sections" else (value * 2)[:layers]
            writer.add_array(name, long)
        elif value is not None:
            writer.add_key_value(name, value, _TYPES[type(value)])
    words = ["a", "b", *(f"[{token}]" for token in range(2, 256)), "<s>", "</s>", "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([1] * 256 + [3, 3, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    for name, weight in _weights(architecture, keys, more, seed).items():
        writer.add_tensor(name, weight.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class _Drawn(dict[str, np.ndarray]):
    """Tensors by name, drawn by a seed: numpy's old numbers, the same in every version."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.RandomState(seed)

    def put(self, name: str, *shape: int, scale: float = 0.0):
        """A matrix whose products are of the size of its inputs, or a vector."""
        usual = 2 * shape[-1] ** -0.5 if len(shape) > 1 else 0.5
        self[name] = self.random.standard_normal(shape) * (scale or usual)

    def norm(self, name: str, count: int, scale: float = 1.0):
        """The weights of a norm."""
        self[name] = scale * (1 + 0.3 * self.random.standard_normal(count))


def _weights(architecture: str, keys: Change, more: list[str], seed: int) -> _Drawn:
    """The tensors of a file; ``more`` names some that not every file has."""
    found = _Drawn(seed)
    width = keys["embedding_length"]
    size = keys["attention.key_length"] or width // keys["attention.head_count"]
    pairs = (keys["rope.dimension_count"] or size) // 2
    gemma = architecture.startswith("gemma")
    found.put("token_embd.weight", VOCAB, width, scale=0.25 if gemma else 0.5)
    found.norm("output_norm.weight", width)
    if "tied" not in more and not gemma:
        found.put("output.weight", VOCAB, width, scale=0.5)
    for table in [*found]:
        if table != "output_norm.weight":
            found[table][256:] = 0  # ends of a text are not drawn
    if "freqs" in more:
        found["rope_freqs.weight"] = np.linspace(1, 6, pairs)
    if "factors" in more:
        found["rope_factors_long.weight"] = np.linspace(1, 9, pairs)
        found["rope_factors_short.weight"] = np.linspace(1, 2, pairs)
    for layer in range(keys["block_count"]):
        _add_layer(found, architecture, keys, layer, size)
        for part in _BIASED if architecture == "qwen2" else sorted({*more} & {*_BIASED, *_OTHERS}):
            name = f"blk.{layer}.{part}"
            rows = len(found.get(f"{name}.weight", np.zeros(width)))
            found.put(f"{name}.bias", rows)
    return found


_BIASED, _OTHERS = ("attn_q", "attn_k", "attn_v"), ("attn_output", "ffn_gate", "ffn_up", "ffn_down")


def _add_layer(found: _Drawn, architecture: str, keys: Change, layer: int, size: int):
    """The tensors of a layer."""
    at = f"blk.{layer}."
    width, inner = keys["embedding_length"], keys["feed_forward_length"]
    heads = keys["attention.head_count"]
    given = keys["attention.head_count_kv"] or heads
    queries, pairs = heads * size, (given[0] if isinstance(given, list) else given) * size
    phi, qwen = architecture == "phi3", architecture == "qwen35"
    gemma, olmo = architecture.startswith("gemma"), architecture == "olmo2"
    if not olmo:
        found.norm(f"{at}attn_norm.weight", width)
        found.norm(f"{at}{'post_attention_norm' if qwen else 'ffn_norm'}.weight", width)
    if gemma or olmo:
        found.norm(f"{at}post_attention_norm.weight", width, 3.0 if gemma else 1.0)
        found.norm(f"{at}post_ffw_norm.weight", width, 3.0 if gemma else 1.0)
    found.put(f"{at}ffn_up.weight", inner * (1 + phi), width)
    found.put(f"{at}ffn_down.weight", width, inner)
    if not phi:
        found.put(f"{at}ffn_gate.weight", inner, width)
    if qwen and (layer + 1) % keys.get("full_attention_interval", 4):
        _add_delta(found, at, keys, width)
        return
    found.put(f"{at}attn_output.weight", width, queries)
    if phi:
        found.put(f"{at}attn_qkv.weight", queries + 2 * pairs, width)
    else:
        found.put(f"{at}attn_q.weight", queries * (1 + qwen), width)
        found.put(f"{at}attn_k.weight", pairs, width)
        found.put(f"{at}attn_v.weight", pairs, width)
    if olmo or qwen or architecture in ("qwen3", "gemma3"):
        found.norm(f"{at}attn_q_norm.weight", queries if olmo else size)
        found.norm(f"{at}attn_k_norm.weight", pairs if olmo else size)


def _add_delta(found: _Drawn, at: str, keys: Change, width: int):
    """The tensors of a gated delta net."""
    groups, values, state, inner = (
        keys[f"ssm.{key}"] for key in ("group_count", "time_step_rank", "state_size", "inner_size")
    )
    mixed = 2 * groups * state + inner
    found.put(f"{at}attn_qkv.weight", mixed, width)
    found.put(f"{at}attn_gate.weight", inner, width)
    found.put(f"{at}ssm_conv1d.weight", mixed, 4, scale=0.5)
    found.put(f"{at}ssm_dt.bias", values)
    found[f"{at}ssm_a"] = -np.exp(found.random.standard_normal(values))
    found.put(f"{at}ssm_beta.weight", values, width)
    found.put(f"{at}ssm_alpha.weight", values, width)
    found.norm(f"{at}ssm_norm.weight", state)
    found.put(f"{at}ssm_out.weight", width, inner)


_CHILD = """
import json, os, sys, urllib.request, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port, params.n_ctx, params.n_parallel = sys.argv[1], 9033, 512, 1
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.fit_params = params.warmup = False
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type(0)  # float32
server = xllamacpp.Server(params)
asked = {"prompt": json.loads(sys.argv[2]), "n_predict": int(sys.argv[3]), "temperature": 0}
asked |= {"top_k": 1, "n_probs": 2, "return_tokens": True, "ignore_eos": True}
request = urllib.request.Request(
    f"{server.listening_address}/completion",
    json.dumps(asked).encode(),
    {"Content-Type": "application/json"},
)
print("ANSWER", urllib.request.urlopen(request).read().decode(), flush=True)
os._exit(0)
"""


def _asked(path: Path) -> tuple[list[int], float] | None:
    """The ids that llama.cpp draws, and how near the nearest other one came;
    None if it does not load the file.
    """
    command = [sys.executable, "-c", _CHILD, str(path), json.dumps(PROMPT), str(LENGTH)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    said = [line for line in ran.stdout.splitlines() if line.startswith("ANSWER ")]
    if not said:
        return None
    answer = json.loads(said[0].removeprefix("ANSWER "))
    gaps = [
        first["logprob"] - second["logprob"]
        for first, second in (each["top_logprobs"] for each in answer["completion_probabilities"])
    ]
    assert len(gaps) == len(answer["tokens"]) == LENGTH
    return answer["tokens"], min(gaps)


def main():
    """Ask llama.cpp for what is not known yet."""
    known = json.loads(ANSWERS.read_text()) if ANSWERS.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "variant.gguf"
        for architecture in ARCHITECTURES:
            for name, change in CHANGES.items():
                key = f"{architecture}: {name}"
                if key in known:
                    continue
                known[key] = None
                for seed in _SEEDS:
                    found = _asked(write_variant(path, architecture, change, seed))
                    if found is None:
                        break
                    if found[1] > NEAR:
                        known[key] = [seed, *found[0]]
                        break
                else:
                    known[key] = "only near-ties"
                lines = (f"{json.dumps(key)}: {json.dumps(row)}" for key, row in known.items())
                ANSWERS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
