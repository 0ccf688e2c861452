"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const report = data.report;
  const byId = (id) => document.getElementById(id);
  const count = (value) => value.toLocaleString("en-US");
  const percent = (part) => `${(part * 100).toFixed(1)}%`;
  const plural = (value, word) =>
    `${count(value)} ${value === 1 ? word : word.endsWith("y") ? `${word.slice(0, -1)}ies` : `${word}s`}`;

  function element(name, text, className) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  }

  // ---- The trees, as columns indexed by node in preorder -------------------------------------------------------

  // LEB128 in base64, one number per node.
  function numbers(base64, length) {
    const bytes = atob(base64);
    const values = new Float64Array(length);
    let at = 0;
    for (let n = 0; n < length; ++n) {
      let value = 0, factor = 1, byte;
      do {
        byte = bytes.charCodeAt(at++);
        value += (byte & 127) * factor;
        factor *= 128;
      } while (byte & 128);
      values[n] = value;
    }
    return values;
  }

  const NONE = -1; // the place above all roots
  const N = data.tree.nodes;
  const columns = data.tree.columns;
  const size = numbers(columns.size, N);
  const multiplicity = numbers(columns.multiplicity, N);
  const ends = numbers(columns.ends, N);
  const trained = numbers(columns.trained, N);
  const hidden = numbers(columns.hidden, N);
  const parent = new Int32Array(N);
  const depth = new Int32Array(N);
  const last = new Int32Array(N); // one past the last node of the subtree
  const position = new Float64Array(N);
  const deepest = new Float64Array(N); // position at which the subtree ends
  const below = new Float64Array(N); // tree tokens of the subtree

  function buildTree() {
    const up = numbers(columns.up, N);
    const path = []; // node at each depth
    for (let n = 0; n < N; ++n) {
      const d = (n === 0 ? 0 : depth[n - 1] + 1) - up[n];
      depth[n] = d;
      parent[n] = d === 0 ? NONE : path[d - 1];
      path[d] = n;
      position[n] = d === 0 ? 0 : position[parent[n]] + size[parent[n]];
      deepest[n] = position[n] + size[n];
      below[n] = size[n] + hidden[n];
      last[n] = n + 1;
    }
    for (let n = N - 1; n >= 0; --n) {
      const p = parent[n];
      if (p === NONE) continue;
      deepest[p] = Math.max(deepest[p], deepest[n]);
      below[p] += below[n];
      last[p] = Math.max(last[p], last[n]);
    }
  }
  buildTree();
  const maxDeepest = deepest.reduce((most, value) => Math.max(most, value), 1);
  const maxMultiplicity = multiplicity.reduce((most, value) => Math.max(most, value), 1);

  // Left edge of every node when its width is `weight`: children stand side by side, from their parent's left edge.
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
  const layouts = { tokens: leftEdges(below), trajectories: leftEdges(multiplicity) };

  // ---- The chart -----------------------------------------------------------------------------------------------

  const canvas = byId("icicle");
  const pen = canvas.getContext("2d");
  const tip = byId("tip");
  let zoom = NONE, focused = N > 0 ? 0 : NONE, hovered = NONE;
  let widthMode = "tokens", colourMode = "multiplicity";
  let width = 0, height = 0, palette = [], labelInks = [];
  const SHADES = 24;
  const dark = matchMedia("(prefers-color-scheme: dark)");

  function buildPalette() {
    const hue = colourMode === "multiplicity" ? 152 : 28;
    palette = [];
    labelInks = [];
    for (let s = 0; s < SHADES; ++s) {
      const t = s / (SHADES - 1);
      const light = dark.matches ? 20 + 52 * t : 90 - 58 * t;
      palette.push(`hsl(${hue} ${22 + 28 * t}% ${light}%)`);
      labelInks.push(light > 40 ? "#0d1712" : "#f4f8f5");
    }
    byId("legend-bar").style.background = `linear-gradient(to right, ${palette.join(",")})`;
    byId("legend-low").textContent = colourMode === "multiplicity" ? "1" : "none";
    byId("legend-high").textContent = colourMode === "multiplicity" ? count(maxMultiplicity) : "all";
  }

  function shade(n) {
    const t = colourMode === "trained" ? trained[n] / size[n]
      : maxMultiplicity > 1 ? Math.log(multiplicity[n]) / Math.log(maxMultiplicity) : 0;
    return Math.round(Math.min(1, t) * (SHADES - 1));
  }

  // What of the forest is seen: units and positions to pixels.
  function view() {
    const { left, weight, all } = layouts[widthMode];
    const top = zoom === NONE ? 0 : position[zoom];
    return {
      left, weight, top,
      origin: zoom === NONE ? 0 : left[zoom],
      across: width / Math.max(1e-9, zoom === NONE ? all : weight[zoom]),
      down: height / Math.max(1, (zoom === NONE ? maxDeepest : deepest[zoom]) - top),
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

  function drawLabel(n, box, ink) {
    const text = data.tree.texts[n].replace(/\s+/g, " ").trim() || plural(size[n], "token");
    const room = Math.floor((box.w - 8) / 6.6);
    pen.fillStyle = ink;
    pen.fillText(text.length > room ? text.slice(0, Math.max(1, room - 1)) + "\u2026" : text, box.x + 4, box.y + Math.min(box.h / 2, 9));
  }

  // A subtree in one column of pixels: its deepest path, whose end is where the subtree ends.
  function drawLine(n, column, v) {
    let drawn = 0;
    for (let child = n; child !== NONE;) {
      n = child;
      const top = (position[n] - v.top) * v.down, bottom = top + size[n] * v.down;
      if (Math.floor(bottom) > Math.floor(top) || drawn === 0) {
        pen.fillStyle = palette[shade(n)];
        pen.fillRect(column, top, 1, Math.max(1, bottom - top));
        ++drawn;
      }
      child = NONE;
      for (let c = n + 1; c < last[n]; c = last[c]) {
        if (deepest[c] === deepest[n]) { child = c; break; }
      }
    }
    return drawn;
  }

  // Boxes below a pixel are not drawn one by one: a subtree narrower than a pixel is one line, and of boxes lower
  // than a pixel those that cross into a new row of pixels are drawn.
  function draw() {
    const v = view();
    pen.clearRect(0, 0, width, height);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
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
      const tall = box.h >= 1;
      if (tall || Math.floor(box.y + box.h) > Math.floor(box.y)) {
        const s = shade(n);
        pen.fillStyle = palette[s];
        pen.fillRect(box.x, tall ? box.y : Math.floor(box.y + box.h), Math.max(1, box.w - (box.w > 3 ? 1 : 0)),
          Math.max(1, box.h - (box.h > 3 ? 1 : 0)));
        if (box.w > 44 && box.h > 13) drawLabel(n, box, labelInks[s]);
        ++drawn;
      }
      ++n;
    }
    outline(hovered, v, getComputedStyle(canvas).color, 1);
    if (document.activeElement === canvas) outline(focused, v, getComputedStyle(document.documentElement).getPropertyValue("--focus"), 3);
    canvas.dataset.drawn = drawn;
  }

  function outline(n, v, colour, thick) {
    if (n === NONE || n < v.begin || n >= v.end) return;
    const box = boxOf(n, v);
    pen.strokeStyle = colour;
    pen.lineWidth = thick;
    const half = thick / 2;
    pen.strokeRect(Math.min(box.x, width - 5) + half, Math.min(box.y, height - 5) + half,
      Math.max(4, box.w - 1) - thick, Math.max(4, box.h - 1) - thick);
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
    width = Math.max(1, box.width - 2); // the border
    height = Math.max(1, box.height - 2);
    canvas.width = Math.round(width * dots);
    canvas.height = Math.round(height * dots);
    pen.setTransform(dots, 0, 0, dots, 0, 0);
    draw();
  }

  // The node at a point of the canvas; NONE where there is none.
  function nodeAt(x, y) {
    const v = view();
    const unit = v.origin + x / v.across, at = v.top + y / v.down;
    let n = zoom === NONE ? 0 : zoom, end = v.end;
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

  function describe(n) {
    const parts = [
      `${plural(size[n], "token")} at positions ${count(position[n])} to ${count(position[n] + size[n] - 1)}`,
      `multiplicity ${count(multiplicity[n])}`,
      plural(trained[n], "trained token"),
      `${count(below[n])} tree tokens from here on`,
    ];
    if (ends[n] > 0) {
      const names = data.tree.names[n];
      const more = names && ends[n] > 2 ? ", ..." : "";
      parts.push(`${plural(ends[n], "trajectory")} end${ends[n] === 1 ? "s" : ""} here${names ? ` (${names}${more})` : ""}`);
    }
    if (hidden[n] > 0) parts.push(`${plural(hidden[n], "token")} in branches left out`);
    const text = data.tree.texts[n];
    return { facts: parts.join(", "), text };
  }

  function say(n) {
    if (n === NONE) {
      byId("here").textContent = "";
      return;
    }
    const { facts, text } = describe(n);
    let children = 0;
    for (let child = n + 1; child < last[n]; child = last[child]) ++children;
    byId("here").textContent =
      `Node ${count(n)}, level ${depth[n] + 1}, ${children === 1 ? "1 child" : `${count(children)} children`}: ${facts}.` +
      (text ? ` Text: ${text}` : "");
  }

  function setZoom(n) {
    zoom = n;
    byId("up").disabled = byId("all").disabled = zoom === NONE;
    hovered = NONE;
    tip.hidden = true;
    redraw();
  }

  function setFocus(n) {
    if (n === NONE || n >= N) return;
    focused = n;
    // Out of what is seen: go up until it is in it.
    let z = zoom;
    while (z !== NONE && (n < z || n >= last[z])) z = parent[z];
    if (z !== zoom) setZoom(z);
    say(n);
    redraw();
  }

  function zoomOut() {
    if (zoom === NONE) return;
    const from = zoom;
    setZoom(parent[zoom]);
    setFocus(from);
  }

  function previousSibling(n) {
    const p = parent[n];
    let found = NONE;
    for (let child = p === NONE ? 0 : p + 1; child < n; child = last[child]) found = child;
    return found;
  }

  function nextSibling(n) {
    const end = parent[n] === NONE ? N : last[parent[n]];
    return last[n] < end ? last[n] : NONE;
  }

  const keys = {
    ArrowDown: () => { if (last[focused] > focused + 1) setFocus(focused + 1); },
    ArrowUp: () => setFocus(parent[focused]),
    ArrowLeft: () => setFocus(previousSibling(focused)),
    ArrowRight: () => setFocus(nextSibling(focused)),
    Enter: () => setZoom(focused),
    Escape: zoomOut,
    Backspace: zoomOut,
    Home: () => { setZoom(NONE); setFocus(0); },
  };

  function listen() {
    canvas.addEventListener("keydown", (event) => {
      if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey || N === 0) return;
      event.preventDefault();
      keys[event.key]();
    });
    canvas.addEventListener("focus", () => { say(focused); redraw(); });
    canvas.addEventListener("blur", redraw);
    canvas.addEventListener("pointermove", (event) => {
      const n = nodeAt(event.offsetX, event.offsetY);
      if (n !== hovered) {
        hovered = n;
        tip.hidden = n === NONE;
        if (n !== NONE) {
          const { facts, text } = describe(n);
          tip.textContent = facts.replace(/, (?=\D|\d[\d,]* )/g, "\n") + (text ? `\n\u201c${text}\u201d` : "");
        }
        redraw();
      }
      if (n === NONE) return;
      const x = Math.min(event.offsetX + 14, Math.max(0, width - tip.offsetWidth - 4));
      const y = event.offsetY + 18 + tip.offsetHeight < height ? event.offsetY + 18 : event.offsetY - tip.offsetHeight - 8;
      tip.style.left = `${x}px`;
      tip.style.top = `${Math.max(0, y)}px`;
    });
    canvas.addEventListener("pointerleave", () => { hovered = NONE; tip.hidden = true; redraw(); });
    canvas.addEventListener("click", (event) => {
      const n = nodeAt(event.offsetX, event.offsetY);
      if (n === NONE) return;
      focused = n;
      if (n === zoom) zoomOut();
      else setZoom(n);
      say(focused);
    });
    byId("up").addEventListener("click", zoomOut);
    byId("all").addEventListener("click", () => setZoom(NONE));
    byId("width").addEventListener("change", (event) => { widthMode = event.target.value; redraw(); });
    byId("colour").addEventListener("change", (event) => { colourMode = event.target.value; buildPalette(); redraw(); });
    dark.addEventListener("change", () => { buildPalette(); redraw(); });
    new ResizeObserver(resize).observe(canvas);
  }

  // ---- The rest of the page ------------------------------------------------------------------------------------

  // Both gains in equal size, that one first which applies (see gains.h).
  function showGains() {
    const leads = report.verdict.leads_with === "append_only";
    const figures = [
      [report.predicted_speedup_over_sequence_packing, "over sequence packing",
        "A trainer that encodes every trajectory by itself."],
      [report.predicted_speedup_over_append_only, "over append-only merging",
        `A trainer that first drops trajectories which others extend${leads ? "" : ": hardly any here"}.`],
    ];
    if (leads) figures.reverse();
    for (const [value, over, meaning] of figures) {
      const box = element("div");
      box.append(element("strong", `${value.toFixed(2)}\u00d7`), element("span", over, "over"),
        element("div", `${meaning} Predicted, by ${report.prediction_counts}.`, "note"));
      byId("gains").append(box);
    }
  }

  function showTotals() {
    const rows = [
      ["Trajectories", count(report.trajectories)], ["Trees", count(report.trees)], ["Nodes", count(report.nodes)],
      ["Flat tokens", count(report.flat_tokens)], ["Append-only tokens", count(report.append_only_tokens)],
      ["Tree tokens", count(report.tree_tokens)], ["Cached-token ratio", report.cached_token_ratio.toFixed(2)],
      ["POR", report.por.toFixed(3)],
      ["Longest trajectory", count(report.depth_tokens)],
      ["Tokens lost, at least", count(report.sharing.lost_tokens)],
    ];
    for (const [name, value] of rows) {
      const cell = element("div");
      cell.append(element("dt", name), element("dd", value));
      byId("totals").append(cell);
    }
  }

  // `head`: names of columns. A cell is a text, or {bar: part}, or {text: ...} to be set left.
  function table(caption, head, rows, classes = []) {
    const made = element("table");
    made.append(element("caption", caption));
    const headRow = made.createTHead().insertRow();
    head.forEach((name, k) => {
      const cell = element("th", name, rows.length > 0 && rows[0][k].text !== undefined ? "text" : "");
      cell.scope = "col";
      headRow.append(cell);
    });
    const body = made.createTBody();
    rows.forEach((row, r) => {
      const line = body.insertRow();
      line.className = classes[r] || "";
      for (const cell of row) {
        if (cell.bar !== undefined) {
          const place = element("td", undefined, "bar");
          const bar = element("span");
          bar.style.width = `${Math.max(0, Math.min(1, cell.bar)) * 100}%`;
          place.append(bar);
          line.append(place);
        } else {
          line.append(element("td", cell.text ?? cell, cell.text !== undefined ? "text" : ""));
        }
      }
    });
    const scroll = element("div", undefined, "scroll");
    scroll.append(made);
    return scroll;
  }

  // A map from number to count; in buckets [2^k, 2^(k+1)) where it is long.
  function byPowersOfTwo(counts) {
    const exact = Object.entries(counts);
    if (exact.length <= 12) return exact.map(([key, value]) => [count(Number(key)), value]);
    const buckets = new Map();
    for (const [key, value] of Object.entries(counts)) {
      const low = key === "0" ? 0 : 2 ** Math.floor(Math.log2(Number(key)));
      buckets.set(low, (buckets.get(low) || 0) + value);
    }
    return [...buckets].sort((a, b) => a[0] - b[0])
      .map(([low, value]) => [low < 2 ? String(low) : `${count(low)} to ${count(2 * low - 1)}`, value]);
  }

  function powersTable(caption, name, what, counts) {
    const rows = byPowersOfTwo(counts);
    const all = rows.reduce((sum, row) => sum + row[1], 0) || 1;
    return table(caption, [name, what, "part", ""],
      rows.map(([range, value]) => [range, count(value), percent(value / all), { bar: value / all }]));
  }

  function showHistograms() {
    const place = element("div", undefined, "columns");
    place.append(table("Sharing by depth", ["positions", "tree tokens", "flat tokens", "multiplicity", "reused", ""],
      report.sharing_by_depth.map((b) => [`${count(b.begin)} to ${count(b.end - 1)}`, count(b.tree_tokens),
        count(b.flat_tokens), b.mean_multiplicity.toFixed(2), percent(b.reused), { bar: b.reused }])));
    const beside = element("div");
    beside.append(
      powersTable("Tree tokens by multiplicity", "multiplicity", "tree tokens", report.tokens_by_multiplicity),
      powersTable("Nodes by number of children", "children", "nodes", report.nodes_by_branching));
    place.append(beside);
    byId("histograms").append(place);
  }

  function exampleSide(example, side) {
    const line = element("pre");
    const differing = example[side], after = example[`${side}_after`], token = example[`${side}_token`];
    line.append(element("span", example.before.slice(-160), "faint"), element("mark", differing || "\u2205"), after);
    const label = element("div", `${example[`${side}_trajectory`]}${token ? `, token ${token.id}` : ""}`, "faint");
    const box = element("div");
    box.append(label, line);
    return box;
  }

  function showLost() {
    const { sharing } = report;
    const place = byId("lost");
    if (sharing.places === 0) {
      place.append(element("p", "No trajectories part after a common token."));
      return;
    }
    const rows = sharing.causes.map((c) => [{ text: c.meaning }, { text: c.lost ? "lost" : "meant" }, count(c.places),
      count(c.divergences), c.lost ? count(c.tokens) : "\u2013", c.lost ? count(c.tokens_between_groups) : "\u2013"]);
    if (sharing.not_examined > 0) {
      rows.push([{ text: "not examined: the comparison was cut short" }, { text: "" }, "", count(sharing.not_examined), "", ""]);
    }
    place.append(table("", ["why trajectories part", "", "places", "branches", "tokens lost", "between groups"], rows,
      sharing.causes.map((c) => (c.lost ? "lost" : ""))));
    place.append(element("p", sharing.how_counted, "note"));
    if (!sharing.text_known) {
      place.append(element("p", "Only ids are known. With a model folder that has a tokenizer.json, more causes are told apart.", "note"));
    }
    for (const cause of sharing.causes.filter((c) => c.examples.length > 0)) {
      const box = element("details");
      box.open = cause.lost && !sharing.causes.some((other) => other.lost && other.tokens > cause.tokens);
      box.append(element("summary", `Examples: ${cause.meaning}`));
      if (cause.values.length > 0) {
        const list = element("p", "Such as ");
        cause.values.forEach((value, k) => list.append(k > 0 ? ", " : "", element("code", value)));
        box.append(list);
      }
      if (cause.remedy) box.append(element("p", `To share: ${cause.remedy}.`));
      for (const example of cause.examples) {
        const part = element("div", undefined, "example");
        part.append(element("div", `Position ${count(example.position)}, ${example.role === "unknown" ? "speaker unknown" : example.role}` +
          (example.between_groups ? "; between groups" : "") + (cause.lost ? `; ${plural(example.common, "equal token")} follow` : "")));
        part.append(exampleSide(example, "left"), exampleSide(example, "right"));
        box.append(part);
      }
      place.append(box);
    }
  }

  function start() {
    document.title = `${data.file}: espalier inspect`;
    byId("file").textContent = data.file;
    const verdict = report.verdict.text;
    byId("verdict").textContent = verdict.charAt(0).toUpperCase() + verdict.slice(1);
    byId("verdict").classList.toggle("no", !report.verdict.worth_it);
    byId("advice").textContent = report.verdict.advice;
    showGains();
    showTotals();
    showLost();
    showHistograms();
    if (data.tree.nodes < data.tree.of) {
      byId("left-out").textContent =
        `The chart holds the ${count(data.tree.nodes)} nodes with the largest subtrees of ${count(data.tree.of)}.`;
    }
    setZoom(NONE);
    buildPalette();
    listen();
    resize();
    document.documentElement.dataset.ready = performance.now().toFixed(0);
  }
  start();
})();
