"""Encoder presets: names and shapes of weights, normalization of pixels, and refusal of unsafe files."""

import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from conftest import nightly, refused
from safetensors.torch import save_file
from torch.nn import functional

from wsi_fl.models.encoder import Encoder, build_preset_model
from wsi_fl.models.presets import PRESETS
from wsi_fl.models.weights import _convert_names, load_weights
from wsi_fl.types import WsiFlError

SIZES = {  # parameters as transformers counts them, blocks, d, hidden, side of the grid, patch, kind
    "phikon": (85798656, 12, 768, 3072, 14, 16, "vit"),
    "phikon-v2": (303351808, 24, 1024, 4096, 14, 16, "dinov2"),
    "hibou-b": (85741056, 12, 768, 2048, 16, 14, "registers"),
    "hibou-l": (303659264, 24, 1024, 2736, 16, 14, "registers"),
    "midnight-12k": (1136480768, 40, 1536, 4096, 37, 14, "swiglu"),
}


def in_transformers(blocks, d, hidden, side, patch, kind):
    """Return names and shapes of transformers' ViTModel, Dinov2Model, and Hibou's with registers."""
    patches = "embeddings.patch_embeddings.projection"
    shapes = {
        "embeddings.cls_token": (1, 1, d),
        "embeddings.position_embeddings": (1, 1 + side * side, d),
        f"{patches}.weight": (d, 3, patch, patch),
        f"{patches}.bias": (d,),
    }
    if kind != "vit":
        shapes["embeddings.mask_token"] = (1, d)
    if kind == "registers":
        shapes["embeddings.register_tokens"] = (1, 4, d)
    linear = {f"attention.attention.{part}": (d, d) for part in ("query", "key", "value")}
    linear["attention.output.dense"] = (d, d)
    if kind == "vit":
        linear |= {"intermediate.dense": (hidden, d), "output.dense": (d, hidden)}
    elif kind == "dinov2":
        linear |= {"mlp.fc1": (hidden, d), "mlp.fc2": (d, hidden)}
    else:
        linear |= {"mlp.weights_in": (2 * hidden, d), "mlp.weights_out": (d, hidden)}
    norms = ("layernorm_before", "layernorm_after") if kind == "vit" else ("norm1", "norm2")
    linear = {f"encoder.layer.{k}.{name}": shape for k in range(blocks) for name, shape in linear.items()}
    norms = ["layernorm", *(f"encoder.layer.{k}.{name}" for k in range(blocks) for name in norms)]
    for name, shape in (linear | dict.fromkeys(norms, (d,))).items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    if kind != "vit":
        scales = [f"encoder.layer.{k}.layer_scale{n}.lambda1" for k in range(blocks) for n in (1, 2)]
        shapes |= dict.fromkeys(scales, (d,))
    return shapes


NEWER = {"attention.attention.query": "attention.q_proj", "attention.attention.key": "attention.k_proj"}
NEWER |= {"attention.attention.value": "attention.v_proj", "attention.output.dense": "attention.o_proj"}
NEWER |= {"intermediate.dense": "mlp.fc1", "output.dense": "mlp.fc2", "encoder.layer.": "layers."}
"""What transformers 5 calls them when it saves a model."""


def randomly(model, seed=0):
    """Return random weights under a model's names."""
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(one.shape, generator=g) * 0.05 for name, one in model.state_dict().items()}


def newer(key):
    for old, new in NEWER.items():
        key = key.replace(old, new)
    return key


@pytest.mark.parametrize("name", SIZES)
def test_transformers_5_weight_names_are_converted_to_timm(name):
    n_parameters, *sizes = SIZES[name]
    shapes, model = in_transformers(*sizes), build_preset_model(PRESETS[name])
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == n_parameters
    wanted = {key: one.shape for key, one in model.state_dict().items()}
    assert sum(shape.numel() for shape in wanted.values()) == PRESETS[name].n_parameters
    for called in (str, newer) if "phikon" in name else (str,):
        saved = {called(key): torch.empty(shape, device="meta") for key, shape in shapes.items()}
        assert ("layers.0.attention.k_proj.bias" in saved) == (called is newer) and len(saved) == len(shapes)
        assert {key: one.shape for key, one in _convert_names(saved, model).items()} == wanted


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("UNI2", "did you mean 'uni2-h'?"),
        ("GenBio_PathFM", "did you mean 'genbio-pathfm'?"),
        ("conch_v1", "wsi-fl import"),
        ("titan", "whole slide"),
        ("musk", "import"),
        ("rudolfv2-s", "runs code of its authors"),
    ],
)
def test_an_unknown_preset_is_refused_with_advice(name, word):
    refused(lambda: Encoder(name), word)


