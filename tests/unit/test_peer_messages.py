"""Messages of untrusted peers are valid or refused in one line."""

import json
import re
from pathlib import Path

import fuzz_peers
import numpy as np
import pytest
from conftest import nightly, refused
from test_communication import run_ranks

from wsi_fl.federation.comm import PeerTimeout
from wsi_fl.federation.documents import MAX_BYTES, ProtocolError, check_length, decode_document
from wsi_fl.federation.exchange import _find_problem
from wsi_fl.federation.membership import ResumeState
from wsi_fl.federation.message import Message
from wsi_fl.federation.preflight import PreflightDocument, compare_sites
from wsi_fl.stages.training.checks import check_budgets
from wsi_fl.stages.training.ranks import SummaryRow
from wsi_fl.types import NoCommonPlan, ReportableError, UsageError

BROUGHT = fuzz_peers.example_of(PreflightDocument)


@pytest.mark.parametrize("target", fuzz_peers.TARGETS)
@pytest.mark.parametrize("n", [300, *nightly(20_000)])
def test_any_message_of_a_peer_is_valid_or_refused(target, n):
    seen = fuzz_peers.fuzz(target, n, slow=n > 300)
    assert seen["valid"] > n / 10, seen
    if target in {fuzz_peers.fuzz_documents, fuzz_peers.fuzz_messages}:
        assert seen["refused"] > n / 10, seen


def test_every_kind_of_document_between_sites_is_fuzzed():
    told = {
        "SummaryRow",
        "PreflightDocument",
        "ResumeState",
        "RunStates",
        "_ScoringOffer",
        "StatisticsOffer",
        "_SumOffer",
    }
    assert told | {"MessageHeader", "Handshake", "SiteGreeting"} <= fuzz_peers.kinds().keys()


def membership_report(values, rest=b""):
    """Return a site's membership report with these values."""
    return b'{"kept": [%s], "returning": true%s}' % (values, rest)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"[" * 100_000, "recursion limit exceeded"),
        (b'{"kept":' * 100_000, "recursion limit exceeded"),
        (membership_report(b"[" * 150 + b"]" * 150), "kept.0: Input should be a valid integer"),
        (membership_report(b"NaN"), "kept.0: Input should be a valid integer"),
        (membership_report(b"Infinity"), "kept.0"),
        (membership_report(b"1e999"), "kept.0"),
        (membership_report(b"9" * 10_000), "number out of range"),
        (membership_report(b"2147483648"), "less than or equal to 2147483647"),
        (membership_report(b"true"), "kept.0: Input should be a valid integer"),
        (b'{"kept": [], "returning": 0}', "returning: Input should be a valid boolean"),
        (membership_report(b",".join([b"1"] * 1001)), "kept: List should have at most 1000 items"),
        (membership_report(b"", b', "a\\nb\\u001b": 1'), "a?b?: Extra inputs are not permitted"),
        (membership_report(b"", b', "%s": 1' % (b"x" * 100_000)), "xxx: Extra inputs are not permitted"),
        (membership_report(b"", b', "\xff": 1'), "invalid unicode"),
        (membership_report(b"").decode().encode("utf-16"), "Invalid JSON"),
        (b"", "Invalid JSON: EOF"),
        (b"null", "Input should be an object"),
        (b"[]" * 9, "trailing characters"),
        (b"[" + b"[]," * (1 << 18) + b"[]]", "a document of 524290 values"),
        (b" " * (MAX_BYTES + 1), "announced a document of 16777217 bytes; at most 16777216"),
    ],
    ids=range(20),
)
def test_a_text_outside_the_schema_is_refused_in_one_line(text, words):
    with pytest.raises(ProtocolError) as caught:
        decode_document(text, ResumeState, "C2")
    message = str(caught.value)
    assert message.startswith("site C2 ") and words in message
    assert len(message) <= 500 and message.isprintable()


@pytest.mark.parametrize("n_bytes", [-5, -(2**63), MAX_BYTES + 1, 2 * 10**14, 2**63 - 1])
def test_an_announced_length_is_refused_before_memory_is_taken(n_bytes):
    words = f"site C2 announced a document of {n_bytes} bytes"
    refused(lambda: check_length(n_bytes, "C2"), words, error=ProtocolError)


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
def test_names_and_numbers_of_a_site_have_bounds(change, words):
    text = json.dumps(BROUGHT | change).encode()
    told = ("site C2 told what was not agreed on", words)
    refused(lambda: decode_document(text, PreflightDocument, "C2"), *told, error=ProtocolError)


def test_a_summary_row_may_omit_undisclosed_values():
    row = fuzz_peers.example_of(SummaryRow)
    assert row["trained_seconds"] is None and row["communication_seconds"] is None
    assert decode_document(json.dumps(row).encode(), SummaryRow, "C1") == row
    text, words = (json.dumps(row | {"epsilon": -1.0}).encode(), "epsilon: Input should be greater than or equal to 0")
    refused(lambda: decode_document(text, SummaryRow, "C1"), words, error=ProtocolError)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"settings": BROUGHT["settings"] | {"train.lr": 0.1}}, "0.1 as train.lr, the others 0.01"),
        (
            {"settings": {k: v for k, v in BROUGHT["settings"].items() if k != "train.lr"}},
            "nothing as train.lr, the others 0.01",
        ),
        ({"run": "77aa"}, "77aa as the run's identity, the others 5f0e"),
    ],
)
def test_settings_are_compared_one_by_one_and_named(change, words):
    three = [BROUGHT | {"site": f"C{k}"} for k in (1, 2, 3)]
    compare_sites(three)
    three[2] |= change
    refused(lambda: compare_sites(three), f"sites disagree: C3 has {words}", error=NoCommonPlan)


