"""A feasibility query: noisy counts of a hospital's patients by values of a column of its table, before any plan.

Each column puts a patient into one cell: a declared value, or "other" for none, an undeclared one, or several. So
undeclared values are never disclosed. The cells are one release: whole numbers with discrete Gaussian noise, on the
hospital's ledger, signed with its key, and made once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from wsi_fl.federation.documents import Amount, Name
from wsi_fl.hospitals.trust.certificates import Identity, signer_of
from wsi_fl.privacy.accounting import Mechanism, sigma_for
from wsi_fl.privacy.guarantee import Terms
from wsi_fl.privacy.ledger_file import digest
from wsi_fl.stages.site.account import check_own, open_ledger, require_budget
from wsi_fl.stages.site.targets import column_by_patient
from wsi_fl.stages.work.console import Line, Lines, Table
from wsi_fl.study.folder import Study
from wsi_fl.study.site import SiteFile
from wsi_fl.study.toml import toml_value
from wsi_fl.system.files import locked, read_object, write_json
from wsi_fl.types import UsageError

_ENOUGH = 20
"""Patients of a value that a hospital should have for a task on it."""
_SURE = NormalDist().inv_cdf(0.95)
_FORMAT, _PURPOSE, _RUN, _OTHER = "wsi-fl census 1", b"wsi-fl census, version 1\n", "census", "other"


class _Census(TypedDict):
    """A hospital's released counts of its patients.

    Attributes:
        counts: noisy patients by column and value; with `only_enough` 1 if there are `_MIN_PATIENTS` at 95 %
            confidence, else 0.
        deviation: of the noise, in patients.
    """

    format: str
    site: Name
    counts: dict[str, dict[str, float]]
    only_enough: bool
    deviation: Amount
    epsilon: Amount
    delta: Amount


def _exact_counts(study: Study, site: SiteFile, columns: Mapping[str, Sequence[str]]) -> NDArray[np.int64]:
    """Return int64[cells], the patients of each declared value and of all others, column by column.

    One patient changes one cell of each of k columns by 1, so these numbers by √k in L2.
    """
    found: list[int] = []
    for column, values in columns.items():
        cells = dict.fromkeys([*values, _OTHER], 0)
        for said in column_by_patient(study, site, column).values():
            (value,) = said if len(said) == 1 else (_OTHER,)
            cells[value if value in values else _OTHER] += 1
        found += cells.values()
    return np.array(found, np.int64)


def take_census(
    study: Study,
    identity: Identity,
    columns: Mapping[str, Sequence[str]],
    *,
    epsilon: float,
    only_enough: bool = False,
) -> dict[str, Any]:
    """Return a hospital's signed response to a feasibility query; the same query has the same response, at no cost.

    Args:
        columns: of the hospital's table, with the counted values.
        epsilon: of all columns together, at the δ of the site's file, per patient.

    Raises:
        UsageError: when the site names no budget, a value is declared twice, or the table lacks something.
        WsiFlError: when the budget is not enough, or the account counts rows.
    """
    site = study.site(identity.name)
    require_budget(site)
    for column, values in columns.items():
        if len({*values, _OTHER, ""}) != len(values) + 2:
            raise UsageError(
                f"--column {column}: name each value once, as in {column}=low,high; not {_OTHER!r}"
            )
    delta, clip = site.delta or 1e-5, sqrt(len(columns))
    asked = json.dumps([columns, only_enough, epsilon, delta], sort_keys=True)
    kept = study.root / "federation" / "census" / f"{hashlib.sha256(asked.encode()).hexdigest()[:16]}.json"
    terms = Terms(delta, site.max_epsilon, site.real, site.allowed, "guaranteed", "patient")
    with locked(kept.parent, identity.name):
        ledger = open_ledger(study, site, _RUN, terms)
        if kept.exists():
            document = read_object(kept, "put its backup back", ("certificate", *_Census.__annotations__))
            cells = [number for values in document["counts"].values() for number in values.values()]
            vector = np.array(cells, np.float32)
            round_ = check_own(ledger, _RUN, digest(vector), kept.name)
            if not round_.final:
                ledger.reissue(round_.number, vector, schema=_RUN)
            if document["certificate"] != identity.certificate:
                said = {key: document[key] for key in _Census.__annotations__}
                document = identity.signed(said, _PURPOSE)
            return document
        sigma = sigma_for(epsilon, 1.0, 1, delta)
        noisy = _noisy(_exact_counts(study, site, columns), sigma, clip)
        if only_enough:
            noisy = (noisy - _SURE * sigma * clip >= _ENOUGH).astype(float)
        mechanism = Mechanism(sigma, clip, 1.0, 1)
        made = ledger.release(None, noisy.astype(np.float32), schema=_RUN, mechanism=mechanism, content=_RUN)
        told = iter(noisy.tolist())
        census: _Census = {
            "format": _FORMAT,
            "site": site.name,
            "counts": {
                column: {one: next(told) for one in [*values, _OTHER]} for column, values in columns.items()
            },
            "only_enough": only_enough,
            "deviation": sigma * clip,
            "epsilon": epsilon,
            "delta": delta,
        }
        document = identity.signed(census, _PURPOSE)
        write_json(kept, document)
        ledger.sending(made.round, made.digest)
    return document


def _noisy(counts: NDArray[np.int64], sigma: float, clip: float) -> NDArray[np.float64]:
    """Add the noise of class statistics, and round to whole patients, which discloses no more."""
    import torch

    from wsi_fl.privacy.cipher import CipherStream
    from wsi_fl.privacy.sums import NoisySums

    sums, exact = NoisySums(sigma, clip, len(counts), "patient"), torch.from_numpy(counts.astype(np.float64))
    noisy: NDArray[np.float64] = sums.noisy(exact, CipherStream.fresh()).numpy()
    return np.rint(noisy)


def read_census(path: Path, root: str) -> _Census:
    """Return a hospital's signed response, verified by the trusted text (PEM); UsageError if it is invalid."""
    document = read_object(path, "ask the hospital for it again")
    holder = signer_of(document, root, _PURPOSE, str(path))
    said = {key: value for key, value in document.items() if key in _Census.__annotations__}
    try:
        census = TypeAdapter(_Census).validate_python(said, strict=True)
    except ValidationError:
        raise UsageError(f"{path}: no census that this version of wsi-fl reads") from None
    if (census["format"], census["site"]) != (_FORMAT, holder.name):
        raise UsageError(f"{path}: says that it is of {census['site']}, and {holder.name} signed it")
    return census