def test_the_documentation_of_encoders_matches_the_table():
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "prepare-data.md").read_text("utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()]
    lines = {row[0].strip("`"): row[1:] for row in rows if row[0].startswith("`")}
    for name, preset in PRESETS.items():
        mpp = preset.mpp_text.removesuffix(" µm/px")
        facts = [str(preset.n_features), str(preset.transform.px), mpp, f"{preset.n_parameters / 1e6:.1f} M"]
        assert lines[name][:6] == [*facts, preset.pooling, preset.licence]
        assert preset.hub_id in lines[name][6]


@pytest.mark.parametrize("name", ["lunit-vits16", *nightly("h0-mini")])
def test_weights_of_a_preset_give_the_features_of_the_plain_model(name, tmp_path):
    preset = PRESETS[name]
    with torch.device("cpu"):
        gated = {"mlp_layer": timm.layers.SwiGLUPacked, "act_layer": torch.nn.SiLU} if preset.swiglu else {}
        plain = timm.create_model(preset.architecture, num_classes=0, **preset.arguments, **gated).eval()
    plain.load_state_dict(randomly(plain))
    path = tmp_path / "weights.safetensors"
    save_file(plain.state_dict(), path)
    encoder = Encoder(name, path)
    side = preset.transform.resize_px or 224
    patches = np.random.default_rng(0).integers(0, 256, (2, side, side, 3)).astype(np.uint8)
    colours = torch.tensor([preset.transform.mean, preset.transform.sd]).view(2, 1, 3, 1, 1)
    edge = (side - 224) // 2
    images = torch.from_numpy(patches).permute(0, 3, 1, 2)[..., edge : edge + 224, edge : edge + 224] / 255
    with torch.inference_mode():
        tokens = plain.forward_features((images - colours[0]) / colours[1])
    expected = tokens[:, 0]
    if name == "h0-mini":
        expected = torch.cat([expected, tokens[:, 5:].mean(1)], 1)
    assert encoder.n_features == preset.n_features == expected.shape[1]
    np.testing.assert_allclose(encoder(patches), expected.numpy(), atol=1e-4)
    assert encoder.label.startswith(f"{name} at 224 px sha256:") and preset.pooling in encoder.label
    refused(lambda: Encoder(name, path, input_px=96), "only patches of 224 px")


def dinov2_by_hand(state, pixels, heads):
    """Compute a block of transformers' DINOv2 with registers and SwiGLU, as in its paper."""

    def linear(x, name):
        return functional.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    def norm(x, name):
        return functional.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], 1e-6)

    kernel = "embeddings.patch_embeddings.projection"
    patches = functional.conv2d(pixels, state[f"{kernel}.weight"], state[f"{kernel}.bias"], stride=14)
    x = torch.cat([state["embeddings.cls_token"], patches.flatten(2).mT], 1)
    x = x + state["embeddings.position_embeddings"]
    x = torch.cat([x[:, :1], state["embeddings.register_tokens"], x[:, 1:]], 1)
    block = "encoder.layer.0"
    y = norm(x, f"{block}.norm1")
    q, k, v = (
        linear(y, f"{block}.attention.attention.{part}").unflatten(-1, (heads, -1)).transpose(1, 2)
        for part in ("query", "key", "value")
    )
    attention = ((q @ k.mT) / q.shape[-1] ** 0.5).softmax(-1) @ v
    y = linear(attention.transpose(1, 2).flatten(2), f"{block}.attention.output.dense")
    x = x + state[f"{block}.layer_scale1.lambda1"] * y
    gate, value = linear(norm(x, f"{block}.norm2"), f"{block}.mlp.weights_in").chunk(2, -1)
    y = linear(functional.silu(gate) * value, f"{block}.mlp.weights_out")
    return norm(x + state[f"{block}.layer_scale2.lambda1"] * y, "layernorm")


