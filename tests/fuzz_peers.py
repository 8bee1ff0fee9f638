"""Random messages of broken or hostile peers: headers, bodies and documents of every kind, for Hypothesis."""

import ast
import importlib
import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from typing_extensions import is_typeddict

import wsi_fl
from wsi_fl.federation import message, topology
from wsi_fl.federation.documents import decode_document, encode_document
from wsi_fl.federation.exchange import _find_problem as problem_of_model
from wsi_fl.federation.membership import MembershipReply, ResumeState, build_membership, find_first_round
from wsi_fl.federation.payload import ModelPayload
from wsi_fl.federation.preflight import PreflightDocument, compare_sites
from wsi_fl.federation.site_state import BufferShape
from wsi_fl.privacy.ledger_file import Release
from wsi_fl.stages.site.privacy_account import describe_spending
from wsi_fl.stages.training.checks import check_budgets
from wsi_fl.types import WsiFlError

ROOT = Path(wsi_fl.__file__).parent
SCHEMA = "ab" * 32
N_SITES, ROUND, HOP, N_VALUES = 4, 3, 1, 24
SHAPE = BufferShape(n=3, size_px=2, channels=3, n_classes=2)
SAMPLES: dict[str, dict[str, Any]] = {
    "PreflightDocument": {
        "site": "C1",
        "run": "5f0e",
        "method": "proxyfl",
        "settings": {"train.lr": 0.01, "train.rounds": 3, "privacy.enabled": True, "audit.x": [1, "a"]},
        "classes": ["healthy", "tumor"],
        "size_px": 256,
        "mpp": 0.5,
        "channels": 3,
        "input_px": 64,
        "schema": SCHEMA,
        "sites": ["C1", "C2", "C3"],
        "graph": None,
        "buffer": ["replay", 9, 16, 3, 2],
        "statistics": {"C1": "0123abcd"},
        "versions": {"torch": "2.6.0"},
        "affordable": 3,
    },
    "SummaryRow": {
        "epsilon": 1.5,
        "sigma": 1.4,
        "batch_size": 8,
        "max_tpr_at_fpr_1pct": 0.02,
        "group": {"rows": 12, "epsilon": None, "delta": 1e-5},
    },
    "ResumeState": {"kept": [2, 3], "returning": False},
    "MessageHeader": {"sender": "C1", "to": "C2", "place": "x3.0"},
    "StatisticsOffer": {"own": SCHEMA, "held": {"C1": SCHEMA}, "began": ["C1"]},
    "StatisticsFile": {"letter": "c2Vl"},
    "RunStates": {"runs": [{"identity": "ab" * 16, "rounds": 3}]},
}
"""Where an example with all keys, some of them None, says too little."""
TOKENS = (
    *(b"NaN", b"-Infinity", b"1e999", b"-", b"00", b"9" * 5000, b"[" * 5000, b'{"a":' * 300, b"]", b"}", b",", b":"),
    *(b"null", b"\x00", b"\xff", b"\xed\xa0\x80", b'"\\ud800"', b'"\\u0000"', b"\\", b'"', b"\xef\xbb\xbf", b"\n"),
)
TEXTS = st.text(max_size=9) | st.sampled_from(
    ["C1", "C2", "away", "leaving", "../../x", "/etc", "a b", "\u202e", "a\nb", "\x1b[31m", "x" * 5000, SCHEMA, "NaN"]
)
NUMBERS = st.sampled_from([0, 1, -1, 3, 2**31, 2**53 + 1, 2**63, -(2**70), 10**300, 0.5, -0.0, 1e308, 5e-324])
ATOMS = TEXTS | NUMBERS | st.sampled_from([None, True, False, {}, []])


