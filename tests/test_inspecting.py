"""What is known of a model before it is loaded: sizes, positions,
and the free memory it would need.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, Gemma3TextConfig, LlamaConfig, Qwen2Config

from tests.conftest import make_checkpoint
from tests.helpers import CPU, tiny_llama
from tests.rows import every_row
from tswift import machine
from tswift.forward.hf import probe_attention
from tswift.forward.target import Target
from tswift.loading.model import load
from tswift.loading.plan import plan_model
from tswift.machine import available_bytes
from tswift.models import shapes
from tswift.models.architecture import max_positions
from tswift.models.config import ModelConfig
from tswift.models.hashes import named_weights
from tswift.speculators.heads import HEAD_TYPES


def bytes_of(module: torch.nn.Module | None) -> int:
    """Of all weights, packed ones as the numbers that they stand for."""
    if module is None:
        return 0
    size = next(module.parameters()).element_size()
    return size * sum(weight.numel() for _, weight in named_weights(module))


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({}, "auto"),
        ({"tie_word_embeddings": True}, "bfloat16"),
        ({"num_key_value_heads": 1, "head_dim": 16}, "float64"),
    ],
)
def test_a_folder(tmp_path, changes, dtype):
    model = str(make_checkpoint(tmp_path / "m", **changes))
    seen = plan_model(ModelConfig(model=model, dtype=dtype))
    loaded = load(model, dtype=dtype)
    target = loaded.target
    assert seen.device == target.device
    assert (seen.max_positions, seen.vocab_size) == (target.max_positions, target.vocab_size)
    assert seen.loaded_bytes["weights"] == bytes_of(target.model)
    assert seen.kv_shape.bytes_per_token == target.kv_shape.bytes_per_token
    assert (seen.heads_count, seen.loaded_bytes["heads"]) == (3, bytes_of(loaded.heads))
    assert seen.most_nodes is None


@pytest.mark.parametrize(("name", "heads"), [("tiny", None), *(("tied", x) for x in HEAD_TYPES)])
def test_a_shape(tiny_shapes, name, heads):
    model = f"shape:{name}"
    seen = plan_model(ModelConfig(model=model, heads=heads))
    loaded = load(model, heads=heads)
    assert seen.loaded_bytes["weights"] == bytes_of(loaded.target.model)
    assert (seen.heads_count, seen.loaded_bytes["heads"]) == (
        loaded.heads.count,
        bytes_of(loaded.heads),
    )
    assert loaded.heads.count == shapes.HEADS
    assert seen.kv_shape.bytes_per_token == loaded.target.kv_shape.bytes_per_token


def test_a_configuration_that_does_not_say_how_many_kv_heads(tmp_path):
    """At least one: no more may be taken for granted."""
    from transformers import GPTNeoXConfig

    GPTNeoXConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=128,
    ).save_pretrained(tmp_path)
    seen = plan_model(ModelConfig(model=str(tmp_path)))
    assert seen.kv_shape.bytes_per_token == 2 * 2 * 8 * 4
    assert (seen.heads_count, seen.loaded_bytes["heads"]) == (0, 0)


LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
QWEN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}


def llama(positions: int, **rope) -> LlamaConfig:
    settings = {
        "hidden_size": 64,
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "vocab_size": 10,
    }
    return LlamaConfig(
        **settings, max_position_embeddings=positions, rope_parameters={"rope_theta": 1e4, **rope}
    )


# as they are published, or as their model cards say that they are to be changed
CONFIGS = {
    "Llama 2": (llama(4096, rope_type="default"), 4096),
    "Llama 2 at linear 4": (llama(4096, rope_type="linear", factor=4.0), 16_384),
    "Yarn Llama 2": (
        llama(131_072, rope_type="yarn", factor=32.0, original_max_position_embeddings=4096),
        131_072,
    ),
    "Qwen2.5 with YaRN": (llama(32_768, **QWEN), 131_072),
    "Qwen3 with YaRN": (llama(40_960, **QWEN), 131_072),
    "YaRN without an original": (llama(32_768, rope_type="yarn", factor=4.0), 131_072),
    "Llama 3.1": (
        llama(131_072, **LLAMA3, factor=8.0, original_max_position_embeddings=8192),
        131_072,
    ),
    "Llama 3.2": (
        llama(131_072, **LLAMA3, factor=32.0, original_max_position_embeddings=8192),
        131_072,
    ),
    "Llama 3 scaled by hand": (
        llama(8192, **LLAMA3, factor=8.0, original_max_position_embeddings=8192),
        65_536,
    ),
    "nonsense": (llama(4096, rope_type="linear", factor="x"), 4096),
    "more than there is": (llama(4096, rope_type="linear", factor=1e30), 1 << 24),
    "Gemma 3": (
        Gemma3TextConfig(
            max_position_embeddings=131_072,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
        131_072,
    ),
}


@every_row("name", CONFIGS)
def test_configurations(name):
    config, positions = CONFIGS[name]
    assert max_positions(config) == positions


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_as_it_stands_in_a_file(tmp_path, key):
    """Qwen2.5's model card: add this to config.json."""
    config = Qwen2Config(max_position_embeddings=32_768).to_dict()
    config.pop("rope_parameters")
    scaling = {"rope_type" if key == "rope_parameters" else "type": "yarn", "factor": 4.0}
    config[key] = {**scaling, "original_max_position_embeddings": 32_768}
    Qwen2Config.from_dict(config).save_pretrained(tmp_path)
    assert max_positions(AutoConfig.from_pretrained(tmp_path)) == 131_072


