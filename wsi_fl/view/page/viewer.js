// The page: a list of slides, one of them in OpenSeadragon, layers over it. State lies in `state` and nowhere else.
import { colours, draw, drawScale, groupColour, lineColour, patchAt, said } from "./drawing.js";

const OPACITY = { outlines: 1, patches: 0.6, values: 0.6 };
const by = id => document.getElementById(id);
const state = {
  slides: [],     // of the catalogue, each with its number
  number: null,   // of the slide that is shown
  slide: null,    // its document
  layers: [],     // [{layer, how, why}] in the order of the slide's document
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

function element(tag, attributes = {}, ...children) {
  const made = Object.assign(document.createElement(tag), attributes);
  made.append(...children);
  return made;
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
    button.setAttribute("aria-current", String(one.number === state.number));
    return element("li", {}, button);
  }));
  by("count").textContent = found.length === state.slides.length ? `${found.length} slides` : `${found.length} of ${state.slides.length} slides`;
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
  fillList();
  document.querySelector("#slides [aria-current=true]")?.scrollIntoView({ block: "nearest" });
  by("list").classList.remove("open");
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
  fillLayers();
  await Promise.all(state.layers.map((_, which) => load(number, which)));
  if (state.number === number) document.body.dataset.ready = String(number);
}

// Layers

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
  fillLayers();
  redraw();
}

function toggle(which) {
  const one = state.layers[which];
  if (!one) return;
  one.how.on = !one.how.on;
  load(state.number, which);
  fillLayers();
  redraw();
}

function dial(name, how, key) {
  const shown = element("output", { textContent: how[key].toFixed(2) });
  const range = element("input", { type: "range", min: 0, max: 1, step: 0.01, value: how[key] });
  range.oninput = () => { how[key] = Number(range.value); shown.textContent = how[key].toFixed(2); redraw(); };
  return element("label", { className: "dial" }, name, range, shown);
}

function fillLayers() {
  const focused = document.activeElement?.dataset?.layer;
  by("boxes").replaceChildren(...state.layers.map(({ layer, how, why }, which) => {
    const box = element("input", { type: "checkbox", checked: how.on, onchange: () => toggle(which) });
    box.dataset.layer = how.name;
    const key = which < 9 ? [element("kbd", { textContent: which + 1 })] : [];
    const parts = [element("label", { className: "head" }, box, how.name, ...key)];
    if (why) parts.push(element("p", { className: "why", textContent: why }));
    else if (how.on) parts.push(...(layer ? legend(layer, how) : []), dial("opacity", how, "opacity"));
    if (how.on && how.kind === "values" && !why) parts.push(dial("threshold", how, "threshold"));
    return element("li", {}, ...parts);
  }));
  if (focused) document.querySelector(`#boxes [data-layer="${CSS.escape(focused)}"]`)?.focus();
}

function legend(layer, how) {
  if (how.kind === "values") return [...columns(layer, how), ramp()];
  const groups = how.kind === "patches" ? layer.groups : [];
  const counts = groups.map((_, k) => layer.group.filter(one => one === k).length);
  const keys = how.kind === "outlines" ? [swatch(lineColour(how.name), `${layer.rings.length} outline${layer.rings.length === 1 ? "" : "s"}`)]
    : groups.flatMap((name, k) => counts[k] ? [swatch(groupColour(layer, k), `${counts[k]} ${name}`)] : []);
  return [element("div", { className: "key" }, ...keys)];
}

function columns(layer, how) {
  if (layer.columns.length < 2) return [];
  const options = layer.columns.map((name, k) => element("option", { value: k, textContent: name }));
  const choice = element("select", { ariaLabel: `What ${how.name} shows` }, ...options);
  choice.value = how.column ?? layer.shown;
  choice.onchange = () => { how.column = Number(choice.value); redraw(); };
  return [choice];
}

function swatch(colour, text) {
  const square = element("canvas", { width: 10, height: 10 }), context = square.getContext("2d");
  context.fillStyle = colour;
  context.fillRect(0, 0, 10, 10);
  return element("span", {}, square, ` ${text}`);
}

function ramp() {
  const bar = element("canvas", { className: "ramp", width: colours.length, height: 1, title: "0 to 1" });
  const context = bar.getContext("2d");
  colours.forEach((colour, k) => { context.fillStyle = colour; context.fillRect(k, 0, 1, 1); });
  return bar;
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
  draw(context, state.layers, where);
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

function trouble(text) {
  by("trouble").textContent = text;
  by("trouble").hidden = !text;
}

// Keys, and what else people do

const KEYS = {
  ArrowDown: () => step(1), ArrowRight: () => step(1), j: () => step(1),
  ArrowUp: () => step(-1), ArrowLeft: () => step(-1), k: () => step(-1),
  "+": () => zoom(1.5), "=": () => zoom(1.5), "-": () => zoom(1 / 1.5), 0: () => viewer.viewport?.goHome(),
  "/": () => { by("list").classList.add("open"); by("filter").focus(); },
  "?": () => by("help").open ? by("help").close() : by("help").showModal(),
};

function zoom(factor) {
  viewer.viewport?.zoomBy(factor).applyConstraints();
}

addEventListener("keydown", event => {
  const typing = event.target.matches("input:not([type=checkbox]), select");
  if (event.key === "Escape" && typing) event.target.blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const act = /^[1-9]$/.test(event.key) ? () => toggle(Number(event.key) - 1) : KEYS[event.key];
  if (!act) return;
  event.preventDefault();
  act();
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
for (const panel of ["list", "layers"]) {
  by(`to-${panel}`).onclick = () => by(`to-${panel}`).setAttribute("aria-expanded", String(by(panel).classList.toggle("open")));
}
addEventListener("resize", redraw);
addEventListener("hashchange", fromAddress);

function fromAddress() {
  const number = Number(/^#slide=(\d+)$/.exec(location.hash)?.[1] ?? NaN);
  if (!state.slides[number]?.shown) return step(0);
  if (number !== state.number) show(number);
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
