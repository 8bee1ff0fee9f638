"""What a dossier says beside the plan: what is not protected, a draft for a data protection impact assessment (GDPR,
Article 35 (7)), and who connects to whom, as a firewall's owner asks.
"""

from __future__ import annotations

from typing_extensions import TypedDict

from wsi_fl.hospitals.plans.making import PlanDocument
from wsi_fl.hospitals.trust.kit import Kit
from wsi_fl.report.words import size
from wsi_fl.stages.site.account import Group, group_words
from wsi_fl.study.site import SiteFile


class Part(TypedDict):
    """A heading of the assessment, the facts under it, and what only the hospital can write."""

    heading: str
    facts: list[str]
    gaps: list[str]


def not_protected(said: PlanDocument, kit: Kit | None, group: Group | None) -> list[str]:
    """Return in plain sentences what no part of wsi-fl protects, the gravest first.

    Args:
        group: what ε of all that was released and of the plan is worth to the patient with the most rows.
    """
    found = []
    if not said["privacy"]["differential_privacy"]:
        found.append(
            "What leaves has no differential privacy: whoever receives a model may learn of single patients."
        )
    elif said["privacy"]["unit"] == "row":
        worth = f": {group_words(group)}." if group else "; how much less is not known here."
        found.append(f"Patients with many records, for ε is of one row: they are protected less{worth}")
    found.append("Whoever holds the federation's root key can name anybody: a made-up hospital too.")
    found.append(
        "An administrator of the hospital's own machine can read its slides, its key and its letters, and can run "
        "another program under its name."
    )
    if said["privacy"]["guarantee"] == "nominal":
        found.append("ε is nominal: the proxy learns from a model that was trained without noise.")
    if any("scores" in site["allow"] for site in said["sites"]):
        found.append(
            "Counts of test examples by score leave without differential privacy where a site allows scores."
        )
    found += [
        "The number of a site's records (rows or patients) is known to all sites.",
        "When a letter is sent, how long it is and to whom it goes are seen by whatever carries it, and a slow site is "
        "seen to be slow.",
        "How a store was made of slides (tissue, balance, drawn splits) is not covered by ε.",
        "A site that lies about its own data can spoil what all learn; ε protects its patients and not the model.",
        "What floating point leaves open: the theorem is about real numbers, and what travels is rounded.",
    ]
    if kit is not None and kit.folder is not None:
        found.append("Whoever can write in the shared folder can delete letters and so stop a run.")
    return found


def assessment(said: PlanDocument, site: SiteFile, group: Group | None, *, audited: bool) -> list[Part]:
    """Return the draft's parts, in the order of Article 35 (7) and of what goes with it.

    Args:
        group: as of `not_protected`.
        audited: whether a model of the site was attacked by `audit`.
    """
    return [
        _description(said, site),
        _necessity(said),
        _risks(said, group),
        _measures(said, site, audited=audited),
        _consultation(),
    ]


def _description(said: PlanDocument, site: SiteFile) -> Part:
    learned, names = said["learns"], [one["name"] for one in said["sites"]]
    leaving = [
        f"{row['what']}, {row['often']}{_each(row['bytes'])} ({row['protected_by']})"
        for row in said["leaves"]
        if row["of_records"]
    ]
    return {
        "heading": "Systematic description of the processing and its purposes, Art. 35 (7) (a)",
        "facts": [
            f"{len(names)} sites ({', '.join(names)}) train models on whole-slide images together: {said['does']}",
            f"At site {site.name} the processing reads {learned['data']} made of its slides, and learns to answer "
            f"{learned['asks']}: {', '.join(learned['classes'] or ['classes that the stores know'])}.",
            f"What leaves the hospital and is computed of records: {'; '.join(leaving)}.",
            f"What never leaves: {'; '.join(said['stays'])}.",
        ],
        "gaps": [
            "purpose, controller, joint controllers and their arrangement (Art. 26), processors (Art. 28)",
            "categories and number of patients, where the slides come from, and how long all is kept",
            "legal basis (Art. 6 and Art. 9 (2)), national law on research, and where other sites lie (Chapter V)",
        ],
    }


def _necessity(said: PlanDocument) -> Part:
    return {
        "heading": "Necessity and proportionality, Art. 35 (7) (b)",
        "facts": [
            "Slides, labels and names stay in the hospital; the other sites receive only what the table names (data "
            "minimisation, Art. 5 (1) (c)).",
            f"The number of rounds is fixed at {said['rounds']}; another plan or other software is refused.",
            "Whether one hospital alone would do as well can be measured with wsi-fl compare on this plan's runs.",
        ],
        "gaps": [
            "why the purpose cannot be reached with less data, or by the hospital alone",
            "how patients are informed, and how they object or withdraw (Art. 12 to 22)",
        ],
    }


