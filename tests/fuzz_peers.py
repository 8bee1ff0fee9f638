"""Random messages of broken or hostile peers: mutated headers, bodies and documents of every kind."""

import importlib
import json
import random
import re
import time
from collections import Counter
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
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
ATOMS: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 2**31, 2**53 + 1, 2**63, -(2**70), 10**300),
    *(0.5, -0.0, 1e308, 5e-324, "", "C1", "C2", "away", "leaving", "../../x", "/etc", "a b", "é", "\u202e", "\u2028"),
    *("\x00", "a\nb", "\x1b[31m", "\x7f", "x" * 300, "x" * 5000, SCHEMA, "abcdef01" * 4, "NaN", {}, []),
)
TOKENS = (
    *(b"NaN", b"-Infinity", b"1e999", b"-", b"00", b"9" * 5000, b"[" * 5000, b'{"a":' * 300, b"]", b"}", b",", b":"),
    *(b"null", b"\x00", b"\xff", b"\xed\xa0\x80", b'"\\ud800"', b'"\\u0000"', b"\\", b'"', b"\xef\xbb\xbf", b"\n"),
)


@cache
def kinds(*, slow: bool = False) -> dict[str, Any]:
    """Return every kind of document in modules that exchange any; generators are slow to import."""
    found = {}
    for path in ROOT.rglob("*.py"):
        text, parts = path.read_text(encoding="utf-8"), path.relative_to(ROOT).with_suffix("").parts
        told = re.findall(r"(?:code_document|exchange_documents|\.gather)\([^,]*,\s*(\w*)", text)
        if not told or ("synthesis" in parts and not slow):
            continue
        module = importlib.import_module(".".join(("wsi_fl", *parts)))
        imported = [vars(module).get(name) for name in told]
        own = [kind for kind in vars(module).values() if getattr(kind, "__module__", "") == module.__name__]
        found |= {kind.__name__: kind for kind in (*imported, *own, PreflightDocument) if is_typeddict(kind)}
    return found


@cache
def example_of(kind: Any) -> dict[str, Any]:
    """Return a document of this kind with all required keys, mostly plain ones."""
    schema = TypeAdapter(kind).json_schema()
    return _plain(schema, schema.get("$defs", {})) | SAMPLES.get(kind.__name__, {})


def _plain(schema: dict[str, Any], kinds: dict[str, Any]) -> Any:
    """Return a valid value of a field."""
    schema = kinds.get(schema.get("$ref", "").rpartition("/")[2], schema)
    if "anyOf" in schema:
        return None
    if "enum" in schema:
        return schema["enum"][0]
    if schema["type"] == "object":
        return {key: _plain(schema["properties"][key], kinds) for key in schema.get("required", ())}
    hexadecimal = "ab" * (32 if "{64}" in schema.get("pattern", "") else 16)
    return {"boolean": True, "integer": 3, "number": 0.5, "string": hexadecimal, "array": []}[schema["type"]]


