// Layers on a canvas: pure functions of a layer, how it is to be drawn, and where the slide lies in the picture.

// Okabe and Ito's colours, distinguishable with every kind of colour vision; the first two as in the overviews of `tile`.
const GROUPS = [[0, 114, 178], [230, 159, 0], [213, 94, 0], [204, 121, 167], [240, 228, 66], [153, 153, 153], [86, 180, 233], [0, 158, 115]];
const LINES = { tissue: "#009e73", annotation: "#000000" };
// matplotlib's viridis, as in the heatmaps of `predict`: faint for low values, so that only high ones stand out.
const RAMP = [
  [68, 1, 84], [72, 36, 117], [65, 68, 135], [53, 95, 141], [42, 120, 142], [33, 145, 140], [34, 168, 132], [68, 191, 112],
  [122, 209, 81], [189, 223, 38], [253, 231, 37],
];
const FAINT = 0.15;
const STEPS = 64;
const COLOURS = Array.from({ length: STEPS }, (_, k) => {
  const share = k / (STEPS - 1), at = share * (RAMP.length - 1), low = Math.min(Math.floor(at), RAMP.length - 2);
  const mixed = RAMP[low].map((from, i) => Math.round(from + (RAMP[low + 1][i] - from) * (at - low)));
  return [...mixed, Math.round(255 * (FAINT + (1 - FAINT) * share))];
});
const EDGE_PX = 6;         // minimum side of patches with edges or crosses; shorter ones on a grid are one picture
const MIN_PX = 2;          // minimum side of patches off a grid before they are one picture
const RIM = [4.5, "#ffffff"];  // under a line, visible on any background
const LINE_PX = 2;         // precision of outlines
const MAX_CELLS = 2048;   // of that picture, a side

const css = ([red, green, blue, alpha]) => `rgb(${red} ${green} ${blue} / ${alpha / 255})`;
const groupRgb = (layer, group) => [...GROUPS[(layer.first + group) % GROUPS.length], 255];

export const colours = COLOURS.map(css);
export const groupColour = (layer, group) => css(groupRgb(layer, group));
export const lineColour = name => LINES[name] ?? LINES.annotation;

/** The patches of a layer by colour: [[red, green, blue, alpha], numbers of patches]. Kept until it changes. */
function batches(layer, how) {
  const key = how.kind === "values" ? how.column ?? layer.shown : "";
  if (layer.batches?.key !== key) {
    const found = how.kind === "values" ? batchesByValue(layer.values[key]) : batchesByGroup(layer);
    layer.batches = Object.assign(found.filter(([, numbers]) => numbers.length), { key });
  }
  return layer.batches;
}

function batchesByGroup(layer) {
  const found = layer.groups.map((_, group) => [groupRgb(layer, group), []]);
  layer.group.forEach((group, k) => found[group][1].push(k));
  return found;
}

function batchesByValue(values) {
  const found = COLOURS.map(colour => [colour, []]);
  values.forEach((value, k) => {
    if (value !== null) found[Math.min(STEPS - 1, Math.floor(value * STEPS))][1].push(k);
  });
  return found;
}

function drawLines(context, layer, how, view) {
  const step = 2 ** Math.floor(Math.log2(LINE_PX * view.density / view.zoom));  // from afar a line needs fewer points
  layer.paths ??= {};
  stroke(context, layer.paths[step] ??= buildPath(layer.rings, step), [RIM, [2, lineColour(how.name)]], view);
}

/** Draw a path of level-0 pixels, line upon line. @param lines [[width, colour]] */
function stroke(context, path, lines, view) {
  context.setTransform(view.zoom, 0, 0, view.zoom, view.left, view.top);
  context.lineJoin = "bevel";
  for (const [width, colour] of lines) {
    context.lineWidth = width * view.density / view.zoom;
    context.strokeStyle = colour;
    context.stroke(path);
  }
  context.setTransform(1, 0, 0, 1, 0, 0);
}

function drawValues(context, layer, how, view) {
  drawPatches(context, layer, how, view);
  const column = how.column ?? layer.shown, key = `${column} ${how.threshold}`;
  if (layer.edge?.key !== key) layer.edge = Object.assign(thresholdEdge(layer, layer.values[column], how.threshold), { key });
  context.globalAlpha = 1;
  const far = layer.side * view.zoom < EDGE_PX * view.density;  // a rim would hide patches as small as that
  stroke(context, layer.edge, far ? [[1, LINES.annotation]] : [RIM, [2, LINES.annotation]], view);
}

/** The edge of the patches from a threshold on: the sides not shared by two of them, on a grid. */
function thresholdEdge({ xy, side, grid }, values, threshold) {
  const { left, top, cell, exact, columns } = grid, row = columns + 2, path = new Path2D(), reached = new Map();
  values.forEach((value, k) => {
    if (value === null || value < threshold) return;
    const at = Math.round((xy[2 * k + 1] - top) / cell) * row + Math.round((xy[2 * k] - left) / cell);
    reached.set(exact ? at : -k - 1, k);
  });
  for (const [at, k] of reached) {
    const x = xy[2 * k], y = xy[2 * k + 1];
    for (const [to, right, down] of [[-row, 0, 0], [row, 0, 1], [-1, 0, 0], [1, 1, 0]]) {
      if (exact && reached.has(at + to)) continue;
      const across = Math.abs(to) === row;
      path.moveTo(x + right * side, y + down * side);
      path.lineTo(x + (across || right) * side, y + (!across || down) * side);
    }
  }
  return path;
}

