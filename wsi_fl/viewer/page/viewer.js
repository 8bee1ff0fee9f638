// The page: a list of slides, one of them in OpenSeadragon, layers over it. All state is in `state`.
import { draw, drawScale, patchAt, describePatch } from "./drawing.js";
import { countWords, element, buildItem, updateItem } from "./panels.js";

const OPACITY = { outlines: 1, patches: 0.5, values: 0.7 };
const byId = id => document.getElementById(id);
const state = {
  slides: [],     // of the catalogue, each with its number
  number: null,   // of the slide that is shown
  slide: null,    // its document
  layers: [],     // [{layer, how, why}] in the order of the slide's document
  bare: false,    // whether layers are hidden for a look at the slide
  hows: {},       // name of a layer → the user's settings, for every slide
};

const viewer = OpenSeadragon({
  element: byId("slide"), drawer: "canvas", showNavigationControl: false, showNavigator: true,
  navigatorPosition: "TOP_RIGHT", navigatorAutoFade: true, animationTime: 0.5, maxZoomPixelRatio: 4, visibilityRatio: 0.3,
  gestureSettingsMouse: { clickToZoom: false, dblClickToZoom: true }, timeout: 120000,
});

const over = viewer.canvas.appendChild(element("canvas", { id: "over" }));  // above the slide, below the navigator

async function ask(path) {
  const answer = await fetch(path);
  const document = answer.headers.get("Content-Type").startsWith("application/json") ? await answer.json() : {};
  if (!answer.ok) throw new Error(document.error ?? `the server responded with ${answer.status}`);
  return document;
}

// Slides

function filteredSlides() {
  const query = byId("filter").value.trim().toLowerCase();
  const found = state.slides.filter(slide => `${slide.name} ${slide.note}`.toLowerCase().includes(query));
  if (byId("order").value === "score") found.sort((a, b) => (b.score ?? -Infinity) - (a.score ?? -Infinity) || a.number - b.number);
  return found;
}

