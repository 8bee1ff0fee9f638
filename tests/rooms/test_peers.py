"""Peers are not trusted: what one of them sends is valid, or ends in one line, whatever it is."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import fuzz_peers
import numpy as np
import pytest
from conftest import refused
from test_comm import run_ranks

from wsi_fl.federation.documents import MOST_BYTES, NotAgreed, check_length, decoded
from wsi_fl.federation.exchange import _problem, _too_far
from wsi_fl.federation.message import Message
from wsi_fl.federation.preflight import Brought, compare
from wsi_fl.federation.roster import Standing
from wsi_fl.stages.training.checks import check_budgets
from wsi_fl.stages.training.ranks import SummaryRow
from wsi_fl.types import KnownToAll, NoCommonPlan, UsageError, WsiFlError

BROUGHT = fuzz_peers.example_of(Brought) | fuzz_peers.SAMPLES["Brought"]


def test_nothing_that_a_peer_may_send_is_more_than_refused():
    seen = fuzz_peers.fuzz(seed=1, cases=1200)
    for target in fuzz_peers.TARGETS:
        assert seen[f"{target.__name__} valid"] > 40, seen
    assert seen["fuzz_documents refused"] > 100 < seen["fuzz_messages refused"], seen


@pytest.mark.slow
def test_nothing_that_a_peer_may_send_in_many_cases_is_more_than_refused():
    """Set WSI_FL_FUZZ_SECONDS and WSI_FL_FUZZ_SEED for more, or for the same once more."""
    seed = int(os.environ.get("WSI_FL_FUZZ_SEED", str(int(time.time()))))
    print(f"seed {seed}")
    assert fuzz_peers.fuzz(seed, seconds=float(os.environ.get("WSI_FL_FUZZ_SECONDS", "60")), slow=True)


def test_every_kind_of_document_that_sites_gather_is_fuzzed():
    """A module that calls `gather` with a kind of its own belongs to those that are looked through."""
    root = Path(fuzz_peers.importlib.import_module("wsi_fl").__file__).parent
    callers = {
        path
        for path in root.rglob("*.py")
        if ".gather([" in path.read_text() or ".gather(mine" in path.read_text()
    }
    names = {".".join(path.relative_to(root).with_suffix("").parts) for path in callers}
    # the kinds of the loop are the roster's, and ranks that tile are those of one site
    assert names - {"federation.loop", "stages.work.job"} <= {*fuzz_peers.MODULES, *fuzz_peers.SLOW_MODULES}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"[" * 100_000, "recursion limit exceeded"),
        (b'{"kept":' * 100_000, "recursion limit exceeded"),
        (
            b'{"kept": ' + b"[" * 150 + b"]" * 150 + b', "returning": true}',
            "kept.0: Input should be a valid integer",
        ),
        (b'{"kept": [NaN], "returning": true}', "kept.0: Input should be a valid integer"),
        (b'{"kept": [Infinity], "returning": true}', "kept.0"),
        (b'{"kept": [1e999], "returning": true}', "kept.0"),
        (b'{"kept": [%s], "returning": true}' % (b"9" * 10_000), "number out of range"),
        (b'{"kept": [2147483648], "returning": true}', "less than or equal to 2147483647"),
        (b'{"kept": [true], "returning": true}', "kept.0: Input should be a valid integer"),
        (b'{"kept": [], "returning": 0}', "returning: Input should be a valid boolean"),
        (
            b'{"kept": [%s], "returning": true}' % b",".join([b"1"] * 1001),
            "kept: List should have at most 1000 items",
        ),
        (b'{"kept": [], "returning": true, "a\\nb\\u001b": 1}', "a?b?: Extra inputs are not permitted"),
        (
            b'{"kept": [], "returning": true, "%s": 1}' % (b"x" * 100_000),
            "xxx: Extra inputs are not permitted",
        ),
        (b'{"kept": [], "returning": true, "\xff": 1}', "invalid unicode"),
        ('{"kept": [], "returning": true}'.encode("utf-16"), "Invalid JSON"),
        (b"", "Invalid JSON: EOF"),
        (b"null", "Input should be an object"),
        (b"[]" * 9, "trailing characters"),
        (b"[" + b"[]," * (1 << 18) + b"[]]", "a document of 524290 values"),
        (b" " * (MOST_BYTES + 1), "announced a document of 16777217 bytes; at most 16777216"),
    ],
    ids=range(20),
)
def test_a_text_that_is_not_what_was_agreed_on_is_refused_in_one_line(text, words):
    with pytest.raises(NotAgreed) as caught:
        decoded(text, Standing, "C2")
    message = str(caught.value)
    assert message.startswith("site C2 ")
    assert words in message
    assert len(message) <= 500
    assert message.isprintable()


@pytest.mark.parametrize("n_bytes", [-5, -(2**63), MOST_BYTES + 1, 2 * 10**14, 2**63 - 1])
def test_an_announced_length_is_refused_before_memory_is_taken(n_bytes):
    refused(
        lambda: check_length(n_bytes, "C2"),
        f"site C2 announced a document of {n_bytes} bytes",
        error=NotAgreed,
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"site": "../../C1"}, "site: String should match pattern"),
        ({"site": "C1\n"}, "site: String should match pattern"),
        ({"sites": ["C1", "/etc"]}, "sites.1: String should match pattern"),
        ({"run": "a\u202eb"}, "run: String should match pattern"),
        ({"settings": {"train.lr": {"a": 1}}}, "settings.train.lr"),
        ({"settings": {"x" * 200: 1}}, "settings.xxx"),
        ({"affordable": -1}, "affordable: Input should be greater than or equal to 0"),
        ({"mpp": None}, "mpp: Input should be a valid number"),
    ],
)
def test_what_a_site_brings_has_names_and_numbers_within_bounds(change, words):
    text = json.dumps(BROUGHT | change).encode()
    refused(
        lambda: decoded(text, Brought, "C2"), "site C2 told what was not agreed on", words, error=NotAgreed
    )


def test_a_row_may_leave_out_what_a_real_site_keeps_to_itself():
    row = fuzz_peers.example_of(SummaryRow)
    assert row["trained_seconds"] is None and row["communication_seconds"] is None
    assert decoded(json.dumps(row).encode(), SummaryRow, "C1") == row
    text = json.dumps(row | {"epsilon": -1.0}).encode()
    refused(
        lambda: decoded(text, SummaryRow, "C1"),
        "epsilon: Input should be greater than or equal to 0",
        error=NotAgreed,
    )


def test_settings_are_compared_one_by_one_and_named():
    three = [BROUGHT | {"site": f"C{k}"} for k in (1, 2, 3)]
    compare(three)
    three[2] = three[2] | {"settings": BROUGHT["settings"] | {"train.lr": 0.1}}
    refused(
        lambda: compare(three),
        "sites disagree: C3 brings 0.1 as train.lr, the others 0.01",
        error=NoCommonPlan,
    )
    three[2] = three[2] | {"settings": {k: v for k, v in BROUGHT["settings"].items() if k != "train.lr"}}
    refused(lambda: compare(three), "C3 brings nothing as train.lr, the others 0.01")
    three[2] = three[2] | {"settings": BROUGHT["settings"], "run": "77aa"}
    refused(lambda: compare(three), "C3 brings 77aa as the run's identity, the others 5f0e")


def test_however_much_sites_disagree_it_is_one_line_of_readable_length():
    many = [
        BROUGHT
        | {"site": f"C{k}" + "x" * 150, "run": f"{k}" * 900, "settings": {f"train.key_{k}": "y" * 900}}
        for k in range(50)
    ]
    with pytest.raises(NoCommonPlan) as caught:
        compare(many)
    assert len(str(caught.value)) <= 500
    assert str(caught.value).isprintable()
    few = [BROUGHT | {"site": f"C{k}", "mpp": k if k > 4 else 0.5} for k in range(1, 11)]
    refused(
        lambda: compare(few),
        "C5 brings 5; C6 brings 6; C7 brings 7; 3 more bring something else as the resol",
    )


def test_what_may_be_told_to_other_sites_keeps_its_exit_code():
    assert issubclass(NoCommonPlan, KnownToAll) and issubclass(NoCommonPlan, UsageError)
    assert issubclass(NotAgreed, KnownToAll) and not issubclass(NotAgreed, UsageError)
    from wsi_fl.federation.comm import PeerLate

    assert issubclass(PeerLate, KnownToAll) and issubclass(PeerLate, WsiFlError)


def test_a_limit_that_other_sites_do_not_know_is_not_in_what_they_may_be_told():
    poor = [{"site": f"C{k}", "affordable": 0} for k in (1, 2)]
    with pytest.raises(NoCommonPlan, match=r"^sites/C1\.toml: max_epsilon is enough for 0 of 3 rounds"):
        check_budgets(poor, {"C1": 0.25}, 3)
    with pytest.raises(
        NoCommonPlan, match=r"^sites/C1\.toml: max_epsilon = 0\.25 is enough for 0 of 3 rounds"
    ):
        check_budgets(poor, {"C1": 0.25, "C2": 0.5}, 3)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_model_without_weight_or_values_is_no_model():
    nothing = Message(1, 0, 1, "aa", np.zeros(4, np.float32), 1e-60)
    assert _problem(nothing, "aa", 4) == ""
    assert "lies nan from" in _too_far(nothing, np.ones(4, np.float32), ())


MEMORY = """
import re, sys
from pathlib import Path
from wsi_fl.federation.documents import MOST_BYTES, decoded
from wsi_fl.federation.roster import Standing
from wsi_fl.types import WsiFlError

