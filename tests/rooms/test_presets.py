"""Published encoders: their names and shapes, what is done to pixels, and what files and hubs may bring."""

import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from conftest import SHARED, refused
from safetensors.torch import load_file, save_file
from torch.nn import functional
from typer.testing import CliRunner

from wsi_fl.cli.main import app
from wsi_fl.federation.preflight import MUST_AGREE, compare
from wsi_fl.models.encoder import Encoder
from wsi_fl.models.network import Network, preset_model
from wsi_fl.models.presets import PRESETS, warning_of
from wsi_fl.models.renaming import timm_named
from wsi_fl.models.weights import published_weights
from wsi_fl.stages.site.encoders import transform_of
from wsi_fl.types import NoCommonPlan, UsageError, WsiFlError

LITE0 = SHARED / "weights" / "tf_efficientnet_lite0.fp16.safetensors"
ROOT = Path(__file__).parents[2]

PUBLISHED = {  # parameters, tensors and some shapes, as the sources in docs/encoders.md imply them
    "uni": (303350784, 342, {"pos_embed": (1, 197, 1024), "blocks.23.ls2.gamma": (1024,)}),
    "uni2-h": (
        681394176,
        343,
        {
            "pos_embed": (1, 256, 1536),
            "reg_token": (1, 8, 1536),
            "blocks.23.mlp.fc1.weight": (8192, 1536),
            "blocks.23.mlp.fc2.weight": (1536, 4096),
            "patch_embed.proj.weight": (1536, 3, 14, 14),
        },
    ),
    "virchow": (
        631229184,
        454,
        {"pos_embed": (1, 257, 1280), "blocks.31.mlp.fc1.weight": (6832, 1280), "norm.bias": (1280,)},
    ),
    "virchow2": (631239424, 455, {"pos_embed": (1, 261, 1280), "reg_token": (1, 4, 1280)}),
    "h-optimus-0": (1134774272, 567, {"pos_embed": (1, 256, 1536), "blocks.39.ls1.gamma": (1536,)}),
    "h-optimus-1": (1134774272, 567, {"reg_token": (1, 4, 1536), "blocks.0.mlp.fc1.bias": (8192,)}),
    "h0-mini": (85739520, 175, {"blocks.11.mlp.fc1.weight": (4096, 768), "reg_token": (1, 4, 768)}),
    "gigapath": (
        1134953984,
        566,
        {"patch_embed.proj.weight": (1536, 3, 16, 16), "pos_embed": (1, 197, 1536)},
    ),
    "kaiko-vits8": (21670272, 150, {"pos_embed": (1, 785, 384)}),
    "kaiko-vits16": (21665664, 150, {"pos_embed": (1, 197, 384)}),
    "kaiko-vitb8": (85807872, 150, {"patch_embed.proj.weight": (768, 3, 8, 8)}),
    "kaiko-vitb16": (85798656, 150, {"blocks.11.attn.qkv.weight": (2304, 768)}),
    "kaiko-vitl14": (304370688, 343, {"pos_embed": (1, 1369, 1024), "reg_token": (1, 4, 1024)}),
    "lunit-vits8": (21670272, 150, {"patch_embed.proj.weight": (384, 3, 8, 8)}),
    "lunit-vits16": (21665664, 150, {"patch_embed.proj.weight": (384, 3, 16, 16)}),
}
IN_TRANSFORMERS = {  # parameters as transformers counts them, blocks, d, hidden, side of the grid, patch, kind
    "phikon": (85798656, 12, 768, 3072, 14, 16, "vit"),
    "phikon-v2": (303351808, 24, 1024, 4096, 14, 16, "dinov2"),
    "hibou-b": (85741056, 12, 768, 2048, 16, 14, "registers"),
    "hibou-l": (303659264, 24, 1024, 2736, 16, 14, "registers"),
    "midnight-12k": (1136480768, 40, 1536, 4096, 37, 14, "swiglu"),
}


