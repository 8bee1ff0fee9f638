"""`view`: without the token no slide is shown, nor one of another hospital, and every layer shows the stored values."""

import csv
import gc
import http.client
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit
from weakref import WeakSet

import numpy as np
import pytest
import shapely
from browser import CHROMIUM, browser
from conftest import REAL, SHARED, refused
from matplotlib import colormaps
from PIL import Image
from test_predict import trained_on

from wsi_fl.data.tasks import CLASSES
from wsi_fl.demo import simulated_slides
from wsi_fl.demo.simulated_slides.tiff_writer import encode_tiles, write_levels
from wsi_fl.slides.patching.annotations import read_annotations
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.stages.evaluation.predict import predict, write_patch_table
from wsi_fl.stages.evaluation.slide_predictor import SlidePrediction
from wsi_fl.stages.prepare.init_study import init_study
from wsi_fl.stages.site.site_data import open_store
from wsi_fl.stores.bag_store import Bag, BagMeta, BagStore, write_bags
from wsi_fl.study.folder import Study
from wsi_fl.system.extras import explain_missing
from wsi_fl.types import BagTable, GridSpec, WsiFlError
from wsi_fl.viewer import gallery as galleries
from wsi_fl.viewer import server as servers
from wsi_fl.viewer import site_layers
from wsi_fl.viewer.build_gallery import build_gallery
from wsi_fl.viewer.cli import view
from wsi_fl.viewer.gallery import Exhibit, Gallery, Overlay
from wsi_fl.viewer.server import ADDRESS, ViewServer
from wsi_fl.viewer.site_layers import Prediction, patch_layer, value_layer
from wsi_fl.viewer.tiles import TILE_PX, Pyramid, TileReader, _average_area

ILL = "patient_000_node_1"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def predicted(archive, tmp_path_factory):
    """A study and a run; C1's slides predicted with its own models, one of them with C2's too."""
    trained, run = trained_on(archive, tmp_path_factory.getbasetemp() / "trained")
    study = Study(tmp_path_factory.mktemp("view") / "study")
    shutil.copytree(trained.root, study.root, ignore=shutil.ignore_patterns("predictions"))
    predict(study, run, site="C1", slides=slides_of(archive, 0)[:2])
    predict(study, run, site="C2", slides=[slides_of(archive, 0)[1], slides_of(archive, 1)[0]])
    return study, Path(run).name


@pytest.fixture
def own(predicted, tmp_path):
    """A copy of that study that tests may change."""
    study, run = predicted
    shutil.copytree(study.root, tmp_path / "own")
    return Study(tmp_path / "own"), run


def slides_of(archive, centre):
    return sorted((archive / "training" / f"center_{centre}").glob("*.tif"))


def make_real(study, *sites, allow=()):
    for site in sites:
        path = study.root / "sites" / f"{site}.toml"
        kept = [line for line in path.read_text().splitlines() if not line.startswith("real")]
        path.write_text("\n".join([*kept, REAL, f"allow = {json.dumps(list(allow))}"]))


def layers_of(shown, name):
    """The layers of a slide by their name, drawn."""
    number = [one.name for one in shown.exhibits].index(name)
    found = shown.exhibits[number].overlays
    return {one.name: json.loads(shown.render_layer(number, k)) for k, one in enumerate(found)}


@contextmanager
def served(shown):
    with ViewServer(shown, 0) as server:
        thread = threading.Thread(target=server.serve)
        thread.start()
        try:
            yield server
        finally:
            server.stop()
            thread.join()


def gallery_of(*paths):
    return Gallery("some", [Exhibit(path.stem, path) for path in paths])


def request_path(server, path, *, method="GET", host=None, token=True):
    """Return (status, headers, body) of a request whose path is sent unchanged."""
    connection = http.client.HTTPConnection(ADDRESS, server.port, timeout=20)
    connection.putrequest(method, f"/{server.token}/{path}" if token else path, skip_host=True)
    connection.putheader("Host", f"{ADDRESS}:{server.port}" if host is None else host)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.headers, body


@contextmanager
def send_bytes(server, head):
    """Open a connection and send raw bytes, as no client would; HOST stands for the correct name."""
    with socket.create_connection((ADDRESS, server.port), timeout=20) as connection:
        connection.sendall(head.replace("HOST", f"Host: {ADDRESS}:{server.port}").encode())
        yield connection


def status_of(server, path):
    head = f"GET {path} HTTP/1.1\r\nHOST\r\nConnection: close\r\n\r\n"
    with send_bytes(server, head) as connection, connection.makefile("rb") as answer:
        return int(answer.readline().split()[1])


