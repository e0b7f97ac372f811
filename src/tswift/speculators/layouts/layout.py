"""What a layout of published drafters is, and what several of them read alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tswift.errors import InputError
from tswift.models.checkpoint import CONFIG, StoredTensor
from tswift.speculators.spec import DFLASH, DFLASH2, DSPARK, SpeculatorSpec

OPTION = "drafter"
BY_LIBRARY = "speculators_model_type"  # what vLLM's library speculators calls a drafter
_LARGEST = 1 << 31
_COUNTS = {
    *("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers", "block_size"),
    *("num_attention_heads", "num_key_value_heads", "mask_token_id", "markov_rank"),
    *("draft_vocab_size", "target_hidden_size", "num_target_layers", "sliding_window"),
    *("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
}
_ROPES = ("default", "linear", "llama3", "yarn")  # whose rates are the same at every length
# objects within a configuration, from what counts least to what counts most; None is the
# configuration itself
_NESTED = ("eagle_config", "transformer_layer_config", None, "dflash_config")
_TAPS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
_CAUSAL = ("is_causal", "causal")

Config = Mapping[str, object]
Shapes = dict[str, tuple[int, ...]]  # by name


def refused(path: Path, reason: str) -> InputError:
    """The error of a drafter in a folder."""
    return InputError(f"{path} {reason}", OPTION)


class Said(dict[str, Any]):
    """What a drafter's configuration says, the objects within it laid over it;
    what is asked for and missing is refused.
    """

    def __init__(self, path: Path, config: Config, stored: Mapping[str, StoredTensor]) -> None:
        super().__init__()
        self.path = path
        self.config = config  # as it is written
        self.stored = stored  # empty of random weights
        self.beside: Shapes = {}  # tensors that may be stored and are not read
        for nested in _NESTED:
            part = config if nested is None else config.get(nested) or {}
            if not isinstance(part, dict):
                raise refused(path, f"has {nested} {part!r:.40}, which is no object")
            self.update({name: value for name, value in part.items() if value is not None})
        for name in _COUNTS & self.keys():
            value = self[name]
            self.refuse(
                type(value) is not int or not 0 <= value < _LARGEST,
                f"has {name} {value!r:.40}, which is no count",
            )

    def refuse(self, wrong: object, reason: str) -> None:
        """Refuse the drafter if something is wrong with it."""
        if wrong:
            raise refused(self.path, reason)

    def __missing__(self, name: str) -> object:
        raise refused(self.path, f"says nothing of {name} in its {CONFIG}")

    def spec(self, kind: str, taps: list[int] | None, **own: Any) -> SpeculatorSpec:
        """A drafter's sizes; what is wrong or not served is refused by its name.

        Args:
            kind: its kind.
            taps: after which layers of the target, from 0, it reads states; None for EAGLE-3's
                usual.
            own: more fields.
        """
        heads = self["num_attention_heads"]
        kv_heads = self.get("num_key_value_heads", heads)
        # configurations are known to be wrong about the size of a head
        name = next((name for name in self.stored if name.endswith("self_attn.q_proj.weight")), "")
        shape = [*self.stored[name].shape] if name else [heads * self["head_dim"], 0]
        act = self.get("hidden_act", "silu")
        given = self.get("rope_parameters") or self.get("rope_scaling") or {}
        rope = {"rope_theta": self.get("rope_theta", 10_000.0), **given}
        turned = rope.setdefault("rope_type", rope.get("type", "default"))
        fine = taps is None or (taps and all(type(tap) is int and tap >= 0 for tap in taps))
        for wrong, reason in (
            (act != "silu", f"hidden_act {act!r:.40}, not silu"),
            (
                len(shape) != 2 or shape[0] % (2 * heads),
                f"{name} of shape {shape}, which {heads} query heads cannot share",
            ),
            (heads % kv_heads, f"{heads} query heads, which {kv_heads} KV heads cannot share"),
            (not fine, f"target_layer_ids {taps!r:.60}, which are no layers"),
            (turned not in _ROPES, f"rotary embeddings of type {turned!r:.40}"),
        ):
            self.refuse(wrong, f"has {reason}")
        return SpeculatorSpec(
            kind=kind,
            hidden_size=self["hidden_size"],
            inner_size=self["intermediate_size"],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=shape[0] // heads,
            vocab_size=self["vocab_size"],
            eps=float(self.get("rms_norm_eps", 1e-6)),
            rope=rope,
            tap_count=3 if taps is None else len(taps),
            taps=None if taps is None else tuple(taps),
            target_layers=self.get("num_target_layers") or None,
            **own,
        )

    def block(
        self,
        kind: str,
        taps: list[int],
        edge: int = 0,
        both_ways: bool = False,
        **own: Any,
    ) -> SpeculatorSpec:
        """The same of a block drafter.

        Args:
            kind, taps, own: as of :meth:`spec`.
            edge: how much more than the tokens before the block a window counts.
            both_ways: whether slots in layers with a window see those after them, if that is not
                said.
        """
        layers, vocab, mask = (
            self[name] for name in ("num_hidden_layers", "vocab_size", "mask_token_id")
        )
        sliding = self.sliding()
        if self.get("model_type") == "qwen3" and not self.get("use_sliding_window"):
            sliding = ()  # transformers' configuration of Qwen3 drops the window then
        causal = next((name for name in _CAUSAL if self.get(name)), "")
        self.refuse(causal and len(sliding) < layers, f"says {causal}, which tswift does not serve")
        self.refuse(0 < vocab <= mask, f"has mask_token_id {mask}, the vocabulary has {vocab:,}")
        return self.spec(
            kind,
            taps,
            layers=layers,
            tap_size=self["hidden_size"],
            block=self["block_size"],
            mask=mask,
            sliding=sliding,
            window=self["sliding_window"] - edge if sliding else 0,
            causal=not self.get("sliding_window_non_causal", both_ways)
            and False not in map(self.get, _CAUSAL),
            **own,
        )

    def second(self) -> dict[str, Any]:
        """The fields that DFlash2 has beside DFlash's."""
        vocab = self["vocab_size"]
        taps = self.get("conv_kernel_size", 2)
        group = self.get("conv_group_size", 16)
        chosen = self.get("selector_top_k", 16)
        self.refuse(
            not 0 < taps <= self["block_size"] or not group or self["hidden_size"] % group,
            f"has convolutions of {taps} taps in groups of {group}",
        )
        self.refuse(not 0 < chosen <= vocab, f"has selector_top_k {chosen}")
        self.refuse(self.get("draft_vocab_size", vocab) != vocab, "has a draft vocabulary")
        rank = self.get("selector_rank", 256)
        return {"kind": DFLASH2, "rank": rank, "chosen": chosen, "conv": (taps, group)}

    def markov(self, rank: int, sure: bool) -> dict[str, Any]:
        """The fields of a bias that the token before gives to a slot, by its usual rank.

        ``sure``: whether there usually is a head that tells how sure a slot's guess is.
        """
        rank = self.get("markov_rank", rank)
        markov = self.get("markov_head_type", "vanilla")
        self.refuse(
            rank and markov != "vanilla",
            f"has markov_head_type {markov!r:.40}, and only vanilla is served",
        )
        if self.get("enable_confidence_head", sure):
            told = rank if self.get("confidence_head_with_markov", True) else 0
            head = "confidence_head.proj"
            self.beside |= {f"{head}.weight": (1, self["hidden_size"] + told), f"{head}.bias": (1,)}
        return {"kind": DSPARK if rank else DFLASH, "rank": rank}

    def maps(self) -> None:
        """Allow what leads from an id of the target to one of a draft vocabulary, and back."""
        self.beside |= dict.fromkeys(("t2d", "d2t"), (self["vocab_size"],))

    def sliding(self) -> tuple[int, ...]:
        """The layers that see a window; refused where the configuration does not say it of
        each.
        """
        kinds = self.get("layer_types", [])
        known = isinstance(kinds, list) and {*kinds} <= {"full_attention", "sliding_attention"}
        found = tuple(
            index for index, kind in enumerate(kinds if known else ()) if kind != "full_attention"
        )
        self.refuse(
            not known
            or (found and len(kinds) != self.get("num_hidden_layers"))
            or (self.get("use_sliding_window") and not kinds),
            "has layers of sliding attention, which tswift does not serve; --budget makes windows",
        )
        return found

    def before(self) -> list[int] | None:
        """Taps by the ids of layers that the states go into, from 0; None where it names none."""
        ids = next((self[name] for name in _TAPS if name in self), None)
        return ids and [index - 1 for index in ids]


class Layout(NamedTuple):
    """How somebody writes drafters."""

    title: str  # who
    kinds: tuple[str, ...]  # by what name configurations say what they are of
    spec: Callable[[Said], SpeculatorSpec]
    # of what the parameters' names begin with, up to the first point: what it is called
    names: Mapping[str, str] = {}
    copies: bool = False  # whether the target's embeddings and LM head may be stored, too

    def matches(self, config: Config) -> bool:
        """Whether a configuration is of a drafter that is written so."""
        said = config.get("architectures")
        first = said[0] if isinstance(said, list) and said else None
        return config.get(BY_LIBRARY, first) in self.kinds
