"""DDIM with few steps against the whole chain: seconds per image, and KID of both against held-out images.

Run in a study with a trained denoiser:

    python benchmarks/ddpm_sampling.py --site S1 --n 24 --weights encoder.safetensors --encoder tf_efficientnet_lite0

KID is unbiased; of few images it is noisy, so that of as many training images is told too, and everything on stdout is
one JSON document.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
import torch

from wsi_fl.stages.site.site_data import open_store
from wsi_fl.study.folder import Study
from wsi_fl.synthesis.ddpm import Sampling, draw_images
from wsi_fl.synthesis.stages.ddpm import KIND, load_denoiser
from wsi_fl.synthesis.stages.generator_check import compute_quality
from wsi_fl.synthesis.stages.generator_types import HELD_OUT, load_images
from wsi_fl.synthesis.training_state import balance_labels


def measured(site: str, n: int, overrides: list[str], pipeline_name: str | None) -> dict[str, Any]:
    """Both samplers on the same labels and seed, one batch each."""
    study = Study.find()
    pipeline = study.load_pipeline(study.pipeline_name(pipeline_name), overrides)
    denoiser = load_denoiser(KIND.require_trained(study, site)[0])
    shape = denoiser.shape
    labels = balance_labels(shape.n_classes, -(-n // shape.n_classes))
    rows: dict[str, Any] = {}
    sets = {}
    for name, sampling in (
        ("ddim 25", Sampling("ddim", 25, batch_size=n)),
        ("dpm++ 25", Sampling("dpm++", 25, batch_size=n)),
        (f"ddpm {shape.chain}", Sampling("ddpm", shape.chain, batch_size=n)),
    ):
        began = time.perf_counter()
        sets[name] = torch.cat(list(draw_images(denoiser, labels, sampling, seed=0)))
        rows[name] = {"seconds": time.perf_counter() - began}
    with open_store(study, site) as store:
        held_out = load_images(store, shape.resolution, *HELD_OUT).images
        training = load_images(store, shape.resolution, "train").images
    chosen = np.random.default_rng(0).permutation(len(training))[: len(labels)]
    quality, note = compute_quality(study, pipeline, held_out, sets | {"training": training[chosen]})
    for name in sets:
        rows[name] |= quality.get(name, {})
    whole = rows[f"ddpm {shape.chain}"]["seconds"]
    ratios = {name: whole / row["seconds"] for name, row in rows.items()}
    return {"n": len(labels), "rows": rows, "faster": ratios, "training": quality.get("training"), "note": note}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", required=True)
    parser.add_argument("--n", type=int, default=24)
    parser.add_argument("--pipeline")
    parser.add_argument("--encoder")
    parser.add_argument("--weights")
    given = parser.parse_args()
    overrides = [f"features.encoder={given.encoder}"] if given.encoder else []
    overrides += [f"features.weights={given.weights}"] if given.weights else []
    print(json.dumps(measured(given.site, given.n, overrides, given.pipeline), indent=2))


if __name__ == "__main__":
    main()
