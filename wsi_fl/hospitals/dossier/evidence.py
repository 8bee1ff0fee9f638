"""The evidence of a hospital: answers to others' forms, derived from its state, in one signed folder."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from string import Formatter
from typing import Any

from wsi_fl import __version__
from wsi_fl.hospitals.dossier.dossier_page import make_dossier
from wsi_fl.hospitals.trust.certificates import key_fingerprint, verify_document
from wsi_fl.hospitals.trust.kit import Kit
from wsi_fl.hospitals.trust.provisioning import fingerprint_line
from wsi_fl.privacy.accounting import ACCOUNTANT
from wsi_fl.privacy.guarantee import ADJACENCY
from wsi_fl.report.templates import fill_template
from wsi_fl.stages.runtime.console import Lines, TextLine
from wsi_fl.study.folder import Study
from wsi_fl.system.files import read_object, require_regular_file, write_json, write_text
from wsi_fl.types import UsageError

_ABSOLUTE_PATH = re.compile(r"(?<![\w:/.])/(?:[^\s/'\"]+/)*([^\s/'\"]+)")
"""An absolute path, of which the last part is disclosed."""
_PURPOSE = b"wsi-fl evidence, version 1\n"
_SIGNATURE_FILE = "evidence.sig.json"
_SHEETS = tomllib.loads(Path(__file__).with_name("evidence.toml").read_text("utf-8"))["sheet"]
_GUARANTEED = "It holds for all trained on, against every attack; counts of test examples, if any left, are exact."


def make_evidence(study: Study, kit: Kit, out: Path) -> dict[str, object]:
    """Write the folder: the dossier, the sheets, the software list, and a signature of all; return the document."""
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"{out}: it holds something already; give a new folder")
    identity = kit.load_identity()
    dossier = make_dossier(study, site=None, kit=kit.path, out=out / "dossier.html", for_others=True)
    software, audit = out / "sbom.json", out / "vulnerabilities.json"
    tools = {
        "sbom": _run_tool("cyclonedx_py", "cyclonedx-bom", ["environment", "--of", "JSON"], software),
        "vulnerabilities": _run_tool("pip_audit", "pip-audit", ["--format", "json"], audit),
    }
    _remove_local_paths(software)
    facts = dossier | _sheet_facts(dossier) | tools
    document = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "wsi_fl": __version__,
        "site": identity.name,
        "plan_sha256": dossier["plan_sha256"],
        **tools,
        "sheets": [sheet | {"row": [_answer_row(row, facts) for row in sheet["row"]]} for sheet in _SHEETS],
    }
    write_json(out / "evidence.json", document)
    write_text(out / "index.html", fill_template("evidence", {"e": document}, Path(__file__).parent))
    content = {"site": identity.name, "time": document["created"], "root": identity.root, "files": _file_digests(out)}
    write_json(out / _SIGNATURE_FILE, identity.sign_document(content, _PURPOSE))
    return document


def verify_evidence(folder: Path, root: str | None) -> dict[str, Any]:
    """Return {"site", "organization", "time", "files", "fingerprint", "root_fingerprint"} of a folder unchanged since
    its hospital signed it, else UsageError. The fingerprints are of the signing key, and of the root CA that named it.

    Args:
        root: the trusted text, PEM. None takes the root CA from the folder, which anybody can make: then people compare
            its fingerprint by telephone.
    """
    signed = read_object(folder / _SIGNATURE_FILE, "ask for the folder again")
    if root is None and "root" not in signed:
        raise UsageError(f"{folder}: it has no root CA's certificate; give --kit, or ask for the folder again")
    trusted = str(signed["root"]) if root is None else root
    holder = verify_document(signed, trusted, _PURPOSE, str(folder / _SIGNATURE_FILE))
    content = {key: signed.get(key) for key in ("site", "time", "files")}
    digests, files = _file_digests(folder), content["files"] if isinstance(content["files"], dict) else {}
    if holder.name != content["site"]:
        raise UsageError(f"{holder.name} signed {folder} in the name of {content['site']}")
    if other := sorted(name for name in digests | files if digests.get(name) != files.get(name)):
        raise UsageError(f"{folder}: {other[0]} is not as {holder.name} signed it; ask it for the folder again")
    keys = {"fingerprint": str(signed["certificate"]), "root_fingerprint": trusted}
    return content | {"organization": holder.organization} | {key: key_fingerprint(pem) for key, pem in keys.items()}


def verification_lines(evidence: Mapping[str, Any], *, folder: Path, vouched: bool) -> Lines:
    """Report the signer of a folder; if no kit vouches for the root CA, also the keys, and what to compare."""
    yield f"{folder} is as {evidence['site']} ({evidence['organization']}) signed it at {evidence['time']}"
    if not vouched:
        yield fingerprint_line("the key that signed", evidence["fingerprint"])
        yield fingerprint_line("the root CA that came with it", evidence["root_fingerprint"])
        warning = "anybody can make such a root CA: have the coordinator read out its fingerprint, or give --kit too"
        yield TextLine(f"  {warning}", "yellow")


def _sheet_facts(dossier: Mapping[str, Any]) -> dict[str, object]:
    """Return the facts that sheets may name beside the dossier's own keys; None for unknown ones."""
    plan, accounts, audits = dossier["plan"], dossier["accounts"], dossier["audits"]
    group, limit = dossier["group"], dossier["budget"]["max_epsilon"]
    releases = [release for account in accounts for release in account["releases"]]
    guarantees = {account["guarantee"] for account in accounts if account["epsilon"] is not None}
    return {
        "auroc": _largest_value(audits, "auroc"),
        "lower": _largest_value(audits, "epsilon_lower"),
        "upper": _largest_value(audits, "epsilon_upper"),
        "guarantee": ", ".join(sorted(guarantees)) or plan["privacy"]["guarantee"],
        "worth": _GUARANTEED if guarantees == {"guaranteed"} else "It is no guarantee by itself: see the dossier.",
        "patient": group["epsilon"] if group else None,
        "packages": ", ".join(f"{name} {version}" for name, version in plan["packages"].items()),
        "does": plan["does"].rstrip("."),
        "leaves": "; ".join(row["what"].partition(":")[0] for row in plan["leaves"]),
        "stays": "; ".join(plan["stays"]),
        "limit": "no limit" if limit is None else f"{limit:.4g}",
        "releases": len(releases),
        "runs": len(accounts),
        "kinds": ", ".join(sorted({release["what"] for release in releases})) or None,
        "accountant": f"{ACCOUNTANT.upper()}; exact for Gaussian sums without sampling",
        "neighbours": ADJACENCY,
        "never": None,
    }


