"""The model of a run that is asked for, and whether its site lets it go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wsi_fl.federation.methods import Method
from wsi_fl.runs.run import RunFolder
from wsi_fl.stages.site.party import Party
from wsi_fl.study.site import SiteFile
from wsi_fl.system.files import read_json
from wsi_fl.types import GridSpec, Images, Shape, UsageError


@dataclass(frozen=True)
class Leaving:
    """The model that is asked for.

    Attributes:
        called: "private", "proxy" or "shared", as people ask for it.
        role: as the run keeps it.
        covered: whether the ε of the run's ledgers is this model's.
        architecture: its name.
        facts: what the run noted of the store it learned from.
    """

    party: Party
    site: SiteFile
    called: str
    role: str
    covered: bool
    architecture: str
    facts: Mapping[str, Any]

    @property
    def spec(self) -> GridSpec:
        return GridSpec(**self.facts["spec"])

    @property
    def shape(self) -> Shape:
        """What it takes of an example."""
        if self.party.kind.of_images:
            size = self.party.pipeline.train.input_px or self.spec.size_px
            return Images(int(self.facts.get("channels", 3)), size)
        return self.party.kind.shape(int(self.facts["n_features"]))


def offered(method: Method) -> dict[str, str]:
    """Return the models that sites of a method have by the name they are asked for: name → role in the run.

    A model is `private` where it stays at home. One that travels, or that all sites have alike, is `proxy` or `shared`.
    """
    if method.once:
        return {"private": "private", "shared": "proxy"}
    if "proxy" in method.learners:
        return {"private": "private", "proxy": "proxy"}
    return {
        "shared" if method.learns_from == "everybody" or method.travels == "private" else "private": "private"
    }


def asked_for(party: Party, called: str, site_name: str | None) -> Leaving:
    """Return the model of this name, of a site or of the first that has it here.

    Raises:
        UsageError: when the run has no such model, or it is not here.
        WsiFlError: when nobody noted what it learned from.
    """
    from wsi_fl.stages.training.learners import architecture

    run, models = party.run, offered(party.method)
    if called not in models:
        raise UsageError(f"--model {called!r}: {party.name} has {' and '.join(models)}")
    role = models[called]
    if site_name is None and called == "private":
        raise UsageError("--model private: every site has its own; add --site NAME")
    there = [name for name in party.names if (run.site(name).path / f"{role}.safetensors").exists()]
    wanted = [name for name in there if name not in party.lost and site_name in (None, name)]
    if not wanted:
        raise UsageError(
            f"{run.name}: no {called} model of {site_name or 'any site'} here; found: {', '.join(there) or 'none'}"
        )
    folder = run.site(wanted[0])
    site = party.site(wanted[0])
    with_dp = party.pipeline.privacy.enabled and (role == "proxy" or "proxy" not in party.method.learners)
    return Leaving(
        party,
        site,
        called,
        role,
        covered=with_dp and _all_promised(_accounts(party, called, site)),
        architecture=architecture(site, party.pipeline, role, common=party.method.travels == "private"),
        facts=folder.store_facts(),
    )


def require_allowed(leaving: Leaving, *, private: bool) -> None:
    """Refuse what the site has not let go by name.

    Args:
        private: whether whoever asks says that a private model may leave.

    Raises:
        UsageError: which says what to write where.
    """
    site = leaving.site
    if leaving.called == "private":
        if not private:
            raise UsageError(
                "--model private: it may have memorised patients and was to stay at home; add --private if it may leave"
            )
        if not site.allows("private_model"):
            raise UsageError(
                f"sites/{site.name}.toml: a real hospital's private model leaves only where the file allows that when "
                'the run begins; add allow = ["private_model"] and train a new run'
            )
        return
    shut = [one.name for one in leaving.party.sites if not one.allows("model")]
    if shut and not leaving.covered:
        raise UsageError(
            f"sites/{shut[0]}.toml: this model was trained without differential privacy; "
            'it leaves only with allow = ["model"]'
        )


def _all_promised(accounts: Sequence[Mapping[str, Any]]) -> bool:
    return bool(accounts) and all(account["guarantee"] != "none" for account in accounts)


def _accounts(party: Party, called: str, site: SiteFile) -> list[dict[str, Any]]:
    """The accounts that a model's ε rests on: the site's own, and of a shared one all that lie here."""
    names = [site.name] if called == "private" else party.names
    return [
        account_of(party.run, name) for name in names if (party.run.site(name).path / "ledger.json").exists()
    ]


def account_of(run: RunFolder, site: str) -> dict[str, Any]:
    """Return what a run's ledger said of a site when it ended."""
    return dict(read_json(run.site(site).path / "ledger.json"))
