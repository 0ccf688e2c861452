// ---- The data: trees as columns indexed by node in preorder ----------------------------------------------------

const data = JSON.parse(document.getElementById("data").textContent);
const report = data.report;
const byId = (id) => document.getElementById(id);
const count = (value) => value.toLocaleString("en-US");
const percent = (part) => `${(part * 100).toFixed(1)}%`;
const plural = (value, word) =>
  `${count(value)} ${value === 1 ? word : /(ch|s)$/.test(word) ? `${word}es` : word.endsWith("y") ? `${word.slice(0, -1)}ies` : `${word}s`}`;

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function button(text, action, className) {
  const made = element("button", text, className);
  made.type = "button";
  made.addEventListener("click", action);
  return made;
}

// LEB128 in base64.
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
const [size, multiplicity, ends, trained, hidden, lostBegin, lost, cause, other, shown] =
  ["size", "multiplicity", "ends", "trained", "hidden", "lost_begin", "lost", "cause", "other", "shown"]
    .map((name) => numbers(columns[name], N));
const texts = data.tree.texts, names = data.tree.names, ROLES = data.tree.roles;
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

// Roles: node n has the spans [spanBegin[n], spanBegin[n + 1]); mainRole is the role of the longest.
const spanBegin = new Int32Array(N + 1);
const spanRole = numbers(data.tree.span_columns.role, data.tree.num_spans);
const spanSize = numbers(data.tree.span_columns.size, data.tree.num_spans);
const mainRole = new Uint8Array(N);

function buildSpans() {
  const spans = numbers(columns.spans, N);
  for (let n = 0; n < N; ++n) {
    spanBegin[n + 1] = spanBegin[n] + spans[n];
    let most = 0;
    for (let s = spanBegin[n]; s < spanBegin[n + 1]; ++s) {
      if (spanSize[s] <= most) continue;
      most = spanSize[s];
      mainRole[n] = spanRole[s];
    }
  }
}
buildSpans();
const rolesKnown = mainRole.some((role) => role > 0);

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

// A node's text as parts {role, text, ends}, at most `most` characters.
function partsOf(n, most = Infinity) {
  const parts = [];
  let left = most;
  for (let k = 0; k < texts[n].length && left > 0; k += 3) {
    const text = texts[n][k + 1];
    const cut = text.length > left;
    parts.push({
      role: texts[n][k], text: cut ? `${text.slice(0, left)}\u2026` : text, ended: !cut && texts[n][k + 2] === 1,
    });
    left -= Math.max(1, text.length);
  }
  return parts;
}

// The first words of a node on one line, without roles.
function excerpt(n, most) {
  const words = partsOf(n, 2 * most + 40).map((part) => part.text).join(" ").replace(/\s+/g, " ").trim();
  return words.length > most ? `${words.slice(0, most - 1)}\u2026` : words;
}

// The first words with their role, or the number of tokens if there is no text.
function title(n, most) {
  const words = excerpt(n, most);
  const role = texts[n].length > 0 && texts[n][0] > 0 ? `${ROLES[texts[n][0]]}: ` : "";
  return words ? role + words : `${role}${plural(size[n], "token")}`;
}

