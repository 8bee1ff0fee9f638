"""Messages by MPI equal those in process, and messages outside the plan are refused."""

import json
import re
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import NotRequired

import numpy as np
import pytest
from typing_extensions import TypedDict

from wsi_fl.federation import comm
from wsi_fl.federation import message as wire
from wsi_fl.federation.comm import LocalComm
from wsi_fl.federation.documents import PrintableText, ProtocolError
from wsi_fl.federation.message import Outgoing, body_length, compute_tag, pack_message, unpack_message
from wsi_fl.federation.topology import exponential, list_receivers, list_senders
from wsi_fl.privacy.ledger import PrivacyLedger, PrivacyTerms
from wsi_fl.stages.training import launch
from wsi_fl.types import WsiFlError

SCHEMA = "ab" * 32


def release_of(folder, site, round_, values, weight=1.0):
    ledger = PrivacyLedger(folder / f"{site}.jsonl", site=site, run="r", terms=PrivacyTerms(1e-5, allow=("model",)))
    vector = np.asarray(values, np.float32)
    return ledger.release(round_, vector, schema=SCHEMA, weight=weight, mechanism=None, content="model")


def test_only_a_release_travels():
    lookalike = SimpleNamespace(site="C1", round=1, schema=SCHEMA, vector=np.zeros(3, np.float32), weight=1.0)
    for thing in (np.zeros(3, np.float32), lookalike, None):
        with pytest.raises(TypeError, match="only a Release may leave a site"):
            Outgoing(0, 1, 1.0, thing)


def test_in_process_messages_are_scaled_counted_and_recorded(tmp_path):
    local = LocalComm(2, record=True)
    release = release_of(tmp_path, "a", 3, [1.0, 2.0, 3.0], weight=0.8)
    (message,) = local.exchange([Outgoing(0, 1, 0.25, release)], [(0, 1)], round_=3, hop=0, size=3)
    assert message.vector.tolist() == [0.25, 0.5, 0.75] and message.weight == pytest.approx(0.2)
    assert (message.sender, message.receiver, message.round, message.schema) == (0, 1, 3, SCHEMA)
    assert local.sent == [message] and local.traffic[0].messages == 1
    assert 0 < local.traffic[0].bytes - 12 <= 256  # a small header
    assert local.traffic[1].messages == 0


def test_a_message_outside_the_plan_is_refused(tmp_path):
    local = LocalComm(2)
    sent = [Outgoing(0, 1, 1.0, release_of(tmp_path, "a", 1, [1.0, 2.0]))]
    (message,) = local.exchange(sent, [(0, 1)], round_=1, hop=0, size=3)
    assert message.refused == "it has 2 values, agreed on 3"
    assert not message.vector.size
    with pytest.raises(WsiFlError, match="release of round 1 cannot be sent in round 2"):
        local.exchange(sent, [(0, 1)], round_=2, hop=0, size=2)
    with pytest.raises(WsiFlError, match="nothing from site 1 to site 0"):
        local.exchange(sent, [(0, 1), (1, 0)], round_=1, hop=0, size=2)


def test_false_headers_are_refused(tmp_path):
    header, vector = pack_message(Outgoing(0, 1, 1.0, release_of(tmp_path, "a", 1, [1.0])), 1, 0)

    def refusal(head=header, body=vector, sender=0, round_=1):
        return unpack_message(head, body, sender, 1, round_, 1).refused

    assert refusal() == ""
    for position in (0, 4):  # magic, version
        broken = bytearray(header)
        broken[position] ^= 1
        assert refusal(broken) == "it speaks another protocol"
    assert refusal(sender=2) == refusal(round_=2) == "it is of round 1 of site 0"
    endless = bytearray(header)
    endless[-8:] = b"\xff" * 8
    assert body_length(endless, 1) == body_length(header[:-1], 1) == 0
    assert "values, agreed on 1" in refusal(endless)
    assert refusal(header[:-1]) == "it speaks another protocol"
    assert refusal(body=vector[:0]) == "it brings 0 values, announced 1"


