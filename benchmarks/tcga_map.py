"""The map of TCGA by hospital at full size: a made-up TCGA, `wsi-fl init` and `wsi-fl bench`, with times and memory.

    python benchmarks/tcga_map.py FOLDER                        # 40 institutions of 25 to 400 patients, 25 GB
    python benchmarks/tcga_map.py FOLDER --patches 500 --hospitals 10
    python benchmarks/tcga_map.py FOLDER --target survival      # the same files again

Barcodes, folders, HDF5 attributes and the headings of tables are those of public features and of cBioPortal; values are
random. Two directions of the features depend on the class and on survival, two others on the institution.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

import h5py
import numpy as np

PROJECTS = ("COAD", "READ", "STAD", "UCEC")
CODES = [
    "A6",
    "AA",
    "AD",
    "AF",
    "A5",
    "AH",
    "AM",
    "AU",
    "AY",
    "AZ",
    "CA",
    "CK",
    "CM",
    "D5",
    "A2",
    "DM",
    "DT",
    "DY",
    "EF",
    "EI",
    "F4",
    "A7",
    "G4",
    "G5",
    "NH",
    "QG",
    "QL",
    "RU",
    "SS",
    "T9",
    "WS",
    "3L",
    "4N",
    "4T",
    "5M",
    "AJ",
    "AX",
    "B5",
    "D3",
    "AR",
]
"""Tissue source sites of different institutions."""
SAMPLE_COLUMNS = ("PATIENT_ID", "SAMPLE_ID", "ONCOTREE_CODE", "CANCER_TYPE", "MSI_SCORE_MANTIS", "MSI_SENSOR_SCORE")
PATIENT_COLUMNS = ("PATIENT_ID", "SUBTYPE", "CANCER_TYPE_ACRONYM", "OS_STATUS", "OS_MONTHS")


def write_slide(path: Path, mean: np.ndarray, n_patches: int, rng: np.random.Generator) -> None:
    """Write the features of a slide as TRIDENT does, float16[n, d] around a mean float32[d]."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.take(_noise(len(mean)), rng.integers(4096, size=n_patches), axis=0)
    with h5py.File(path, "w") as file:
        file["features"] = (noise + mean).astype(np.float16)
        file["features"].attrs["encoder"] = "uni_v2" if len(mean) == 1536 else "uni_v1"
        file["coords"] = 512 * np.stack(np.divmod(np.arange(n_patches), 100), axis=1)
        values = {"patch_size": 256, "patch_size_level0": 512, "level0_magnification": 40, "target_magnification": 20}
        file["coords"].attrs.update(values | {"overlap": 0})


@cache
def _noise(width: int) -> np.ndarray:
    """Return rows of which the patches of all slides are drawn; drawing each anew would take hours."""
    return np.random.default_rng(0).normal(size=(4096, width)).astype(np.float32)


def write_federation(
    folder: Path, patients: Sequence[int], *, n_patches: int, width: int, share_of_high: float = 0.25, seed: int = 0
) -> Path:
    """Write `TCGA/TCGA-<project>/<barcode>.h5` of so many patients at each source site, and cBioPortal's two tables.

    Every tenth patient has a second slide; a frozen slide and one of healthy tissue are among them.
    """
    rng, rows = np.random.default_rng(seed), []
    direction, shifts = rng.normal(size=width), rng.normal(size=(len(patients), width)) / 8
    direction *= 0.8 / np.linalg.norm(direction)  # the classes overlap, whatever the width
    for index, n in enumerate(patients):
        for number in range(n):
            patient, project = f"TCGA-{CODES[index]}-{number:04d}", PROJECTS[index % len(PROJECTS)]
            high, risk = bool(rng.random() < share_of_high), rng.normal()
            mean = (
                shifts[index]
                + direction * (1.0 if high else 0.0)
                + 0.5 * risk * direction[::-1]
                + rng.normal(size=width) / 4
            )
            kinds = ["01Z-00-DX1", *(["01Z-00-DX2"] if number % 10 == 0 else [])]
            kinds += ["01A-01-TS1", "11A-01-DX1"] if number == 0 and index == 0 else []
            for kind in kinds:
                barcode = f"{patient}-{kind}.{str(uuid5(NAMESPACE_URL, patient + kind)).upper()}"
                path = folder / "TCGA" / f"TCGA-{project}" / f"{barcode}.h5"
                write_slide(path, mean.astype(np.float32), int(n_patches * rng.uniform(0.5, 1.5)), rng)
            score = rng.uniform(0.7, 1.1) if high else rng.uniform(0.1, 0.39)
            months, seen = rng.exponential(40 * np.exp(-risk)), rng.uniform(6, 90)
            rows.append((patient, project, score, min(months, seen), months <= seen))
    _write_tables(folder, rows)
    return folder


