"""The plan that hospitals sign: one readable file that says what runs, what leaves, and what it costs.

A hospital's approval is a signature of the file's SHA-256 with the key of its kit. A process takes part in nothing but
the plan that lies approved in its own study, and its ledger names that plan.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from wsi_fl import __version__, plugins
from wsi_fl.hospitals.plans.frames import Frame, ended
from wsi_fl.hospitals.trust.certificates import Identity, fingerprint, signer_of, withdrawn
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline, pipeline_model
from wsi_fl.study.site import SiteFile
from wsi_fl.study.toml import toml_value, validated
from wsi_fl.system.files import ordinary, read_object, write_json, write_text
from wsi_fl.types import UsageError, WsiFlError

FORMAT, VERSION = "wsi-fl plan", 1
_REQUEST_FORMAT = "wsi-fl federation request"
PROMISES = ("real", "role", "allow", "max_epsilon", "delta")
"""What of a site's file stands in a plan."""
_PURPOSE = b"wsi-fl approval of a plan, version 1\n"
_RESTS_ON = ("torch", "opacus", "numpy", "cryptography")
"""What the guarantee rests on."""
_PACKAGE = Path(__file__).parents[2]
_STRING, _MOST_DOTS = re.compile(r'"(?:[^"\\]|\\.)*"'), 8
"""A string in the settings of a plan, and more dots than a line has outside of strings."""


@dataclass(frozen=True)
class Plan:
    """A plan as it was written: the text of its file, whose SHA-256 is what hospitals sign."""

    text: str

    @staticmethod
    def load(path: Path) -> Plan:
        """Read a plan; UsageError where the file is none."""
        try:
            text = ordinary(path).read_text(encoding="utf-8")
        except (OSError, ValueError):
            text = ""
        return Plan.of(text, str(path))

    @staticmethod
    def of(text: str, label: str) -> Plan:
        """Return the plan that a text is; UsageError, with a label of where it comes from, where it is none."""
        plan = Plan(text)
        try:
            said = (plan.document.get("format"), plan.document.get("version"))
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise UsageError(f"{label}: this is no plan; make one with `wsi-fl federation plan`") from None
        if said != (FORMAT, VERSION):
            raise UsageError(f"{label}: this is no plan that this version of wsi-fl reads")
        return plan

    @cached_property
    def document(self) -> dict[str, Any]:
        """What the file says."""
        return dict(json.loads(self.text))

    @property
    def digest(self) -> str:
        """SHA-256 of the file, in hexadecimal digits."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def method(self) -> str:
        return str(self.document["method"])

    @property
    def name(self) -> str:
        """Of the pipeline."""
        return str(self.document["pipeline"])

    @property
    def sites(self) -> list[str]:
        """The names of all sites, in order."""
        return [str(site["name"]) for site in self.document["sites"]]

    @property
    def keys(self) -> dict[str, str]:
        """The fingerprint of each site's key, as far as the plan pins them."""
        return {str(site["name"]): str(site["key"]) for site in self.document["sites"] if site.get("key")}

    @property
    def parameters(self) -> str:
        """The SHA-256 of the parameters of the model that travels; "" where only the hospitals' stores know."""
        return str(self.document.get("learns", {}).get("parameters") or "")

    @property
    def most_bytes(self) -> int:
        """The longest letter that can be part of this plan."""
        return int(self.document["most_bytes"])

    def pipeline(self) -> Pipeline:
        """Return the settings of the plan; UsageError where they are none of this version."""
        return validated(pipeline_model(), _settings_in(str(self.document["settings"])), "plan")


def _settings_in(text: str) -> dict[str, Any]:
    """Return what the settings of a plan say, a TOML text of somebody whom nobody trusts; UsageError for any other.

    Whoever reads a TOML text gives its writer memory and time, so lines that plans never write are refused unread.
    """
    try:
        for line in text.split("\n"):
            bare = _STRING.sub("\0", line)
            if bare.count(".") > _MOST_DOTS or any(odd in bare for odd in ("'", '"', "\0\0")):
                raise ValueError
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        raise UsageError("plan: its settings are not as plans write them; ask for it anew") from None


def changes(before: Plan, plan: Plan) -> list[str]:
    """Say what a plan asks otherwise than one before it: who takes part, the method, settings, and what sites allow."""
    both = [name for name in plan.sites if name in before.sites]
    was, now = (_terms(one, both) for one in (before, plan))
    return [
        *(f"without {name}" for name in before.sites if name not in both),
        *(f"with {name}" for name in plan.sites if name not in both),
        *(
            f"{key} {shown(was.get(key))} → {shown(now.get(key))}"
            for key in dict.fromkeys([*was, *now])
            if was.get(key) != now.get(key)
        ),
    ]


def by_key(settings: str) -> dict[str, object]:
    """Return the settings of a TOML text by "section.key"; the list of sites is none of them."""
    sections = _settings_in(settings).items()
    return {
        f"{name}.{key}": one for name, keys in sections if isinstance(keys, dict) for key, one in keys.items()
    }


