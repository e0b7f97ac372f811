"""What properties and fuzzing have in common: how many examples, damage to bytes,
other values in what JSON says.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

# of a property that takes long to look at
few = settings(max_examples=max(3, settings().max_examples // 4))
many = settings(max_examples=15 * settings().max_examples)  # and of one that takes next to no time
fuzzed = settings(deadline=5000)  # a reader that takes seconds for a small file hangs

VALUES = st.sampled_from(
    [
        *(
            None,
            True,
            False,
            0,
            1,
            -1,
            2,
            7,
            2.5,
            -0.0,
            1e300,
            float("nan"),
            float("inf"),
            10**40,
            -(2**63),
            2**64,
        ),
        *(
            "",
            "x",
            "1",
            "demo",
            "float32",
            "\0",
            "\x1b[31m",
            "../..",
            "/dev/zero",
            "\ud800",
            "y" * 999,
        ),
        *([], {}, [[]], [1], ["x"], {"a": 1}, [None], {"": []}),
    ]
)


@st.composite
def damage(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """Some damage to bytes: bits flipped, a piece cut out, put in or doubled, an end gone,
    or all of it other bytes.
    """
    place, length = draw(st.floats(0, 1)), draw(st.integers(1, 64))
    bits, other = draw(st.integers(1, 255)), draw(st.binary(max_size=200))

    def flip(data: bytes, at: int) -> bytes:
        return data[:at] + bytes(byte ^ bits for byte in data[at : at + 1]) + data[at + 1 :]

    damaged = draw(
        st.sampled_from(
            [
                *(flip, flip),
                lambda data, at: data[:at] + data[at + length :],
                lambda data, at: data[:at],
                lambda data, at: data[:at] + other + data[at:],
                lambda data, at: data[: at + length] + data[at:],
                lambda data, at: other,
            ]
        )
    )
    return lambda data: damaged(data, min(int(place * len(data)), max(len(data) - 1, 0)))


@st.composite
def other_values(draw: st.DrawFn) -> Callable[[Any], Any]:
    """One to three changes of what JSON says: another value somewhere, or one taken away."""
    changes = draw(
        st.lists(st.tuples(st.floats(0, 1), VALUES | st.just(_AWAY)), min_size=1, max_size=3)
    )

    def done(value):
        value = copy.deepcopy(value)
        for where, new in changes:
            places = list(_places(value))
            if places:
                holder, key = places[min(int(where * len(places)), len(places) - 1)]
                if new is _AWAY:
                    del holder[key]
                else:
                    holder[key] = copy.deepcopy(new)
        return value

    return done


@st.composite
def json_damage(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """Damage to the bytes of JSON, or to what it says."""
    if draw(st.booleans()):
        return draw(damage())
    change = draw(other_values())
    return lambda data: json.dumps(change(json.loads(data))).encode()


class _Away:
    def __repr__(self) -> str:
        return "taken away"


_AWAY = _Away()


def _places(value) -> Iterator[tuple[Any, Any]]:
    keys = (
        list(value)
        if isinstance(value, dict)
        else range(len(value))
        if isinstance(value, list)
        else ()
    )
    for key in keys:
        yield value, key
        yield from _places(value[key])
