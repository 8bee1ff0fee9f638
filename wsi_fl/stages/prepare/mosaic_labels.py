"""What a slide is labelled with in a store of mosaics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from wsi_fl.types import CLASSES, BagTable, SetAside, SlideRecord, UsageError

Subtypes = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Labelled:
    """The slides that have a class, with its position and their tumour type."""

    records: tuple[SlideRecord, ...]
    label: dict[str, int]
    """Slide → position in the classes."""
    tumor_type: dict[str, str]
    aside: tuple[SetAside, ...]


def classes_of(subtypes: Subtypes) -> tuple[str, ...]:
    """The classes of a study, the same at every site: its diagnoses, or healthy and tumour.

    Example:
        >>> classes_of({"kidney": ["KIRP", "KIRC"]}), classes_of({})
        (('KIRC', 'KIRP'), ('healthy', 'tumor'))
    """
    return tuple(sorted({name for names in subtypes.values() for name in names})) or CLASSES


def labelled(records: Sequence[SlideRecord], subtypes: Subtypes) -> Labelled:
    """The slides by class; those whose diagnosis is none of the study's are set aside.

    Raises:
        UsageError: when slides have diagnoses and the study does not say which ones it is about.
    """
    classes = classes_of(subtypes)
    if not subtypes:
        if one := next((record for record in records if record.diagnosis), None):
            raise UsageError(
                f"site {one.site}: its slides have diagnoses ({one.slide}: {one.diagnosis}); say in the pipeline which "
                f'ones count, for example subtypes = {{ {one.tumor_type or "tumor"} = ["{one.diagnosis}", …] }}'
            )
        label = {record.slide: classes.index("tumor" if record.positive else "healthy") for record in records}
        return Labelled(tuple(records), label, {record.slide: record.tumor_type for record in records}, ())
    kept, aside = [], []
    label, types = {}, {}
    for record in records:
        reason = _unfit(record, subtypes)
        if reason:
            aside.append(SetAside(record.slide, reason))
            continue
        kept.append(record)
        label[record.slide] = classes.index(record.diagnosis)
        types[record.slide] = _type_of(record, subtypes)
    return Labelled(tuple(kept), label, types, tuple(aside))


def table_of(kept: Sequence[SlideRecord], known: Labelled) -> BagTable:
    """Return the columns of a store of these slides, in order."""
    return BagTable(
        np.array([known.label[record.slide] for record in kept], np.int64),
        np.array([known.tumor_type[record.slide] for record in kept], np.str_),
        np.array([record.slide for record in kept], np.str_),
        np.array([record.patient for record in kept], np.str_),
        np.array([record.split or "train" for record in kept], np.str_),
    )


def _unfit(record: SlideRecord, subtypes: Subtypes) -> str:
    """Why a slide has no place in the study; "" when it has."""
    known = ", ".join(classes_of(subtypes))
    if not record.diagnosis:
        return f"it has no diagnosis; the study's are {known}"
    if record.diagnosis not in classes_of(subtypes):
        return f"its diagnosis {record.diagnosis} is none of the study's ({known})"
    if record.tumor_type in subtypes and record.diagnosis not in subtypes[record.tumor_type]:
        return f"its diagnosis {record.diagnosis} is none that {record.tumor_type} may have"
    return ""


def _type_of(record: SlideRecord, subtypes: Subtypes) -> str:
    """The archive's tumour type where the study knows it, else the one its diagnosis belongs to alone."""
    if record.tumor_type in subtypes:
        return record.tumor_type
    possible = [name for name, diagnoses in subtypes.items() if record.diagnosis in diagnoses]
    return possible[0] if len(possible) == 1 else ""