def _largest_value(audits: Sequence[Mapping[str, float | None]], key: str) -> float | None:
    return max((value for audit in audits if (value := audit[key]) is not None), default=None)


class _UnknownFact(Exception):
    pass


class _FactFormatter(Formatter):
    """Fills places of a text with known facts."""

    def get_field(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        field = super().get_field(name, args, kwargs)
        if field[0] is None:
            raise _UnknownFact
        return field


def _answer_row(row: Mapping[str, str], facts: Mapping[str, Any]) -> dict[str, object]:
    """Return the answer of a row, if all facts that it names are known."""
    try:
        answer = {"shown": True, "says": _FactFormatter().vformat(row["says"], (), facts)}
    except _UnknownFact:
        answer = {"shown": False, "says": row.get("otherwise", "")}
    return {"asks": row["asks"], **answer}


def _run_tool(module: str, package: str, arguments: list[str], file: Path) -> str:
    """Run a tool, if installed, that writes a file; return the result in words."""
    command = ["-m", module, *arguments, "-o", str(file)]
    if find_spec(module) is None:
        return f"not made; pip install {package}, then python {' '.join(command[:-1])} {file.name}"
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    last = _ABSOLUTE_PATH.sub(r"\1", (done.stderr.strip().splitlines() or ["it said nothing"])[-1])
    return file.name if file.is_file() else f"not made; {package} failed: {last}"


def _remove_local_paths(file: Path) -> None:
    """Remove from a software list the paths of this machine that packages were installed from."""
    if not file.is_file():
        return

    def strip_paths(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: strip_paths(part) for key, part in value.items()}
        if isinstance(value, list):
            return [strip_paths(part) for part in value if not _is_local_path(part)]
        return value

    write_json(file, strip_paths(read_object(file, "make it again")))


def _is_local_path(entry: object) -> bool:
    """Return whether an entry of a list, such as a reference or a property, is a path of this machine."""
    values = entry.values() if isinstance(entry, dict) else [entry]
    return any(isinstance(value, str) and value.startswith(("file:", "/")) for value in values)


def _file_digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file except the signature, by its path in the folder."""
    files = sorted(path for path in folder.rglob("*") if not path.is_dir() and path != folder / _SIGNATURE_FILE)
    return {
        path.relative_to(folder).as_posix(): sha256(require_regular_file(path).read_bytes()).hexdigest()
        for path in files
    }