def test_renamed_weights_compute_what_transformers_computes():
    generator = torch.Generator().manual_seed(0)
    shapes = in_transformers(1, 24, 16, 3, 14, "registers")
    state = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    how = {"embed_dim": 24, "depth": 1, "num_heads": 2, "mlp_ratio": 32 / 24, "img_size": 42, "num_classes": 0}
    how |= {"mlp_layer": timm.layers.SwiGLUPacked, "act_layer": torch.nn.SiLU}
    model = timm.create_model("vit_base_patch14_reg4_dinov2", **how).eval()
    model.load_state_dict(_convert_names(state, model))
    pixels = torch.randn(1, 3, 42, 42, generator=generator)
    with torch.inference_mode():
        expected = dinov2_by_hand(state, pixels, heads=2)
        torch.testing.assert_close(model.forward_features(pixels), expected, atol=1e-5, rtol=1e-4)


def test_the_own_names_of_dinov2_with_registers_compute_the_same_as_those_of_transformers():
    generator = torch.Generator().manual_seed(0)
    shapes = in_transformers(1, 24, 16, 3, 14, "registers")
    state = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    how = {"embed_dim": 24, "depth": 1, "num_heads": 2, "mlp_ratio": 32 / 24, "img_size": 42, "num_classes": 0}
    how |= {"mlp_layer": timm.layers.SwiGLUPacked, "act_layer": torch.nn.SiLU}
    models = [timm.create_model("vit_base_patch14_reg4_dinov2", **how).eval() for _ in range(2)]
    load_weights(models[0], state, "transformers")
    own = {"register_tokens": state["embeddings.register_tokens"], "mask_token": torch.zeros(1, 24)}
    own["pos_embed"] = state["embeddings.position_embeddings"]
    own["cls_token"] = state["embeddings.cls_token"]
    known = {**own, "reg_token": None}
    for name, tensor in models[0].state_dict().items():
        if name not in known:
            own[name.replace("fc1", "w12").replace("fc2", "w3")] = tensor
    load_weights(models[1], own, "dinov2")
    pixels = torch.randn(1, 3, 42, 42, generator=generator)
    with torch.inference_mode():
        expected = dinov2_by_hand(state, pixels, heads=2)
        torch.testing.assert_close(models[1].forward_features(pixels), expected, atol=1e-5, rtol=1e-4)


def dinov3_by_hand(state, images, heads):
    """Compute the class tokens of a block of DINOv3 without biases of queries, keys and values, as in its paper."""

    def linear(x, name):
        return functional.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    def norm(x, name):
        return functional.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], 1e-6)

    patches = functional.conv2d(images, state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], stride=16)
    side, first = patches.shape[-1], torch.cat([state["cls_token"], state["storage_tokens"]], 1)
    x = torch.cat([first.expand(len(images), -1, -1), patches.flatten(2).mT], 1)
    q, k, v = (
        linear(norm(x, "blocks.0.norm1"), "blocks.0.attn.qkv").unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    )
    quarter = q.shape[-1] // 4
    places = 2 * (torch.arange(side) + 0.5) / side - 1
    grid = torch.stack(torch.meshgrid(places, places, indexing="ij"), -1).reshape(-1, 2, 1)
    angles = (2 * torch.pi * grid / 100 ** (torch.arange(quarter) / quarter)).flatten(1).tile(2)

    def rotate(x):
        low, high = x[..., 5:, :].chunk(2, -1)
        return torch.cat([x[..., :5, :], x[..., 5:, :] * angles.cos() + torch.cat([-high, low], -1) * angles.sin()], 2)

    attention = ((rotate(q) @ rotate(k).mT) / q.shape[-1] ** 0.5).softmax(-1) @ v
    y = linear(attention.transpose(1, 2).flatten(2), "blocks.0.attn.proj")
    x = x + state["blocks.0.ls1.gamma"] * y
    y = norm(x, "blocks.0.norm2")
    y = linear(functional.silu(linear(y, "blocks.0.mlp.w1")) * linear(y, "blocks.0.mlp.w2"), "blocks.0.mlp.w3")
    return norm(x + state["blocks.0.ls2.gamma"] * y, "norm")[:, 0]