def test_every_hop_of_a_round_has_a_unique_tag_and_more_hops_are_refused(tmp_path):
    assert sorted({wire.BUFFERS, wire.FAREWELL, wire.WELCOME, wire.SCORING}) == list(range(wire.GRAPH_HOPS, wire.HOPS))
    tags = [compute_tag(round_, hop) + part for round_ in range(500) for hop in range(wire.HOPS) for part in (0, 1)]
    assert len(set(tags)) == len(tags) and max(tags) < comm._GATHER_TAG
    with pytest.raises(AssertionError):
        pack_message(Outgoing(0, 1, 1.0, release_of(tmp_path, "a", 1, [1.0])), 1, wire.HOPS)


class Told(TypedDict):
    site: int
    text: NotRequired[PrintableText]


def test_documents_are_gathered_in_order_and_exchanged_without_missing_ones():
    local, told = LocalComm(3), [{"site": 1}, {"site": 0, "text": ""}, {"site": 2, "text": "é"}]
    assert local.gather(told, Told) == told
    said = {(0, 1): {"site": 1}, (0, 2): {"site": 2}}
    assert local.exchange_documents(said, Told, [(0, 1), (2, 1)]) == {(0, 1): {"site": 1}}
    with pytest.raises(ProtocolError, match=r"^site 0 .*valid integer"):
        local.exchange_documents({(0, 1): {"site": "1"}}, Told, [(0, 1)])


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"site": "1"}, "site: Input should be a valid integer"),
        ({"site": True}, "site: Input should be a valid integer"),
        ({}, "site: Field required"),
        ({"site": 1, "more": 1}, "more: Extra inputs are not permitted"),
        ({"site": 1, "text": "a\nb"}, "text: String should match pattern"),
        ({"site": 1, "text": "x" * 1001}, "text: String should have at most 1000 characters"),
        ({"site": 1, "text": "\ud800"}, "Invalid JSON: unexpected end of hex escape"),
        ({"site": float("nan")}, "a number that is not finite"),
        ([1], "Input should be an object"),
    ],
)
def test_a_document_outside_the_schema_is_refused_from_any_site(document, words):
    with pytest.raises(ProtocolError, match=f"^site 2 .*{re.escape(words)}"):
        LocalComm(3, running=(0, 2)).gather([{"site": 0}, document], Told)


RANKS = """
import json, sys, time
from pathlib import Path
import numpy as np
sys.path[:0] = {tests!r}
from test_communication import Told, plan_of, release_of, said
from wsi_fl.federation import message as wire
from wsi_fl.federation.comm import MpiComm
from wsi_fl.federation.message import Outgoing
from wsi_fl.types import WsiFlError
folder = Path({folder!r})
comm = MpiComm(20.0)
(me,) = comm.sites
def together():
    comm.gather([{{"site": me}}], Told)

out = {{"gathered": comm.gather([{{"site": me, "text": "é" * me}}], Told), "rounds": []}}
others = [k for k in range(3) if k != me]
handed = comm.exchange_documents({{(me, k): {{"site": 10 * me + k}} for k in others}}, Told, [(k, me) for k in others])
out["handed"] = sorted([*pair, one["site"]] for pair, one in handed.items())
for round_ in (1, 2, 3, 4, 5, 6):
    wire._PART_BYTES = 1 << 30 if round_ < 4 else 100_000  # whole, then in three parts
    outgoing, expected = plan_of(folder, round_, [me])
    out["rounds"].append([said(m) for m in comm.exchange(outgoing, expected, round_=round_, hop=0, size=70_001)])
out["traffic"] = [comm.traffic[me].messages, comm.traffic[me].bytes]

comm.timeout_s, began, out["silent"] = 1.0, time.monotonic(), None
try:  # nobody sends
    comm.exchange([], [(1, 2)] if me == 2 else [], round_=9, hop=0, size=3)
except WsiFlError as error:
    out["silent"] = [str(error), time.monotonic() - began]
comm.timeout_s = 20.0
together()
sent = [Outgoing(me, 1, 1.0, release_of(folder, "w", 8, [1.0, 2.0]))] if me == 0 else []
messages = comm.exchange(sent, [(0, 1)], round_=8, hop=0, size=2 if me == 0 else 3)
out["refused"] = [message.refused for message in messages]
(folder / f"rank{{me}}.json").write_text(json.dumps(out))
together()
"""