@cache
def kinds(*, slow: bool = False) -> dict[str, Any]:
    """Return every kind of document in modules that exchange any; generators are slow to import."""
    found = {}
    for path in ROOT.rglob("*.py"):
        text, parts = path.read_text(encoding="utf-8"), path.relative_to(ROOT).with_suffix("").parts
        if not re.search(r"code_document\(|exchange_documents\(|\.gather\(", text) or (
            "synthesis" in parts and not slow
        ):
            continue
        module = importlib.import_module(".".join(("wsi_fl", *parts)))
        told = [call.args[1] for call in ast.walk(ast.parse(text)) if isinstance(call, ast.Call) and len(call.args) > 1]
        imported = [vars(module).get(one.id) for one in told if isinstance(one, ast.Name)]
        own = [kind for kind in vars(module).values() if getattr(kind, "__module__", "") == module.__name__]
        found |= {kind.__name__: kind for kind in (*imported, *own, PreflightDocument) if is_typeddict(kind)}
    return found


@cache
def example_of(kind: Any) -> dict[str, Any]:
    """Return a document of this kind with all required keys, mostly plain ones."""
    schema = TypeAdapter(kind).json_schema()
    plain = {key: _plain(schema["properties"][key]) for key in schema.get("required", ())}
    return plain | SAMPLES.get(kind.__name__, {})


def _plain(schema: dict[str, Any]) -> Any:
    """Return a valid value of a field."""
    if "anyOf" in schema:
        return None
    if "enum" in schema:
        return schema["enum"][0]
    hexadecimal = "ab" * (32 if "{64}" in schema.get("pattern", "") else 16)
    some = {"boolean": True, "integer": 3, "number": 0.5, "string": hexadecimal, "array": [], "object": {}}
    return some[schema["type"]]


@st.composite
def bent_bytes(draw, data: bytes) -> bytes:
    """Draw the bytes with some of them replaced, cut, repeated or inserted."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        to = draw(st.integers(at, min(len(data), at + 12)) | st.just(len(data)))
        data = data[:at] + draw(st.binary(max_size=12) | st.sampled_from((*TOKENS, data[at:] * 2))) + data[to:]
    return data


@st.composite
def bent(draw, value: Any) -> Any:
    """Draw the JSON value with a part replaced, omitted, added or nested."""
    if not isinstance(value, dict | list) or not value or draw(st.integers(0, 4)) == 0:
        nested = draw(ATOMS)
        for _ in range(draw(st.sampled_from((*[0] * 9, 3, 150, 400)))):
            nested = [nested]
        return nested
    key, made = draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value)))), value.copy()
    change = draw(st.sampled_from(("omit", "add", *["bend"] * 6)))
    if change == "omit":
        del made[key]
    elif change == "add":
        made = made | {draw(TEXTS): draw(ATOMS)} if isinstance(made, dict) else made * draw(st.sampled_from((2, 1200)))
    else:
        made[key] = draw(bent(value[key]))
    return made


@st.composite
def documents(draw, kind: Any, sample: Any) -> Any:
    """Draw a document of this kind as received from a peer; WsiFlError where it is refused."""
    for _ in range(draw(st.sampled_from((0, 1, 1, 2, 6)))):
        sample = draw(bent(sample))
    text = json.dumps(sample).encode()
    text = draw(bent_bytes(text)) if draw(st.integers(0, 3)) == 0 else text
    try:
        told = decode_document(text, kind, "C1")
    except WsiFlError as error:
        return error
    assert decode_document(encode_document(told, kind, "C1"), kind, "C1") == told
    return told


def several(data, kind: Any, samples: list[Any]) -> list[Any]:
    """Draw the documents of a few sites, valid ones where they would be refused."""
    told = [data.draw(documents(kind, sample)) for sample in samples]
    return [sample if isinstance(one, WsiFlError) else one for one, sample in zip(told, samples, strict=True)]


def fuzz_documents(data, slow: bool) -> None:
    """Documents of all kinds, and the line printed for a row."""
    kind = data.draw(st.sampled_from([*kinds(slow=slow).values()]))
    told = data.draw(documents(kind, example_of(kind)))
    if isinstance(told, WsiFlError):
        raise told
    if kind.__name__ == "SummaryRow":
        describe_spending(told)


def fuzz_preflight(data, slow: bool) -> None:
    """The comparison of the sites' data and budgets."""
    brought = several(
        data, PreflightDocument, [example_of(PreflightDocument) | {"site": f"C{k}"} for k in range(1, N_SITES)]
    )
    check_budgets(brought, data.draw(st.sampled_from([{"C1": 3.0}, {}])), 3)
    compare_sites(brought)