def in_transformers(blocks, d, hidden, side, patch, kind):
    """Names and shapes of transformers' ViTModel, Dinov2Model, and Hibou's with registers."""
    shapes = {
        "embeddings.cls_token": (1, 1, d),
        "embeddings.position_embeddings": (1, 1 + side * side, d),
        "embeddings.patch_embeddings.projection.weight": (d, 3, patch, patch),
        "embeddings.patch_embeddings.projection.bias": (d,),
        "layernorm.weight": (d,),
        "layernorm.bias": (d,),
    }
    if kind != "vit":
        shapes["embeddings.mask_token"] = (1, d)
    if kind == "registers":
        shapes["embeddings.register_tokens"] = (1, 4, d)
    plain = kind == "dinov2"
    for k in range(blocks):
        block = f"encoder.layer.{k}."
        linear = {f"attention.attention.{part}": (d, d) for part in ("query", "key", "value")}
        linear["attention.output.dense"] = (d, d)
        if kind == "vit":
            linear |= {"intermediate.dense": (hidden, d), "output.dense": (d, hidden)}
        elif plain:
            linear |= {"mlp.fc1": (hidden, d), "mlp.fc2": (d, hidden)}
        else:
            linear |= {"mlp.weights_in": (2 * hidden, d), "mlp.weights_out": (d, hidden)}
        norms = ("layernorm_before", "layernorm_after") if kind == "vit" else ("norm1", "norm2")
        for name, shape in linear.items():
            shapes |= {f"{block}{name}.weight": shape, f"{block}{name}.bias": shape[:1]}
        for name in norms:
            shapes |= {f"{block}{name}.weight": (d,), f"{block}{name}.bias": (d,)}
        if kind != "vit":
            shapes |= {f"{block}layer_scale{n}.lambda1": (d,) for n in (1, 2)}
    return shapes


def meta(shapes):
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def randomly(model, seed=0):
    """Random weights under a model's names."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(one.shape, generator=generator) * 0.05 for name, one in model.state_dict().items()
    }


def test_every_preset_is_held_against_a_table():
    assert PUBLISHED.keys() | IN_TRANSFORMERS.keys() == PRESETS.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_names_and_shapes_are_those_that_the_sources_imply(name):
    n_parameters, n_tensors, some = PUBLISHED[name]
    state = preset_model(PRESETS[name]).state_dict()
    assert sum(one.numel() for one in state.values()) == n_parameters == PRESETS[name].n_parameters
    assert len(state) == n_tensors
    assert {key: tuple(state[key].shape) for key in some} == some


@pytest.mark.parametrize("name", IN_TRANSFORMERS)
def test_transformers_names_become_timms(name):
    n_parameters, *sizes = IN_TRANSFORMERS[name]
    shapes = in_transformers(*sizes)
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == n_parameters
    model = preset_model(PRESETS[name])
    wanted = {key: one.shape for key, one in model.state_dict().items()}
    assert {key: one.shape for key, one in timm_named(meta(shapes), model).items()} == wanted
    assert sum(shape.numel() for shape in wanted.values()) == PRESETS[name].n_parameters


@pytest.mark.parametrize("name", ["kaiko-vits8", "lunit-vits16", "h0-mini"])
def test_weights_of_a_preset_give_the_features_of_the_plain_model(name, tmp_path):
    preset = PRESETS[name]
    with torch.device("cpu"):
        gated = {"mlp_layer": timm.layers.SwiGLUPacked, "act_layer": torch.nn.SiLU} if preset.swiglu else {}
        plain = timm.create_model(preset.architecture, num_classes=0, **preset.arguments, **gated).eval()
    plain.load_state_dict(randomly(plain))
    path = tmp_path / "weights.safetensors"
    save_file(plain.state_dict(), path)
    encoder = Encoder(name, path)
    patches = np.random.default_rng(0).integers(0, 256, (2, 224, 224, 3)).astype(np.uint8)
    colours = torch.tensor([preset.transform.mean, preset.transform.sd]).view(2, 1, 3, 1, 1)
    images = torch.from_numpy(patches).permute(0, 3, 1, 2) / 255
    with torch.inference_mode():
        tokens = plain.forward_features((images - colours[0]) / colours[1])
    expected = tokens[:, 0]
    if name == "h0-mini":
        expected = torch.cat([expected, tokens[:, 5:].mean(1)], 1)
    assert encoder.n_features == preset.n_features == expected.shape[1]
    np.testing.assert_allclose(encoder(patches), expected.numpy(), atol=1e-4)
    assert encoder.label.startswith(f"{name} at 224 px sha256:") and preset.pooling in encoder.label
    refused(lambda: Encoder(name, path, input_px=96), "224 px alone")


def dinov2_by_hand(state, pixels, heads):
    """A block of transformers' DINOv2 with registers and SwiGLU, written down from its paper."""

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
    model = timm.create_model(
        "vit_base_patch14_reg4_dinov2",
        num_classes=0,
        img_size=42,
        embed_dim=24,
        depth=1,
        num_heads=2,
        mlp_ratio=32 / 24,
        mlp_layer=timm.layers.SwiGLUPacked,
        act_layer=torch.nn.SiLU,
    ).eval()
    model.load_state_dict(timm_named(state, model))
    pixels = torch.randn(1, 3, 42, 42, generator=generator)
    with torch.inference_mode():
        expected = dinov2_by_hand(state, pixels, heads=2)
        torch.testing.assert_close(model.forward_features(pixels), expected, atol=1e-5, rtol=1e-4)