most, values = MOST_BYTES - 40, (1 << 18) - 2
texts = [
    lambda: b"[[]" + b",[]" * (values // 2 - 1) + b"]",
    lambda: b"[" + b"[]," * (most // 3) + b"[]]",
    lambda: b"[" * most,
    lambda: b"{" + b",".join(b'"%d":1' % k for k in range(values)) + b"}",
    lambda: b'{"kept": [' + b"-1," * (values - 2) + b'-1], "returning": true}',
    lambda: b'{"kept": "' + b"x" * most + b'"}',
    lambda: b'{"kept": ["' + b"\\\\u20ac" * (most // 6) + b'"]}',
    lambda: b'{"' + b"k" * most + b'": 1}',
    lambda: b"9" * most,
]

def megabytes(what):
    return int(re.search(what + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024

for make in texts:
    text = make()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what it is now
    before = megabytes("VmRSS")
    try:
        decoded(text, Standing, "C2")
        sys.exit("taken")
    except WsiFlError as error:
        assert len(str(error)) <= 500
        print(megabytes("VmHWM") - before, str(error)[:100])
"""


@pytest.mark.slow
def test_no_document_takes_much_more_memory_than_the_longest_text():
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    taken = [int(line.split()[0]) for line in done.stdout.splitlines()]
    assert len(taken) == 9
    assert max(taken) < 200, done.stdout


HOSTILE = """
import json, os, sys, time
from pathlib import Path
import numpy as np
sys.path[:0] = {tests!r}
from mpi4py import MPI
from test_comm import Told, release_of
from wsi_fl.federation.comm import _GATHER_TAG, MpiComm
from wsi_fl.federation.message import Outgoing, pack, tag_of

world, folder = MPI.COMM_WORLD, Path({folder!r})
me = world.Get_rank()
text = json.dumps({{"site": 1}}).encode()
gathered = [  # length, text
    (2 * 10**14, text),
    (-5, text),
    (100_000, b"[" * 100_000),
    (8, b'\\xff\\xfe[1, 2]'),
    (10, b'{{"site":1}}' + b"A" * 100_000),
    (len(text) + 1000, text),
    (len(text), text),
]
header, body = pack(Outgoing(1, 0, 1.0, release_of(folder, "h", 1, np.ones(3000))), 1, 0)
exchanged = [  # header, body
    (header + b"H" * 100_000, body),
    (header[:10], body),
    (header, np.ones(100_000, np.float32)),
    (header, body[:10]),
    (header, body),
]
sent = []

def send(first, second, tag):
    for number, data in enumerate((first, second)):
        sent.append(world.Isend([data, MPI.BYTE], 0, tag + number))

if me == 1:
    for number, (length, data) in enumerate(gathered):
        world.Barrier()
        send(np.int64(length).tobytes(), data, _GATHER_TAG + 2 * number)
    for hop, (head, values) in enumerate(exchanged):
        world.Barrier()
        send(head, values.tobytes(), tag_of(1, hop))
else:
    comm, said = MpiComm(20.0, names=("A", "B")), []

    def attempt(action):
        world.Barrier()
        began = time.monotonic()
        try:
            found = str(action())
        except Exception as error:
            found = f"{{type(error).__name__}}: {{error}}"
        said.append([found, time.monotonic() - began])

    for _ in gathered:
        attempt(lambda: comm.gather([{{"site": 0}}], Told))
    for hop, _ in enumerate(exchanged):
        attempt(lambda: len(comm.exchange([], [(1, 0)], round_=1, hop=hop, size=3000)[0].vector))
    (folder / "said.json").write_text(json.dumps(said))
world.Barrier()
os._exit(0)  # what was not taken is left where it is
"""


def test_a_rank_that_lies_about_lengths_is_refused_in_one_line_and_not_received(tmp_path):
    done = run_ranks(tmp_path, HOSTILE, 2)
    assert (tmp_path / "said.json").exists(), done.stderr[-2000:]
    said = json.loads((tmp_path / "said.json").read_text())
    expected = [
        "NotAgreed: site B announced a document of 200000000000000 bytes; at most 16777216",
        "NotAgreed: site B announced a document of -5 bytes; at most 16777216",
        "NotAgreed: site B told what was not agreed on: Invalid JSON: recursion limit exceeded",
        "NotAgreed: site B told what was not agreed on: Invalid JSON: expected value at line 1 column 1",
        "NotAgreed: site B sent something else than the 10 values it announced",
        "NotAgreed: site B sent something else than the 1011 values it announced",
        "[{'site': 0}, {'site': 1}]",
        "NotAgreed: site B sent something else than the 64 values it announced",
        "NotAgreed: site B sent something else than the 64 values it announced",
        "NotAgreed: site B sent something else than the 3000 values it announced",
        "NotAgreed: site B sent something else than the 3000 values it announced",
        "3000",
    ]
    for (text, _), beginning in zip(said, expected, strict=True):
        assert text.startswith(beginning)
        assert len(text) < 200
    assert max(seconds for _, seconds in said) < 5