/** Rings as one path, without the points that are nearer than a step, in level-0 pixels, to the one before. */
function buildPath(rings, step) {
  const path = new Path2D();
  for (const ring of rings) {
    let [x, y] = ring;
    path.moveTo(x, y);
    for (let k = 2; k < ring.length; k += 2) {
      if (Math.abs(ring[k] - x) < step && Math.abs(ring[k + 1] - y) < step) continue;
      [x, y] = [ring[k], ring[k + 1]];
      path.lineTo(x, y);
    }
    path.closePath();
  }
  return path;
}

function drawPatches(context, layer, how, view) {
  const side = layer.side * view.zoom, found = batches(layer, how);
  layer.grid ??= findGrid(layer);
  if (side < (layer.grid.exact ? EDGE_PX : MIN_PX) * view.density) return drawSmall(context, layer, found, view);
  for (const [colour, numbers] of found) {
    context.fillStyle = css(colour);
    const corners = visible(layer, numbers, view);
    for (let k = 0; k < corners.length; k += 2) context.fillRect(corners[k], corners[k + 1], side, side);
    if (how.kind === "patches" && side >= EDGE_PX * view.density) drawEdges(context, corners, side, colour, layer.crossed, view);
  }
}

/** Left and top, in pixels of the picture, of those of a layer's patches that lie in it: [x, y, x, y, …].
 *  @param view {left, top, zoom, width, height}: picture pixels of level 0's corner, per level-0 pixel, of the picture. */
function visible(layer, numbers, view) {
  const side = layer.side * view.zoom, found = [];
  for (const k of numbers) {
    const x = view.left + layer.xy[2 * k] * view.zoom, y = view.top + layer.xy[2 * k + 1] * view.zoom;
    if (x < view.width && y < view.height && x + side > 0 && y + side > 0) found.push(x, y);
  }
  return found;
}

/** Frames around patches, and crosses through excluded ones. */
function drawEdges(context, corners, side, colour, crossed, view) {
  const path = new Path2D(), inner = side - 1, alpha = context.globalAlpha;
  for (let k = 0; k < corners.length; k += 2) {
    const x = corners[k] + 0.5, y = corners[k + 1] + 0.5;
    path.rect(x, y, inner, inner);
    if (!crossed) continue;
    path.moveTo(x, y);
    path.lineTo(x + inner, y + inner);
    path.moveTo(x + inner, y);
    path.lineTo(x, y + inner);
  }
  context.globalAlpha = Math.min(1, 2 * alpha);
  context.strokeStyle = css(colour);
  context.lineWidth = (crossed ? 1.5 : 1) * view.density;
  context.stroke(path);
  context.globalAlpha = alpha;
}

/** Patches too small to distinguish, as one picture with a pixel for each. */
function drawSmall(context, layer, found, view) {
  if (!found.length) return;
  const { left, top, cell } = layer.grid, small = found.small ??= buildPicture(layer, found);
  context.imageSmoothingEnabled = cell * view.zoom < 1;
  const [width, height] = [small.width, small.height].map(extent => extent * cell * view.zoom);
  context.drawImage(small, view.left + left * view.zoom, view.top + top * view.zoom, width, height);
}

/** Where the patches of a layer lie: in level-0 pixels its corner and the side of a cell, in cells its extent; and
 *  whether each patch is a cell. */
function findGrid({ xy, side }) {
  let [left, top, right, bottom] = [Infinity, Infinity, -Infinity, -Infinity];
  for (let k = 0; k < xy.length; k += 2) {
    left = Math.min(left, xy[k]); right = Math.max(right, xy[k]);
    top = Math.min(top, xy[k + 1]); bottom = Math.max(bottom, xy[k + 1]);
  }
  const cell = Math.max(side, (right - left) / MAX_CELLS, (bottom - top) / MAX_CELLS);
  const off = (at, from) => Math.abs(at - from - Math.round((at - from) / cell) * cell);
  const exact = cell === side && xy.every((at, k) => off(at, k % 2 ? top : left) <= 1);  // corners are whole pixels
  return { left, top, cell, exact, columns: Math.round((right - left) / cell) + 1, rows: Math.round((bottom - top) / cell) + 1 };
}

function buildPicture({ xy, grid }, found) {
  const { left, top, cell, columns, rows } = grid, small = new OffscreenCanvas(columns, rows);
  const pixels = new ImageData(columns, rows);
  for (const [colour, numbers] of found) {
    for (const k of numbers) {
      const at = Math.round((xy[2 * k + 1] - top) / cell) * columns + Math.round((xy[2 * k] - left) / cell);
      pixels.data.set(colour, 4 * at);
    }
  }
  small.getContext("2d").putImageData(pixels, 0, 0);
  return small;
}

const DRAW = { outlines: drawLines, patches: drawPatches, values: drawValues };

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

/** A scale bar at the lower right; none without the slide's resolution. */
export function drawScale(context, mpp, view, ink, paper) {
  if (!mpp) return;
  const umPerPixel = mpp / view.zoom, maximum = Math.min(view.width / 4, 160 * view.density) * umPerPixel;
  const power = 10 ** Math.floor(Math.log10(maximum));
  const um = [5, 2, 1].map(n => n * power).find(n => n <= maximum);
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

/** Describe the value of a layer's patch number k. */
export function describePatch(layer, kind, k) {
  if (kind === "patches") return layer.groups[layer.group[k]];
  return layer.columns.map((name, i) => `${name} ${layer.values[i][k]?.toFixed(3) ?? "unknown"}`).join(", ");
}
