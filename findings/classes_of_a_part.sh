#!/bin/sh
# A part of an AnnData has other classes than the whole, so the numbers of its labels mean something else.
#
# Versions: anndata 0.12.19, pandas 2.3.3.
# Input: four spots of the classes healthy, necrosis and tumor (a pandas Categorical); the part without necrosis.
# Expected from: pandas ("Categorical data"): slicing keeps all categories, so that codes stay what they are.
# Guess: AnnData keeps them too, at least in a view.
# Seen: view, copy and the file that is written have healthy and tumor alone; tumor's code goes from 2 to 1. pandas keeps
#   all three of the same table. A model that learned codes of the whole is wrong on the part.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check anndata==0.12.19 pandas==2.3.3
venv/bin/python -W ignore - <<'PYTHON'
import anndata
import numpy as np
import pandas as pd

classes = ["healthy", "necrosis", "tumor"]
label = pd.Categorical(["healthy", "tumor", "tumor", "necrosis"], categories=classes)
whole = anndata.AnnData(np.zeros((4, 2), np.float32), obs=pd.DataFrame({"label": label}, index=list("abcd")))
part = whole[whole.obs.label != "necrosis"]
part.write_h5ad("part.h5ad")
seen = {
    "view": part.obs.label,
    "copy": part.copy().obs.label,
    "file": anndata.read_h5ad("part.h5ad").obs.label,
    "pandas": whole.obs[whole.obs.label != "necrosis"].label,
}
for name, column in seen.items():
    print(name, list(column.cat.categories), column.cat.codes.tolist())
assert all(list(seen[name].cat.categories) == ["healthy", "tumor"] for name in ("view", "copy", "file"))
assert seen["copy"].cat.codes.tolist() == [0, 1, 1] and seen["pandas"].cat.codes.tolist() == [0, 2, 2]
assert list(whole.obs.label.cat.categories) == classes
PYTHON
