"""Model folders: files missing, damaged, of other shapes, of other kinds, or out to run code."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cli.bad_inputs.case import Case, World, generate, words_of
from tests.helpers import read_json

Change = Callable[[Path], object]

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MARKER = "code-was-run"  # in the case's folder; a case that makes it has run the checkpoint's code


class Bomb:
    """Unpickled, it leaves a marker."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def gone(*names: str) -> Change:
    """Take files away."""
    return lambda folder: [(folder / name).unlink(missing_ok=True) for name in names]


def edit_json(name: str, change: Callable[[dict[str, Any]], object]) -> Change:
    """Change what a JSON file holds."""

    def edit(folder: Path):
        path = folder / name
        content = read_json(path) if path.exists() else {}
        change(content)
        path.write_text(json.dumps(content))

    return edit


def config(**values) -> Change:
    """Other values in ``config.json``."""
    return edit_json("config.json", lambda content: content.update(values))


def content(name: str, data: bytes) -> Change:
    """Another content of a file."""
    return lambda folder: (folder / name).write_bytes(data)


def cut(name: str, size: int) -> Change:
    """A file's first bytes, or all but its last if the size is negative."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def flip(name: str, place: int, mask: int = 0xFF) -> Change:
    """Other bits in a byte of a file."""

    def flipped(folder: Path):
        data = bytearray((folder / name).read_bytes())
        data[place] ^= mask
        (folder / name).write_bytes(data)

    return flipped


def tensors(change: Callable[[dict[str, Any]], object], name: str = WEIGHTS) -> Change:
    """Other tensors in a safetensors file."""

    def edit(folder: Path):
        from safetensors.torch import load_file, save_file

        weights = load_file(folder / name)
        change(weights)
        save_file(weights, folder / name, metadata={"format": "pt"})

    return edit


def header(name: str, change: Callable[[dict[str, Any]], object]) -> Change:
    """Another header of a safetensors file, its data as it was."""

    def edit(folder: Path):
        data = (folder / name).read_bytes()
        size = int.from_bytes(data[:8], "little")
        about = json.loads(data[8 : 8 + size])
        change(about)
        text = json.dumps(about).encode()
        (folder / name).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])

    return edit


def sharded(*changes: Change) -> Change:
    """The weights in two shards and an index, and then changes."""

    def edit(folder: Path):
        from safetensors.torch import load_file, save_file

        weights = load_file(folder / WEIGHTS)
        names = sorted(weights)
        shards = {
            "model-00001-of-00002.safetensors": names[::2],
            "model-00002-of-00002.safetensors": names[1::2],
        }
        for shard, mine in shards.items():
            save_file(
                {name: weights[name] for name in mine}, folder / shard, metadata={"format": "pt"}
            )
        (folder / WEIGHTS).unlink()
        places = {name: shard for shard, mine in shards.items() for name in mine}
        (folder / INDEX).write_text(
            json.dumps({"metadata": {"total_size": 1}, "weight_map": places})
        )
        for change in changes:
            change(folder)

    return edit


def _pickled(folder: Path):
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(folder.parent / MARKER)))


def _code(**values) -> Change:
    """Code in the folder that the configuration wants run, and other values."""

    def edit(folder: Path):
        code = f"import os\nos.mkdir({str(folder.parent / MARKER)!r})\n"
        for name in ("configuration_x.py", "modeling_x.py", "tokenization_x.py"):
            (folder / name).write_text(code)
        config(**values)(folder)

    return edit


_AUTO = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X"}
_DEEP = b"[" * 100_000 + b"]" * 100_000
_NORM = "model.norm.weight"


def _elsewhere(shard) -> Change:
    """An index by which the first shard's tensors are somewhere else."""

    def change(index: dict[str, Any]):
        places = index["weight_map"]
        index["weight_map"] = {
            name: shard if "00001" in where else where for name, where in places.items()
        }

    return edit_json(INDEX, change)


def _more_ids(tokenizer: dict[str, Any]):
    """The ids of two words that the prompt has, beyond the model's vocabulary."""
    vocab = tokenizer["model"]["vocab"]
    vocab.update({word: vocab[word] + 5000 for word in ("h", "e", "s")})


_Z = (WEIGHTS, "config.json", "tokenizer.json")