def collect(censuses: Sequence[_Census], epsilon: float = 1.0) -> dict[str, Any]:
    """Return possible tasks of all hospitals, with the sites that lack labels and the expected gains.

    Args:
        epsilon: of the plan to come, per patient.

    Returns:
        {"sites": {site: the noise's deviation}, "questions": [{"column", "values", "counts", "lacks", "receivers",
        "all", "expected", "pipeline"}]}; "lacks" are each site's values with possibly fewer than `_MIN_PATIENTS`.
        A site that lacks all of them is among "receivers".
    """
    sites = [census["site"] for census in censuses]
    if twice := [site for site in sites if sites.count(site) > 1]:
        raise UsageError(f"{twice[0]} answered twice; give the newer file alone")
    asked = {c: list(v) for c, v in censuses[0]["counts"].items()} if censuses else {}
    common = [c for c, v in asked.items() if all(list(one["counts"].get(c, ())) == v for one in censuses)]
    return {
        "sites": {census["site"]: census["deviation"] for census in censuses},
        "questions": [_question(column, asked[column][:-1], censuses, epsilon) for column in common],
    }


def _question(column: str, values: list[str], censuses: Sequence[_Census], epsilon: float) -> dict[str, Any]:
    """Summarize the responses on one column."""
    from wsi_fl.stages.training.plan import expected  # and with it PyTorch

    lacks, gains = {}, {}
    for census in censuses:
        told = [census["counts"][column][value] for value in values]
        least = 1 if census["only_enough"] else _ENOUGH + _SURE * census["deviation"]
        lacks[census["site"]] = [value for value, n in zip(values, told, strict=True) if n < least]
        if not census["only_enough"] and lacks[census["site"]] != values:
            known = [max(0.0, n) for n in told]
            rarest = min(known) * len(known) / max(1.0, sum(known))
            gains[census["site"]] = expected(round(sum(known)), epsilon, rarest)
    return {
        "column": column,
        "values": values,
        "counts": {census["site"]: census["counts"][column] for census in censuses},
        "lacks": lacks,
        "receivers": [site for site, lacking in lacks.items() if lacking == values],
        "all": not any(lacks.values()),
        "expected": gains,
        "pipeline": f'[target]\ncolumn = {toml_value(column)}\nclasses = {toml_value(values)}\nper = "patient"\n',
    }


def census_lines(document: Mapping[str, Any]) -> Lines:
    """Report possible tasks, and the lines for the pipeline and the site files."""
    for one in document["questions"]:
        cells = [*one["values"], _OTHER]
        rows = [
            [site, *(f"{counts[value]:g}" for value in cells), f"{document['sites'][site]:.1f}"]
            for site, counts in one["counts"].items()
        ]
        yield Table(one["column"], ["site", *cells, "± noise"], rows)
        for site in one["receivers"]:
            none = f"{site} cannot be shown to have {_ENOUGH} patients of any value"
            yield Line(f'  {none}: role = "receiver" in sites/{site}.toml')
        for site, lacks in one["lacks"].items():
            if lacks and site not in one["receivers"]:
                yield Line(f"  {site} may have fewer than {_ENOUGH} of {', '.join(lacks)}", "yellow")
        for site, gain in one["expected"].items():
            yield Line(f"  {site}: in our study joining brought {gain} (studies/ROUNDS.md)")
        able = "all hospitals" if one["all"] else "not all hospitals"
        yield Line(f"  {able} can answer it; in the pipeline: {', '.join(one['pipeline'].splitlines())}")
    if not document["questions"]:
        yield Line("no column with the same values was asked of all hospitals", "yellow")
