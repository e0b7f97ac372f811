"""README.md and docs/: links that lead somewhere, and a place for every option."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.rows import every_row
from tswift.cli.app import app
from tswift.drafting import history, methods
from tswift.drafting.options import KV, METHODS
from tswift.options import options_of
from tswift.sampling.parameters import SamplingParams

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PATH = re.compile(r"`((?:src|tests|docs|results|benchmarks|recipes|prompts)/[\w./-]+)`")


def _anchors(page: Path) -> set[str]:
    """Anchors that GitHub makes of a page's headings."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.M
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_exist(page):
    text = page.read_text()
    for link in _LINK.findall(text):
        if not link.startswith("https://"):
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            assert target.is_relative_to(ROOT), link
            assert target.exists(), link
            assert not anchor or anchor in _anchors(target), link
    for path in _PATH.findall(text):
        assert (ROOT / path).exists(), path


def test_every_page_is_linked_from_the_readme():
    links = {link.partition("#")[0] for link in _LINK.findall(PAGES[0].read_text())}
    assert {f"docs/{page.name}" for page in PAGES[1:]} <= links


def test_every_page_is_in_the_sites_navigation():
    named = set(re.findall(r"[\w ]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert named >= {str(page.relative_to(ROOT)) for page in PAGES}
    assert all((ROOT / name).is_file() for name in named)


def _commands(command) -> Iterator[Any]:
    if hasattr(command, "commands"):
        for each in command.commands.values():
            yield from _commands(each)
    else:
        yield command


def test_every_option_is_on_a_page():
    text = "".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", text))
    for command in _commands(typer.main.get_command(app)):
        for parameter in command.params:
            if parameter.param_type_name == "option":
                missing = {*parameter.opts, *parameter.secondary_opts} - named
                assert not missing, f"{missing} of {command.name}: docs/cli.md has no row of it"


@every_row(
    ("page", "names"),
    [
        ("serve.md", {option.name for option, _ in options_of(SamplingParams)}),
        ("methods.md", {*METHODS, *KV}),
    ],
)
def test_every_name_is_in_a_row(page, names):
    """Fields of a request that say how tokens are drawn; methods, and what partial caches hold."""
    cells = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / page).read_text(), re.M)
    assert names <= {*re.findall(r"`(.*?)`", " ".join(cells))}


def test_how_long_a_pass_takes_where_auto_keeps_what_came():
    words = " ".join((ROOT / "docs/methods.md").read_text().split())
    told = re.findall(r"pass takes (?:at most|more than) (\S+) ms", words)
    limits = methods._RECORDED, methods._RECORDED, history._SLOW_PASS
    assert told == [f"{1e3 * limit:g}" for limit in limits]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_need_a_prompt_have_one(page):
    """Only the bundled model has a text to continue of its own."""
    text = page.read_text().replace("\\\n", " ")  # a command may have several lines
    for command in re.findall(r"^(?:.*[ /])?tswift (?:generate|compare) (.*?)(?:#|$)", text, re.M):
        others = re.search(r"--(model (?!demo)|preset|heads|draft-model|drafter)", command)
        if command.count("--") and "`" not in command and others:
            assert "--prompt" in command, command
