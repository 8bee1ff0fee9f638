"""What others wrote reaches a terminal or a page as letters alone: nothing moves a cursor, hides or turns round."""

import io
import json

import pytest
from rich.console import Console

from wsi_fl import __main__ as program
from wsi_fl.cli.options import show
from wsi_fl.report.between import render_coordinator
from wsi_fl.stages.work import console
from wsi_fl.types import WsiFlError, printable

EVIL = "\x1b[2J\x1b]0;owned\x07 \u202egnp\u2066\u200b\x9b31m \u2028[bold red]C1[/]"
HIDDEN = "\x1b\x07\u202e\u2066\u200b\x9b\u2028"


def shown(text):
    assert not set(text) & set(HIDDEN), ascii(text)
    return text


@pytest.fixture
def terminal(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(console, "stderr", Console(file=out, width=200, highlight=False))
    return out


def test_what_letters_say_stays():
    text = "Universitätsklinik 病院, site\tC1\nε = 1.0\u00a0(δ)"
    assert printable(text) == text
    assert len(printable(EVIL)) == len(EVIL)
    shown(printable(EVIL + "\ud800"))


def test_a_line_for_people_has_no_escapes(terminal):
    console.say(EVIL)
    with console.Bars("work") as bars:
        bars.update("C1", 1, 2, EVIL)
        bars._say()
    assert "[bold red]C1[/]" in shown(terminal.getvalue())


def test_a_table_has_no_escapes_and_takes_no_orders(capsys):
    console.render([console.Table(EVIL, [EVIL, "b"], [["x", EVIL]])])
    assert shown(capsys.readouterr().err).count("[bold red]C1[/]") == 3


def test_the_reason_of_a_failure_has_no_escapes(capsys, monkeypatch):
    def fails(**_):
        raise WsiFlError(EVIL)

    monkeypatch.setattr(program, "app", fails)
    with pytest.raises(SystemExit):
        program.main()
    assert "[bold red]C1[/]" in shown(capsys.readouterr().err)


def test_json_means_the_same_and_has_no_escapes(capsys):
    show({"said": EVIL}, True, print)
    assert json.loads(shown(capsys.readouterr().out)) == {"said": EVIL}


def test_a_page_has_no_escapes():
    row = {"site": EVIL, "epsilon": 1.0, "rounds": 1, "guarantee": "guaranteed"}
    loss = {"site": EVIL, "round": 1, "reason": EVIL}
    sums = {"messages": 1, "bytes": 1, "seconds": 1.0}
    summary = {"run": EVIL, "method": "proxyfl", "seconds": 1.0, "sites": [row], "losses": [loss]}
    shown(render_coordinator(summary | {"communication": sums}, None))
