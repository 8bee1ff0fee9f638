"""Communication against the number of sites, for a star and for the exponential graph, in lockstep.

python benchmarks/communication.py [--parameters 199210] [--sites 2 4 8 16 32 64] [--json] [--figure PATH]

Counts what `LocalComm` really carries. The modelled time is that of a site which sends or receives one message at a
time (ProxyFL, Fig. 4): the hub of a star handles two messages per other site, everybody in the exponential graph two
in all. Default model: the MLP of the MNIST study.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from wsi_fl.federation.comm import LocalComm
from wsi_fl.federation.message import HEADER_BYTES, Outgoing
from wsi_fl.federation.push_sum import PushSum, mix_states
from wsi_fl.federation.topology import Matrix, Topology, exponential, list_receivers, list_senders, star
from wsi_fl.privacy.guarantee import PrivacyTerms
from wsi_fl.privacy.ledger import PrivacyLedger
from wsi_fl.privacy.ledger_file import Release
from wsi_fl.report.figures import build_png_style, load_palette

GRAPHS: dict[str, Topology] = {"star": star, "exponential": exponential}
SCHEMA = "00" * 32


@dataclass
class Site:
    """A site that has trained nothing: an account and a state to pass on."""

    ledger: PrivacyLedger
    push: PushSum
    own: str = ""


@dataclass(frozen=True)
class Link:
    """What joins two sites."""

    megabits_per_s: float
    latency_s: float

    def seconds(self, n_bytes: float) -> float:
        """For one message."""
        return self.latency_s + 8 * n_bytes / (1e6 * self.megabits_per_s)


def hop_of(sites: list[Site], comm: LocalComm, matrix: Matrix, round_: int, hop: int) -> float:
    """Sends P·(x, w) and adds up what arrives; returns the seconds of both, ledgers left out."""
    releases = {k: _release(site, round_, hop) for k, site in enumerate(sites) if hop == 0 or list_receivers(matrix, k)}
    outgoing = [
        Outgoing(k, to, float(matrix[to, k]), r) for k, r in releases.items() for to in list_receivers(matrix, k)
    ]
    expected = [(sender, k) for k in range(len(sites)) for sender in list_senders(matrix, k)]
    began = time.perf_counter()
    arrived = comm.exchange(outgoing, expected, round_=round_, hop=hop, size=sites[0].push.x.size)
    for k, site in enumerate(sites):
        mine = [PushSum(np.asarray(m.vector, np.float32), m.weight) for m in arrived if m.receiver == k]
        site.push = mix_states(site.push, float(matrix[k, k]), mine)
    return time.perf_counter() - began


def _release(site: Site, round_: int, hop: int) -> Release:
    """What a site trained in the first hop, what it holds by then in a further one."""
    x, w = site.push.x, site.push.w
    if hop:
        return site.ledger.relay_mixture(round_, x, own_sha256=site.own, schema=SCHEMA, weight=w)
    made = site.ledger.release(round_, x, schema=SCHEMA, weight=w, mechanism=None, content="model")
    site.own = made.digest
    return made


def messages_handled(hops: list[Matrix]) -> int:
    """The most messages any site sends or receives in a round, hop after hop."""
    n = len(hops[0])
    return sum(max(len(list_receivers(hop, k)) + len(list_senders(hop, k)) for k in range(n)) for hop in hops)


def measured(graph: str, n_sites: int, n_parameters: int, rounds: int, link: Link) -> dict[str, Any]:
    """One row: counts per round, bytes of the busiest and of the other sites, measured and modelled seconds."""
    rng = np.random.default_rng(0)
    comm, seconds = LocalComm(n_sites), []
    with tempfile.TemporaryDirectory() as folder:
        sites = [
            Site(
                PrivacyLedger(
                    Path(folder) / f"{k}.jsonl", site=str(k), run="r", terms=PrivacyTerms(1e-5, allow=("model",))
                ),
                PushSum(rng.normal(size=n_parameters).astype(np.float32), 1.0),
            )
            for k in range(n_sites)
        ]
        before = {k: replace(tally) for k, tally in comm.traffic.items()}
        for round_ in range(1, rounds + 1):
            hops = GRAPHS[graph](n_sites, round_ - 1, 0.0)
            seconds.append(sum(hop_of(sites, comm, matrix, round_, hop) for hop, matrix in enumerate(hops)))
    sent = [comm.traffic[k].traffic_since(before[k]) for k in range(n_sites)]
    sent_bytes = sorted(tally.bytes / rounds for tally in sent)
    handled = messages_handled(hops)
    return {
        "graph": graph,
        "n_sites": n_sites,
        "messages": sum(tally.messages for tally in sent) / rounds,
        "bytes": sum(sent_bytes),
        "busiest_bytes": sent_bytes[-1],
        "others_bytes": median(sent_bytes[:-1]),
        "lockstep_seconds": median(seconds),
        "handled": handled,
        "modelled_seconds": handled * link.seconds(HEADER_BYTES + 4 * n_parameters),
    }


def print_rows(rows: list[dict[str, Any]]) -> None:
    heads = ("graph", "sites", "messages", "MB in all", "MB hub", "MB others", "lockstep ms", "handled", "modelled ms")
    print("".join(f"{head:>13}" for head in heads))
    for row in rows:
        numbers = (
            f"{row['messages']:.0f}",
            *(f"{row[key] / 1e6:.2f}" for key in ("bytes", "busiest_bytes", "others_bytes")),
            f"{1e3 * row['lockstep_seconds']:.2f}",
            f"{row['handled']}",
            f"{1e3 * row['modelled_seconds']:.1f}",
        )
        print("".join(f"{cell:>13}" for cell in (row["graph"], str(row["n_sites"]), *numbers)))


def draw(path: Path, rows: list[dict[str, Any]], link: Link) -> None:
    """Modelled and measured time of a round, bytes of the busiest site and of all: log-log."""
    colors = load_palette()
    shown = (
        (
            "modelled_seconds",
            f"Time of a round, s: one message\nat a time, {link.megabits_per_s:g} Mbit/s (model)",
            1.0,
        ),
        ("lockstep_seconds", "Time of a round, ms: all sites\nin one process (measured)", 1e-3),
        ("busiest_bytes", "Sent per round by the\nbusiest site, MB", 1e6),
        ("bytes", "Sent per round by\nall sites, MB", 1e6),
    )
    with mpl.rc_context(build_png_style()):
        figure = Figure(figsize=(13, 3.6), layout="constrained")
        for axes, (key, title, unit) in zip(figure.subplots(1, 4), shown, strict=True):
            for color, graph in zip(("s1", "s0"), GRAPHS, strict=True):
                mine = [row for row in rows if row["graph"] == graph]
                x, y = [row["n_sites"] for row in mine], [row[key] / unit for row in mine]
                axes.plot(x, y, marker="o" if graph == "star" else "s", ms=5, color=colors[color], label=graph)
            _log_axes(axes, sorted({row["n_sites"] for row in rows}), title)
        figure.axes[0].legend(frameon=False, loc="upper left")
        figure.savefig(path)


def _log_axes(axes: Axes, n_sites: list[int], title: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(n_sites, [str(n) for n in n_sites])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.set_xlabel("number of sites")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=199_210, help="floats of the model that travels")
    parser.add_argument("--sites", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--mbit-s", type=float, default=100.0, help="of the link, for the modelled time")
    parser.add_argument("--latency-ms", type=float, default=1.0)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--figure", type=Path, help="draw the figure into this file")
    args = parser.parse_args()
    if min(args.sites) < 2 or args.rounds < 1 or args.parameters < 1:
        parser.error("two sites, one round and one parameter are the least")
    link = Link(args.mbit_s, args.latency_ms / 1e3)
    rows = [measured(graph, n, args.parameters, args.rounds, link) for graph in GRAPHS for n in args.sites]
    if args.json:
        print(json.dumps({"parameters": args.parameters, "rounds": args.rounds, "rows": rows}, indent=2))
    else:
        print_rows(rows)
    if args.figure:
        draw(args.figure, rows, link)


if __name__ == "__main__":
    main()
