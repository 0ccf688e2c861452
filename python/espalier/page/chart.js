// ---- The chart: drawing, pointer and keys ----------------------------------------------------------------------

function drawLabel(text, x, y, width, ink) {
  const most = Math.floor((width - 8) / 6.4);
  pen.fillStyle = ink;
  pen.fillText(text.length > most ? `${text.slice(0, Math.max(1, most - 1))}\u2026` : text, x + 4, y);
}

// Draws a box with a band for each message, and the first words in bands that are large enough.
function drawBox(n, box) {
  const s = shade(n);
  const w = Math.max(1, box.w - (box.w > 3 ? 1 : 0)), h = Math.max(1, box.h - (box.h > 3 ? 1 : 0));
  const begin = spanBegin[n], end = spanBegin[n + 1];
  pen.fillStyle = fillOf(mainRole[n], s);
  pen.fillRect(box.x, box.y, w, h);
  if (view.colourMode === "role" && end - begin > 1) {
    let y = 0;
    for (let k = begin; k < end; ++k) {
      const next = y + spanSize[k] / size[n] * h;
      if (Math.floor(next) > Math.floor(y)) {
        pen.fillStyle = fillOf(spanRole[k], s);
        pen.fillRect(box.x, box.y + y, w, next - y);
      }
      y = next;
    }
  }
  drawLost(n, box, w);
  if (box.w > 44 && box.h > 13) drawLabel(title(n, 160), box.x, box.y + Math.min(box.h / 2, 9), box.w, labelInks[s]);
}

function drawLost(n, box, w) {
  if (lost[n] === 0) return;
  pen.fillStyle = hatch;
  pen.fillRect(box.x, box.y + lostBegin[n] / size[n] * box.h, w, Math.max(1, lost[n] / size[n] * box.h - 1));
}

// Draws a subtree in one column of pixels, by its deepest path.
function drawLine(n, column, v) {
  let drawn = 0;
  for (let child = n; child !== NONE;) {
    n = child;
    const top = (position[n] - v.top) * v.down, bottom = top + size[n] * v.down;
    if (Math.floor(bottom) > Math.floor(top) || drawn === 0) {
      pen.fillStyle = fillOf(mainRole[n], shade(n));
      pen.fillRect(column, top, 1, Math.max(1, bottom - top));
      drawLost(n, { x: column, y: top, h: bottom - top }, 1);
      ++drawn;
    }
    child = NONE;
    for (let c = n + 1; c < last[n]; c = last[c]) {
      if (deepest[c] === deepest[n]) { child = c; break; }
    }
  }
  return drawn;
}

// Draws all boxes. A subtree narrower than a pixel becomes one line; of boxes lower than a pixel only those that
// cross into a new row of pixels are drawn.
function drawBoxes(v) {
  let lineAt = -1, lineEnd = -1; // the last line: its column of pixels, and how far down it goes
  let drawn = 0;
  for (let n = v.begin; n < v.end;) {
    const box = boxOf(n, v);
    if (box.w < 1) {
      const column = Math.floor(box.x), bottom = (deepest[n] - v.top) * v.down;
      if (column !== lineAt || bottom > lineEnd + 1) {
        drawn += drawLine(n, column, v);
        lineEnd = column === lineAt ? Math.max(lineEnd, bottom) : bottom;
        lineAt = column;
      }
      n = last[n];
      continue;
    }
    if (box.h >= 1) {
      drawBox(n, box);
      ++drawn;
    } else if (Math.floor(box.y + box.h) > Math.floor(box.y)) {
      drawBox(n, { ...box, y: Math.floor(box.y + box.h), h: 1 });
      ++drawn;
    }
    ++n;
  }
  return drawn;
}

// Marks found nodes at their upper left corner, once per pixel.
function drawMatches(v, colour) {
  pen.fillStyle = colour;
  let before = "";
  for (const n of view.matches) {
    if (n < v.begin || n >= v.end) continue;
    const box = boxOf(n, v);
    const at = `${Math.round(box.x)},${Math.round(box.y)}`;
    if (at === before) continue;
    before = at;
    pen.fillRect(box.x, box.y, 4, Math.min(16, Math.max(4, box.h - 1)));
  }
}

function outline(n, v, colour, thick) {
  if (n === NONE || n < v.begin || n >= v.end) return;
  const box = boxOf(n, v);
  pen.strokeStyle = colour;
  pen.lineWidth = thick;
  const half = thick / 2;
  pen.strokeRect(Math.min(box.x, view.width - 5) + half, Math.min(box.y, view.height - 5) + half,
    Math.max(4, box.w - 1) - thick, Math.max(4, box.h - 1) - thick);
}

