"""Ten slides to features, from start to end as `mosaic` and `features` do it, against the encoder alone.

python benchmarks/extraction.py [--weights FILE] [--encoder tf_efficientnet_lite0] [--size-px 256] [--batch-size 32]

All take turns in one process; the ratio is that of the best of each. Without --weights they are random. On processors
give the encoder fewer threads than there are cores (OMP_NUM_THREADS), so that reading has some too.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from wsi_fl.demo import simulated_slides
from wsi_fl.models.encoder import Encoder
from wsi_fl.stages.prepare.build_bags import make_features, make_mosaics
from wsi_fl.stages.prepare.init_study import init_study
from wsi_fl.stages.prepare.tile import tile_slides
from wsi_fl.stages.site.encoders import load_encoder
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.study.folder import Study

SITE, PATIENTS, MPP = "C1", 5, 1.0


def study_of(folder: Path, size_px: int, slide_px: int) -> Study:
    """Return a study of ten painted slides, tiled."""
    archive = simulated_slides.simulate_archive(
        folder / "archive", n_sites=1, patients_per_site=PATIENTS, size_px=slide_px
    )
    init_study(folder / "study", archive=archive)
    study = Study(folder / "study")
    keys = {"size_px": size_px, "stride_px": size_px, "mpp": MPP, "min_tissue": 0.1, "balance": "false"}
    tile_slides(study, site=SITE, overrides=[f"tile.{key}={value}" for key, value in keys.items()])
    return study


def patches_by_slide(study: Study) -> list[NDArray[np.uint8]]:
    with PatchStore(study.store_path(SITE)) as store:
        return [store.read(np.flatnonzero(store.table.slide == slide)) for slide in store.slides]


def bare_rate(slides: list[NDArray[np.uint8]], encoder: Encoder, size: int) -> float:
    """Encode patches that are in memory, in the batches that stages make of them; return patches per second."""
    began = time.perf_counter()
    for patches in slides:
        for k in range(0, len(patches), size):
            encoder(patches[k : k + size])
    return sum(map(len, slides)) / (time.perf_counter() - began)


def rate_of(study: Study, command: Callable[..., Mapping[str, Any]], overrides: list[str]) -> float:
    """Run a command of which nothing is made yet; return patches per second."""
    for name in ("features", "mosaics"):
        shutil.rmtree(study.store_path(SITE).parent / name, ignore_errors=True)
    began = time.perf_counter()
    (row,) = command(study, site=SITE, overrides=overrides)["sites"]
    return float(row["patches"]) / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--encoder", default="tf_efficientnet_lite0")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--size-px", type=int, default=256)
    parser.add_argument("--slide-px", type=int, default=4096)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weights = args.weights
        if weights is None:
            weights = folder / "random.safetensors"
            save_file(timm.create_model(args.encoder, num_classes=0).state_dict(), weights)
        study = study_of(folder, args.size_px, args.slide_px)
        keys = {
            "encoder": args.encoder,
            "weights": weights.absolute(),
            "batch_size": args.batch_size,
            "size_px": args.size_px,
            "mpp": MPP,
            "min_tissue": 0.1,
            "clusters": 1,
            "fraction": 1,
        }
        overrides = [f"mosaic.{key}={value}" for key, value in keys.items()]
        pipeline = study.load_pipeline(study.pipeline_name(None), overrides)
        encoder = load_encoder(study, pipeline, "mosaic", torch.get_num_threads())
        slides = patches_by_slide(study)
        n, size = sum(map(len, slides)), encoder.batch_size_for(args.size_px)
        bare_rate(slides[:1], encoder, size)
        rates: dict[str, list[float]] = {"encoder alone": [], "features": [], "mosaic": []}
        for _ in range(args.rounds):
            rates["encoder alone"].append(bare_rate(slides, encoder, size))
            rates["features"].append(rate_of(study, make_features, overrides))
            rates["mosaic"].append(rate_of(study, make_mosaics, overrides))
    threads = f"{torch.get_num_threads()} threads" if encoder.device.type == "cpu" else str(encoder.device)
    print(f"{args.encoder} on {threads}: {len(slides)} slides, {n} patches of {args.size_px} px, batches of {size}")
    alone = max(rates["encoder alone"])
    for command, found in rates.items():
        print(f"{command:<16}{max(found):9.1f} patches/s, ratio {max(found) / alone:.3f}")


if __name__ == "__main__":
    main()
