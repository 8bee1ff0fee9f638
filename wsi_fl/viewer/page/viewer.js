// The page: a list of slides, one of them in OpenSeadragon, layers over it. State lies in `state` and nowhere else.
import { draw, drawScale, patchAt, said } from "./drawing.js";
import { counted, element, itemOf, tell } from "./panels.js";

const OPACITY = { outlines: 1, patches: 0.5, values: 0.7 };
const by = id => document.getElementById(id);
const state = {
  slides: [],     // of the catalogue, each with its number
  number: null,   // of the slide that is shown
  slide: null,    // its document
  layers: [],     // [{layer, how, why}] in the order of the slide's document
  bare: false,    // whether layers are hidden for a look at the slide
  hows: {},       // name of a layer → how people want it drawn, on every slide
};

const viewer = OpenSeadragon({
  element: by("slide"), drawer: "canvas", showNavigationControl: false, showNavigator: true,
  navigatorPosition: "TOP_RIGHT", navigatorAutoFade: true, animationTime: 0.5, maxZoomPixelRatio: 4, visibilityRatio: 0.3,
  gestureSettingsMouse: { clickToZoom: false, dblClickToZoom: true }, timeout: 120000,
});

const over = viewer.canvas.appendChild(element("canvas", { id: "over" }));  // above the slide, below the navigator

async function ask(path) {
  const answer = await fetch(path);
  const document = answer.headers.get("Content-Type").startsWith("application/json") ? await answer.json() : {};
  if (!answer.ok) throw new Error(document.error ?? `the server says ${answer.status}`);
  return document;
}

// Slides

function listed() {
  const wanted = by("filter").value.trim().toLowerCase();
  const found = state.slides.filter(one => `${one.name} ${one.note}`.toLowerCase().includes(wanted));
  if (by("order").value === "score") found.sort((a, b) => (b.score ?? -Infinity) - (a.score ?? -Infinity) || a.number - b.number);
  return found;
}

function fillList() {
  const found = listed();
  by("slides").replaceChildren(...found.map(one => {
    const score = one.score === null ? "" : one.score.toFixed(3);
    const button = element("button", { disabled: !one.shown, onclick: () => go(one.number) },
      element("span", { className: "name", textContent: one.name }), element("span", { textContent: score }),
      element("span", { className: "note", textContent: one.note }));
    button.dataset.number = one.number;
    return element("li", {}, button);
  }));
  const all = counted(state.slides.length, "slide");
  by("count").textContent = found.length === state.slides.length ? all : `${found.length} of ${all}`;
  mark();
}

/** Mark the slide that is shown; the list stays as it is, and with it what has the focus. */
function mark() {
  for (const button of document.querySelectorAll("#slides button")) {
    button.setAttribute("aria-current", String(Number(button.dataset.number) === state.number));
  }
}

function go(number) {
  location.hash = `slide=${number}`;
}

function step(by_) {
  const shown = listed().filter(one => one.shown), at = shown.findIndex(one => one.number === state.number);
  const next = shown[at < 0 ? 0 : Math.min(shown.length - 1, Math.max(0, at + by_))];
  if (next) go(next.number);
}

async function show(number) {
  state.number = number;
  state.slide = null;
  state.layers = [];
  delete document.body.dataset.ready;
  viewer.close();
  trouble("");
  mark();
  document.querySelector("#slides [aria-current=true]")?.scrollIntoView({ block: "nearest" });
  unfold("");
  const one = state.slides[number];
  by("name").textContent = one.name;
  by("note").textContent = one.note;
  by("boxes").replaceChildren();
  let slide;
  try {
    slide = await ask(`slides/${number}.json`);
  } catch (error) {
    if (state.number === number) trouble(error.message);
    return;
  }
  if (state.number !== number) return;
  state.slide = slide;
  viewer.open({
    width: slide.size[0], height: slide.size[1], tileSize: slide.tile, tileOverlap: 0, minLevel: slide.first,
    maxLevel: slide.last, getTileUrl: (level, column, row) => `slides/${number}/tiles/${level}/${column}_${row}.jpg`,
  });
  const squares = slide.layers.find(one => one.kind !== "outlines");  // squares over squares would mix their colours
  state.layers = slide.layers.map(one => ({ layer: null, why: "", how: state.hows[one.name] ??= usual(one, one === squares) }));
  by("boxes").replaceChildren(...state.layers.map((one, which) => itemOf(one, which, act)));
  await Promise.all(state.layers.map((_, which) => load(number, which)));
  if (state.number === number) document.body.dataset.ready = String(number);
}

// Layers

const act = { toggle, redraw };

function usual({ name, kind }, first) {
  return { name, kind, on: first || kind === "outlines", opacity: OPACITY[kind], threshold: 0.5, column: null };
}

async function load(number, which) {
  const one = state.layers[which];
  const wanted = one.how.on || one.how.kind !== "outlines";  // what is said of a patch is read under the cursor, drawn or not
  if (!wanted || one.asked) return;
  one.asked = true;
  try {
    one.layer = await ask(`slides/${number}/layers/${which}.json`);
  } catch (error) {
    one.why = error.message;
  }
  if (state.number !== number) return;
  tell(one, act);
  redraw();
}

function toggle(which) {
  const one = state.layers[which];
  if (!one) return;
  one.how.on = !one.how.on;
  load(state.number, which);
  tell(one, act);
  redraw();
}

function hide(bare) {
  state.bare = bare;
  by("bare").hidden = !bare;
  redraw();
}

// The picture

function view() {
  const item = viewer.world.getItemAt(0), density = devicePixelRatio || 1;
  if (!item || !state.slide) return null;
  const at = x => item.imageToViewerElementCoordinates(new OpenSeadragon.Point(x, 0), true);
  const [corner, far] = [at(0), at(state.slide.size[0])];
  return {
    left: corner.x * density, top: corner.y * density, zoom: (far.x - corner.x) / state.slide.size[0] * density,
    width: over.width, height: over.height, density,
  };
}