def _terms(plan: Plan, sites: Collection[str]) -> dict[str, object]:
    """Return the method, the settings, and what of these sites a plan says, by name."""
    found: dict[str, object] = {"method": plan.method, **by_key(str(plan.document["settings"]))}
    for site in plan.document["sites"]:
        if site["name"] in sites:
            found |= {f"{site['name']}'s {key}": site.get(key) for key in (*PROMISES, "key")}
    return found


def is_request(path: Path) -> bool:
    """Return whether a file is a certificate request, which is approved otherwise than a plan."""
    try:
        document = json.loads(ordinary(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and document.get("format") == _REQUEST_FORMAT


def plan_path(study: Study) -> Path:
    """Return where a study keeps the plan that its hospital signed."""
    return study.root / "federation" / "plan.json"


def approval_path(study: Study, site: str) -> Path:
    """Return where a study keeps a site's approval of that plan."""
    return study.root / "federation" / f"approval-{site}.json"


def cost_path(study: Study, site: str) -> Path:
    """Return where a study keeps what its site saw of the plan's cost as it signed, which nobody else gets to know."""
    return study.root / "federation" / f"cost-{site}.json"


def keep_other(path: Path, plan: Plan) -> str:
    """Copy a plan, or an approval, that is about another plan to a name with the first digits of its plan's digest.

    Nobody but people reads the copy, such as approval-A-8e8966ae.json. Returns its path, "" where there is nothing to
    keep.
    """
    try:
        text = ordinary(path).read_text(encoding="utf-8")
        said = json.loads(text)
        about = Plan(text).digest if said.get("format") == FORMAT else str(said["plan"])
    except (OSError, ValueError, KeyError, AttributeError, RecursionError):
        return ""
    if about == plan.digest or not re.fullmatch("[0-9a-f]{64}", about):
        return ""
    kept = path.with_name(f"{path.stem}-{about[:8]}.json")
    write_text(kept, text)
    return str(kept)


def approve(study: Study, plan: Plan, identity: Identity, frame: Frame | None = None) -> dict[str, str]:
    """Sign a plan in the name of a hospital of it, or of its frame where no person does; keep both in its study."""
    if identity.name not in plan.sites:
        raise UsageError(f"site {identity.name} is not in this plan, which has {', '.join(plan.sites)}")
    plan_path(study).parent.mkdir(exist_ok=True)
    for path in (plan_path(study), approval_path(study, identity.name)):
        keep_other(path, plan)
    write_text(plan_path(study), plan.text)
    document = {"site": identity.name, "plan": plan.digest, "time": datetime.now(UTC).isoformat()}
    if frame is not None:
        known = json.dumps(frame, sort_keys=True).encode()
        document |= {"preapproval": frame["id"], "preapproval_sha256": hashlib.sha256(known).hexdigest()}
    write_json(approval_path(study, identity.name), identity.signed(document, _PURPOSE))
    return document


_SIGN_AGAIN = "sign the plan again with `wsi-fl federation approve`"


def approved_plan(study: Study, identity: Identity) -> Plan:
    """Return the plan that a hospital has signed; UsageError where there is none, or the file is another one now."""
    path, approval = plan_path(study), approval_path(study, identity.name)
    if not path.exists() or not approval.exists():
        raise UsageError(
            f"site {identity.name} has approved no plan; read it and sign it with `wsi-fl federation approve PLAN`"
        )
    plan = Plan.load(path)
    if plan.keys.get(identity.name) in withdrawn(identity.root).keys:  # not of the identity, which holds
        raise UsageError(f"this plan names an older key of {identity.name}; ask for a new plan, and sign it")
    _check_approval(read_object(approval, _SIGN_AGAIN), plan, identity.root, site=identity.name)
    frame = approved_at(study, identity.name).partition(" frame ")[2]
    if frame and (why := ended(study, identity, frame)):
        raise UsageError(f"site {identity.name} {why} ({plan.digest[:8]}); have it approve the plan itself")
    return plan


def approved_at(study: Study, site: str) -> str:
    """Return when a site approved its plan, and in which frame; "" where it did not. It is good for one run."""
    path = approval_path(study, site)
    said = read_object(path, _SIGN_AGAIN, ["time"]) if path.exists() else {"time": ""}
    return f"{said['time']} frame {said['preapproval']}" if "preapproval" in said else str(said["time"])


def _check_approval(document: Mapping[str, object], plan: Plan, root: str, *, site: str) -> None:
    """Refuse an approval that is not a site's signature of this very plan, by what is trusted (PEM)."""
    holder = signer_of(document, root, _PURPOSE, f"the approval of {site}")
    check_key(plan, str(document["certificate"]), site)
    if (holder.name, document.get("site"), document.get("plan")) != (site, site, plan.digest):
        raise UsageError(
            f"site {site} has signed another plan than federation/plan.json ({plan.digest[:8]}); read it and sign it "
            "with `wsi-fl federation approve`"
        )


class _Approvals(NamedTuple):
    """The sites whose signature of a plan is there, in its order, and why that of every other site does not count."""

    signed: tuple[str, ...]
    missing: dict[str, str]


def approvals(study: Study, plan: Plan, root: str) -> _Approvals:
    """Return who has signed a plan and who has not, by the approvals in a study and by what is trusted (PEM)."""
    missing: dict[str, str] = {}
    for site in plan.sites:
        path = approval_path(study, site)
        try:
            if not path.is_file():
                raise UsageError("has not signed it, or its approval has not arrived")
            _check_approval(read_object(path, _SIGN_AGAIN), plan, root, site=site)
        except WsiFlError as error:
            missing[site] = str(error)
        except (TypeError, ValueError):
            missing[site] = f"{path.name} is damaged"
    return _Approvals(tuple(site for site in plan.sites if site not in missing), missing)


def check_key(plan: Plan, certificate: str, site: str) -> None:
    """Refuse a certificate (PEM) for another key than the one that a plan pins for a site."""
    pinned = plan.keys.get(site)
    if pinned is not None and fingerprint(certificate) != pinned:
        raise UsageError(
            f"the plan names another key of {site} than its certificate here has; a new key needs a new plan, and one "
            f"that {site} did not ask for needs a telephone call"
        )


def check_withdrawn(plan: Plan, root: str, sites: Collection[str]) -> None:
    """Refuse to work with sites whose key, as the plan pins it, was withdrawn by what is trusted (PEM)."""
    gone = withdrawn(root).keys
    for site in sites:
        if (since := gone.get(plan.keys.get(site, ""))) is not None:
            raise UsageError(
                f"the plan names a key of {site} that was withdrawn on {since:%Y-%m-%d}; a new plan needs its "
                f"new key, or sites/{site}.toml taken away; a run goes on --without {site}"
            )


def check_code(plan: Plan, site: str, listed: Collection[str] = ()) -> None:
    """Refuse a plan for other code than a site has installed, or for other versions of what the guarantee rests on.

    Code whose digests its frame lists counts as the same.
    """
    said, here = str(plan.document["code"]), code_digest()
    if said != here and {said, here} <= set(listed):
        return
    installed, planned = packages(), plan.document.get("packages")
    planned = planned if isinstance(planned, dict) else installed
    for name in sorted(installed | planned):
        one, other = (versions.get(name, "not installed") for versions in (planned, installed))
        if one != other:
            raise UsageError(
                f"the plan is for {name} {one}, and site {site} has {other}; install the plan's version, or agree on "
                "a new plan"
            )
    if said != here:
        raise UsageError(
            f"the plan is for wsi-fl {plan.document['wsi_fl']} ({said[:8]}), and site {site} has {__version__} "
            f"({here[:8]}); install the plan's version, or agree on a new plan"
        )


def check_promises(said: Mapping[str, Any], file: SiteFile) -> None:
    """Refuse a site file that promises something else than its part of a plan says."""
    for key in PROMISES:
        own, agreed = getattr(file, key), said.get(key)
        if key in said and (sorted(own) != sorted(agreed or ()) if key == "allow" else own != agreed):
            raise UsageError(
                f"the plan says {key} = {shown(agreed)} of {file.name}, and sites/{file.name}.toml says {shown(own)}; "
                "have the plan made with your site file, or change your site file"
            )


def shown(value: Any) -> str:
    """Return a value as a TOML file has it, and "nothing" for none."""
    return "nothing" if value is None else toml_value(value)


def packages() -> dict[str, str]:
    """Return the versions of the packages that the guarantee rests on, without what a build calls itself (`+cu126`).

    Those that add methods, readers, encoders or commands are among them, since their code runs too. WsiFlError where
    one is not installed.
    """
    try:
        found = {name: version(name) for name in _RESTS_ON} | plugins.versions()
    except PackageNotFoundError as error:
        raise WsiFlError(f"{error.name} is not installed; install wsi-fl again") from None
    return {name: number.partition("+")[0] for name, number in found.items()}


def code_digest(package: Path = _PACKAGE) -> str:
    """Return the SHA-256 over what runs, which all sites of a plan must have alike.

    That is every file of the package, such as code, templates, scripts of pages, tables and weights, and the versions
    of `packages`. What Python compiled, hidden files and shipped pipelines are left out, since a plan has its settings
    in itself. WsiFlError where the folder of the package cannot be read.
    """
    digest = hashlib.sha256(json.dumps(packages(), sort_keys=True).encode())
    try:
        for path in sorted(package.rglob("*")):
            name = path.relative_to(package)
            hidden = any(part == "__pycache__" or part.startswith(".") for part in name.parts)
            if path.is_file() and name.parts[0] != "shipped" and not hidden:
                digest.update(f"{name.as_posix()}\n".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    except OSError as error:
        raise WsiFlError(f"the installed package cannot be read: {error}") from None
    return digest.hexdigest()