def test_places_are_interpolated_to_the_models_grid():
    model = timm.create_model("vit_small_patch14_dinov2", num_classes=0, img_size=28, depth=0)
    places = torch.arange(17.0).view(1, 17, 1).expand(1, 17, 384)
    state = {"embeddings.cls_token": torch.zeros(1, 1, 384), "embeddings.position_embeddings": places}
    found = timm_named(state, model)["pos_embed"]
    assert found.shape == (1, 5, 384) and torch.equal(found[:, 0], places[:, 0])
    corners = found[0, 1:, 0]
    assert corners[0] < corners[1] < corners[2] < corners[3]
    assert corners.mean() == pytest.approx(8.5)


def test_gigapath_sees_the_middle_of_patches_of_256_px():
    network = Network(torch.nn.Identity(), PRESETS["gigapath"].transform, PRESETS["gigapath"].pooling)
    pixels = torch.zeros(1, 256, 256, 3, dtype=torch.uint8)
    pixels[:, 16:240, 16:240] = 255
    seen = network.prepared(pixels)
    assert seen.shape == (1, 3, 224, 224)
    white = [(1 - mean) / sd for mean, sd in zip((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), strict=True)]
    torch.testing.assert_close(seen, torch.tensor(white).view(1, 3, 1, 1).expand_as(seen))
    assert network.prepared(torch.zeros(1, 512, 512, 3, dtype=torch.uint8)).shape == (1, 3, 224, 224)


def test_a_wrong_key_or_shape_is_named_with_shapes(tmp_path):
    state = randomly(preset_model(PRESETS["lunit-vits16"]))
    path = tmp_path / "weights.safetensors"

    def refusal(state, *words):
        save_file(state, path)
        refused(lambda: Encoder("lunit-vits16", path), *words, error=WsiFlError)

    other = dict(state)
    other["blocks.0.attn.qvk.weight"] = other.pop("blocks.0.attn.qkv.weight")
    refusal(
        other,
        "'blocks.0.attn.qkv.weight' is missing (shape [1152, 384])",
        "'blocks.0.attn.qvk.weight' (shape",
    )
    wrong = state | {"pos_embed": torch.zeros(1, 257, 384)}
    refusal(wrong, "'pos_embed' has shape [1, 257, 384] instead of [1, 197, 384]")
    refusal({key: one for key, one in state.items() if not key.startswith("norm")}, "'norm.bias'", "1 more")