def bent_bytes(rng: random.Random, data: bytes) -> bytes:
    """Return the bytes with some of them flipped, cut, repeated or inserted."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(data) + 1)
        to = min(len(data), at + rng.randrange(1, 12))
        flipped = bytes(byte ^ (1 << rng.randrange(8)) for byte in data[at:to])
        data = rng.choice(
            (
                data[:at] + flipped + data[to:],
                data[:at] + rng.choice(TOKENS) + data[rng.choice((at, to)) :],
                data[:at] + data[to:],
                data[:at],
                data[:at] + rng.randbytes(rng.randrange(12)) + data[to:],
                data + data[at:],
            )
        )
    return data


def bent(rng: random.Random, value: Any, depth: int = 0) -> Any:
    """Return the JSON value with a part replaced, omitted, added or nested."""
    if isinstance(value, dict | list) and 0 < len(value) < 1000 and depth < 4 and rng.random() < 0.8:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key, made = rng.choice(keys), value.copy()
        what = rng.random()
        if what < 0.1:
            del made[key]
        elif what < 0.2 and isinstance(made, dict):
            made[str(rng.choice(ATOMS))] = rng.choice(ATOMS)
        elif what < 0.25 and isinstance(made, list) and len(json.dumps(made)) < 1000:
            made *= rng.choice((2, 50, 1200))
        else:
            made[key] = bent(rng, value[key], depth + 1)
        return made
    if rng.random() < 0.05:
        for _ in range(rng.choice((3, 150, 400))):
            value = [value]
        return value
    return rng.choice(ATOMS) if rng.random() < 0.9 else rng.randbytes(6).decode("latin-1")


def document(rng: random.Random, kind: Any, sample: Any) -> Any:
    """Return a document of this kind as received from a peer: valid, or refused."""
    for _ in range(rng.choice((0, 1, 1, 2, 6))):
        sample = bent(rng, sample)
    text = json.dumps(sample).encode()
    if rng.random() < 0.3:
        text = bent_bytes(rng, text)
    told = decode_document(text, kind, "C1")
    assert decode_document(encode_document(told, kind, "C1"), kind, "C1") == told
    return told


def several(rng: random.Random, kind: Any, samples: list[Any]) -> list[Any]:
    """Return the documents of a few sites, mutated within their schema."""
    found = []
    for sample in samples:
        try:
            found.append(document(rng, kind, sample))
        except WsiFlError:
            found.append(decode_document(json.dumps(sample).encode(), kind, "C1"))
    return found


def fuzz_documents(rng: random.Random, slow: bool) -> None:
    """Documents of all kinds, and the line printed for a row."""
    kind = rng.choice([*kinds(slow=slow).values()])
    told = document(rng, kind, example_of(kind))
    if kind.__name__ == "SummaryRow":
        describe_spending(told)


def fuzz_preflight(rng: random.Random, slow: bool) -> None:
    """The comparison of the sites' data and budgets."""
    own = [example_of(PreflightDocument) | {"site": f"C{k}"} for k in range(1, N_SITES)]
    brought = several(rng, PreflightDocument, own)
    check_budgets(brought, rng.choice([{"C1": 3.0}, {}]), 3)
    compare_sites(brought)


def fuzz_membership(rng: random.Random, slow: bool) -> None:
    """Membership and the graph among members: no report of a site loses mass."""
    first = find_first_round(several(rng, ResumeState, [SAMPLES["ResumeState"]] * N_SITES))
    assert 0 <= first < 2**31
    states = ("staying", "leaving", "returning", "away")
    replies = [{"state": rng.choice(states), "ahead": rng.random() < 0.3} for _ in range(N_SITES)]
    members = build_membership(range(N_SITES), several(rng, MembershipReply, replies))
    edges = {"rounds": [[["A", "B"], ["B", "C"]], [["C", "D", 0.5], ["D", "A", 0.5]], [["D", "A"]]]}
    graphs = [make(rng.randrange(9)) for make in topology.TOPOLOGIES.values()] + [topology.parse_graph(edges, "ABCD")]
    hops = topology.list_hops(rng.choice(graphs), N_SITES, members.present, min(first, ROUND), 0.5)
    hops.append(topology.build_handover(N_SITES, members.leaving, members.staying))
    hops.append(topology.build_welcome(N_SITES, members.returning, members.staying))
    for matrix in hops:
        np.testing.assert_allclose(matrix.sum(axis=0), 1)


def fuzz_messages(rng: random.Random, slow: bool) -> None:
    """Headers and bodies of models and buffers: each is refused or matches the plan."""
    values: Any = np.linspace(0, 1, N_VALUES).astype(np.float32)
    if images := rng.random() < 0.3:
        values = SHAPE.pack_samples(np.zeros((3, 2, 2, 3), np.uint8), np.array([0, 1, 1]))
    kind, size = values.dtype, values.size
    header, body = message.pack_message(message.Outgoing(1, 0, 1.0, _release(values)), ROUND, HOP)
    header = bent_bytes(rng, header) if rng.random() < 0.8 else header
    announced = message.body_length(header, size, kind)
    assert 0 <= announced <= 4 * size
    raw = bent_bytes(rng, body.tobytes()) if rng.random() < 0.5 else body.tobytes()
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
    first = time.time_ns() if slow else 0
    for case in range(first, first + n):
        try:
            target(random.Random(case), slow)
            seen["valid"] += 1
        except WsiFlError as error:
            assert 0 < len(str(error)) <= 500 and str(error).isprintable(), ascii(error)
            seen["refused"] += 1
        except BaseException as error:
            error.add_note(f"fuzz_peers.{target.__name__}(random.Random({case}), {slow})")
            raise
    return seen
