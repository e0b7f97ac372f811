"""Options as fields of dataclasses: ranges, types, and what the command line makes of them."""

from __future__ import annotations

from dataclasses import dataclass

from typer.main import get_command

from tests.helpers import refused
from tests.rows import every_row
from tswift.benchmarking.config import BenchOptions, CompareConfig, Plan
from tswift.drafting.options import DraftOptions
from tswift.errors import InputError
from tswift.jobs.config import AuditConfig, RunConfig
from tswift.models.config import ModelConfig
from tswift.options import (
    changed,
    check_options,
    described,
    given_names,
    given_options,
    option,
    options_of,
    parse_numbers,
    part,
)
from tswift.sampling.parameters import SamplingParams

KINDS = (
    SamplingParams,
    DraftOptions,
    ModelConfig,
    RunConfig,
    AuditConfig,
    CompareConfig,
    BenchOptions,
    Plan,
)


@dataclass(frozen=True)
class Example:
    count: int = option(3, "How many.", least=1, most=9)
    share: float = option(0.5, "How much.", above=0, below=1)
    large: int = option(1, "A large one.", least=0, most=1 << 40)
    name: str | None = option(None, "Which.", shown="the first", choices=("first", "second"))
    flag: bool = option(True, "Whether.")
    some: tuple[int, ...] = option((1, 2), "Several.", shown="1,2", least=1)
    endless: float = option(1.0, "Any.", least=0)
    hidden: int = 7  # no option

    def __post_init__(self):
        check_options(self)


@every_row(
    ("values", "message"),
    [
        ({"count": 0}, "count: must be between 1 and 9, got 0"),
        ({"count": 10}, "count: must be between 1 and 9, got 10"),
        ({"count": 2.0}, "count: must be an integer, got 2.0"),
        ({"count": True}, "count: must be an integer, got True"),
        ({"count": None}, "count: must be an integer, got None"),
        ({"share": 0}, "share: must be above 0 and below 1, got 0"),
        ({"share": float("nan")}, "share: must be above 0 and below 1, got nan"),
        ({"share": "x"}, "share: must be a number, got 'x'"),
        (
            {"share": 1 << 70},
            "share: must be a number below 2^62, or have a decimal point, got "
            "1180591620717411303424",
        ),
        ({"endless": float("inf")}, "endless: must be at least 0, got inf"),
        ({"large": -1}, "large: must be at least 0, got -1"),
        ({"large": 1 << 41}, "large: must be at most 1,099,511,627,776, got 2199023255552"),
        ({"name": "frst"}, "name: must be one of first, second, got 'frst'; did you mean first?"),
        ({"name": 3}, "name: must be a text, got 3"),
        ({"flag": 1}, "flag: must be yes or no, got 1"),
        ({"some": (1, 0)}, "some: must be at least 1, got 0"),
    ],
)
def test_a_wrong_value_is_named(values, message):
    with refused() as caught:
        Example(**values)
    assert str(caught.value) == message


def test_right_values_pass():
    Example()
    Example(count=9, share=0.99, large=1 << 40, name="second", flag=False, some=())


def test_the_help_says_the_default():
    said = [described(each.default, carried) for each, carried in options_of(Example)]
    assert said == [
        "How many. (default: 3)",
        "How much. (default: 0.5)",
        "A large one. (default: 1)",
        "Which. (default: the first)",
        "Whether. (default: yes)",
        "Several. (default: 1,2)",
        "Any. (default: 1)",
    ]


@every_row("kind", KINDS)
def test_every_option_says_what_it_is_and_its_default_is_in_range(kind):
    for each, carried in options_of(kind):
        assert carried.help.endswith((".", "...")), each.name
    kind()


def test_a_filter_says_what_turns_it_off():
    carried = {each.name: one for each, one in options_of(SamplingParams)}
    assert {name: carried[name].off for name in ("min_p", "eta", "top_k", "top_p")} == {
        **{"min_p": 0.0, "eta": 0.0, "top_k": 0, "top_p": 1.0}
    }
    assert carried["penalty"].off is None


def test_numbers():
    assert parse_numbers("1000,20_000") == (1000, 20_000)
    with refused("wants numbers and commas, got '1,x'"):
        parse_numbers("1,x")


def test_other_parameters_are_flags_on_the_command_line_alone():
    from tswift.cli.app import app
    from tswift.cli.options import as_typed

    generate = get_command(app).commands["generate"].params
    with refused(r"^gamma: cannot be given together with tree$") as caught:
        DraftOptions(tree=(1, 2), gamma=2)
    assert as_typed(caught.value, generate) == "--gamma: cannot be given together with --tree"
    # and by the command's own name for it
    assert as_typed(InputError("is `seed`", "length"), generate) == "--len: is --seed"


@dataclass(frozen=True)
class Whole:
    example: Example = part(Example)
    more: int = option(0, "More.")
    given: frozenset[str] = given_names()


def test_options_of_parts_go_by_their_names():
    made = changed(Whole(), {"count": 5, "more": 0})
    assert (made.example, made.more, made.given) == (Example(count=5), 0, {"count", "more"})
    other = changed(made, {"share": 0.25, "more": 2})
    assert (other.example, other.more, other.given) == (
        Example(count=5, share=0.25),
        2,
        {"count", "share", "more"},
    )
    with refused(r"^count: must be between 1 and 9, got 10"):
        changed(made, {"count": 10})


def test_what_was_given_counts_although_it_is_the_default():
    made = changed(Whole(), {"count": 3, "share": 0.25})
    assert given_options(made.example, made.given) == {"count": 3, "share": 0.25}
    assert given_options(made.example) == {"share": 0.25}