function redraw() {
  const density = devicePixelRatio || 1;
  const [width, height] = [over.clientWidth, over.clientHeight].map(extent => Math.round(extent * density));
  if (over.width !== width || over.height !== height) Object.assign(over, { width, height });
  const context = over.getContext("2d"), where = view();
  if (!where) return context.clearRect(0, 0, width, height);
  draw(context, state.bare ? [] : state.layers, where);
  drawScale(context, state.slide.mpp, where, "#1b2129", "#ffffff");
}

function point(event) {
  const item = viewer.world.getItemAt(0);
  if (!item || !state.slide) return;
  const frame = by("slide").getBoundingClientRect();
  const at = item.viewerElementToImageCoordinates(new OpenSeadragon.Point(event.clientX - frame.left, event.clientY - frame.top));
  const [x, y] = [Math.floor(at.x), Math.floor(at.y)], [width, height] = state.slide.size;
  const lines = state.layers.flatMap(({ layer, how }) => {
    const k = layer?.xy ? patchAt(layer, x, y) : -1;
    return k < 0 ? [] : [`${how.name}: ${said(layer, how.kind, k)}`];
  });
  by("cursor").hidden = x < 0 || y < 0 || x >= width || y >= height;
  by("cursor").textContent = [`${x}, ${y} px of level 0`, ...lines].join("\n");
}

const PANELS = ["list", "layers"];

/** Open a panel on a small screen, where there is room for one; "" closes both. */
function unfold(name) {
  for (const panel of PANELS) {
    by(panel).classList.toggle("open", panel === name);
    by(`to-${panel}`).setAttribute("aria-expanded", String(panel === name));
  }
}

function trouble(text) {
  by("trouble").textContent = text;
  by("trouble").hidden = !text;
}

// Keys, and what else people do

const KEYS = {
  j: () => step(1), PageDown: () => step(1), k: () => step(-1), PageUp: () => step(-1),
  ArrowDown: () => pan(0, 1), ArrowUp: () => pan(0, -1), ArrowRight: () => pan(1, 0), ArrowLeft: () => pan(-1, 0),
  "+": () => zoom(1.5), "=": () => zoom(1.5), "-": () => zoom(1 / 1.5), 0: () => viewer.viewport?.goHome(),
  h: () => hide(!state.bare),
  "/": () => { unfold("list"); by("filter").focus(); },
  "?": () => by("help").open ? by("help").close() : by("help").showModal(),
};
const OF_FIELDS = /^(Arrow|Page|Home|End)/;  // by which sliders and choices are moved
const PAN = 0.2;                             // of the picture

function zoom(factor) {
  viewer.viewport?.zoomBy(factor).applyConstraints();
}

function pan(right, down) {
  const bounds = viewer.viewport?.getBounds();
  if (bounds) viewer.viewport.panBy(new OpenSeadragon.Point(PAN * right * bounds.width, PAN * down * bounds.height)).applyConstraints();
}

function escape(field) {
  if (field.matches("#filter")) field.blur();
  unfold("");
}

addEventListener("keydown", event => {
  const field = event.target, typed = field.matches("#filter"), moved = field.matches("input[type=range], select");
  if (event.key === "Escape" && !by("help").open) escape(field);
  if (by("help").open && event.key !== "?") return;
  if (typed || moved && OF_FIELDS.test(event.key) || event.ctrlKey || event.metaKey || event.altKey) return;
  const does = /^[1-9]$/.test(event.key) ? () => toggle(Number(event.key) - 1) : KEYS[event.key];
  if (!does) return;
  event.preventDefault();
  does();
});
viewer.addHandler("canvas-key", event => { event.preventDefaultAction = true; });  // keys are those above
viewer.addHandler("tile-load-failed", () => trouble("a part of this slide cannot be read"));
for (const moved of ["update-viewport", "open", "resize"]) viewer.addHandler(moved, redraw);
for (const pointed of ["pointermove", "pointerdown"]) by("stage").addEventListener(pointed, point);
by("stage").addEventListener("pointerleave", event => {  // a finger leaves when it is lifted, a mouse when it goes
  if (event.pointerType === "mouse") by("cursor").hidden = true;
});
by("filter").oninput = by("order").onchange = fillList;
by("to-help").onclick = KEYS["?"];
for (const panel of PANELS) by(`to-${panel}`).onclick = () => unfold(by(panel).classList.contains("open") ? "" : panel);
addEventListener("resize", redraw);
addEventListener("hashchange", fromAddress);

function fromAddress() {
  const number = Number(/^#slide=(\d+)$/.exec(location.hash)?.[1] ?? NaN);
  const shown = state.slides[number]?.shown ? number : state.number ?? listed().find(one => one.shown)?.number;
  if (shown === undefined) return;
  if (shown !== number) history.replaceState(null, "", `#slide=${shown}`);  // so that Back leads out of the page
  if (shown !== state.number) show(shown);
}

async function begin() {
  const { title, patients_of, slides } = await ask("slides.json");
  document.title = by("title").textContent = title;
  by("patients").hidden = !patients_of.length;
  by("patients").textContent = `Patients of ${patients_of.join(", ")}: what is shown must not leave the hospital.`;
  state.slides = slides.map((one, number) => ({ ...one, number }));
  const scored = slides.some(one => one.score !== null);
  by("order").value = scored ? "score" : "name";
  by("order").hidden = !scored;
  fillList();
  fromAddress();
  if (!slides.some(one => one.shown)) trouble("no slide can be shown; the list says why");
}

begin().catch(error => trouble(error.message));