def fuzz_membership(data, slow: bool) -> None:
    """Membership and the graph among members: no report of a site loses mass."""
    first = find_first_round(several(data, ResumeState, [SAMPLES["ResumeState"]] * N_SITES))
    assert 0 <= first < 2**31
    states = st.sampled_from(("staying", "leaving", "returning", "away"))
    replies = [{"state": data.draw(states), "ahead": data.draw(st.booleans())} for _ in range(N_SITES)]
    members = build_membership(range(N_SITES), several(data, MembershipReply, replies))
    edges = {"rounds": [[["A", "B"], ["B", "C"]], [["C", "D", 0.5], ["D", "A", 0.5]], [["D", "A"]]]}
    graphs = [make(3) for make in topology.TOPOLOGIES.values()] + [topology.parse_graph(edges, "ABCD")]
    hops = topology.list_hops(data.draw(st.sampled_from(graphs)), N_SITES, members.present, min(first, ROUND), 0.5)
    hops.append(topology.build_handover(N_SITES, members.leaving, members.staying))
    hops.append(topology.build_welcome(N_SITES, members.returning, members.staying))
    for matrix in hops:
        np.testing.assert_allclose(matrix.sum(axis=0), 1)


def fuzz_messages(data, slow: bool) -> None:
    """Headers and bodies of models and buffers: each is refused or matches the plan."""
    values: Any = np.linspace(0, 1, N_VALUES).astype(np.float32)
    if images := data.draw(st.booleans()):
        values = SHAPE.pack_samples(np.zeros((3, 2, 2, 3), np.uint8), np.array([0, 1, 1]))
    kind, size = values.dtype, values.size
    header, body = message.pack_message(message.Outgoing(1, 0, 1.0, _release(values)), ROUND, HOP)
    header = data.draw(st.just(header) | bent_bytes(header))
    announced = message.body_length(header, size, kind)
    assert 0 <= announced <= 4 * size
    raw = data.draw(st.just(body.tobytes()) | bent_bytes(body.tobytes()))
    raw = raw[: announced * kind.itemsize].ljust(announced * kind.itemsize, b"\x7f")
    arrived = message.unpack_message(header, np.frombuffer(raw, kind), 1, 0, ROUND, size, kind=kind)
    assert arrived.refused or (arrived.vector.size, arrived.sender, arrived.round) == (size, 1, ROUND)
    if arrived.refused:
        problem = arrived.refused
    elif images:
        problem = SHAPE.find_problem(np.asarray(arrived.vector, np.uint8))
    else:
        with np.errstate(all="ignore"):
            problem = problem_of_model(arrived, SCHEMA, N_SITES) or too_far(arrived, np.ones(size, np.float32))
    if problem:
        raise WsiFlError(problem)
    assert images or (np.isfinite(arrived.vector).all() and 0 < arrived.weight <= N_SITES + 1e-6)


def too_far(message, local_vector):
    """Return why a model lies too far from the local one."""
    learner = SimpleNamespace(parameter_vector=lambda: local_vector)
    return ModelPayload().find_problem(message, None, learner, (), is_single=True)


def _release(values: Any) -> Any:
    """Return a release as a ledger would make it."""
    release = object.__new__(Release)
    content = {"site": "C1", "round": ROUND, "schema": SCHEMA, "vector": values, "weight": 1.0}
    for name, value in content.items():
        object.__setattr__(release, name, value)
    return release


TARGETS = (fuzz_documents, fuzz_preflight, fuzz_membership, fuzz_messages)


def fuzz(target, n: int, *, slow: bool = False) -> Counter[str]:
    """Count the outcomes of n cases: "valid", or "refused" in one printable line; any other error is raised."""
    seen: Counter[str] = Counter()

    @settings(max_examples=n, deadline=None, derandomize=not slow, database=None, suppress_health_check=[*HealthCheck])
    @given(st.data())
    def run(data) -> None:
        try:
            target(data, slow)
        except WsiFlError as error:
            seen["refused"] += 1
            assert 0 < len(str(error)) <= 500 and str(error).isprintable(), ascii(error)
        else:
            seen["valid"] += 1

    run()
    return seen
