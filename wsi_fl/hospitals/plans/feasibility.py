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

from wsi_fl.federation.documents import Amount, SiteName
from wsi_fl.hospitals.trust.certificates import Identity, verify_document
from wsi_fl.privacy.accounting import Mechanism, find_sigma
from wsi_fl.privacy.guarantee import PrivacyTerms
from wsi_fl.privacy.ledger_file import digest_values
from wsi_fl.stages.runtime.console import Lines, TextLine, TextTable
from wsi_fl.stages.site.privacy_account import open_ledger, require_budget, require_release
from wsi_fl.stages.site.target_labels import read_patient_column
from wsi_fl.study.folder import Study
from wsi_fl.study.site_file import SiteFile
from wsi_fl.study.toml import toml_value
from wsi_fl.system.files import read_object, site_lock, write_json
from wsi_fl.types import UsageError

_MIN_PATIENTS = 20
"""Patients of a value that a hospital should have for a task on it."""
_QUANTILE_95 = NormalDist().inv_cdf(0.95)
_FORMAT, _PURPOSE, _RUN_NAME, _OTHER_VALUE = ("wsi-fl census 1", b"wsi-fl census, version 1\n", "census", "other")


class _FeasibilityCounts(TypedDict):
    """A hospital's released counts of its patients.

    Attributes:
        counts: noisy patients by column and value; with `only_enough` 1 if there are `_MIN_PATIENTS` at 95 %
            confidence, else 0.
        deviation: of the noise, in patients.
    """

    format: str
    site: SiteName
    counts: dict[str, dict[str, float]]
    only_enough: bool
    deviation: Amount
    epsilon: Amount
    delta: Amount


def _exact_counts(study: Study, site: SiteFile, columns: Mapping[str, Sequence[str]]) -> NDArray[np.int64]:
    """Return int64[cells], the patients of each declared value and of all others, column by column.

    One patient changes one cell of each of k columns by 1, so these numbers by √k in L2.
    """
    counts: list[int] = []
    for column, values in columns.items():
        cells = dict.fromkeys([*values, _OTHER_VALUE], 0)
        for patient_values in read_patient_column(study, site, column).values():
            (value,) = patient_values if len(patient_values) == 1 else (_OTHER_VALUE,)
            cells[value if value in values else _OTHER_VALUE] += 1
        counts += cells.values()
    return np.array(counts, np.int64)


def run_query(
    study: Study, identity: Identity, columns: Mapping[str, Sequence[str]], *, epsilon: float, only_enough: bool = False
) -> dict[str, Any]:
    """Return a hospital's signed response to a feasibility query; the same query has the same response, at no cost.

    Args:
        columns: of the hospital's table, with the counted values.
        epsilon: of all columns together, at the δ of the site's file, per patient.

    Raises:
        UsageError: when the site names no budget, a value is declared twice, or the table lacks something.
        WsiFlError: when the budget is not enough, or the account counts rows.
    """
    site = study.load_site(identity.name)
    require_budget(site)
    for column, values in columns.items():
        if len({*values, _OTHER_VALUE, ""}) != len(values) + 2:
            raise UsageError(f"--column {column}: name each value once, as in {column}=low,high; not {_OTHER_VALUE!r}")
    delta, clip = site.delta or 1e-5, sqrt(len(columns))
    query = json.dumps([columns, only_enough, epsilon, delta], sort_keys=True)
    file = study.root / "federation" / "census" / f"{hashlib.sha256(query.encode()).hexdigest()[:16]}.json"
    terms = PrivacyTerms(delta, site.max_epsilon, site.real, site.permissions, "guaranteed", "patient")
    with site_lock(file.parent, identity.name):
        ledger = open_ledger(study, site, _RUN_NAME, terms)
        if file.exists():
            document = read_object(file, "put its backup back", ("certificate", *_FeasibilityCounts.__annotations__))
            cells = [number for values in document["counts"].values() for number in values.values()]
            vector = np.array(cells, np.float32)
            round_ = require_release(ledger, _RUN_NAME, digest_values(vector), file.name)
            if not round_.final:
                ledger.release_again(round_.number, vector, schema=_RUN_NAME)
            if document["certificate"] != identity.certificate:
                content = {key: document[key] for key in _FeasibilityCounts.__annotations__}
                document = identity.sign_document(content, _PURPOSE)
            return document
        sigma = find_sigma(epsilon, 1.0, 1, delta)
        noisy = _add_noise(_exact_counts(study, site, columns), sigma, clip)
        if only_enough:
            noisy = (noisy - _QUANTILE_95 * sigma * clip >= _MIN_PATIENTS).astype(float)
        mechanism = Mechanism(sigma, clip, 1.0, 1)
        release = ledger.release(
            None, noisy.astype(np.float32), schema=_RUN_NAME, mechanism=mechanism, content=_RUN_NAME
        )
        numbers = iter(noisy.tolist())
        response: _FeasibilityCounts = {
            "format": _FORMAT,
            "site": site.name,
            "counts": {
                column: {value: next(numbers) for value in [*values, _OTHER_VALUE]}
                for column, values in columns.items()
            },
            "only_enough": only_enough,
            "deviation": sigma * clip,
            "epsilon": epsilon,
            "delta": delta,
        }
        document = identity.sign_document(response, _PURPOSE)
        write_json(file, document)
        ledger.record_transmission(release.round, release.digest)
    return document


