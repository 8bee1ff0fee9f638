"""Verify a ledger by docs/reference/ledger.md: `python verify_ledger.py LEDGER [HEAD…]` prints ε and δ, or fails."""

import json
import sys
from contextlib import suppress
from hashlib import sha256
from math import inf
from pathlib import Path

from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, get_epsilon_gaussian
from dp_accounting.rdp import RdpAccountant

KINDS = {
    "site run time guarantee released relayed": (str,),
    "round steps version": (int,),
    "sending real insecure": (bool,),
    "sigma clip sample_rate delta": (int, float),
}
TYPES = {key: kind for keys, kind in KINDS.items() for key in keys.split()}
ORDERS = [*(1 + k / 10 for k in range(1, 100)), *range(12, 64)]
NULLABLE = ("mechanism", "delta", "unit", "released", "relayed")


def parse_object(pairs):
    return dict(pairs) if len(dict(pairs)) == len(pairs) else {"a key": "twice"}


def parse(text, prev):
    document = json.loads(text, object_pairs_hook=parse_object)
    k = {key: value for key, value in document.items() if value is not None or key not in NULLABLE}
    m = k.get("mechanism", {"sigma": 1, "clip": 1, "sample_rate": 1, "steps": 1})
    good = [type(value) in TYPES.get(key, (type(value),)) for key, value in [*k.items(), *m.items()]]
    good += [k.get("version", 1) == 1, k.get("prev") == prev, "site" in k, 1 <= len(k.get("run", "")) <= 300]
    good += [k.get("round", -1) >= 0, k.get("unit", "row") in ("row", "patient", "site"), 0 < k.get("delta", 0.5) < 1]
    good += [k.get("guarantee", "none") in ("guaranteed", "shared", "nominal", "none"), 0 <= m["steps"] <= 1e12]
    good += [m["sigma"] == 0 or 1e-9 <= m["sigma"] <= 1e9, 0 < m["clip"] < inf, 0 < m["sample_rate"] <= 1]
    is_departure = k.get("sending") or k.get("relayed")
    good += ["mechanism" not in k or ({"delta", "unit"} <= k.keys() and not is_departure)]
    if not all(good):
        raise ValueError("a line breaks the format or the chain")
    return k


def read(path, heads=()):
    *texts, last = Path(path).read_bytes().split(b"\n")
    with suppress(ValueError):
        texts += [last for _ in [json.loads(last)]]
    lines, digests, chain = [], [], sha256()
    for text in texts:
        lines.append(parse(text, chain.hexdigest()))
        chain.update(text + b"\n")
        digests.append(chain.hexdigest())
    for head in (json.loads(Path(head).read_bytes()) for head in heads):
        if digests[head["lines"] - 1 : head["lines"]] != [head["sha256"]]:
            raise ValueError("this is not the ledger of the head")
    return lines


def spend(lines):
    units, rounds, current = {k["unit"] for k in lines if k.get("real") and "mechanism" in k}, [], {}
    lines = [k for k in lines if len(units) != 1 or k.get("real") or k.get("unit") in (None, *units)]
    for k in lines:
        key, m = (k["site"], k["run"].split(" ")[-1]), k.get("mechanism")
        now = current.get(key, [None, False, None])  # the round's number, whether it is final, its mechanism
        if k.get("sending") or k.get("relayed"):
            now[1] |= now[0] == k["round"]
        elif now[0] == k["round"] and not (now[1] and m):
            now[2] = m or now[2]
        else:
            rounds.append([k["round"], False, m])
            current[key] = rounds[-1]
    paid, spent = [k for k in lines if "mechanism" in k], [m for *_, m in rounds if m]
    delta, units = min((k["delta"] for k in paid), default=None), {k["unit"] for k in paid}
    bare = any(k.get("released") and k["released"].split()[0] != "scores" for k in lines if "mechanism" not in k)
    is_bare = bare or any(k.get("insecure") for k in paid) or any(m["steps"] and not m["sigma"] for m in spent)
    if is_bare or not spent or len(units) > 1:
        return None, delta
    spent = [m for m in spent if m["steps"]]
    mu = sum(m["steps"] / m["sigma"] ** 2 for m in spent) ** 0.5
    value, accountant = get_epsilon_gaussian(1 / mu, delta) if mu else 0.0, RdpAccountant(ORDERS)
    for m in spent:
        accountant.compose(PoissonSampledDpEvent(m["sample_rate"], GaussianDpEvent(m["sigma"])), m["steps"])
    value = min(value, accountant.get_epsilon(delta)) if any(m["sample_rate"] < 1 for m in spent) else value
    return (value if value <= 100 else None), delta


if __name__ == "__main__":
    print(*spend(read(sys.argv[1], sys.argv[2:])))