def plan_of(folder, round_, sites):
    """Return a plan with the same releases from any caller, on the exponential graph over three sites."""
    (matrix,) = exponential(3, round_, 0.3)
    outgoing, expected = [], []
    for site in sites:
        values = np.random.default_rng([site, round_]).normal(size=70_001)
        release = release_of(folder, f"{site}", round_, values, weight=1 + site / 10)
        outgoing += [Outgoing(site, to, float(matrix[to, site]), release) for to in list_receivers(matrix, site)]
        expected += [(sender, site) for sender in list_senders(matrix, site)]
    return outgoing, expected


def said(message):
    digest = sha256(message.vector.tobytes()).hexdigest()
    return [message.sender, message.receiver, message.round, message.schema, message.weight, digest]


def run_ranks(folder, text, n):
    """Run a script as n ranks, with the tests and a folder written into it."""
    script = folder / "ranks.py"
    tests = [str(p) for p in Path(__file__).parents[:2]]
    script.write_text(text.format(tests=tests, folder=str(folder)))
    options = f"-n {n} --oversubscribe --bind-to none".split()
    command = [launch.find_mpiexec(), *options, sys.executable, script]
    how = {"env": launch.rank_environment(n), "capture_output": True, "text": True, "timeout": 100}
    return subprocess.run(command, check=False, **how)


def test_a_message_too_long_for_one_mpi_call_is_sent_in_parts(monkeypatch):
    values = (np.arange(70_001, dtype=np.float32), np.arange(9), b"", b"x", bytearray(300), np.zeros(0, np.float32))
    monkeypatch.setattr(wire, "_PART_BYTES", 100)
    for one in values:
        parts = wire.split_buffer(one)
        assert b"".join(parts) == bytes(one) and max(part.nbytes for part in parts) <= 100
        assert len(parts) == max(1, -(-memoryview(one).nbytes // 100)), one


def test_ranks_exchange_what_one_process_would_and_wait_no_longer_than_the_timeout(tmp_path):
    done = run_ranks(tmp_path, RANKS, 3)
    assert done.returncode == 0, done.stderr[-2000:]
    ranks = [json.loads((tmp_path / f"rank{k}.json").read_text()) for k in range(3)]
    local = LocalComm(3)
    for number, round_ in enumerate((1, 2, 3, 4, 5, 6)):
        outgoing, expected = plan_of(tmp_path, round_, range(3))
        alone = local.exchange(outgoing, expected, round_=round_, hop=0, size=70_001)
        by_mpi = [message for rank in ranks for message in rank["rounds"][number]]
        assert sorted(map(said, alone)) == sorted(by_mpi)
    for k, rank in enumerate(ranks):
        assert rank["gathered"] == [{"site": j, "text": "é" * j} for j in range(3)]
        assert rank["handed"] == [[j, k, 10 * j + k] for j in range(3) if j != k]
        assert rank["traffic"] == [local.traffic[k].messages, local.traffic[k].bytes]
    assert [rank["silent"] is None for rank in ranks] == [True, True, False]
    message, waited = ranks[2]["silent"]
    assert message == "site 1 did not answer for 1 s in round 9 (comm.timeout_s)" and 1 <= waited < 5
    assert [rank["refused"] for rank in ranks] == [[], ["it has 2 values, agreed on 3"], []]
