"""The Python API, and the examples of it in README.md and docs/python.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import tswift
from tests.helpers import needs_program, refused, tokens_of
from tswift.cli import main
from tswift.drafting.options import METHODS

ROOT = Path(__file__).parents[1]


def example(page: str, number: int = 0) -> str:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)[number]


def run(page: str, number: int = 0, **names):
    exec(compile(example(page, number), page, "exec"), {"__name__": "__main__", **names})


def test_import_is_light():
    code = "import sys, tswift; assert tswift.__version__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_names_are_there():
    for name in tswift.__all__:
        assert getattr(tswift, name) is not None
    assert dir(tswift) == sorted(tswift.__all__)
    assert (Path(tswift.__file__).parent / "py.typed").exists()
    with pytest.raises(AttributeError):
        tswift.nothing  # noqa: B018


def test_text_and_ids_are_the_same_prompt(checkpoint):
    model = tswift.load(str(checkpoint), dtype="float64")
    drawn = [
        tokens_of([*tswift.generate(model, prompt, 20, method=method)])
        for prompt in ("The ship", model.encode("The ship"))
        for method in ("ar", "tokenswift")
    ]
    assert len(drawn[0]) == 20
    assert drawn == [drawn[0]] * 4


def test_a_text_that_is_none_is_told_as_that(checkpoint):
    model = tswift.load(str(checkpoint))
    for text, what in (("a\udcff", "is not UTF-8"), ("a\0b", "has NUL bytes")):
        with refused(f"^prompt: the text is not text: it {what}$"):
            tswift.generate(model, text, 3)


def test_the_text_of_the_steps_is_the_text(checkpoint):
    """Whatever is held back for a character that is begun,
    or for a stop string that is not completed.
    """
    model = tswift.load(str(checkpoint), dtype="float64")
    for method in ("ar", "tokenswift"):
        for stop in ((), ("\nxyz",)):
            steps = [*tswift.generate(model, "The ship", 60, method=method, stop=stop)]
            whole = model.tokenizer.decode(tokens_of(steps), skip_special_tokens=False)
            assert "".join(step.text for step in steps) == whole
            # what could have been the beginning of a stop string
            more = f"{whole[-1]}\u2603"
            held = tswift.generate(model, "The ship", 60, method=method, stop=more)
            assert "".join(step.text for step in held) == whole
    begun = tokens_of(steps)[:20]
    rest = tswift.generate(model, "The ship", 60, method="ar", written=begun)
    shown = model.tokenizer.decode(begun, skip_special_tokens=False) + "".join(
        step.text for step in rest
    )
    assert shown.replace("\N{REPLACEMENT CHARACTER}", "") == whole.replace(
        "\N{REPLACEMENT CHARACTER}", ""
    )


def test_a_model_is_shown_in_one_line(checkpoint):
    shown = repr(tswift.load(str(checkpoint), dtype="float64", heads="none"))
    assert "\n" not in shown
    assert all(word in shown for word in (str(checkpoint), "cpu", "float64", "positions", "heads"))
    assert ", no heads, decoded by ar, cascade, " in shown


@needs_program
def test_a_model_names_the_methods_that_decode_it():
    """All that it names do, and others are refused."""
    model = tswift.load(draft_model="demo-draft")
    networks = {name for name, method in METHODS.items() if method.speculator_kinds}
    assert {*METHODS} - {*model.methods} == networks | {"ar-reference"}
    assert {*tswift.load(heads="none").methods} == {*model.methods} - {
        *("medusa", "tokenswift", "standalone", "triforce")
    }
    for name in METHODS:
        if name in model.methods:
            assert next(tswift.generate(model, "The ship", 2, method=name)).tokens
        elif name in networks:
            with pytest.raises(tswift.InputError, match=r"drafter|MTP head"):
                tswift.generate(model, "The ship", 2, method=name)


def test_a_keyword_that_there_is_not(checkpoint):
    with pytest.raises(
        TypeError, match=r"^load.* unexpected keyword argument 'devise'; did you mean device\?$"
    ):
        tswift.load(str(checkpoint), devise="cpu")
    with pytest.raises(TypeError, match=r"'lenght'; did you mean length\?$"):
        tswift.generate(tswift.load(str(checkpoint)), "The ship", lenght=3)
    for name, part in {"top_p": "params=SamplingParams", "nodes": "options=DraftOptions"}.items():
        with pytest.raises(TypeError, match=rf"{name!r}; give {part}\({name}=...\)$"):
            tswift.generate(tswift.load(str(checkpoint)), "The ship", 3, **{name: 1})


def test_refuses_at_the_call_not_at_the_first_step(checkpoint):
    model = tswift.load(str(checkpoint))
    for field, wrong in (
        ("prompt", {"prompt": ""}),
        ("prompt", {"prompt": None}),
        ("prompt", {"prompt": ["The"]}),
        ("length", {"length": 0}),
        ("length", {"length": 5000}),
        ("length", {"length": 10.5}),
        ("seed", {"seed": "a"}),
        ("written", {"written": [1 << 20]}),
        ("written", {"written": "a"}),
        ("stop_at_eos", {"stop_at_eos": "yes"}),
        ("method", {"method": ["ar"]}),
        ("method", {"method": "nope"}),
        ("params", {"params": {"min_p": 0.1}}),
        # which it does not use
        ("budget", {"method": "ar", "options": tswift.DraftOptions(budget=64)}),
    ):
        with pytest.raises(tswift.InputError, match=f"^{field}: ") as caught:
            tswift.generate(model, **{"prompt": "The", "length": 5, **wrong})
        assert caught.value.field == field
    with pytest.raises(
        tswift.InputError, match=r"^model: must be what tswift\.load returns, got 'demo'"
    ):
        tswift.generate("demo", "The", 5)


@needs_program  # they recall
def test_examples_on_a_tiny_model(checkpoint, monkeypatch, capsys):
    model = tswift.load(str(checkpoint))
    run("docs/python.md", -1, tswift=tswift, SamplingParams=tswift.SamplingParams, model=model)
    assert capsys.readouterr().out.splitlines()[-1].endswith((".", "None"))
    monkeypatch.setattr(tswift, "load", lambda: model, raising=False)
    run("docs/python.md")
    assert capsys.readouterr().out.strip()


def test_examples_on_the_bundled_model(tmp_path, monkeypatch, capsys):
    run("README.md")
    assert len(capsys.readouterr().out) > 200
    (command,) = re.findall(r"```sh\ntswift (.*?)  .*\n```", (ROOT / "docs/python.md").read_text())
    (tmp_path / "src").symlink_to(ROOT / "src")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    assert main(command.split()) == 0
    run("docs/python.md", 1)
    assert "The ship had lain three days becalmed," in capsys.readouterr().out