def _risks(said: PlanDocument, group: Group | None) -> Part:
    return {
        "heading": "Risks to the rights and freedoms of patients, Art. 35 (7) (c)",
        "facts": [
            "A model that was received may tell whether a patient was trained on (membership), or what a patient's "
            "records were like (reconstruction).",
            "A stranger may read, alter or repeat what travels, or speak in the name of a hospital.",
            *not_protected(said, None, group),
        ],
        "gaps": ["likelihood and severity of each risk for this hospital's patients"],
    }


def _measures(said: PlanDocument, site: SiteFile, *, audited: bool) -> Part:
    privacy = said["privacy"]
    limit = "no limit named" if site.max_epsilon is None else f"{site.max_epsilon:g}"
    delta = site.delta or privacy["delta"]
    budget = f"Budget of site {site.name} for good: ε {limit}, δ {delta:g}, per {privacy['unit']}; "
    return {
        "heading": "Measures against the risks, Art. 35 (7) (d)",
        "facts": [
            privacy["says"],
            f"{budget}a ledger that only grows keeps the account, and refuses what would cross it.",
            "Every letter is sealed for its receiver (HPKE, RFC 9180) and signed by its sender; what carries it reads "
            "nothing, and repeats, changes and letters of strangers are refused.",
            "Keys are made where they are used and stay there; certificates end by themselves.",
            "Nothing runs but the plan that the hospital has signed, with the software that the plan names; no code "
            "travels.",
            "Audits attacked trained models by membership inference and planted canaries; their bounds are above."
            if audited
            else "No model of the site was audited yet: `wsi-fl audit RUN` attacks them.",
        ],
        "gaps": [
            "access control, backups (of the ledger above all), updates and logs of the machine",
            "who holds the federation's root key, and how certificates are withdrawn",
        ],
    }


def _consultation() -> Part:
    return {
        "heading": "Advice, views and review, Art. 35 (2), (9) and (11)",
        "facts": [
            "This draft is made of the signed plan and the files of this study. It is no legal advice."
        ],
        "gaps": [
            "advice of the data protection officer, with date",
            "views of patients or their representatives, where appropriate",
            "whether the authority is to be consulted before (Art. 36), and when this is reviewed",
        ],
    }


def _each(n_bytes: int | None) -> str:
    return f", {size(n_bytes)} each" if n_bytes is not None else ""


_LETTERS = "letters, sealed for one receiver (HPKE) and signed by the sender (RSA)"


class Connection(TypedDict):
    """One kind of connection; `direction` is as the hospital's firewall sees it."""

    opens: str
    to: str
    direction: str
    port: str
    protocol: str
    carries: str


def connections(kit: Kit | None) -> list[Connection]:
    """Return every kind of connection of a federation; of a server's where no kit says how hospitals are joined."""
    if kit is not None and kit.folder is not None:
        folder = f"the folder that all can reach ({kit.folder})"
        protocol = "that of the share: a mounted file system, or as its address begins (for example https)"
        rows = [("hospital", folder, "outgoing", "that of the share", protocol, f"{_LETTERS}, one file each")]
    else:
        rows = _of_server(*_address(kit))
    return [
        Connection(opens=opens, to=to, direction=direction, port=port, protocol=protocol, carries=carries)
        for opens, to, direction, port, protocol, carries in rows
    ]


def _of_server(host: str, port: str) -> list[tuple[str, str, str, str, str, str]]:
    secure = "WebSocket over TLS 1.3, both sides show a certificate"
    state = f"{_LETTERS}; the state of the job; one connection, and one more for each running job"
    passed = "letters that the server passes on and cannot read"
    told = "begin, state and end of a job, its summary and its scores; no code"
    server, client = "server, at the coordinator", "hospital's client process"
    inside = ("inside the machine", "a free one of 127.0.0.1", "TCP on the loopback interface")
    closed = "none; nothing listens at a hospital beyond 127.0.0.1"
    return [
        ("hospital", host, "outgoing", port, secure, state),
        ("hospitals and administration", server, "incoming at the server alone", port, secure, passed),
        ("coordinator's administration", host, "none at the hospital", port, secure, told),
        ("hospital's job process", client, *inside, "the same letters, on their way"),
        ("anybody else", "hospital", "incoming: none", "none", closed, "nothing"),
    ]


def _address(kit: Kit | None) -> tuple[str, str]:
    """(host, port) of the server, in words where the kit does not say."""
    said = kit.document.get("server") if kit else None
    if isinstance(said, dict):
        return f"server {said.get('host', '')}".strip(), f"TCP {said.get('port', 'of the server')}"
    if isinstance(said, str) and said:
        host, _, port = said.rpartition(":")
        return f"server {host or said}", f"TCP {port}" if host else "the server's one TCP port"
    return "the coordinator's server", "the server's one TCP port"
