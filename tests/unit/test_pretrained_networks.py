"""Networks from published weights give timm's numbers, and only their trained part has gradients and is sent."""

import argparse
import shlex
import subprocess
import sys
from collections import OrderedDict
from datetime import date

import numpy as np
import pytest
import timm
import torch
from builders import compare_with_loop, cross_entropy, vary
from conftest import published, refused
from safetensors.torch import save_file

from wsi_fl.models import StartWeights, create_model, schema_digest, start_digest
from wsi_fl.models.weights import load_weights, read_weights
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.dpsgd import DPTrainer, _sum_unit_gradients, check_per_example_gradients
from wsi_fl.privacy.gradients import ENGINES, trainable_parameters
from wsi_fl.types import Images, UsageError, Vectors, WsiFlError

SIZE, N_CLASSES = 32, 3
PARTS = ("all", "head", "last", "norm", "lora")
NAMES = ("test_resnet", "test_vit", "test_efficientnet")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    return {name: published(folder, name) for name in NAMES}


def build_model(path, train="all", seed=0, size_px=SIZE, name=None):
    name = f"timm:{name or path.stem}"
    return create_model(name, n_classes=N_CLASSES, shape=Images(3, size_px), seed=seed, start=StartWeights(train, path))


def batch(b, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.rand(b, 3, SIZE, SIZE, generator=g) * 2 - 1, torch.arange(b) % N_CLASSES


def test_features_are_those_of_timm_in_evaluation_mode_bit_for_bit_in_either_mode(files):
    for name in NAMES:
        theirs = timm.create_model(name, num_classes=0)
        load_weights(theirs, read_weights(files[name]), name)
        if name == "test_vit":  # places are interpolated from the size of the weights to this one
            theirs.set_input_size(img_size=SIZE)
        ours, (x, _) = build_model(files[name]), batch(2)
        mean, sd = (torch.tensor(theirs.pretrained_cfg[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
        ours.model.reset_classifier(0)
        with torch.no_grad():
            wanted = theirs.eval()((x * 0.5 + 0.5 - mean) / sd)
            for mode in (True, False):
                assert torch.equal(ours.train(mode)(x), wanted), name
        assert float(wanted.std()) > 0


@pytest.mark.parametrize("train", PARTS)
@pytest.mark.parametrize("name", NAMES)
def test_clipped_sums_of_the_trained_part_are_those_of_a_loop(files, name, train):
    """Sums are of rows, by a learner's engine and by hooks, and of patients."""
    model = build_model(files[name], train)
    engine = check_per_example_gradients(model, (3, SIZE, SIZE), N_CLASSES)
    assert engine == ("hooks" if (name, train) == ("test_vit", "all") else "ghost")
    vary(model.train(), -0.1, 0.1)  # adapters say nothing yet
    x, y = batch(4)
    for sums_of in (
        ENGINES[engine],
        ENGINES["hooks"],
        lambda model, x, *rest: _sum_unit_gradients(model, x, torch.arange(4), *rest),
    ):
        compare_with_loop(sums_of, model, x, y)
    assert len(trainable_parameters(model)) < len(list(model.parameters())) or train == "all"


@pytest.mark.parametrize("train", ["head", "norm", "lora"])
def test_a_step_moves_the_trained_part_and_nothing_else(files, train):
    model = build_model(files["test_resnet"], train)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    trainer = DPTrainer(model, torch.optim.SGD(trainable_parameters(model), lr=1.0), sigma=1.0, clip=1.0, batch_size=2)
    x, y = batch(2)
    trainer.step(x, cross_entropy(y), CipherStream.from_entropy())
    moved = {name for name, one in model.state_dict().items() if not torch.equal(one, before[name])}
    assert moved == {name for name, p in model.named_parameters() if p.requires_grad}
    assert all("running" not in name for name in moved)


def test_each_trained_part_has_the_named_parameters(files):
    def names(name, train):
        model = build_model(files[name], train).model
        return {key.replace(".0.weight", ".weight") for key, p in model.named_parameters() if p.requires_grad}

    head = {"head.weight", "head.bias"}
    assert names("test_vit", "head") == head
    assert {key.split(".")[0] for key in names("test_resnet", "last")} == {"layer4", "fc"}
    last = {key for key in names("test_vit", "last") if not key.startswith("blocks.5.")}
    assert last == head | {"norm.weight", "norm.bias"}
    assert all("norm" in key or key.startswith("head.") for key in names("test_vit", "norm"))
    lora = names("test_vit", "lora")
    assert {key for key in lora if ".down." not in key and ".up." not in key} == head
    assert {"blocks.0.attn.qkv.down.weight", "blocks.5.mlp.fc2.up.weight"} < lora


@pytest.mark.parametrize("name", NAMES)
def test_adapters_start_without_effect_and_alike_at_all_sites(files, name):
    plain, adapted, again = build_model(files[name]), build_model(files[name], "lora"), build_model(files[name], "lora")
    other = build_model(files[name], "lora", seed=1)
    assert all(map(torch.equal, trainable_parameters(adapted), trainable_parameters(again)))
    assert not torch.equal(other.model.get_classifier().weight, again.model.get_classifier().weight)
    adapted.model.get_classifier().load_state_dict(plain.model.get_classifier().state_dict())
    x, _ = batch(2)
    with torch.no_grad():
        torch.testing.assert_close(adapted(x), plain(x))


def test_models_from_different_start_weights_have_different_digests(files, tmp_path):
    path = files["test_resnet"]
    other = published(tmp_path, "test_resnet", seed=1)
    assert schema_digest(build_model(path, "norm")) == schema_digest(build_model(path, "norm", seed=5))
    assert (
        len(
            {
                schema_digest(build_model(path)),
                schema_digest(build_model(path, "norm")),
                schema_digest(build_model(other, "norm")),
            }
        )
        == 3
    )
    assert (
        start_digest(build_model(path, "norm")) == start_digest(build_model(path)) != start_digest(build_model(other))
    )
    bare = create_model(
        "timm:test_resnet", n_classes=N_CLASSES, shape=Images(3, SIZE), seed=9, start=StartWeights("norm")
    )
    whole = build_model(path, "norm")
    bare.load_state_dict(whole.state_dict())
    x, _ = batch(2)
    assert torch.equal(bare.eval()(x), whole.eval()(x)) and schema_digest(bare) == schema_digest(whole)
    assert start_digest(create_model("gn_cnn", n_classes=2, shape=Images(3, SIZE), seed=0)) == ""


def test_a_folder_holds_the_weights_of_several_architectures_and_pickles_are_read(files, tmp_path):
    folder = files["test_vit"].parent
    assert start_digest(build_model(folder, name="test_vit")) == start_digest(build_model(files["test_vit"]))
    state = timm.create_model("test_vit").state_dict()
    torch.save({"state_dict": state}, tmp_path / "w.pth")
    assert start_digest(build_model(tmp_path / "w.pth", name="test_vit"))


def _pickles():
    """Return weights as training programs save them beside other objects, and one with a tensor under two names."""
    table, arguments = torch.arange(12.0).reshape(3, 4).t(), argparse.Namespace(lr=0.1)
    yield {"state_dict": {"a": table, "n": torch.tensor(3)}, "best": np.float64(0.9)}
    yield {"model": OrderedDict(a=table, b=table), "args": arguments}
    yield {"a": table[:, 1:], "epoch": np.int64(3)}
    yield {"epoch": 3, "teacher": {"a": torch.nn.Parameter(table.half())}, "date": date(2026, 1, 2)}


@pytest.mark.parametrize("document", _pickles(), ids=["state_dict", "model", "flat", "teacher"])
def test_the_advice_for_a_pickle_that_is_not_opened_makes_a_file_that_is(tmp_path, document):
    path = tmp_path / "in.pth"
    torch.save(document, path)
    with pytest.raises(WsiFlError, match="never opened") as caught:
        read_weights(path)
    message = str(caught.value)
    assert len(message) < 600 and "\n" not in message
    _, *words = shlex.split(message[message.index("python -c") :])
    subprocess.run([sys.executable, *words], cwd=tmp_path, check=True)
    tensors = read_weights(tmp_path / "out.safetensors")
    inner = next((document[key] for key in ("state_dict", "model", "teacher") if key in document), document)
    inner = {name: each for name, each in inner.items() if isinstance(each, torch.Tensor)}
    assert tensors.keys() == inner.keys()
    for name, each in inner.items():
        assert torch.equal(tensors[name], each.to(tensors[name].dtype))


def test_resnet18_takes_the_weights_of_torchvision(tmp_path):
    import torchvision

    theirs = torchvision.models.resnet18().eval()
    save_file(theirs.state_dict(), tmp_path / "w.safetensors")
    start = StartWeights("head", tmp_path / "w.safetensors")
    ours = create_model("resnet18", n_classes=1000, shape=Images(3, SIZE), seed=0, start=start)
    ours.model.fc.load_state_dict(theirs.fc.state_dict())
    x, _ = batch(2)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs((x * 0.5 + 0.5 - ours.mean) / ours.sd))


@pytest.mark.parametrize(
    ("name", "shape", "start", "error", "words"),
    [
        ("mlp", Images(3, SIZE), "test_resnet", UsageError, "'mlp' starts from no weights"),
        ("linear_head", Vectors(8), "test_resnet", UsageError, "'linear_head' starts from no weights"),
        ("timm:test_resnet", Images(1, SIZE), "test_resnet", UsageError, "3 channels, and these have 1"),
        ("timm:no_such_net", Images(3, SIZE), "test_resnet", UsageError, "knows no model 'no_such_net'"),
        ("timm:test_vit", Images(3, SIZE), "test_resnet", WsiFlError, "does not fit the encoder test_vit"),
        ("timm:test_resnet", Images(3, SIZE), "none", WsiFlError, "no such file"),
        ("timm:test_vit", Images(3, 8), "test_vit", UsageError, "of images of 8 px"),
    ],
)
def test_unusable_start_weights_are_refused_in_one_line(files, name, shape, start, error, words):
    start = StartWeights("norm", files["test_vit"].parent / f"{start}.safetensors")
    refused(lambda: create_model(name, n_classes=2, shape=shape, seed=0, start=start), words, error=error)
