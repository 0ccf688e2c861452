// ---- The view of the trees: zoom, selection, widths, colours ----------------------------------------------------

const canvas = byId("icicle");
const pen = canvas.getContext("2d");
const tip = byId("tip");
const dark = matchMedia("(prefers-color-scheme: dark)");
const view = {
  zoom: NONE, selected: N > 0 ? 0 : NONE, hovered: NONE, matches: [],
  widthMode: "tokens", colourMode: rolesKnown ? "role" : "multiplicity",
  width: 0, height: 0, // of the canvas, in pixels of CSS
};
const maxDeepest = deepest.reduce((most, value) => Math.max(most, value), 1);
const maxMultiplicity = multiplicity.reduce((most, value) => Math.max(most, value), 1);

// Left edge of every node if its width is `weight`: children are side by side, from their parent's left edge.
function leftEdges(weight) {
  const left = new Float64Array(N);
  const next = new Float64Array(N); // where the next child of each node goes
  let nextRoot = 0;
  for (let n = 0; n < N; ++n) {
    const p = parent[n];
    left[n] = p === NONE ? nextRoot : next[p];
    if (p === NONE) nextRoot += weight[n];
    else next[p] += weight[n];
    next[n] = left[n];
  }
  return { left, weight, all: nextRoot };
}
const edges = { tokens: leftEdges(below), trajectories: leftEdges(multiplicity) };

// Units and positions to pixels.
function scales() {
  const { left, weight, all } = edges[view.widthMode];
  const { zoom } = view;
  const top = zoom === NONE ? 0 : position[zoom];
  return {
    left, weight, top,
    origin: zoom === NONE ? 0 : left[zoom],
    across: view.width / Math.max(1e-9, zoom === NONE ? all : weight[zoom]),
    down: view.height / Math.max(1, (zoom === NONE ? maxDeepest : deepest[zoom]) - top),
    begin: zoom === NONE ? 0 : zoom,
    end: zoom === NONE ? N : last[zoom],
  };
}

function boxOf(n, v) {
  return {
    x: (v.left[n] - v.origin) * v.across, w: v.weight[n] * v.across,
    y: (position[n] - v.top) * v.down, h: size[n] * v.down,
  };
}

// The node at a point of the canvas, or NONE.
function nodeAt(x, y) {
  const v = scales();
  const unit = v.origin + x / v.across, at = v.top + y / v.down;
  let n = v.begin, end = v.end;
  while (n < end) {
    if (unit < v.left[n] + v.weight[n]) {
      if (unit < v.left[n] || at < position[n]) return NONE;
      if (at < position[n] + size[n]) return n;
      end = last[n];
      ++n;
    } else {
      n = last[n];
    }
  }
  return NONE;
}

// ---- Colours

const SHADES = 24;
const HUES = { unknown: [150, 4], system: [268, 34], user: [212, 46], assistant: [152, 34], tool: [36, 52] }; // hue, saturation
let palettes = []; // by role (one where roles are not shown), then by shade
let labelInks = [];
let hatch = null;

function buildPalette() {
  const { colourMode } = view;
  const kinds = colourMode === "role" ? ROLES.map((role) => HUES[role]) : [colourMode === "multiplicity" ? [152, 32] : [28, 40]];
  palettes = kinds.map(() => []);
  labelInks = [];
  for (let s = 0; s < SHADES; ++s) {
    const t = s / (SHADES - 1);
    const light = dark.matches ? 22 + 48 * t : 89 - 52 * t;
    kinds.forEach(([hue, saturation], k) => palettes[k].push(`hsl(${hue} ${saturation + 14 * t}% ${light}%)`));
    labelInks.push(light > 44 ? "#0d1712" : "#f4f8f5");
  }
  hatch = hatching();
  showLegend();
}

// Diagonal lines, for tokens that are encoded again.
function hatching() {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 10;
  const lines = tile.getContext("2d");
  lines.strokeStyle = dark.matches ? "#ff9d7a" : "#b3261e";
  lines.lineWidth = 1.1;
  lines.beginPath();
  for (const shift of [-10, 0, 10]) {
    lines.moveTo(shift - 1, 11);
    lines.lineTo(shift + 11, -1);
  }
  lines.stroke();
  return pen.createPattern(tile, "repeat");
}

function showLegend() {
  const { colourMode } = view;
  const place = byId("legend");
  place.replaceChildren();
  if (colourMode === "role") {
    ROLES.forEach((role, k) => {
      if (!spanRole.includes(k)) return;
      const entry = element("span", k === 0 ? "other" : role, "entry");
      const colour = element("i");
      colour.style.background = palettes[k][Math.round(SHADES * 0.6)];
      entry.prepend(colour);
      place.append(entry);
    });
    place.append(element("span", maxMultiplicity > 1 ? "(stronger colours: more trajectories)" : ""));
  } else {
    const bar = element("i", undefined, "scale");
    bar.style.background = `linear-gradient(to right, ${palettes[0].join(",")})`;
    place.append(colourMode === "multiplicity" ? "1" : "none", bar, colourMode === "multiplicity" ? count(maxMultiplicity) : "all");
  }
  if (lost.some((tokens) => tokens > 0)) {
    const entry = element("span", "encoded again, could be shared", "entry");
    entry.prepend(element("i", undefined, "hatch"));
    place.append(entry);
  }
}

function shade(n) {
  const t = view.colourMode === "trained" ? trained[n] / size[n]
    : maxMultiplicity > 1 ? Math.log(multiplicity[n]) / Math.log(maxMultiplicity) : view.colourMode === "role" ? 0.4 : 0;
  return Math.round(Math.min(1, t) * (SHADES - 1));
}

function fillOf(role, s) {
  return palettes[view.colourMode === "role" ? role : 0][s];
}

