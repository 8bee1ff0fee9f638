"""`wsi-fl import --format patches`: a site's patch store from patches that were cut elsewhere.

PCam's files, and images in a folder for each class, as those of BACH and NCT-CRC-HE-100K.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict, Unpack

import numpy as np

from wsi_fl.slides.layouts.common import filter_site, read_rows, require_names
from wsi_fl.slides.patching.splits import count_test_patients
from wsi_fl.stages.prepare.partition import SiteImages, describe_leaks, hash_images, write_image_store
from wsi_fl.stages.prepare.slide_lists import Scope, list_patch_steps, select_sites
from wsi_fl.stages.runtime.console import Lines, TextLine
from wsi_fl.stages.runtime.hints import join_commands
from wsi_fl.stores.images import ImageDataSet, ImageSet, read_data_set
from wsi_fl.study.folder import Study
from wsi_fl.system.file_names import compose_text, drop_suffixes
from wsi_fl.system.join_work import site_lock
from wsi_fl.types import UsageError


class _PatchesDocument(TypedDict):
    """The document of `import --format patches`: the site, its number of patients, lines on copies, next commands."""

    sites: list[SiteImages]
    patients: int
    copies: list[str]
    next: list[str]


def import_patches(
    study: Study,
    source: Path,
    *,
    labels: Path | None = None,
    size_px: int | None = None,
    mpp: float | None = None,
    **scope: Unpack[Scope],
) -> _PatchesDocument:
    """Write a site's patch store from images with labels; return the `--json` document.

    Patients are those of the table, else PCam's slides, else every image is one. The test images of the data set stay
    so; without any, patients are drawn (`slides.test_fraction`).

    Args:
        labels: a table of patients and images (column slide: the file's name with or without its suffix, after its
            folder's and a slash where names repeat, or PCam's slide). Rows of other sites are ignored.
        size_px: scales images to squares of this size.
        mpp: µm per pixel of the images as they are, before any scaling; None if unknown.

    Raises:
        UsageError: when an image has no patient in the table, or several, or a patient has training and test images, or
            images of several sizes, which are scaled, have an `mpp`.
    """
    pipeline, (site_file,) = select_sites(study, **scope)
    site = site_file.name
    data_set = read_data_set(source, size_px, empty_classes=True)
    mpp_scaled = 0.0 if mpp is None else _scale_mpp(source, data_set, mpp)
    by_image = _read_patients(labels, site) if labels else None
    patients = {"train": _list_patients(data_set.train, by_image, labels, "train")}
    if data_set.test is None:
        names = np.array(patients["train"])
        order = np.random.default_rng(0).permutation(np.unique(names))
        is_test = np.isin(names, order[: count_test_patients(len(order), pipeline.slides.test_fraction)])
        splits = {"train": np.flatnonzero(~is_test), "test": np.flatnonzero(is_test)}
        data_set, patients["test"] = ImageDataSet(data_set.train, data_set.train, data_set.classes), patients["train"]
    else:
        patients["test"] = _list_patients(data_set.test, by_image, labels, "test")
        if shared := set(patients["train"]) & set(patients["test"]):
            raise UsageError(f"{source}: {min(shared)} has training and test images; move them to one side")
        splits = {"train": np.arange(len(data_set.train)), "test": np.arange(len(data_set.test))}
    with site_lock(study.store_path(site).parent, site) as work:
        work.require_presence()
        row = write_image_store(study, site, data_set, splits, patients=patients, mpp=mpp_scaled)
    assert data_set.test is not None
    train = hash_images(data_set.train)
    test = train if data_set.test is data_set.train else hash_images(data_set.test)
    copies = describe_leaks(train[splits["train"]], test[splits["test"]])
    n_patients = len(set(patients["train"]) | set(patients["test"]))
    steps = list_patch_steps(study, pipeline, **scope)
    return {"sites": [row], "patients": n_patients, "copies": copies, "next": steps}


def _scale_mpp(source: Path, data_set: ImageDataSet, mpp: float) -> float:
    """Return the µm per pixel of images after they were scaled, from those before."""
    sides = {part.source_px for part in (data_set.train, data_set.test) if part is not None}
    if len(sides) > 1 or (side := sides.pop()) is None:
        raise UsageError(
            f"{source}: images of several sizes, or no squares, have no common --mpp when --patch-px has scaled them; "
            "leave --mpp out, or cut them alike"
        )
    factor: float = side / data_set.train.x.shape[1]
    return round(mpp * factor, 6)


def _read_patients(table: Path, site: str) -> dict[str, str]:
    """Return image → its patient, of the rows of a site."""
    by_image: dict[str, str] = {}
    for row in filter_site(read_rows(table, ["slide", "patient"]), site):
        require_names(row, "slide", "patient")
        image, patient = _image_key(row["slide"]), row["patient"]
        if by_image.setdefault(image, patient) != patient:
            raise UsageError(
                f"{row.where}: image {image} is of patient {patient}, and of {by_image[image]} in a line above"
            )
    if not by_image:
        raise UsageError(f"{table}: has no row of site {site}")
    return by_image


def _image_key(name: str) -> str:
    """Return an image's name without suffix, after its folder's where that is given, from a path of any system."""
    return "/".join(drop_suffixes(compose_text(name).replace("\\", "/")).split("/")[-2:])


def _list_patients(images: ImageSet, by_image: dict[str, str] | None, table: Path | None, split: str) -> list[str]:
    names = images.names or tuple(str(row) for row in range(len(images)))
    if by_image is not None:
        keys = [_image_key(name) for name in names]
        patients = [by_image.get(key) or by_image.get(key.rpartition("/")[2]) for key in keys]
        if None in patients:
            raise UsageError(f"{table}: no row of image {names[patients.index(None)]}; add its patient")
        return list(map(str, patients))
    is_slide = len(set(names)) < len(names)  # PCam's; names of files are of one image each
    return list(names) if is_slide else [f"{split}_{name}" for name in names]


def render_patches_lines(document: _PatchesDocument) -> Lines:
    """Yield the numbers of images by class, and of patients, and copies."""
    (row,) = document["sites"]
    classes = ", ".join(f"{name} {count}" for name, count in row["classes"].items())
    counts = f"{row['train']} training images ({classes}), {row['test']} of the test set"
    yield TextLine(f"{row['store']}: {counts}, {document['patients']} patients")
    if len(row["classes"]) == 1:
        (name,) = row["classes"]
        yield TextLine(
            f"  its only class is {name}: other hospitals must have the same classes, so make an empty folder for each "
            "that this one lacks, and import again",
            "bold yellow",
        )
    yield from (TextLine(f"  {line}", "bold yellow") for line in document["copies"])
    yield TextLine("; next: ".join(filter(None, ("stores ready", join_commands(document["next"])))))
