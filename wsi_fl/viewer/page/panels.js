// The panel of layers: names, legends and settings.
import { colours, groupColour, lineColour } from "./drawing.js";

export function element(tag, attributes = {}, ...children) {
  const node = Object.assign(document.createElement(tag), attributes);
  node.append(...children);
  return node;
}

/** "1 slide", "2 slides". */
export const countWords = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;

/** The item of a layer; `updateItem` fills in changes, without replacing controls in use.
 *  @param act {toggle, redraw} */
export function buildItem(entry, index, act) {
  const { how } = entry;
  const box = element("input", { type: "checkbox", onchange: () => act.toggle(index) });
  box.dataset.layer = how.name;
  const key = index < 9 ? [element("kbd", { textContent: index + 1 })] : [];
  const changed = () => { paint(entry); act.redraw(); };
  const dials = (how.kind === "values" ? ["opacity", "threshold"] : ["opacity"]).map(name => dial(name, how, changed));
  entry.parts = { box, meaning: element("div"), dials: element("div", {}, ...dials), ramp: ramp() };
  updateItem(entry, act);
  return element("li", {}, element("label", { className: "head" }, box, how.name, ...key), entry.parts.meaning, entry.parts.dials);
}

/** Show the current state of a layer. */
export function updateItem(entry, act) {
  const { layer, why, how, parts } = entry;
  parts.box.checked = how.on;
  parts.dials.hidden = !how.on || Boolean(why);
  const reason = why ? [element("p", { className: "why", textContent: why })] : [];
  parts.meaning.replaceChildren(...reason, ...(layer && how.on ? legend(entry, act) : []));
  paint(entry);
}

function dial(name, how, changed) {
  const shown = element("output", { textContent: how[name].toFixed(2) });
  const range = element("input", { type: "range", min: 0, max: 1, step: 0.01, value: how[name] });
  range.oninput = () => { how[name] = Number(range.value); shown.textContent = how[name].toFixed(2); changed(); };
  return element("label", { className: "dial" }, name, range, shown);
}

function legend({ layer, how, parts }, act) {
  if (how.kind === "values") return [...columns(layer, how, act), scale(parts.ramp)];
  if (how.kind === "outlines") return [key([swatch(lineColour(how.name), countWords(layer.rings.length, "outline"))])];
  const counts = layer.groups.map(() => 0);
  for (const group of layer.group) counts[group] += 1;
  return [key(layer.groups.flatMap((name, k) => counts[k] ? [swatch(groupColour(layer, k), `${counts[k]} ${name}`)] : []))];
}

const key = swatches => element("div", { className: "key" }, ...swatches);

function columns(layer, how, act) {
  if (layer.columns.length < 2) return [];
  const options = layer.columns.map((name, k) => element("option", { value: k, textContent: name }));
  const choice = element("select", { ariaLabel: `What ${how.name} shows` }, ...options);
  choice.value = how.column ?? layer.shown;
  choice.onchange = () => { how.column = Number(choice.value); act.redraw(); };
  return [choice];
}

function swatch(colour, text) {
  const square = element("canvas", { width: 10, height: 10 }), context = square.getContext("2d");
  context.fillStyle = colour;
  context.fillRect(0, 0, 10, 10);
  return element("span", {}, square, ` ${text}`);
}

const ramp = () => element("canvas", { width: colours.length, height: 1, title: "colours of values; the mark is the threshold" });
const scale = bar => element("div", { className: "ramp" }, element("span", { textContent: 0 }), bar, element("span", { textContent: 1 }));

/** Colour the ramp, with a mark at the threshold. */
function paint({ how, parts }) {
  const context = parts.ramp.getContext("2d"), mark = Math.min(colours.length - 1, Math.floor(how.threshold * colours.length));
  context.clearRect(0, 0, colours.length, 1);
  colours.forEach((colour, k) => {
    context.fillStyle = k === mark ? lineColour("annotation") : colour;
    context.fillRect(k, 0, 1, 1);
  });
}