# what is done to the folder, and what the line has to say beside the folder's name
CHANGES: dict[str, Change] = {
    "no config.json": gone("config.json"),
    "no weights": gone(WEIGHTS),
    "no tokenizer.json": gone("tokenizer.json"),
    **{
        f"an empty {name}": content(name, b"")
        for name in (*_Z, "tokenizer_config.json", "generation_config.json")
    },
    # config.json
    "config.json that is a list": content("config.json", b"[]"),
    "config.json that is nested deeply": content("config.json", _DEEP),
    "model_type of nothing known": config(model_type="nope"),
    "model_type with escapes": config(model_type="\x1b[31mred\x07"),
    "hidden_size 'abc'": config(hidden_size="abc"),
    "vocab_size 10^11": config(vocab_size=10**11),
    "num_hidden_layers 10^30": config(num_hidden_layers=10**30),
    "num_hidden_layers 3": config(num_hidden_layers=3),
    "layers of another type": config(layer_types=["linear_attention"]),
    "dtype 'float99'": config(dtype="float99"),
    "quantised by nobody": config(quantization_config={"quant_method": "nope"}),
    # generation_config.json
    "generation_config.json with eos 999,999": edit_json(
        "generation_config.json", lambda content: content.update(eos_token_id=[0, 999_999])
    ),
    # weights
    "weights cut in the data": cut(WEIGHTS, -8),
    "weights of shape [2^40]": header(WEIGHTS, lambda about: about[_NORM].update(shape=[1 << 40])),
    "a tensor missing": tensors(lambda weights: weights.pop("model.layers.0.mlp.up_proj.weight")),
    "all tensors by other names": tensors(
        lambda weights: [weights.update({f"x.{name}": weights.pop(name)}) for name in [*weights]]
    ),
    "a tensor of another shape": tensors(
        lambda weights: weights.update({_NORM: weights[_NORM].repeat(2)})
    ),
    "weights of NaN": tensors(lambda weights: weights[_NORM].fill_(float("nan"))),
    # shards
    "a shard missing": sharded(gone("model-00002-of-00002.safetensors")),
    "an index without a map": sharded(content(INDEX, b'{"metadata": {}}')),
    "an index that names a pickle": sharded(
        _elsewhere("pytorch_model.bin"), content("pytorch_model.bin", b"x")
    ),
    # code
    "pickled weights only": _pickled,
    "code for an unknown model": _code(auto_map=_AUTO, model_type="x"),
    "code for the tokenizer": lambda folder: [
        _code()(folder),
        gone("tokenizer.json")(folder),
        edit_json(
            "tokenizer_config.json",
            lambda content: content.update(
                auto_map={"AutoTokenizer": ["tokenization_x.X", "tokenization_x.X"]},
                tokenizer_class="X",
            ),
        )(folder),
    ],
    # tokenizer
    "tokenizer.json that is no JSON": content("tokenizer.json", b"{"),
    "tokenizer.json with a vocabulary of numbers": edit_json(
        "tokenizer.json", lambda content: content["model"].update(vocab=[1, 2])
    ),
    "tokenizer.json with ids beyond the vocabulary": edit_json("tokenizer.json", _more_ids),
    "an adapter": content("adapter_config.json", b'{"base_model_name_or_path": "nobody/nothing"}'),
}

# those that have to do with other commands, too; a draft model is checked as the model is
_ELSEWHERE = {
    "bench": ("no config.json", "pickled weights only"),
    "verify": ("no config.json", "a shard missing"),
    "compare": ("no config.json",),
    "roofline": ("config.json that is a list", "hidden_size 'abc'", "dtype 'float99'"),
    "draft": (
        "a shard missing",
        "hidden_size 'abc'",
        "tokenizer.json with ids beyond the vocabulary",
        "an adapter",
    ),
}


def _case(command: str, name: str) -> Case:
    def words(world: World) -> list[object]:
        folder = shutil.copytree(world.model, world.here / "model")
        CHANGES[name](folder)
        if command == "draft":
            return generate(world, "--method", "standalone", "--draft-model", folder)
        fine = "verify RUN" if command == "verify" else command
        return words_of(world, fine, "--model", folder, without=["--model"])

    option = (
        "--draft-model" if command == "draft" else "--prompt" if "ids beyond" in name else "--model"
    )
    return Case(f"{command}, a model with {name}", words, option)


def _escapes(world: World) -> list[object]:
    folder = world.here / "red\x1b[31m\u202e\nnew line\x9b"
    shutil.copytree(world.model, folder)
    (folder / "config.json").unlink()
    return generate(world, "--model", folder)


def _file(world: World) -> list[object]:
    return generate(world, "--model", world.model / "config.json")


MODELS: tuple[Case, ...] = (
    *(_case("generate", name) for name in CHANGES),
    *(_case(command, name) for command, names in _ELSEWHERE.items() for name in names),
    Case("generate, a model in a folder with escapes in its name", _escapes, "--model"),
    Case("generate, a model that is a file", _file, "--model"),
)