def read_tile(slide, level, column, row):
    pyramid = Pyramid(slide.size_l0)
    return _average_area(slide, pyramid.level_scale(level), pyramid.box(level, column, row))


def stitched(slide, level):
    """Put a level [h, w, 3] together from its tiles."""
    width, height = Pyramid(slide.size_l0).level_size(level)
    rows, columns = range(-(-height // TILE_PX)), range(-(-width // TILE_PX))
    return np.vstack([np.hstack([read_tile(slide, level, x, y) for x in columns]) for y in rows])


def test_joined_tiles_equal_the_slide_on_every_level(archive):
    small = SHARED / "data" / "slides" / "CMU-1-Small-Region.svs"
    path = small if small.exists() else slides_of(archive, 0)[1]
    with Slide(path, reader="openslide") as slide:
        pyramid = Pyramid(slide.size_l0)
        for level in range(pyramid.first_level, pyramid.last_level + 1):
            width, height = pyramid.level_size(level)
            whole = np.empty((height, width, 3), np.uint8)
            slide.read_area((0.0, 0.0), float(pyramid.level_scale(level)), whole, overlapping=False)
            assert np.array_equal(stitched(slide, level), whole)
        assert np.array_equal(whole[:200, :300], slide._compose_pixels((0, 0), 0, (300, 200)))


@pytest.fixture(scope="module")
def server(predicted):
    study, _ = predicted
    with served(build_gallery(study, site="C1")) as running:
        yield running


def test_the_server_serves_page_list_slide_layer_and_tile(server, archive):
    assert request_path(server, "")[2].startswith(b"<!doctype html>")
    catalogue = json.loads(request_path(server, "slides.json")[2])
    assert [one["name"] for one in catalogue["slides"]] == [path.stem for path in slides_of(archive, 0)]
    slide = json.loads(request_path(server, "slides/1.json")[2])
    assert (slide["size"], slide["mpp"], slide["last"]) == ([1024, 1024], 0.5, 10)
    layer = json.loads(request_path(server, "slides/1/layers/0.json")[2])
    assert len(layer["group"]) * 2 == len(layer["xy"]) > 0
    status, headers, body = request_path(server, "slides/1/tiles/10/1_0.jpg")
    assert (status, headers["Content-Type"]) == (200, "image/jpeg")
    with Slide(slides_of(archive, 0)[1]) as one:
        apart = np.asarray(Image.open(io.BytesIO(body))).astype(int) - read_tile(one, 10, 1, 0)
    assert np.abs(apart).mean() < 4


NOT_FOUND = r"""
slides slides/ page/ index.html viewer.py openseadragon.LICENSE slides.json/ slides.json?a=1 slides/1e0.json
slides/4.json .. ../ ../slides.json slides/../slides.json ..%2f..%2fetc%2fpasswd %2e%2e/slides.json
slides/0/tiles/9/0_0.jpg/.. slides%2f0.json slides/0%2ejson /etc/passwd //etc/passwd ..\slides.json slides/-1.json
slides/99999999999.json slides/0/layers/9.json slides/4/layers/0.json
slides/4/tiles/9/0_0.jpg slides/0/tiles/9/1_0.jpg slides/0/tiles/99/0_0.jpg slides/0/tiles/9/0_0.png
"""


def test_requests_without_the_token_get_nothing_and_unknown_slides_reveal_no_path(server):
    for path in ("/", "//", "/slides.json", "/wrong/slides.json", "/../slides.json", "*", "x", f"x{server.token}/"):
        assert status_of(server, path) == 403, path
    for token in (server.token[:-1], server.token + "x", server.token.swapcase(), ""):
        assert request_path(server, f"/{token}/slides.json", token=False)[0] == 403
    assert request_path(server, f"/{server.token}", token=False)[0] == 404
    assert len(server.token) >= 43, "256 bits in base64"
    for path in NOT_FOUND.split():
        assert status_of(server, f"/{server.token}/{path}") == 404, path
    for path in ("slides/٣.json", "slides/0.json\x00"):
        assert status_of(server, f"/{server.token}/{path}") == 400, path


def test_the_server_is_read_only_and_refuses_rebound_host_names(server):
    """It listens on this machine only; a tunnel may use localhost."""
    port = server.port
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", "127.0.0.1:1", f"[::1]:{port}", ""):
        assert request_path(server, "slides.json", host=host)[0] == 403, host
    assert request_path(server, "slides.json", host=f"localhost:{port}")[0] == 200
    assert server.socket.getsockname()[0] == "127.0.0.1"
    for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"):
        status, headers, _ = request_path(server, "slides.json", method=method)
        assert (status, set(headers["Allow"].split(", "))) == (405, {"GET", "HEAD"})


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("BREW / HTTP/1.1\r\nHOST\r\nConnection: close\r\n\r\n", 403),
        ("GET /" + "x" * 20_000 + " HTTP/1.1\r\n", 400),
        ("GET / nothing\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHOST\r\nHOST\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHOST\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
    ],
)
def test_malformed_requests_get_the_same_reply_as_all_others(server, head, status):
    with send_bytes(server, head) as connection:
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert (answer.status, answer.headers["Cache-Control"]) == (status, "no-store")
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert b"<" not in answer.read() and connection.recv(1) == b""


def test_a_body_ends_the_connection_and_is_no_second_request(server):
    second = "GET / HTTP/1.1\r\nHOST\r\n\r\n"
    head = f"GET /{server.token}/slides.json HTTP/1.1\r\nHOST\r\nContent-Length: {len(second)}\r\n\r\n"
    with send_bytes(server, head + second) as connection:
        said = connection.makefile("rb").read()
    assert said.count(b"HTTP/1.1 ") == 1 and said.startswith(b"HTTP/1.1 400")


def test_connections_with_an_endless_header_or_beyond_the_limit_are_closed(predicted, monkeypatch):
    monkeypatch.setattr(servers, "_HEAD_S", 0.2)
    monkeypatch.setattr(servers, "_MAX_CONNECTIONS", 3)
    with (
        served(gallery_of()) as running,
        send_bytes(running, "GET / HTTP/1.1\r\nHost: ") as slow,
        send_bytes(running, ""),
        send_bytes(running, ""),
    ):
        with send_bytes(running, "") as more:
            assert more.recv(1) == b"", "one too many"
        while slow.recv(1 << 16):
            pass
        assert request_path(running, "slides.json")[0] == 200, "there is room again"


def test_every_response_forbids_other_origins_caching_and_inline_scripts(server):
    for path in ("", "slides.json", "slides/0/tiles/9/0_0.jpg", "nothing"):
        headers = request_path(server, path)[1]
        policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
        assert (policy["default-src"], policy["script-src"]) == ("'none'", "'self'")
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert (headers["Cache-Control"], headers["Referrer-Policy"]) == ("no-store", "no-referrer")
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert "Server" not in headers


def test_a_taken_port_is_reported_and_the_default_port_moves_on(server, monkeypatch):
    empty = gallery_of()
    refused(lambda: ViewServer(empty, server.port), f"port {server.port} cannot be used", "--port")
    monkeypatch.setattr("wsi_fl.viewer.server._DEFAULT_PORT", server.port)
    with ViewServer(empty) as other:
        assert other.port != server.port


def test_slides_that_are_being_read_stay_open_others_are_closed_and_a_layer_is_drawn_once(archive, monkeypatch):
    monkeypatch.setattr(galleries, "_OPEN_SLIDES", 1)
    paths, drawn, opened = [path for centre in (0, 1) for path in slides_of(archive, centre)], [], WeakSet()
    monkeypatch.setattr(galleries, "Slide", lambda *args: opened.add(slide := Slide(*args)) or slide)
    overlay = Overlay("a", "outlines", lambda slide: drawn.append(slide.path) or {"rings": []})
    shown = Gallery("all", [Exhibit(path.stem, path, overlays=[overlay]) for path in paths])
    with ThreadPoolExecutor(8) as pool, served(shown) as running:
        wanted = [f"slides/{k % len(paths)}/tiles/10/{k % 2}_{k // 2 % 2}.jpg" for k in range(64)]
        found = list(pool.map(lambda path: request_path(running, path), wanted))
        assert {status for status, *_ in found} == {200}
        assert len({body for _, _, body in found}) == len(set(wanted))
        first, _ = shown.open_slide(0), shown.open_slide(1)
        assert read_tile(first, 10, 0, 0) is not None
        bodies = {body for _, _, body in pool.map(lambda _: request_path(running, "slides/0/layers/0.json"), range(8))}
        assert (bodies, len(drawn)) == ({b'{"rings":[]}'}, 1)
    del first, _
    gc.collect()
    assert len(opened) == 1, "the latest"


def test_a_slide_that_cannot_be_opened_is_reported_and_the_others_are_shown(tmp_path, archive):
    (tmp_path / "broken.tif").write_bytes(b"not a slide")
    paths = [tmp_path / "broken.tif", slides_of(archive, 0)[0]]
    with served(gallery_of(*paths)) as running:
        status, _, body = request_path(running, "slides/0.json")
        said = json.loads(body)["error"]
        assert (status, said) == (500, "broken.tif: not a slide format that is known here")
        assert request_path(running, "slides/0/tiles/9/0_0.jpg")[0] == 500
        assert request_path(running, "slides/1/tiles/9/0_0.jpg")[0] == 200


def test_a_slowly_opening_slide_does_not_delay_the_others(archive, monkeypatch):
    paths, go_on = slides_of(archive, 0)[:3], threading.Event()
    monkeypatch.setattr(galleries, "check_opens_safely", lambda path, *_: path == paths[0] and go_on.wait(20))
    with served(gallery_of(*paths)) as running, ThreadPoolExecutor(2) as pool:
        slow = [pool.submit(request_path, running, "slides/0.json") for _ in range(2)]
        assert request_path(running, "slides/1.json")[0] == request_path(running, "slides/2/tiles/9/0_0.jpg")[0] == 200
        assert not any(one.done() for one in slow)
        go_on.set()
        assert [one.result()[0] for one in slow] == [200, 200]


@pytest.fixture(scope="module")
def flat(tmp_path_factory):
    """A slide of 6144 pixels a side without a pyramid."""
    path = tmp_path_factory.mktemp("flat") / "flat.tif"
    picture = simulated_slides.simulate_slide(simulated_slides.plan_slides(1, 1, 1024, 0)[1])
    tiles = list(encode_tiles(np.tile(picture, (6, 6, 1)), 80, TILE_PX))
    write_levels(path, [(6144, 6144, tiles)], 0.5, TILE_PX)
    return path


@pytest.mark.slow
def test_a_slide_without_a_pyramid_is_read_once_for_all_coarse_tiles(flat, monkeypatch):
    read = []
    monkeypatch.setattr("wsi_fl.viewer.tiles._COARSE_PX", 2048)
    monkeypatch.setattr(
        "wsi_fl.slides.reading.reader.Slide.read_area",
        lambda *a, real=Slide.read_area, **k: read.append(a[2]) or real(*a, **k),
    )
    with Slide(flat, reader="openslide") as slide:
        tiles, pyramid = TileReader(), Pyramid(slide.size_l0)
        coarse = tiles.read(slide, 9, 0, 0)
        once = len(read)
        found = [tiles.read(slide, level, x, y) for level in (9, 10) for x in (0, 1) for y in (0, 1)]
        assert len(read) == once and pyramid.level_scale(pyramid.coarse_level) == 4.0
        assert found[1] is None and tiles.read(slide, 10, 2, 0) is None
        apart = found[-1].astype(int) - read_tile(slide, 10, 1, 1)
        assert coarse.shape == (384, 384, 3) and np.abs(apart).max() <= 1


def test_no_tile_is_read_for_a_closed_connection(flat, monkeypatch):
    began, gone, read = threading.Event(), threading.Event(), []

    def slow(*how, **more):
        began.set()
        gone.wait(20)
        read.append(1)

    monkeypatch.setattr("wsi_fl.viewer.tiles._STRIP_PX", 1 << 20)
    with served(gallery_of(flat)) as running:
        running.first_opening.join()
        monkeypatch.setattr("wsi_fl.slides.reading.reader.Slide.read_area", slow)
        with send_bytes(running, f"GET /{running.token}/slides/0/tiles/9/0_0.jpg HTTP/1.1\r\nHOST\r\n\r\n"):
            assert began.wait(20)
        assert request_path(running, "slides.json")[0] == 200
        gone.set()
    assert len(read) < 4, "few strips of hundreds"


def test_a_site_shows_its_slides_and_kept_patches_or_the_lack_of_a_store(predicted, archive, tmp_path, capsys):
    study, _ = predicted
    shown = build_gallery(study, site="C1")
    assert [one.path for one in shown.exhibits] == slides_of(archive, 0) and shown.patients_of == ()
    drawn = layers_of(shown, ILL)
    assert list(drawn) == ["kept patches", "tissue", "annotation"]
    with open_store(study, "C1") as store:
        table = store.table.take(store.table.slide == ILL)
    kept = drawn["kept patches"]
    assert (kept["xy"], kept["group"]) == (table.xy_l0.ravel().tolist(), table.label.tolist())
    assert (kept["side"], kept["groups"]) == (128.0, ["healthy", "tumor"])
    init_study(tmp_path / "new", archive=archive)
    bare = build_gallery(Study(tmp_path / "new"), site="C2")
    assert [one.path for one in bare.exhibits] == slides_of(archive, 1)
    assert "C2 has no store yet" in capsys.readouterr().err
    assert [one.name for one in bare.exhibits[1].overlays] == ["tissue", "annotation"]


def test_outlines_equal_those_of_tile_and_tissue_that_of_a_trusted_reader(predicted, archive, monkeypatch):
    study, vouched = predicted[0], []
    note = lambda path, mpp, reader: vouched.append((path.stem, reader))  # noqa: E731
    monkeypatch.setattr(site_layers, "check_opens_safely", note)
    drawn = layers_of(build_gallery(study, site="C1"), ILL)
    rings = [shapely.Polygon(np.reshape(ring, (-1, 2))) for ring in drawn["annotation"]["rings"]]
    tumor = read_annotations(archive / "annotations" / f"{ILL}.xml").tumor
    assert shapely.area(shapely.symmetric_difference_all(rings)) == pytest.approx(tumor.area, rel=0.01)
    found = [shapely.Polygon(np.reshape(r, (-1, 2))) for r in drawn["tissue"]["rings"] if len(r) > 6]
    tissue = shapely.union_all(found)
    corners = np.reshape(drawn["kept patches"]["xy"], (-1, 2))
    squares = shapely.box(*corners.T, *(corners + 128).T)
    covered = shapely.area(shapely.intersection(squares, tissue)) / 128**2
    assert (covered > 0.2).all() and covered.mean() > 0.7
    assert vouched == [(ILL, "auto")]


def test_prediction_layers_equal_the_files_of_predict_for_runs_and_folders(predicted):
    study, run = predicted
    layer = layers_of(build_gallery(study, run=run, site="C1"), ILL)["model of C1"]
    with (study.root / "runs" / run / "predictions/C1" / ILL / "patches.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert layer["columns"] == ["healthy", "tumor"] and layer["columns"][layer["shown"]] == "tumor"
    assert layer["xy"] == [int(row[key]) for row in rows for key in ("x_l0", "y_l0")]
    assert layer["values"][1] == pytest.approx([float(row["p_tumor"]) for row in rows], abs=1e-4)
    assert layer["side"] == 128.0
    folder = study.root / "runs" / run / "predictions/C1"
    files = folder.glob("*/score.json")
    scores = {path.parent.name: json.loads(path.read_text())["score"]["top_k_mean"] for path in files}
    for shown in (build_gallery(study, run=run, site="C1"), build_gallery(study, predictions=folder)):
        assert {one.name: one.score for one in shown.exhibits} == scores
    assert [one.name for one in build_gallery(study, predictions=folder / ILL).exhibits] == [ILL]


def test_the_attention_layer_is_relative_to_the_highest_attention(archive, tmp_path):
    xy_l0 = np.array([[0, 0], [512, 0], [0, 512]])
    alone = np.array([[0.9, 0.1], [0.2, 0.8], [0.5, 0.5]])
    given = np.array([0.3, 0.7]), alone, np.array([0.1, 0.6, 0.3])
    answer = SlidePrediction(CLASSES, ("luad", "lusc"), *given)
    write_patch_table(tmp_path / "patches.csv", xy_l0, 512.0, answer.columns)
    said = Prediction(tmp_path, {"site": "C1", "slide": "x", **answer.document_fields})
    assert (said.summary, said.value) == ("lusc 0.70", 0.7)
    with Slide(slides_of(archive, 0)[0]) as slide:
        model, attention = (one.draw(slide) for one in said.list_overlays())
    assert attention["values"] == [pytest.approx([1 / 6, 1.0, 0.5], abs=1e-4)]
    assert (model["columns"], model["shown"], model["values"][1]) == (["luad", "lusc"], 1, [0.1, 0.8, 0.5])
    write_patch_table(tmp_path / "patches.csv", xy_l0, None, answer.columns)
    assert said.list_overlays() == [], "nobody knows where the patches lie"


def test_patches_of_imported_features_are_as_large_as_they_were_cut(tmp_path):
    """256 pixels "at 20x" are 512 level-0 pixels for TRIDENT, whatever the slide's µm per pixel."""
    table = BagTable(np.zeros(1, np.int64), *(np.array([text]) for text in ("", "a", "p", "train")))
    meta, bag = (
        BagMeta("S", ("x", "y"), "uni", GridSpec(256, 0.5, 256), "import"),
        Bag(np.ones((1, 2), np.float32), np.full((1, 2), 300)),
    )
    write_bags(tmp_path / "mosaic.h5", meta, table, [bag], np.array([0.25]))
    with BagStore(tmp_path / "mosaic.h5") as store:
        assert site_layers._draw_mosaic(store, 0, SimpleNamespace(mpp=0.2308))["side"] == 512


def test_a_viewer_of_one_site_never_shows_the_slide_of_another(predicted, archive):
    study, run = predicted
    shown = build_gallery(study, run=run, site="C2")
    k = [one.name for one in shown.exhibits].index(ILL)
    theirs, mine = shown.exhibits[k], shown.exhibits[1 - k]
    assert (theirs.path, theirs.note) == (None, "a slide of C1, which is not shown here")
    assert mine.path == slides_of(archive, 1)[0] and len(shown.exhibits) == 2
    with served(shown) as running:
        for path in (f"{k}.json", f"{k}/layers/0.json", f"{k}/tiles/9/0_0.jpg"):
            assert request_path(running, f"slides/{path}")[0] == 404
        assert request_path(running, f"slides/{1 - k}/tiles/9/0_0.jpg")[0] == 200


def test_a_slide_that_two_sites_name_is_shown_if_no_site_hides_it(own, archive):
    study, run = own
    told = study.root / "sites/C2.toml"
    others = [line for line in told.read_text().splitlines() if not line.startswith("slides")]
    both = json.dumps([str(archive / f"training/center_{k}/*.tif") for k in (0, 1)])
    told.write_text("\n".join([f"slides = {both}", *others]))

    def shown(**how):
        return {one.name for one in build_gallery(study, run=run, **how).exhibits if one.path}

    assert ILL in shown(site="C1") and ILL in shown(site="C2"), "it is a slide of both"
    make_real(study, "C1")
    assert ILL in shown(site="C1") and ILL in shown(site="C2")
    told.write_text("\n".join(others))
    assert ILL not in shown(site="C2"), "it is C1's alone"


def test_predictions_of_another_hospitals_model_are_shown_only_if_it_was_or_may_be_released(own):
    study, run = own
    score = study.root / "runs" / run / "predictions/C2" / ILL / "score.json"

    def models():
        shown = layers_of(build_gallery(study, run=run, site="C1"), ILL)
        return [name for name in shown if name.startswith("model")]

    assert models() == ["model of C1", "model of C2"]
    make_real(study, "C2")
    assert models() == ["model of C1"]
    score.write_text(json.dumps(json.loads(score.read_text()) | {"model": "proxy"}))
    assert models() == ["model of C1", "model of C2"], "a proxy has travelled"


def test_a_run_without_a_site_shows_all_sites_like_its_report(own, capsys):
    study, run = own
    assert {one.name for one in build_gallery(study, run=run).exhibits if one.path} > {ILL}
    shutil.move(study.root / "runs" / run / "predictions/C1", study.root / "elsewhere")
    assert ILL in [one.name for one in build_gallery(study, run=run).exhibits if one.path], "C1 may be read"
    shutil.move(study.root / "elsewhere", study.root / "runs" / run / "predictions/C1")
    make_real(study, "C1")
    assert {one.path for one in build_gallery(study, run=run).exhibits if one.name == ILL} == {None}
    assert "C1 are left out" in capsys.readouterr().err
    make_real(study, "C2")
    refused(lambda: build_gallery(study, run=run), "several real sites", "--site")
    assert build_gallery(study, run=run, site="C1").patients_of == ("C1",)


def test_another_slide_of_the_same_name_has_no_layers_and_a_missing_slide_is_listed(own, archive, tmp_path):
    study, run = own
    score = study.root / "runs" / run / "predictions/C1" / ILL / "score.json"

    def said(**more):
        score.write_text(json.dumps(json.loads(score.read_text()) | more))
        return build_gallery(study, run=run, site="C1")

    elsewhere = said(path=str(shutil.copy(slides_of(archive, 0)[0], tmp_path / f"{ILL}.tif")))
    refused(lambda: layers_of(elsewhere, ILL), "not the slide that was predicted", error=WsiFlError)
    gone = {one.name: (one.path, one.note) for one in said(path="gone.tif", slide="gone").exhibits}["gone"]
    assert gone == (None, "the slide is not here")


def test_patches_are_not_drawn_over_another_slide_of_the_same_name(own, archive, tmp_path):
    study, _ = own
    replaced = shutil.copytree(archive, tmp_path / "archive") / "training" / "center_0" / f"{ILL}.tif"
    file = study.root / "sites" / "C1.toml"
    file.write_text(file.read_text().replace(str(archive), str(tmp_path / "archive")))
    assert layers_of(build_gallery(study, site="C1"), ILL)["kept patches"]["xy"]
    shutil.copy(slides_of(archive, 1)[0], replaced)
    shown = build_gallery(study, site="C1")
    refused(lambda: layers_of(shown, ILL), f"{ILL}.tif: not the slide that was tiled", "wsi-fl tile", error=WsiFlError)
    for shard in study.store_path("C1").parent.glob("slides/*.h5"):
        shard.unlink()
    assert layers_of(build_gallery(study, site="C1"), ILL)["kept patches"]["xy"], "a copy without pixels"


def test_a_new_slide_is_shown_at_the_resolution_of_its_prediction_and_as_one_that_was_not_tiled(own, archive, tmp_path):
    study, run = own
    score = study.root / "runs" / run / "predictions/C1" / ILL / "score.json"
    path = shutil.copy(slides_of(archive, 0)[1], tmp_path / "new.tif")
    document = json.loads(score.read_text()) | {"path": str(path), "slide": "new", "slide_mpp": 0.125}
    score.write_text(json.dumps(document))
    shown = build_gallery(study, run=run, site="C1")
    number = [one.name for one in shown.exhibits].index("new")
    assert json.loads(shown.describe_slide(number))["mpp"] == 0.125
    assert shown.exhibits[number].note.endswith("no patch in the store")


def test_errors_name_a_remedy(own, tmp_path):
    study, run = own
    folder = study.root / "runs" / run / "predictions"
    refused(lambda: build_gallery(study), "--site NAME", "--run RUN")
    refused(lambda: build_gallery(study, site="C9"), "unknown site 'C9'")
    refused(lambda: build_gallery(study, run=run, pipeline="camelyon17"), "--pipeline")
    refused(lambda: build_gallery(study, predictions=tmp_path / "none"), "no such folder")
    (folder / "C1" / ILL / "patches.csv").write_text("x_l0,y_l0,size_l0,p_tumor\n1,2,3,many\n")
    refused(lambda: layers_of(build_gallery(study, run=run, site="C1"), ILL), "predict again", error=WsiFlError)
    score = folder / "C1" / ILL / "score.json"
    for damaged in (json.dumps(json.loads(score.read_text()) | {"score": {"top_k_mean": "high"}}), "[]"):
        score.write_text(damaged)
        refused(lambda: build_gallery(study, run=run), "score.json", "predict the slide again", error=WsiFlError)
    shutil.rmtree(folder / "C1")
    refused(lambda: build_gallery(study, run=run, site="C1"), "no prediction of site C1", "wsi-fl predict")
    shutil.rmtree(folder)
    refused(lambda: build_gallery(study, run=run), "no prediction yet", f"wsi-fl predict {run}")


def test_the_command_prints_the_address_of_the_page_and_ends_quietly(predicted):
    study, _ = predicted
    command = [sys.executable, "-m", "wsi_fl", "view", "--site", "C1", "--json"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    given = {"cwd": study.root, "env": os.environ | {"PYTHONPATH": path, "BROWSER": "false"}, "text": True}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **given)
    try:
        text = "".join(takewhile(lambda line: line != "}\n", process.stdout)) + "}"
        document = json.loads(text)
        address = urlsplit(document["url"])
        assert (address.hostname, address.port, document["slides"]) == ("127.0.0.1", document["port"], 4)
        assert document["tunnel"].startswith(f"ssh -N -L {document['port']}:127.0.0.1:{document['port']} ")
        browsers = http.client.HTTPConnection(address.hostname, address.port, timeout=20)
        browsers.request("GET", address.path + "slides.json")
        assert len(json.loads(browsers.getresponse().read())["slides"]) == 4
        process.send_signal(signal.SIGINT)  # while the connection is still open, as a browser keeps it
        rest, said = process.communicate(timeout=20)
        browsers.close()
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, rest, said) == (0, "", "wsi-fl view: starting …\n")


def test_a_missing_server_is_reported_with_the_extra_that_brings_it(predicted, monkeypatch):
    monkeypatch.chdir(predicted[0].root)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    refused(lambda: view(site="C1"), explain_missing("view"))


looked_at = pytest.mark.skipif(not CHROMIUM, reason="no chromium on PATH nor in CHROMIUM: nobody looks")
THRESHOLD = "document.querySelector('#boxes li .dial:last-child input')"
READY = "document.body?.dataset.ready"
INK = """(() => { const over = document.querySelector('#over');
  const d = over.getContext('2d').getImageData(0, 0, over.width, over.height).data;
  let n = 0; for (let k = 3; k < d.length; k += 4) n += d[k] > 0; return n })()"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as one:
        yield one


def opened(page, server, *, width=1280, dark=False, touch=False):
    page.size(width, 800, dark=dark, touch=touch)
    page.said.clear()
    page.asked.clear()
    page.goto("about:blank")
    page.goto(server.url)
    page.until(READY)
    page.until(f"{INK} > 500")


def shot(page, tmp_path):
    return np.asarray(Image.open(page.picture(tmp_path / "shot.png")).convert("RGB")).astype(int)


@looked_at
def test_a_click_on_a_layer_changes_the_picture_without_requests_to_other_hosts(page, predicted, tmp_path):
    study, run = predicted
    with served(build_gallery(study, run=run, site="C1")) as server:
        opened(page, server)
        assert {urlsplit(url).netloc for url in page.asked} <= {f"127.0.0.1:{server.port}", ""}
        page.run(f"(e => {{ e.value = 0; e.oninput() }})({THRESHOLD})")
        ink, before = page.run(INK), shot(page, tmp_path)
        page.click("#boxes [data-layer='model of C1']")
        assert page.run(INK) < ink / 2, "the heatmap is gone"
        assert np.abs(shot(page, tmp_path) - before)[100:700, 300:1000].max(axis=-1).mean() > 5
        page.key("1")
        assert page.run(INK) == ink
        page.run(f"(e => {{ e.value = 1; e.oninput() }})({THRESHOLD})")
        bare = shot(page, tmp_path)
        assert 0.8 * ink < page.run(INK) < ink, "the line at the threshold is gone, and no patch with it"
        assert (before.min(axis=-1) < 20).sum() > (bare.min(axis=-1) < 20).sum() + 200
        told = page.run("import('./drawing.js').then(it => it.colours.join(';'))").split(";")
        found = np.array([[float(n) for n in re.findall(r"[\d.]+", one)] for one in told])
        wanted = 255 * colormaps["viridis"](np.linspace(0, 1, len(told)))[:, :3]
        assert np.abs(found[:, :3] - wanted).max() < 14, "the map of the heatmaps"
        assert (np.diff(found[:, 3]) >= 0).all() and found[0, 3] < 0.3 < found[-1, 3], "cold is faint"
        assert page.said == []


@pytest.mark.slow
@looked_at
def test_keys_move_through_slides_and_zoom_and_the_patch_under_the_cursor_is_read(page, predicted, tmp_path):
    study, run = predicted
    with served(build_gallery(study, run=run, site="C1")) as server:
        opened(page, server)
        names = page.run("[...document.querySelectorAll('#slides .name')].map(e => e.textContent)")
        ranked = sorted(build_gallery(study, run=run, site="C1").exhibits, key=lambda one: -one.score)
        assert names == [one.name for one in ranked]
        page.key("j")
        page.until(f"document.querySelector('#name').textContent === {json.dumps(names[1])} && {READY}")
        page.key("PageUp")
        page.until(f"document.querySelector('#name').textContent === {json.dumps(names[0])} && {READY}")
        page.point(640, 420)
        told = page.until("document.querySelector('#cursor').textContent")
        assert "px of level 0" in told and "model of C1: healthy 0." in told
        near = shot(page, tmp_path)
        for _ in range(4):
            page.key("+")
        page.run("new Promise(done => setTimeout(done, 900))")
        assert np.abs(shot(page, tmp_path) - near)[100:700, 300:800].mean() > 10, "closer by now"
        page.key("?")
        assert page.run("document.querySelector('#help').open")
        page.key("?")
        page.run("(e => { e.value = 'node_1'; e.oninput() })(document.querySelector('#filter'))")
        assert page.run("document.querySelectorAll('#slides li').length") == 1
        assert page.said == []


@looked_at
def test_the_page_reports_a_layer_that_cannot_be_drawn_and_a_real_site(page, archive):
    def broken(slide):
        raise WsiFlError("nobody knows")

    path = slides_of(archive, 0)[0]
    xy, group = np.array([[0, 0]]), np.zeros(1, np.int64)
    drawn = Overlay("good", "values", lambda slide: value_layer(xy, 900.0, {"p": np.ones(1)}, "p"))
    more = Overlay("more", "patches", lambda slide: patch_layer(xy, 900.0, group, ["<b>x"]))
    one = Exhibit("<img src=x>", path, "<i>", overlays=[drawn, more, Overlay("bad", "outlines", broken)])
    with served(Gallery("<script>", [one], patients_of=["H1"])) as server:
        opened(page, server)
        assert page.run("document.querySelector('#boxes .why').textContent") == "nobody knows"
        assert "Patients of H1" in page.run("document.querySelector('#patients').textContent")
        page.key("2")
        page.until("document.querySelector('#boxes').textContent.includes('1 <b>x')")
        assert page.run("document.querySelector('#name').textContent") == "<img src=x>"
        assert [one for one in page.said if "500" not in one] == []