function fillList() {
  const found = filteredSlides();
  byId("slides").replaceChildren(...found.map(slide => {
    const score = slide.score === null ? "" : slide.score.toFixed(3);
    const button = element("button", { disabled: !slide.shown, onclick: () => go(slide.number) },
      element("span", { className: "name", textContent: slide.name }), element("span", { textContent: score }),
      element("span", { className: "note", textContent: slide.note }));
    button.dataset.number = slide.number;
    return element("li", {}, button);
  }));
  const all = countWords(state.slides.length, "slide");
  byId("count").textContent = found.length === state.slides.length ? all : `${found.length} of ${all}`;
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

function step(offset) {
  const shown = filteredSlides().filter(slide => slide.shown), at = shown.findIndex(slide => slide.number === state.number);
  const next = shown[at < 0 ? 0 : Math.min(shown.length - 1, Math.max(0, at + offset))];
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
  const entry = state.slides[number];
  byId("name").textContent = entry.name;
  byId("note").textContent = entry.note;
  byId("boxes").replaceChildren();
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
  const squares = slide.layers.find(layer => layer.kind !== "outlines");  // squares over squares would mix their colours
  state.layers = slide.layers.map(item => ({ layer: null, why: "", how: state.hows[item.name] ??= defaults(item, item === squares) }));
  byId("boxes").replaceChildren(...state.layers.map((entry, index) => buildItem(entry, index, actions)));
  await Promise.all(state.layers.map((_, index) => load(number, index)));
  if (state.number === number) document.body.dataset.ready = String(number);
}

// Layers

const actions = { toggle, redraw };

function defaults({ name, kind }, first) {
  return { name, kind, on: first || kind === "outlines", opacity: OPACITY[kind], threshold: 0.5, column: null };
}

async function load(number, index) {
  const entry = state.layers[index];
  const needed = entry.how.on || entry.how.kind !== "outlines";  // values of a patch are shown under the cursor, drawn or not
  if (!needed || entry.requested) return;
  entry.requested = true;
  try {
    entry.layer = await ask(`slides/${number}/layers/${index}.json`);
  } catch (error) {
    entry.why = error.message;
  }
  if (state.number !== number) return;
  updateItem(entry, actions);
  redraw();
}

function toggle(index) {
  const entry = state.layers[index];
  if (!entry) return;
  entry.how.on = !entry.how.on;
  load(state.number, index);
  updateItem(entry, actions);
  redraw();
}

function hide(bare) {
  state.bare = bare;
  byId("bare").hidden = !bare;
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
  const frame = byId("slide").getBoundingClientRect();
  const at = item.viewerElementToImageCoordinates(new OpenSeadragon.Point(event.clientX - frame.left, event.clientY - frame.top));
  const [x, y] = [Math.floor(at.x), Math.floor(at.y)], [width, height] = state.slide.size;
  const lines = state.layers.flatMap(({ layer, how }) => {
    const k = layer?.xy ? patchAt(layer, x, y) : -1;
    return k < 0 ? [] : [`${how.name}: ${describePatch(layer, how.kind, k)}`];
  });
  byId("cursor").hidden = x < 0 || y < 0 || x >= width || y >= height;
  byId("cursor").textContent = [`${x}, ${y} px of level 0`, ...lines].join("\n");
}

const PANELS = ["list", "layers"];

/** Open a panel on a small screen, where there is room for one; "" closes both. */
function unfold(name) {
  for (const panel of PANELS) {
    byId(panel).classList.toggle("open", panel === name);
    byId(`to-${panel}`).setAttribute("aria-expanded", String(panel === name));
  }
}

function trouble(text) {
  byId("trouble").textContent = text;
  byId("trouble").hidden = !text;
}

// Keys and other input

const KEYS = {
  j: () => step(1), PageDown: () => step(1), k: () => step(-1), PageUp: () => step(-1),
  ArrowDown: () => pan(0, 1), ArrowUp: () => pan(0, -1), ArrowRight: () => pan(1, 0), ArrowLeft: () => pan(-1, 0),
  "+": () => zoom(1.5), "=": () => zoom(1.5), "-": () => zoom(1 / 1.5), 0: () => viewer.viewport?.goHome(),
  h: () => hide(!state.bare),
  "/": () => { unfold("list"); byId("filter").focus(); },
  "?": () => byId("help").open ? byId("help").close() : byId("help").showModal(),
};
const FIELD_KEYS = /^(Arrow|Page|Home|End)/;  // by which sliders and choices are moved
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
  if (event.key === "Escape" && !byId("help").open) escape(field);
  if (byId("help").open && event.key !== "?") return;
  if (typed || moved && FIELD_KEYS.test(event.key) || event.ctrlKey || event.metaKey || event.altKey) return;
  const does = /^[1-9]$/.test(event.key) ? () => toggle(Number(event.key) - 1) : KEYS[event.key];
  if (!does) return;
  event.preventDefault();
  does();
});
viewer.addHandler("canvas-key", event => { event.preventDefaultAction = true; });  // only the keys above
viewer.addHandler("tile-load-failed", () => trouble("a part of this slide cannot be read"));
for (const moved of ["update-viewport", "open", "resize"]) viewer.addHandler(moved, redraw);
for (const pointed of ["pointermove", "pointerdown"]) byId("stage").addEventListener(pointed, point);
byId("stage").addEventListener("pointerleave", event => {  // only for a mouse: a finger leaves when lifted
  if (event.pointerType === "mouse") byId("cursor").hidden = true;
});
byId("filter").oninput = byId("order").onchange = fillList;
byId("to-help").onclick = KEYS["?"];
for (const panel of PANELS) byId(`to-${panel}`).onclick = () => unfold(byId(panel).classList.contains("open") ? "" : panel);
addEventListener("resize", redraw);
addEventListener("hashchange", fromAddress);

function fromAddress() {
  const number = Number(/^#slide=(\d+)$/.exec(location.hash)?.[1] ?? NaN);
  const shown = state.slides[number]?.shown ? number : state.number ?? filteredSlides().find(slide => slide.shown)?.number;
  if (shown === undefined) return;
  if (shown !== number) history.replaceState(null, "", `#slide=${shown}`);  // so that Back leads out of the page
  if (shown !== state.number) show(shown);
}

async function begin() {
  const { title, patients_of, slides } = await ask("slides.json");
  document.title = byId("title").textContent = title;
  byId("patients").hidden = !patients_of.length;
  byId("patients").textContent = `Patients of ${patients_of.join(", ")}: what is shown must not leave the hospital.`;
  state.slides = slides.map((slide, number) => ({ ...slide, number }));
  const scored = slides.some(slide => slide.score !== null);
  byId("order").value = scored ? "score" : "name";
  byId("order").hidden = !scored;
  fillList();
  fromAddress();
  if (!slides.some(slide => slide.shown)) trouble("no slide can be shown; the list shows the reasons");
}

begin().catch(error => trouble(error.message));