def test_tensors_of_a_pickle_are_kept_once_as_safetensors(tmp_path):
    state = randomly(preset_model(PRESETS["lunit-vits16"]))
    path, told = tmp_path / "lunit.pth", []
    torch.save({"state_dict": state, "epoch": 3}, path)
    first = Encoder("lunit-vits16", path, tell=told.append)
    kept = tmp_path / "lunit.pth.safetensors"
    assert len(told) == 1 and str(kept) in told[0]
    written = kept.stat().st_mtime_ns
    assert Encoder("lunit-vits16", path, tell=told.append).label == first.label
    assert kept.stat().st_mtime_ns == written and len(told) == 1
    torch.save({name: one * 2 for name, one in state.items()}, path)
    assert Encoder("lunit-vits16", path, tell=told.append).label != first.label and len(told) == 2


def test_tensors_of_a_pickle_go_to_the_cache_where_its_folder_cannot_be_written(tmp_path, monkeypatch):
    path = tmp_path / "archive" / "lunit.bin"
    path.parent.mkdir()
    torch.save(randomly(preset_model(PRESETS["lunit-vits16"])), path)
    monkeypatch.setattr("os.access", lambda *_: False)
    Encoder("lunit-vits16", path, cache=tmp_path / "weights")
    assert len(list((tmp_path / "weights").glob("lunit-*.safetensors"))) == 1
    assert list(path.parent.iterdir()) == [path]
    refused(lambda: Encoder("lunit-vits16", path), "cannot be written", error=WsiFlError)


class Harm:
    """What a pickle may do when it is opened."""

    def __reduce__(self):
        return (Path.touch, (Path("harm"),))


def test_a_pickle_with_code_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Harm()}, tmp_path / "zipped.pt")
    (tmp_path / "plain.bin").write_bytes(pickle.dumps(Harm()))
    for name in ("zipped.pt", "plain.bin"):
        refused(
            lambda name=name: Encoder("lunit-vits16", tmp_path / name),
            "more than tensors",
            "never opened",
            error=WsiFlError,
        )
    assert not (tmp_path / "harm").exists()
    torch.save([1, 2], tmp_path / "list.pt")
    refused(lambda: Encoder("uni", tmp_path / "list.pt"), "no tensors by name", error=WsiFlError)


def test_gated_weights_say_where_to_ask(monkeypatch):
    import httpx2 as httpx
    from huggingface_hub.errors import GatedRepoError

    def gated(*_):
        raise GatedRepoError(
            "403 Client Error", response=httpx.Response(403, request=httpx.Request("GET", "http://x"))
        )

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr("urllib.request.getproxies", lambda: {"https": "x"})
    monkeypatch.setattr("huggingface_hub.hf_hub_download", gated)
    refused(lambda: Encoder("uni"), "MahmoodLab/UNI", "ask at https://", "hf auth login", error=WsiFlError)


def test_the_other_name_of_a_file_on_the_hub_is_tried(monkeypatch, tmp_path):
    from huggingface_hub.errors import EntryNotFoundError

    asked = []

    def download(_, file):
        asked.append(file)
        if file == "model.safetensors":
            raise EntryNotFoundError("404")
        return str(tmp_path / file)

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr("urllib.request.getproxies", lambda: {"https": "x"})
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    files = ("model.safetensors", "pytorch_model.bin")
    assert published_weights("uni", "MahmoodLab/UNI", files) == tmp_path / "pytorch_model.bin"
    assert asked == list(files)


