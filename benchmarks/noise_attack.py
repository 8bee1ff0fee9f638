"""Can the noise be taken off a released proxy? A real run of one step, and the attack on what it released.

    python benchmarks/noise_attack.py release FOLDER [--per-site 150] [--clip 0.01] [--target-epsilon 1]
    python benchmarks/noise_attack.py attack FOLDER/release.npz [--tries 3] [--out FOLDER/attack.json]
    python benchmarks/noise_attack.py prove

`release` makes a study of synthetic images, trains one round of ProxyFL with an MLP of 2.5 million parameters, as
`wsi-fl train` does it, and keeps what a peer knows: the proxy before and after, and the plan. Beside it lies the true
sum of clipped gradients, which nobody may learn, to compare with. σC / B must be small enough that Adam's first step
can be undone: below about 10⁻³ with Adam's ε of 10⁻⁸. `attack` needs no wsi-fl; `attacks/noise.py` explains it.
`prove` attacks a step of that size with noise of PyTorch's Mersenne Twister, whose state it must find.

`found` says whether the generator's state was found. Where it was, `correlation` is that of the predicted noise with
the released step, and `cosine` that of the release without its noise with the true sum, over the numbers that rounding
leaves known to 10⁻⁴ of the noise. `cosine_with_noise` is what everybody may see.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from attacks.noise import MT19937, Release, attack, simulate_noise, simulate_release
from numpy.typing import NDArray

_SIZE_PX = 64
_SITES, _SITE = 2, "S1"
_MLP_SIZES = (200 * 12_288, 200, 200 * 200, 200, 400, 2)
"""Of the parameters of the MLP on images of 64 pixels."""
_LR, _ADAM_EPS, _SEED = 1e-3, 1e-8, 0
_PIPELINE = """
[model]
private = "cnn1"
proxy = "mlp"
[train]
rounds = 1
lr = {lr}
seed = {seed}
augment = "none"
[privacy]
clip = {clip}
target_epsilon = {target_epsilon}
[evaluate]
bootstrap = 20
"""


def release(folder: Path, *, per_site: int, clip: float, target_epsilon: float) -> Release:
    """Train in a new folder and return what one site released, to which its ledger's digest is held."""
    for name in ("pipelines", "sites"):
        (folder / name).mkdir(parents=True)
    x, y = _images(_SITES * per_site * 5 // 4)
    np.savez(folder / "data.npz", x=x, y=y)
    settings = {"lr": _LR, "seed": _SEED, "clip": clip, "target_epsilon": target_epsilon}
    (folder / "pipelines" / "p.toml").write_text(_PIPELINE.format(**settings))
    _run(folder, "partition", "data.npz", "--sites", str(_SITES), "--per-site", str(per_site))
    _run(folder, "train", "--method", "proxyfl", "--pipeline", "p")
    return _kept(folder)


def _kept(folder: Path) -> Release:
    from safetensors.numpy import load_file

    from wsi_fl.models import create_model
    from wsi_fl.privacy.gradients import trainable_parameters
    from wsi_fl.privacy.ledger_file import digest_values
    from wsi_fl.types import Images

    (state,) = folder.glob(f"runs/*/sites/{_SITE}/state/round_00001.safetensors")
    released = load_file(state)["push/x"]
    entry = json.loads((folder / "ledgers" / f"{_SITE}.jsonl").read_text().splitlines()[0])
    mechanism = entry["mechanism"]
    if entry["released"] != f"model {digest_values(released)}" or entry["insecure"]:
        raise SystemExit(f"{state}: not what the ledger says was released without a seed")
    if mechanism["steps"] != 1:
        raise SystemExit(f"{mechanism['steps']} steps were planned: the attack is on one")
    model = create_model("mlp", n_classes=2, shape=Images(3, _SIZE_PX), seed=_SEED)
    start = [parameter.detach().numpy().ravel() for parameter in trainable_parameters(model)]
    return Release(
        np.concatenate(start),
        released,
        tuple(len(values) for values in start),
        lr=_LR,
        eps=_ADAM_EPS,
        sigma=mechanism["sigma"],
        clip=mechanism["clip"],
        batch_size=entry["plan"]["batch_size"],
        true_sum=_true_sum(folder, model, mechanism["clip"]) if mechanism["sample_rate"] == 1 else None,
    )


def _true_sum(folder: Path, model: Any, clip: float) -> NDArray[np.float32]:
    """Σ clip(g_i, C) over the site's training images, float32[d]."""
    import torch
    from torch.nn import functional

    from wsi_fl.privacy.gradients import ENGINES
    from wsi_fl.stores.patch_store import PatchStore
    from wsi_fl.study.folder import Study

    store = PatchStore(Study(folder).store_path(_SITE))
    rows = np.flatnonzero(store.table.split == "train")
    x = torch.from_numpy(store.read(rows)).permute(0, 3, 1, 2).float() / 127.5 - 1
    y = torch.from_numpy(store.table.label[rows])
    store.close()
    sums, _ = ENGINES["ghost"](
        model, x, lambda logits: functional.cross_entropy(logits, y), lambda norms: (clip / norms).clamp(max=1)
    )
    return np.concatenate([total.detach().numpy().ravel() for total in sums if total is not None])


def _images(n: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Grey noise, striped where the label is 1."""
    y = np.arange(n) % 2
    x = np.random.default_rng(0).integers(90, 160, (n, _SIZE_PX, _SIZE_PX, 3), dtype=np.uint8)
    stripes = (np.arange(_SIZE_PX) // 2 % 2 * 60).astype(np.uint8)
    return x + y.astype(np.uint8)[:, None, None, None] * stripes[:, None, None], y


def _run(folder: Path, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "wsi_fl", *arguments], cwd=folder, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    making = verbs.add_parser("release", help="train, and keep what is released")
    making.add_argument("folder", type=Path, help="is made; gets release.npz")
    making.add_argument("--per-site", type=int, default=150)
    making.add_argument("--clip", type=float, default=0.01)
    making.add_argument("--target-epsilon", type=float, default=1.0)
    trying = verbs.add_parser("attack", help="try to take the noise off")
    trying.add_argument("file", type=Path, help="release.npz")
    trying.add_argument("--tries", type=int, default=3, help="with other signs, while nothing is found")
    trying.add_argument("--out", type=Path, help="JSON of what was found")
    verbs.add_parser("prove", help="find the state of PyTorch's generator")
    given = parser.parse_args()
    if given.verb == "release":
        found = release(
            given.folder.resolve(), per_site=given.per_site, clip=given.clip, target_epsilon=given.target_epsilon
        )
        found.save(given.folder / "release.npz")
        return
    if given.verb == "prove":
        told = attack(simulate_release(simulate_noise(MT19937, _MLP_SIZES), _MLP_SIZES))
        print(json.dumps(told, indent=1))
        raise SystemExit(not (told["found"] and told["cosine"] > 0.999))
    text = json.dumps(attack(Release.load(given.file), tries=given.tries), indent=1)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
