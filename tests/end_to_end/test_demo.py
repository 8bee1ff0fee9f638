"""The demo at a small size: its parts, and its page where federated training helped and where it did not."""

import numpy as np
import pytest
import torch
from conftest import make_study, nightly, refused, write_features

from wsi_fl.demo.run import _STEPS, INPUT_PX, draw_public_patches, random_weights, run_demo
from wsi_fl.demo.simulated_slides import plan_slides
from wsi_fl.evidence.compare import compare_methods
from wsi_fl.stages.training.train import train


def test_hospitals_have_the_stated_number_of_ill_patients():
    slides = plan_slides(4, 20, 512, 0, metastasis_shares=(1.0, 0.5, 0.15, 0.0))
    ill = [sum(slide.is_positive for slide in slides if slide.site == site) for site in range(4)]
    assert ill == [20, 10, 3, 0] and len(slides) == 160
    assert sum(slide.is_positive for slide in plan_slides(2, 3, 512, 0)) == 6


def test_the_untrained_encoder_is_deterministic_and_separates_patches():
    images = draw_public_patches()
    assert images.shape[1:] == (INPUT_PX, INPUT_PX, 3) and len(images) > 30
    np.testing.assert_array_equal(images, draw_public_patches())
    a, b = (random_weights("test_efficientnet", images[:40]) for _ in range(2))
    assert all(torch.equal(a[key], b[key]) for key in a)
    other = random_weights("test_efficientnet", 255 - images[:40])
    means = [key for key in a if key.endswith("running_mean")]
    assert means and any(not torch.equal(a[key], other[key]) for key in means)


@pytest.mark.parametrize("helps", [*nightly(True), False])
def test_the_page_reports_where_federated_training_does_not_help(tmp_path, helps):
    """Two hospitals of one class each gain by federated training; two with complete local data do not."""
    study = make_study(tmp_path / "study", n_sites=3)
    rng = np.random.default_rng(0)
    for k in range(3):
        labels = np.full(60, k % 2) if helps and k < 2 else np.arange(60) % 2
        labels = np.concatenate([labels, np.arange(60) % 2])
        x = rng.normal(size=(120, 24)) + 3 * np.outer(2 * labels - 1, np.arange(24) < 3)
        patients = [f"p{i // 3}" for i in range(60)] + [f"t{i}" for i in range(60)]
        write_features(study, f"S{k}", x, labels, patients, ["train"] * 60 + ["test"] * 60)
    plan = ["train.data=features", "model.private=linear_head", "model.proxy=linear_head"]
    runs = {}
    for name, step in _STEPS.items():
        overrides = [*plan, *step.overrides]
        if name == "federated":
            overrides += ["privacy.unit=patient", "privacy.target_epsilon=8", "model.projection=16"]
        runs[name] = train(study, method=step.method, overrides=overrides, backend="local")["run"]
    document = compare_methods(study, [runs["federated"], runs["pooled"]])
    page = (study.root / document["page"]).read_text(encoding="utf-8")
    verdicts = [row["verdict"] for row in document["benefit"]["sites"]]
    assert page.index("<figure") == page.index('<figure class="worth"')
    assert ("this hospital should take part" in page) is helps
    if helps:
        assert verdicts[:2] == ["join", "join"]
    else:
        assert "join" not in verdicts
        said = ("there is nothing to gain", "these runs do not show", "its local model makes the same predictions")
        assert any(words in page for words in said)


def test_a_foreign_folder_is_not_taken_for_a_demo(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    refused(lambda: run_demo(tmp_path), "choose another --out")
    assert (tmp_path / "precious.txt").read_text() == "mine"
