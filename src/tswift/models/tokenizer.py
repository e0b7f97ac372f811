"""A checkpoint's tokenizer, and the tokens that end a text by all that it says of them."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tswift.errors import InputError
from tswift.models.checkpoint import as_input_error, find_source, hub, silence
from tswift.models.config import SHAPE_PREFIX
from tswift.models.gguf import SUFFIX
from tswift.models.shapes import StandInTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """A model's tokenizer, without its weights; InputError if there is none that can be read."""
    if model.startswith(SHAPE_PREFIX):
        return StandInTokenizer()
    source, folder = find_source(model)
    with silence(), hub(folder is None), as_input_error(model):
        return read_tokenizer(source, model)


def read_tokenizer(source: str, model: str) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder, of a hub id or in a GGUF file; ``model`` is for errors."""
    with as_input_error(model, "its tokenizer: "):
        if source.endswith(SUFFIX):
            tokenizer = _tokenizer_of_gguf(Path(source))
        else:
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise InputError(
            f"{model} has no tokenizer.json that the tokenizers library reads", "model"
        )
    return tokenizer


def _tokenizer_of_gguf(path: Path) -> PreTrainedTokenizerBase:
    """As transformers makes it of the file; in a folder of its own,
    as other files beside it would be preferred.
    """
    with TemporaryDirectory() as folder:
        Path(folder, path.name).symlink_to(path.resolve())
        return PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=path.name)


def eos_ids(
    model: str, network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> tuple[int, ...]:
    """The token ids that end a text, by all that a checkpoint says of them."""
    tokens: list[Any] = []
    for holder in (network.generation_config, network.config, tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        tokens += ids if isinstance(ids, list | tuple) else () if ids is None else (ids,)
    for token in tokens:
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            reason = (
                f"has eos_token_id {token!r:.40}, which is no id of its vocabulary of "
                f"{vocab_size:,}"
            )
            raise InputError(f"{model} {reason}", "model")
    return tuple(sorted(set(tokens)))