@pytest.mark.skipif(not LITE0.exists(), reason="the published weights are not here")
def test_features_of_a_timm_model_are_exactly_timms():
    state = {key: one.float() for key, one in load_file(LITE0).items()}
    model = timm.create_model("tf_efficientnet_lite0", num_classes=0).eval()
    model.load_state_dict({key: one for key, one in state.items() if not key.startswith("classifier")})
    model.to(memory_format=torch.channels_last)
    config = timm.data.resolve_model_data_config(model)
    mean, std = (torch.tensor(config[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    patches = np.random.default_rng(0).integers(0, 256, (3, 96, 96, 3)).astype(np.uint8)
    with torch.inference_mode():
        images = torch.from_numpy(patches).permute(0, 3, 1, 2).float().div_(255)
        expected = model(images.sub_(mean).div_(std)).numpy()
    encoder = Encoder("tf_efficientnet_lite0", LITE0)
    assert np.array_equal(encoder(patches), expected)
    assert "; mean 0.5 0.5 0.5; sd 0.5 0.5 0.5" in encoder.label
    assert transform_of(encoder)["interpolation"] == "bicubic"


def labels(**named):
    same = dict.fromkeys(MUST_AGREE, 1)
    return [{"site": site, **same, "encoder": label} for site, label in named.items()]


def test_sites_that_differ_in_normalisation_alone_are_refused_by_it():
    ours = "uni at 224 px sha256:0; mean 0.485 0.456 0.406; sd 0.229 0.224 0.225; class token"
    theirs = ours.replace("0.485 0.456 0.406", "0.5 0.5 0.5")
    refused(
        lambda: compare(labels(C1=ours, C2=ours, C3=theirs)),
        "C3 brings mean 0.5 0.5 0.5 as the encoder of its features, the others mean 0.485 0.456 0.406",
        error=NoCommonPlan,
    )
    other = ours.replace("sha256:0", "sha256:1")
    refused(lambda: compare(labels(C1=ours, C2=other)), "sha256:0", "sha256:1", error=NoCommonPlan)


def test_another_resolution_than_trained_at_is_said():
    assert warning_of("uni", 256, 0.5) is None and warning_of("virchow2", 224, 2.0) is None
    said = warning_of("uni", 1000, 0.5)
    assert said is not None and "trained at 0.5 µm/px" in said and "2.23 µm/px" in said
    assert warning_of("gigapath", 256, 0.5) is None and warning_of("hibou-b", 224, 4.0) is None
    assert warning_of("densenet121", 1000, 9.0) is None


def test_the_command_lists_them_all(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pipelines").mkdir()
    (tmp_path / "sites").mkdir()
    (tmp_path / "uni.safetensors").touch()
    (tmp_path / "pipelines" / "own.toml").write_text(
        '# wsi-fl mosaic\n[mosaic]\nencoder = "uni"\nweights = "uni.safetensors"\n'
    )
    found = json.loads(CliRunner().invoke(app, ["encoders", "--json"], catch_exceptions=False).stdout)
    rows = {row["name"]: row for row in found["encoders"]}
    assert rows.keys() == PRESETS.keys()
    assert rows["uni"]["weights"] == str(tmp_path / "uni.safetensors") and rows["virchow"]["weights"] is None
    assert rows["uni"]["n_features"] == 1024 and rows["uni"]["licence"] == "CC BY-NC-ND 4.0"
    monkeypatch.setattr("wsi_fl.stages.prepare.encoders._memory", lambda: 2 << 30)
    small = json.loads(CliRunner().invoke(app, ["encoders", "--json"]).stdout)["encoders"]
    assert {row["name"] for row in small if row["fits"]} == {
        name for name, preset in PRESETS.items() if preset.n_parameters < 1 << 27
    }


def test_the_table_in_the_documentation_is_that_of_the_package():
    page = (ROOT / "docs" / "encoders.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in page.splitlines()
        if line.startswith("| `")
    ]
    described = {row[0].strip("`"): row[1:] for row in rows if len(row) == 8}
    assert described == {
        name: [
            str(preset.n_features),
            str(preset.transform.px),
            ", ".join(f"{mpp:g}" for mpp in preset.mpp) or "not stated",
            f"{preset.n_parameters / 1e6:.1f} M",
            preset.pooling,
            preset.licence,
            f"[{preset.hub_id}](https://huggingface.co/{preset.hub_id})",
        ]
        for name, preset in PRESETS.items()
    }
    colours = {0.485: "ImageNet", 0.5: "0.5"}
    assert {row[0].strip("`"): row[1:3] for row in rows if len(row) == 5} == {
        name: [colours.get(preset.transform.mean[0], "own"), preset.transform.parts[2]]
        for name, preset in PRESETS.items()
    }
    assert re.search(r"# Encoders", page)


def test_a_name_that_nobody_knows_points_to_the_list(tmp_path):
    refused(lambda: Encoder("uni3"), "presets are uni, ", error=UsageError)