def test_genbio_pathfm_joins_the_class_tokens_of_the_three_channels(tmp_path, monkeypatch):
    whole, d = PRESETS["genbio-pathfm"], 48
    sizes = {"embed_dim": d, "depth": 1, "num_heads": 2}
    narrow = replace(whole, n_features=3 * d, arguments=whole.arguments | sizes)
    monkeypatch.setitem(PRESETS.builtin, "genbio-pathfm", narrow)
    shapes = {"cls_token": (1, 1, d), "storage_tokens": (1, 4, d), "patch_embed.proj.weight": (d, 1, 16, 16)}
    shapes |= {"rope_embed.periods": (6,), "patch_embed.proj.bias": (d,), "norm.weight": (d,), "norm.bias": (d,)}
    linear = {"attn.qkv": (3 * d, d), "attn.proj": (d, d), "mlp.w1": (128, d), "mlp.w2": (128, d), "mlp.w3": (d, 128)}
    shapes |= {f"blocks.0.{name}.weight": shape for name, shape in (linear | {"norm1": (d,), "norm2": (d,)}).items()}
    shapes |= {f"blocks.0.{name}.bias": (shape[0],) for name, shape in linear.items() if name != "attn.qkv"}
    shapes |= {f"blocks.0.{name}": (d,) for name in ("norm1.bias", "norm2.bias", "ls1.gamma", "ls2.gamma")}
    generator = torch.Generator().manual_seed(0)
    small = ("cls_token", "patch_embed")  # numbers that tell the epsilon of norms
    state = {
        name: torch.randn(shape, generator=generator) * (0.005 if name.startswith(small) else 0.3)
        for name, shape in shapes.items()
    }
    torch.save(state, path := tmp_path / "model.pth")
    patches = np.random.default_rng(0).integers(0, 256, (2, 224, 224, 3)).astype(np.uint8)
    colours = torch.tensor(GENBIO).view(2, 1, 3, 1, 1)
    images = (torch.from_numpy(patches).permute(0, 3, 1, 2) / 255 - colours[0]) / colours[1]
    channels = [dinov3_by_hand(state, images[:, k : k + 1], heads=2) for k in range(3)]
    encoder = Encoder("genbio-pathfm", path)
    np.testing.assert_allclose(encoder(patches), torch.cat(channels, 1).numpy(), atol=1e-4)
    assert encoder.n_features == 3 * d and "mean 0.697 0.575 0.728" in encoder.label


IMAGENET, HALF = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), ((0.5,) * 3, (0.5,) * 3)
BIOPTIMUS = ((0.707223, 0.578729, 0.703617), (0.211883, 0.230117, 0.177517))
LUNIT = ((0.70322989, 0.53606487, 0.66096631), (0.21716536, 0.26081574, 0.20723464))
GENBIO = ((0.697, 0.575, 0.728), (0.188, 0.240, 0.187))
HIBOU = ((0.7068, 0.5755, 0.722), (0.195, 0.2316, 0.1816))
PUBLISHED = {  # colours, short side after resizing, crop, interpolation, d, millions of parameters
    "gigapath-flash": (IMAGENET, 256, 224, "bicubic", 384, 21.7),
    "kaiko-vits8": (HALF, 224, 224, "bilinear", 384, 21.7),
    "kaiko-vits16": (HALF, 224, 224, "bilinear", 384, 21.7),
    "lunit-vits8": (LUNIT, 248, 224, "bicubic", 384, 21.7),
    "lunit-vits16": (LUNIT, 248, 224, "bicubic", 384, 21.7),
    "uni": (IMAGENET, 224, 224, "bilinear", 1024, 303.4),
    "uni2-h": (IMAGENET, 224, 224, "bilinear", 1536, 681.4),
    "virchow": (IMAGENET, 224, 224, "bicubic", 2560, 631.2),
    "virchow2": (IMAGENET, 224, 224, "bicubic", 2560, 631.2),
    "h-optimus-0": (BIOPTIMUS, 224, 224, "bicubic", 1536, 1134.8),
    "h-optimus-1": (BIOPTIMUS, 224, 224, "bicubic", 1536, 1134.8),
    "h0-mini": (BIOPTIMUS, 224, 224, "bicubic", 1536, 85.7),
    "gigapath": (IMAGENET, 256, 224, "bicubic", 1536, 1135.0),
    "phikon": (IMAGENET, 224, 224, "bilinear", 768, 85.8),
    "phikon-v2": (IMAGENET, 224, 224, "bicubic", 1024, 303.4),
    "kaiko-vitb8": (HALF, 224, 224, "bilinear", 768, 85.8),
    "kaiko-vitb16": (HALF, 224, 224, "bilinear", 768, 85.8),
    "kaiko-vitl14": (HALF, 224, 224, "bilinear", 1024, 304.4),
    "hibou-b": (HIBOU, 224, 224, "bicubic", 768, 85.7),
    "hibou-l": (HIBOU, 224, 224, "bicubic", 1024, 303.7),
    "midnight-12k": (HALF, 224, 224, "bilinear", 3072, 1134.8),
    "openmidnight": (IMAGENET, 224, 224, "bilinear", 1536, 1134.8),
    "gpfm": (IMAGENET, 224, 224, "bicubic", 1024, 303.2),
    "mstar": (IMAGENET, 224, 224, "bicubic", 1024, 303.4),
    "genbio-pathfm": (GENBIO, 224, 224, "bilinear", 4608, 1133.7),
}