function draw() {
  const v = scales();
  const style = getComputedStyle(document.documentElement);
  pen.clearRect(0, 0, view.width, view.height);
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  canvas.dataset.drawn = drawBoxes(v);
  drawMatches(v, style.getPropertyValue("--find"));
  outline(view.hovered, v, style.getPropertyValue("--ink"), 1);
  outline(view.selected, v, style.getPropertyValue("--focus"), document.activeElement === canvas ? 3 : 2);
}

let frame = 0;
function redraw() {
  if (frame) return;
  frame = requestAnimationFrame(() => {
    frame = 0;
    draw();
  });
}

function resize() {
  const box = canvas.getBoundingClientRect();
  const dots = window.devicePixelRatio || 1;
  view.width = Math.max(1, box.width - 2); // the border
  view.height = Math.max(1, box.height - 2);
  canvas.width = Math.round(view.width * dots);
  canvas.height = Math.round(view.height * dots);
  pen.setTransform(dots, 0, 0, dots, 0, 0);
  draw();
}

function setZoom(n) {
  view.zoom = n;
  byId("up").disabled = byId("all").disabled = n === NONE;
  view.hovered = NONE;
  tip.hidden = true;
  redraw();
}

// Selects a node and zooms out until it is visible.
function select(n) {
  if (n === NONE || n >= N) return;
  view.selected = n;
  let z = view.zoom;
  while (z !== NONE && (n < z || n >= last[z])) z = parent[z];
  if (z !== view.zoom) setZoom(z);
  showPanel(n);
  redraw();
}

// Selects a node for a link from elsewhere on the page; zooms into its parent if it is too small to see.
function reveal(n) {
  select(n);
  const box = boxOf(n, scales());
  if (box.w < 24 || box.h < 4) setZoom(parent[n] === NONE ? n : parent[n]);
  byId("trees-title").scrollIntoView({ block: "start" });
  canvas.focus({ preventScroll: true });
}

function zoomOut() {
  const from = view.zoom;
  if (from === NONE) return;
  setZoom(parent[from]);
  select(from);
}

const keys = {
  ArrowDown: () => { if (last[view.selected] > view.selected + 1) select(view.selected + 1); },
  ArrowUp: () => select(parent[view.selected]),
  ArrowLeft: () => select(previousSibling(view.selected)),
  ArrowRight: () => select(nextSibling(view.selected)),
  Enter: () => setZoom(view.selected),
  Escape: zoomOut,
  Backspace: zoomOut,
  Home: () => { setZoom(NONE); select(0); },
};

function showTip(n) {
  tip.hidden = n === NONE;
  if (n !== NONE) tip.textContent = `${factsOf(n).join("\n")}\n\u201c${title(n, 160)}\u201d`;
}

function pointAt(event) {
  const n = nodeAt(event.offsetX, event.offsetY);
  if (n !== view.hovered) {
    view.hovered = n;
    showTip(n);
    redraw();
  }
  if (n === NONE) return;
  const x = Math.min(event.offsetX + 14, Math.max(0, view.width - tip.offsetWidth - 4));
  const y = event.offsetY + 18 + tip.offsetHeight < view.height ? event.offsetY + 18 : event.offsetY - tip.offsetHeight - 8;
  tip.style.left = `${x}px`;
  tip.style.top = `${Math.max(0, y)}px`;
}

// The first click selects a node; a click on the selected node zooms into it, or out again.
function click(event) {
  const n = nodeAt(event.offsetX, event.offsetY);
  if (n === NONE) return;
  if (n !== view.selected) select(n);
  else if (n === view.zoom) zoomOut();
  else setZoom(n);
}

function listenToChart() {
  canvas.addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey || N === 0) return;
    event.preventDefault();
    keys[event.key]();
  });
  canvas.addEventListener("focus", redraw);
  canvas.addEventListener("blur", redraw);
  canvas.addEventListener("pointermove", pointAt);
  canvas.addEventListener("pointerleave", () => { view.hovered = NONE; tip.hidden = true; redraw(); });
  canvas.addEventListener("click", click);
  byId("up").addEventListener("click", zoomOut);
  byId("all").addEventListener("click", () => setZoom(NONE));
  byId("width").addEventListener("change", (event) => { view.widthMode = event.target.value; redraw(); });
  byId("colour").addEventListener("change", (event) => { view.colourMode = event.target.value; buildPalette(); redraw(); });
  dark.addEventListener("change", () => { buildPalette(); redraw(); });
  new ResizeObserver(resize).observe(canvas);
}