def test_any_disagreement_of_sites_is_one_line_of_readable_length():
    many = [
        BROUGHT | {"site": f"C{k}" + "x" * 150, "run": f"{k}" * 900, "settings": {f"train.key_{k}": "y" * 900}}
        for k in range(50)
    ]
    with pytest.raises(NoCommonPlan) as caught:
        compare_sites(many)
    assert len(str(caught.value)) <= 500 and str(caught.value).isprintable()
    few = [BROUGHT | {"site": f"C{k}", "mpp": k if k > 4 else 0.5} for k in range(1, 11)]
    words = "C5 has 5; C6 has 6; C7 has 7; 3 more have something else as the resol"
    refused(lambda: compare_sites(few), words)


def test_reportable_errors_keep_their_exit_codes():
    assert all(issubclass(one, ReportableError) for one in (NoCommonPlan, ProtocolError, PeerTimeout))
    assert [issubclass(one, UsageError) for one in (NoCommonPlan, ProtocolError, PeerTimeout)] == [True, False, False]


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ({"C1": 0.25}, r"^sites/C1\.toml: max_epsilon is enough for 0 of 3 rounds"),
        ({"C1": 0.25, "C2": 0.5}, r"^sites/C1\.toml: max_epsilon = 0\.25 is enough for 0 of 3 rounds"),
    ],
)
def test_a_private_limit_is_not_disclosed_in_a_reportable_error(known, words):
    with pytest.raises(NoCommonPlan, match=words):
        check_budgets([{"site": f"C{k}", "affordable": 0} for k in (1, 2)], known, 3)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_model_without_weight_or_values_is_no_model():
    nothing = Message(1, 0, 1, "aa", np.zeros(4, np.float32), 1e-60)
    assert _find_problem(nothing, "aa", 4) == ""
    assert "lies nan from" in fuzz_peers.too_far(nothing, np.ones(4, np.float32))


@pytest.mark.slow
def test_no_document_takes_much_more_memory_than_the_longest_text():
    most, values = MAX_BYTES - 40, (1 << 18) - 2
    texts = [
        lambda: b"[[]" + b",[]" * (values // 2 - 1) + b"]",
        lambda: b"[" + b"[]," * (most // 3) + b"[]]",
        lambda: b"[" * most,
        lambda: b"{" + b",".join(b'"%d":1' % k for k in range(values)) + b"}",
        lambda: membership_report(b"-1," * (values - 2) + b"-1"),
        lambda: b'{"kept": "' + b"x" * most + b'"}',
        lambda: b'{"kept": ["' + b"\\u20ac" * (most // 6) + b'"]}',
        lambda: b'{"' + b"k" * most + b'": 1}',
        lambda: b"9" * most,
    ]

    def megabytes(what):
        return int(re.search(what + r":\s+(\d+)", Path("/proc/self/status").read_text())[1]) // 1024

    for make in texts:
        text = make()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what it is now
        before = megabytes("VmRSS")
        with pytest.raises(ProtocolError) as caught:
            decode_document(text, ResumeState, "C2")
        assert len(str(caught.value)) <= 500 and megabytes("VmHWM") - before < 200


HOSTILE = """
import json, os, sys, time
from pathlib import Path
import numpy as np
sys.path[:0] = {tests!r}
from mpi4py import MPI
from test_communication import Told, release_of
from wsi_fl.federation.comm import _GATHER_TAG, MpiComm
from wsi_fl.federation.message import Outgoing, compute_tag, pack_message

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
header, body = pack_message(Outgoing(1, 0, 1.0, release_of(folder, "h", 1, np.ones(3000))), 1, 0)
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
        send(head, values.tobytes(), compute_tag(1, hop))
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


def test_a_rank_with_false_lengths_is_refused_in_one_line_before_receiving(tmp_path):
    done = run_ranks(tmp_path, HOSTILE, 2)
    assert (tmp_path / "said.json").exists(), done.stderr[-2000:]
    said = json.loads((tmp_path / "said.json").read_text())
    other = "ProtocolError: site B sent another length than the {} values it announced".format
    expected = [
        "ProtocolError: site B announced a document of 200000000000000 bytes; at most 16777216",
        "ProtocolError: site B announced a document of -5 bytes; at most 16777216",
        "ProtocolError: site B told what was not agreed on: Invalid JSON: recursion limit exceeded",
        "ProtocolError: site B told what was not agreed on: Invalid JSON: expected value at line 1 column 1",
        *map(other, (10, 1011)),
        "[{'site': 0}, {'site': 1}]",
        *map(other, (64, 64, 3000, 3000)),
        "3000",
    ]
    for (text, _), beginning in zip(said, expected, strict=True):
        assert text.startswith(beginning) and len(text) < 200
    assert max(seconds for _, seconds in said) < 5
