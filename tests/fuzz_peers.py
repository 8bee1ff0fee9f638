"""Random messages of broken or hostile peers are valid or refused in one line, without other effects.

    python tests/fuzz_peers.py --seconds 600 [--seed 7]
    python tests/fuzz_peers.py --seed 7 --case 1234

Headers, bodies and documents of every kind are mutated and fed to whatever looks at them first. A case of a seed is
always the same; a failure says which it was.
"""

import argparse
import importlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from typing_extensions import is_typeddict

from wsi_fl.federation import message, topology
from wsi_fl.federation.documents import decode_document, encode_document
from wsi_fl.federation.exchange import _find_problem as problem_of_model
from wsi_fl.federation.membership import MembershipReply, ResumeState, build_membership, find_first_round
from wsi_fl.federation.payload import ModelPayload
from wsi_fl.federation.preflight import PreflightDocument, compare_sites
from wsi_fl.federation.site_state import BufferShape
from wsi_fl.federation.topology import parse_graph
from wsi_fl.privacy.ledger_file import Release
from wsi_fl.stages.site.privacy_account import describe_spending
from wsi_fl.stages.training.checks import check_budgets
from wsi_fl.types import WsiFlError

LONGEST = 500
MODULES = (
    "federation.preflight",
    "federation.membership",
    "oneshot.secure_aggregation",
    "federation.cross_site_evaluation",
    "hospitals.trust.sealed_messages",
    "hospitals.work.client",
    "oneshot.sync_statistics",
    "stages.training.ranks",
    "stages.training.resume",
)
SLOW_MODULES = ("synthesis.stages.mpcpa",)
"""It takes seconds to import."""
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


def kinds(*, slow: bool = False) -> list[tuple[Any, dict[str, Any]]]:
    """Return every kind of document that sites exchange, and one valid or nearly valid document."""
    found = {}
    for name in MODULES + (SLOW_MODULES if slow else ()):
        module = importlib.import_module(f"wsi_fl.{name}")
        for kind in vars(module).values():
            if is_typeddict(kind) and kind.__module__ == module.__name__:
                found[kind.__name__] = kind
    return [(kind, example_of(kind) | SAMPLES.get(name, {})) for name, kind in found.items()]


@cache
def example_of(kind: Any) -> dict[str, Any]:
    """Return a plain document of this kind with all required keys."""
    schema = TypeAdapter(kind).json_schema()
    return {key: _plain(schema["properties"][key]) for key in schema.get("required", ())}


def _plain(schema: dict[str, Any]) -> Any:
    """Return a valid value of a field."""
    if "anyOf" in schema:
        return None
    if "enum" in schema:
        return schema["enum"][0]
    hexadecimal = "ab" * (32 if "{64}" in schema.get("pattern", "") else 16)
    some = {"boolean": True, "integer": 3, "number": 0.5, "string": hexadecimal, "array": [], "object": {}}
    return some[schema["type"]]


def outcome(action: Callable[[], object]) -> str:
    """Return "valid", or "refused" for an error in one printable line; raise any other error."""
    try:
        action()
    except WsiFlError as error:
        text = str(error)
        assert 0 < len(text) <= LONGEST, text
        assert text.isprintable(), ascii(text)
        return "refused"
    return "valid"


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


def fuzz_documents(rng: random.Random, every: list[tuple[Any, dict[str, Any]]]) -> object:
    """Fuzz documents of all kinds and the lines printed for a row."""
    kind, sample = rng.choice(every)
    told = document(rng, kind, sample)
    return describe_spending(told) if kind.__name__ == "SummaryRow" else told


def fuzz_preflight(rng: random.Random, every: list[tuple[Any, dict[str, Any]]]) -> object:
    """Fuzz the comparison of the sites' data and budgets."""
    del every
    own = [example_of(PreflightDocument) | SAMPLES["PreflightDocument"] | {"site": f"C{k}"} for k in range(1, N_SITES)]
    brought = several(rng, PreflightDocument, own)
    limits = {"C1": 3.0} if rng.random() < 0.5 else {}
    check_budgets(brought, limits, 3)
    compare_sites(brought)
    return brought


def fuzz_roster(rng: random.Random, every: list[tuple[Any, dict[str, Any]]]) -> object:
    """Fuzz membership and the graph among members: no report of a site loses mass."""
    del every
    first = find_first_round(several(rng, ResumeState, [SAMPLES["ResumeState"]] * N_SITES))
    assert 0 <= first < 2**31
    answers = [
        {"state": rng.choice(("staying", "leaving", "returning", "away")), "ahead": rng.random() < 0.3}
        for _ in range(N_SITES)
    ]
    roster = build_membership(range(N_SITES), several(rng, MembershipReply, answers))
    edges = {"rounds": [[["A", "B"], ["B", "C"]], [["C", "D", 0.5], ["D", "A", 0.5]], [["D", "A"]]]}
    graph = rng.choice([make(rng.randrange(9)) for make in topology.TOPOLOGIES.values()] + [parse_graph(edges, "ABCD")])
    hops = topology.list_hops(graph, N_SITES, roster.present, min(first, ROUND), 0.5)
    hops.append(topology.build_handover(N_SITES, roster.leaving, roster.staying))
    hops.append(topology.build_welcome(N_SITES, roster.returning, roster.staying))
    for matrix in hops:
        np.testing.assert_allclose(matrix.sum(axis=0), 1)
    return roster


def fuzz_messages(rng: random.Random, every: list[tuple[Any, dict[str, Any]]]) -> object:
    """Fuzz headers and bodies of models and buffers: each is refused or matches the plan."""
    del every
    images = rng.random() < 0.3
    if images:
        values: Any = SHAPE.pack_samples(np.zeros((3, 2, 2, 3), np.uint8), np.array([0, 1, 1]))
    else:
        values = np.linspace(0, 1, N_VALUES).astype(np.float32)
    kind, size = values.dtype, values.size
    header, body = message.pack_message(message.Outgoing(1, 0, 1.0, _release(values)), ROUND, HOP)
    if rng.random() < 0.8:
        header = bent_bytes(rng, header)
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
    if not images:
        assert np.isfinite(arrived.vector).all() and 0 < arrived.weight <= N_SITES + 1e-6
    return arrived


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


TARGETS = (fuzz_documents, fuzz_preflight, fuzz_roster, fuzz_messages)


def run_case(seed: int, case: int, every: list[tuple[Any, dict[str, Any]]]) -> str:
    """Run one case and return "target outcome"."""
    rng = random.Random(seed * 1_000_003 + case)
    target = rng.choice(TARGETS)
    try:
        return f"{target.__name__} {outcome(lambda: target(rng, every))}"
    except BaseException as error:
        error.add_note(f"python tests/fuzz_peers.py --seed {seed} --case {case}")
        raise


def fuzz(seed: int, *, cases: int | None = None, seconds: float | None = None, slow: bool = False) -> Counter[str]:
    """Count the outcomes over a number of cases or seconds."""
    every = kinds(slow=slow)
    numbers: Iterator[int] = iter(range(cases if cases is not None else 1 << 62))
    end = time.monotonic() + (seconds if seconds is not None else 1e9)
    seen: Counter[str] = Counter()
    for number in numbers:
        seen[run_case(seed, number, every)] += 1
        if time.monotonic() > end:
            break
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--case", type=int)
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    if arguments.case is not None:
        print(run_case(arguments.seed, arguments.case, kinds(slow=True)))
        return
    for name, count in sorted(fuzz(arguments.seed, seconds=arguments.seconds, slow=True).items()):
        print(f"{count:9d} {name}")


if __name__ == "__main__":
    main()