def test_every_preset_has_its_published_configuration():
    variants = {name for name in PRESETS if name.endswith(("-uncropped", "-cropped"))}
    assert set(PRESETS.builtin) - variants == set(PUBLISHED)
    for name, (colours, side, crop, interpolation, d, millions) in PUBLISHED.items():
        preset, made = PRESETS[name], PRESETS[name].transform
        assert (made.mean, made.sd) == colours
        assert (made.resize_px or made.px, made.px, made.interpolation) == (side, crop, interpolation)
        assert (preset.n_features, round(preset.n_parameters / 1e6, 1)) == (d, millions)
    for name in variants:
        base = name.removesuffix("-uncropped").removesuffix("-cropped")
        assert {other for other in PRESETS if PRESETS[other].hub_id == PRESETS[base].hub_id} == {base, name}
        assert PRESETS[name].transform.resize_px != PRESETS[base].transform.resize_px


@pytest.mark.parametrize("name", ["gigapath-flash", *nightly(*sorted(set(PUBLISHED) - {"gigapath-flash"}))])
def test_the_architecture_of_a_preset_has_its_number_of_parameters(name):
    preset = PRESETS[name]
    assert sum(parameter.numel() for parameter in build_preset_model(preset).parameters()) == preset.n_parameters


def test_a_wrong_key_or_shape_is_named_with_shapes():
    model, qkv = build_preset_model(PRESETS["lunit-vits16"]), "blocks.0.attn.qkv.weight"
    state = randomly(model)
    for wrong, words in (
        (
            {key.replace(qkv, "blocks.0.attn.qvk.weight"): one for key, one in state.items()},
            (f"'{qkv}' is missing (shape [1152, 384])", "'blocks.0.attn.qvk.weight' (shape"),
        ),
        (
            state | {"pos_embed": torch.zeros(1, 257, 384)},
            ("'pos_embed' has shape [1, 257, 384] instead of [1, 197, 384]",),
        ),
        ({key: one for key, one in state.items() if not key.startswith("norm")}, ("'norm.bias'", "1 more")),
    ):
        refused(partial(load_weights, model, wrong, "w"), *words, error=WsiFlError)


class Harm:
    """A pickle that runs code when opened."""

    def __reduce__(self):
        return (Path.touch, (Path("harm"),))


def test_a_pickle_with_code_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Harm()}, tmp_path / "zipped.pt")
    (tmp_path / "plain.bin").write_bytes(pickle.dumps(Harm()))
    for name in ("zipped.pt", "plain.bin"):
        act = partial(Encoder, "lunit-vits16", tmp_path / name)
        refused(act, "more than tensors", "never opened", error=WsiFlError)
    assert not (tmp_path / "harm").exists()
    torch.save([1, 2], tmp_path / "list.pt")
    refused(lambda: Encoder("uni", tmp_path / "list.pt"), "no tensors by name", error=WsiFlError)
