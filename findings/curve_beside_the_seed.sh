#!/bin/sh
# A random transform of MONAI with its random state set: it still makes another image each time.
#
# Versions: MONAI 1.6.1, PyTorch 2.14.1, NumPy 2.4.6.
# Input: one grey ramp of 32 × 32; two instances of each transform with `set_random_state(seed=7)` and a probability of 1,
#   each after `monai.utils.set_determinism(seed=0)`.
# Expected from: MONAI's documentation: random factors come from `self.R`, which `set_random_state` sets, and
#   `set_determinism` makes a training repeatable.
# Guess: both instances of RandIntensityRemap make the same image, as 24 other transforms that were tried do.
# Seen: they differ, after either seed. The sign of its slope comes from its own random state. The curve is drawn by an inner
#   transform made anew for each image, whose state is the one of the class `Randomizable`: one RandomState for all
#   transforms of the process, seeded by the operating system when MONAI is imported, which neither call reaches. Seeding that
#   attribute of the class repeats the image.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install --quiet --quiet --disable-pip-version-check monai==1.6.1 torch==2.14.1 numpy==2.4.6
cat >repeat.py <<'PYTHON'
import sys

import torch
from monai import transforms
from monai.utils import set_determinism

image = torch.linspace(0, 1, 32 * 32).reshape(1, 32, 32)


def repeats(name, prepare):
    views = []
    for _ in range(2):
        prepare()
        transform = getattr(transforms, name)(prob=1.0)
        transform.set_random_state(seed=7)
        views.append(torch.as_tensor(transform(image.clone())))
    return torch.equal(*views)


seen = {}
for name in ("RandAdjustContrast", "RandGaussianNoise", "RandIntensityRemap"):
    seen[name] = repeats(name, lambda: set_determinism(seed=0))
    print(name, "repeats:", seen[name])
seen["class"] = repeats("RandIntensityRemap", lambda: transforms.Randomizable.R.seed(0))
print("RandIntensityRemap repeats where the state of the class is seeded:", seen["class"])
sys.exit(list(seen.values()) != [True, True, False, True])
PYTHON
env/bin/python repeat.py
