"""Text of others reaches a terminal or page as printable characters without control sequences."""

import json

import pytest
from rich.console import Console

from wsi_fl import __main__ as program
from wsi_fl.cli.options import print_document
from wsi_fl.report.cross_site_section import render_coordinator
from wsi_fl.stages.runtime import console
from wsi_fl.types import WsiFlError, make_printable

EVIL = "\x1b[2J\x1b]0;owned\x07 \u202egnp\u2066\u200b\x9b31m \u2028[bold red]C1[/]"
HIDDEN = "\x1b\x07\u202e\u2066\u200b\x9b\u2028"


def check_visible(text):
    assert not set(text) & set(HIDDEN), ascii(text)
    return text


def test_printable_text_is_unchanged():
    text = "Universitätsklinik 病院, site\tC1\nε = 1.0\u00a0(δ)"
    assert make_printable(text) == text and len(make_printable(EVIL)) == len(EVIL)
    check_visible(make_printable(EVIL + "\ud800"))


def test_a_page_has_no_escapes():
    row = {"site": EVIL, "epsilon": 1.0, "rounds": 1, "guarantee": "guaranteed"}
    loss = {"site": EVIL, "round": 1, "reason": EVIL}
    sums = {"messages": 1, "bytes": 1, "seconds": 1.0}
    summary = {"run": EVIL, "method": "proxyfl", "seconds": 1.0, "sites": [row], "losses": [loss]}
    check_visible(render_coordinator(summary | {"communication": sums}, None))


def bars():
    with console.ProgressBars("work") as bars:
        bars.update("C1", 1, 2, EVIL)
        bars._print_progress()


def fails(**_):
    raise WsiFlError(EVIL)


def failure():
    with pytest.raises(SystemExit):
        program.main()


@pytest.mark.parametrize(
    ("tell", "times"),
    [
        (lambda: console.print_message(EVIL), 1),
        (bars, 1),
        (lambda: console.print_lines([console.TextTable(EVIL, [EVIL, "b"], [["x", EVIL]])]), 3),
        (failure, 1),
        (lambda: print_document({"said": EVIL}, True, print), 1),
    ],
    ids=["line", "bars", "table", "failure", "json"],
)
def test_terminal_output_has_no_escapes_and_no_markup_of_others(capsys, monkeypatch, tell, times):
    monkeypatch.setattr(console, "stderr", Console(stderr=True, width=200, highlight=False))
    monkeypatch.setattr(program, "app", fails)
    tell()
    said = capsys.readouterr()
    assert check_visible(said.out + said.err).count("[bold red]C1[/]") == times
    assert not said.out or json.loads(said.out) == {"said": EVIL}