def _add_noise(counts: NDArray[np.int64], sigma: float, clip: float) -> NDArray[np.float64]:
    """Add the noise of class statistics, and round to whole patients, which discloses no more."""
    import torch

    from wsi_fl.oneshot.class_statistics import NoisyStatistics
    from wsi_fl.privacy.cipher import CipherStream

    noise_mechanism, exact = (
        NoisyStatistics(sigma, clip, len(counts), "patient"),
        torch.from_numpy(counts.astype(np.float64)),
    )
    noisy: NDArray[np.float64] = noise_mechanism.add_noise(exact, CipherStream.from_entropy()).numpy()
    return np.rint(noisy)


def read_response(path: Path, root: str) -> _FeasibilityCounts:
    """Return a hospital's signed response, verified by the trusted text (PEM); UsageError if it is invalid."""
    document = read_object(path, "ask the hospital for it again")
    holder = verify_document(document, root, _PURPOSE, str(path))
    content = {key: value for key, value in document.items() if key in _FeasibilityCounts.__annotations__}
    try:
        response = TypeAdapter(_FeasibilityCounts).validate_python(content, strict=True)
    except ValidationError:
        raise UsageError(f"{path}: no census that this version of wsi-fl reads") from None
    if (response["format"], response["site"]) != (_FORMAT, holder.name):
        raise UsageError(f"{path}: says that it is of {response['site']}, and {holder.name} signed it")
    return response


def collect_responses(responses: Sequence[_FeasibilityCounts], epsilon: float = 1.0) -> dict[str, Any]:
    """Return possible tasks of all hospitals, with the sites that lack labels and the expected gains.

    Args:
        epsilon: of the plan to come, per patient.

    Returns:
        {"sites": {site: the noise's deviation}, "questions": [{"column", "values", "counts", "lacks", "receivers",
        "all", "expected", "pipeline"}]}; "lacks" are each site's values with possibly fewer than `_MIN_PATIENTS`.
        A site that lacks all of them is among "receivers".
    """
    sites = [response["site"] for response in responses]
    if duplicates := [site for site in sites if sites.count(site) > 1]:
        raise UsageError(f"{duplicates[0]} answered twice; give the newer file alone")
    columns = {c: list(v) for c, v in responses[0]["counts"].items()} if responses else {}
    common = [c for c, v in columns.items() if all(list(response["counts"].get(c, ())) == v for response in responses)]
    return {
        "sites": {response["site"]: response["deviation"] for response in responses},
        "questions": [_summarize_column(column, columns[column][:-1], responses, epsilon) for column in common],
    }


def _summarize_column(
    column: str, values: list[str], responses: Sequence[_FeasibilityCounts], epsilon: float
) -> dict[str, Any]:
    """Summarize the responses on one column."""
    from wsi_fl.stages.training.run_cost import describe_gain  # and with it PyTorch

    lacks, gains = {}, {}
    for response in responses:
        noisy_counts = [response["counts"][column][value] for value in values]
        threshold = 1 if response["only_enough"] else _MIN_PATIENTS + _QUANTILE_95 * response["deviation"]
        lacks[response["site"]] = [value for value, n in zip(values, noisy_counts, strict=True) if n < threshold]
        if not response["only_enough"] and lacks[response["site"]] != values:
            clipped_counts = [max(0.0, n) for n in noisy_counts]
            rarest = min(clipped_counts) * len(clipped_counts) / max(1.0, sum(clipped_counts))
            gains[response["site"]] = describe_gain(round(sum(clipped_counts)), epsilon, rarest)
    return {
        "column": column,
        "values": values,
        "counts": {response["site"]: response["counts"][column] for response in responses},
        "lacks": lacks,
        "receivers": [site for site, lacking in lacks.items() if lacking == values],
        "all": not any(lacks.values()),
        "expected": gains,
        "pipeline": f'[target]\ncolumn = {toml_value(column)}\nclasses = {toml_value(values)}\nper = "patient"\n',
    }


def feasibility_lines(document: Mapping[str, Any]) -> Lines:
    """Report possible tasks, and the lines for the pipeline and the site files."""
    for question in document["questions"]:
        cells = [*question["values"], _OTHER_VALUE]
        rows = [
            [site, *(f"{counts[value]:g}" for value in cells), f"{document['sites'][site]:.1f}"]
            for site, counts in question["counts"].items()
        ]
        yield TextTable(question["column"], ["site", *cells, "± noise"], rows)
        for site in question["receivers"]:
            none = f"{site} cannot be shown to have {_MIN_PATIENTS} patients of any value"
            yield TextLine(f'  {none}: role = "receiver" in sites/{site}.toml')
        for site, lacks in question["lacks"].items():
            if lacks and site not in question["receivers"]:
                yield TextLine(f"  {site} may have fewer than {_MIN_PATIENTS} of {', '.join(lacks)}", "yellow")
        for site, gain in question["expected"].items():
            yield TextLine(f"  {site}: in our study federation gained {gain} (studies/ROUNDS.md)")
        able = "all hospitals" if question["all"] else "not all hospitals"
        yield TextLine(f"  {able} can answer it; in the pipeline: {', '.join(question['pipeline'].splitlines())}")
    if not document["questions"]:
        yield TextLine("no column with the same values was asked of all hospitals", "yellow")
