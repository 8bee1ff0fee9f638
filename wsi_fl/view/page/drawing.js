// Layers on a canvas: pure functions of a layer, how it is to be drawn, and where the slide lies in the picture.

// Okabe and Ito's colours, told apart with every kind of colour vision; the first two as in the overviews of `tile`.
const GROUPS = ["#0072b2", "#e69f00", "#d55e00", "#cc79a7", "#f0e442", "#999999", "#56b4e9", "#009e73"];
const LINES = { tissue: "#009e73", annotation: "#000000" };
// matplotlib's inferno from light to dark, as in the heatmaps of `predict`: dark and dense is probable.
const RAMP = [[245, 219, 75], [252, 165, 10], [236, 105, 37], [197, 62, 65], [147, 38, 103], [88, 16, 110], [40, 11, 84]];
const STEPS = 64;

export const colours = Array.from({ length: STEPS }, (_, k) => {
  const at = (k / (STEPS - 1)) * (RAMP.length - 1), low = Math.min(Math.floor(at), RAMP.length - 2);
  return "rgb(" + RAMP[low].map((from, i) => Math.round(from + (RAMP[low + 1][i] - from) * (at - low))).join(" ") + ")";
});

export const groupColour = (layer, group) => GROUPS[(layer.first + group) % GROUPS.length];
export const lineColour = name => LINES[name] ?? LINES.annotation;

/** The boxes of a layer that lie in the picture, as (number, left, top, side) in pixels of the picture.
 *  @param view {left, top, zoom, width, height}: picture pixels of level 0's corner, per level-0 pixel, of the picture. */
function* visible(layer, view) {
  const side = layer.side * view.zoom, shown = Math.max(side, 1);
  for (let k = 0; k < layer.xy.length; k += 2) {
    const x = view.left + layer.xy[k] * view.zoom, y = view.top + layer.xy[k + 1] * view.zoom;
    if (x < view.width && y < view.height && x + side > 0 && y + side > 0) yield [k / 2, x, y, shown];
  }
}

function drawLines(context, layer, how, view) {
  layer.path ??= pathOf(layer.rings);
  context.setTransform(view.zoom, 0, 0, view.zoom, view.left, view.top);
  context.lineJoin = "round";
  for (const [width, colour] of [[4.5, "#ffffff"], [2, lineColour(how.name)]]) {
    context.lineWidth = width * view.density / view.zoom;
    context.strokeStyle = colour;
    context.stroke(layer.path);
  }
  context.setTransform(1, 0, 0, 1, 0, 0);
}

function pathOf(rings) {
  const path = new Path2D();
  for (const ring of rings) {
    for (let k = 0; k < ring.length; k += 2) path[k ? "lineTo" : "moveTo"](ring[k], ring[k + 1]);
    path.closePath();
  }
  return path;
}

function drawGroups(context, layer, how, view) {
  const edge = layer.side * view.zoom >= 6 * view.density, alpha = context.globalAlpha;
  context.lineWidth = view.density;
  for (const [k, x, y, side] of visible(layer, view)) {
    context.fillStyle = context.strokeStyle = groupColour(layer, layer.group[k]);
    context.globalAlpha = alpha * 0.6;
    context.fillRect(x, y, side, side);
    context.globalAlpha = alpha;
    if (edge) context.strokeRect(x + 0.5, y + 0.5, side - 1, side - 1);
  }
}

function drawValues(context, layer, how, view) {
  const values = layer.values[how.column ?? layer.shown];
  for (const [k, x, y, side] of visible(layer, view)) {
    if (values[k] < how.threshold) continue;
    context.fillStyle = colours[Math.min(STEPS - 1, Math.floor(values[k] * STEPS))];
    context.fillRect(x, y, side, side);
  }
}

const DRAW = { outlines: drawLines, patches: drawGroups, values: drawValues };

/** Draw what is on, in order. @param layers [{layer, how: {name, kind, on, opacity, threshold, column}}] */
export function draw(context, layers, view) {
  context.clearRect(0, 0, view.width, view.height);
  for (const { layer, how } of layers) {
    if (!layer || !how.on) continue;
    context.globalAlpha = how.opacity;
    DRAW[how.kind](context, layer, how, view);
  }
  context.globalAlpha = 1;
}

/** A scale bar at the lower right; nothing where nobody knows the slide's resolution. */
export function drawScale(context, mpp, view, ink, paper) {
  if (!mpp) return;
  const umPerPixel = mpp / view.zoom, most = Math.min(view.width / 4, 160 * view.density) * umPerPixel;
  const power = 10 ** Math.floor(Math.log10(most));
  const um = [5, 2, 1].map(n => n * power).find(n => n <= most);
  const length = um / umPerPixel, right = view.width - 14 * view.density, y = view.height - 14 * view.density;
  const text = um >= 1000 ? `${um / 1000} mm` : `${um} µm`;
  context.font = `${12 * view.density}px system-ui, sans-serif`;
  context.textAlign = "right";
  for (const [width, colour] of [[5, paper], [2, ink]]) {
    context.strokeStyle = colour;
    context.lineWidth = width * view.density;
    context.beginPath();
    context.moveTo(right - length, y);
    context.lineTo(right, y);
    context.stroke();
    if (colour === paper) context.strokeText(text, right, y - 7 * view.density);
  }
  context.fillStyle = ink;
  context.fillText(text, right, y - 7 * view.density);
}

/** The last patch of a layer at a level-0 point, or -1. */
export function patchAt(layer, x, y) {
  for (let k = layer.xy.length - 2; k >= 0; k -= 2) {
    const dx = x - layer.xy[k], dy = y - layer.xy[k + 1];
    if (dx >= 0 && dy >= 0 && dx < layer.side && dy < layer.side) return k / 2;
  }
  return -1;
}

/** What a layer says of its patch number k, in words. */
export function said(layer, kind, k) {
  if (kind === "patches") return layer.groups[layer.group[k]];
  return layer.columns.map((name, i) => `${name} ${layer.values[i][k].toFixed(3)}`).join(", ");
}