def _write_tables(folder: Path, rows: Sequence[tuple[str, str, float, float, bool]]) -> None:
    """Write the tables of patients and samples with cBioPortal's four lines of remarks."""
    samples = [(p, f"{p}-01", project, "Cancer", f"{score:.4f}", f"{30 * score:.2f}") for p, project, score, *_ in rows]
    patients = [
        (
            p,
            f"{project}_MSI" if score > 0.5 else f"{project}_CIN",
            project,
            "1:DECEASED" if dead else "0:LIVING",
            f"{m:.2f}",
        )
        for p, project, score, m, dead in rows
    ]
    for name, header, lines in (("sample", SAMPLE_COLUMNS, samples), ("patient", PATIENT_COLUMNS, patients)):
        remarks = ["#" + "\t".join(text for _ in header) for text in ("Name", "What it means", "STRING", "1")]
        text = "\n".join([*remarks, *("\t".join(line) for line in (header, *lines))]) + "\n"
        (folder / f"data_clinical_{name}.txt").write_text(text)


def run(arguments: Sequence[str], folder: Path) -> None:
    """Run a command of wsi-fl; print its seconds."""
    start = time.monotonic()
    subprocess.run([sys.executable, "-m", "wsi_fl", *arguments], cwd=folder, check=True)
    print(f"{arguments[0]}: {(time.monotonic() - start) / 60:.1f} min", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hospitals", type=int, default=len(CODES), choices=range(2, len(CODES) + 1), metavar="N")
    parser.add_argument("--patches", type=int, default=2000, help="mean of a slide; 2000 of width 1024 are 4 MB")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--target", default="MSI_SCORE_MANTIS:0.4:0.6")
    parser.add_argument("--method", default="oneshot,fedavg")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    folder, patients = arguments.folder.resolve(), np.geomspace(25, 400, arguments.hospitals).round().astype(int)
    if not (folder / "data_clinical_patient.txt").exists():
        start = time.monotonic()
        write_federation(folder, patients.tolist(), n_patches=arguments.patches, width=arguments.width)
        print(f"written in {(time.monotonic() - start) / 60:.1f} min")
    sizes = [path.stat().st_size for path in folder.glob("TCGA/*/*.h5")]
    print(
        f"{len(patients)} institutions, {sum(patients)} patients, {len(sizes)} slides, {sum(sizes) / 1e9:.1f} GB",
        flush=True,
    )
    name = arguments.target.partition(":")[0]
    study, tables = (
        folder / f"study-{name}",
        [f"--clinical={folder}/data_clinical_{kind}.txt" for kind in ("patient", "sample")],
    )
    if not study.exists():
        run(["init", str(study), f"--from={folder}/TCGA", *tables, f"--target={arguments.target}"], folder)
    options = [f"--{key}={getattr(arguments, key)}" for key in ("method", "seeds", "jobs")]
    run(
        [
            "bench",
            f"{folder}/TCGA",
            "--labels=labels.csv",
            "--hospitals=site",
            f"--target={name}",
            "--out=map.csv",
            *options,
        ],
        study,
    )
    print(f"peak memory of the largest process: {resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6:.2f} GB")


if __name__ == "__main__":
    main()