def test_a_window_beyond_the_maximum_that_is_named_is_seen():
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        sliding_window=100,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    )
    assert (
        probe_attention(MistralForCausalLM(config)).attention_features
        == "sliding windows of 100 tokens"
    )
    assert Target(MistralForCausalLM(config)).max_positions == 128
    assert Target(tiny_llama("gqa", torch.float32)).max_positions == 16_384


MEMORY = "MemTotal:       24000000 kB\nMemFree:         1000000 kB\nMemAvailable:    8000000 kB\n"
STAT = "anon 100\nfile 900\ninactive_anon 1\nactive_anon 2\ninactive_file 300\nactive_file 200\n"
ALL = 8_192_000_000


def left(monkeypatch, root: Path, files: dict[str, str]) -> int | None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    monkeypatch.setattr(machine, "_ROOT", root)
    return available_bytes(CPU)


def test_a_machine(monkeypatch, tmp_path):
    assert left(monkeypatch, tmp_path, {}) is None
    assert left(monkeypatch, tmp_path, {"proc/meminfo": "MemTotal: 5 kB\n"}) is None
    assert left(monkeypatch, tmp_path, {"proc/meminfo": MEMORY}) == ALL
    # what cannot be made sense of
    files = {
        "proc/self/cgroup": "0::/../../x\n",
        "sys/fs/cgroup/memory.max": "",
        "sys/fs/cgroup/memory.current": "5",
    }
    assert left(monkeypatch, tmp_path, files) == ALL
    (tmp_path / "sys/fs/cgroup/memory.max").unlink()
    (tmp_path / "sys/fs/cgroup/memory.max").mkdir()
    assert available_bytes(CPU) == ALL


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, ALL),
        ({"": ("max", "7000")}, ALL),
        ({"": ("1000000", "7000")}, 993_500),
        ({"": ("6000", "7000")}, 0),
        ({"jobs/one": ("5000", "1000"), "jobs": ("4000", "2000"), "": ("max", "9000")}, 2500),
        ({"jobs/one": ("5000", "1000"), "jobs": ("9000", "2000")}, 4500),
        ({"jobs/two": ("5000", "1000")}, ALL),
    ],
)
def test_version_2(monkeypatch, tmp_path, limits, expected):
    files = {"proc/meminfo": MEMORY, "proc/self/cgroup": "0::/jobs/one\n"}
    for group, told in limits.items():
        names = zip(("memory.max", "memory.current", "memory.stat"), (*told, STAT), strict=True)
        files |= {f"sys/fs/cgroup/{group}/{name}": f"{content}\n" for name, content in names}
    assert left(monkeypatch, tmp_path, files) == expected


@pytest.mark.parametrize(
    ("limit", "expected"), [(2_000_000, 1_999_500), (9_223_372_036_854_771_712, ALL)]
)
# in a container, what the process is told is not what it sees
@pytest.mark.parametrize("group", ["docker/abc", ""])
def test_version_1(monkeypatch, tmp_path, limit, expected, group):
    folder = f"sys/fs/cgroup/memory/{group}"
    files = {
        "proc/meminfo": MEMORY,
        "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/docker/abc\n2:cpuacct:/\n0::/\n",
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": "1000\n",
        f"{folder}/memory.stat": f"{STAT}total_inactive_file 400\ntotal_active_file 100\n",
    }
    assert left(monkeypatch, tmp_path, files) == expected


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("avx2", "AVX2"),
        ("avx2 avx512f", "AVX-512"),
        ("avx2 avx_vnni", "AVX2 VNNI"),
        ("avx2 avx512f avx512_vnni avx512_bf16 amx_int8", "AVX-512 VNNI BF16 AMX"),
    ],
)
def test_a_processor_is_named_with_what_it_computes_with(flags, words, monkeypatch):
    first = "model name\t: Intel(R) Xeon(R) Processor\ncpu family\t: 6\nmodel\t\t: 143\n"
    assert named(monkeypatch, f"{first}flags\t\t: fpu {flags}\n\n{first}") == (
        f"Intel Xeon (family 6 model 143), {words}"
    )


PROCESSOR = machine.processor.__wrapped__


def named(monkeypatch, told: str) -> str:
    """A processor by what Linux, or else macOS, says of it."""
    text = "" if told.startswith("hw.") else told
    monkeypatch.setattr(Path, "read_text", lambda path: text)
    monkeypatch.setattr(machine, "_output", lambda command: told)
    monkeypatch.setattr(machine, "processor", PROCESSOR)
    return machine._cpu_name()


def test_an_arm_processor_is_named_by_its_part(monkeypatch):
    told = "Features\t: fp asimd asimddp bf16\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n"
    assert named(monkeypatch, told) == "ARM 0x41 0xd40, NEON DotProd BF16"
    apples = (
        "hw.optional.arm.FEAT_DotProd: 1\nhw.optional.arm64: 1\nmachdep.cpu.brand_string: Apple M1"
    )
    assert named(monkeypatch, apples) == "Apple M1, NEON DotProd"
