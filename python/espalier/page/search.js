// ---- Search over texts and names of trajectories, and links from elsewhere on the page to nodes ----------------

const search = { pattern: null, at: -1 };
const SEARCH_DELAY = 150; // milliseconds after the last key

// A pattern for the words of the query, case-insensitive, with any space between words.
function patternOf(query) {
  const words = query.trim().split(/\s+/).map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  return words[0] ? new RegExp(words.join("\\s+"), "gi") : null;
}

// Nodes in whose text a match ends (it may begin in an ancestor), or whose trajectories' names match.
function nodesWith(pattern, longest) {
  const found = [];
  const tails = new Array(N).fill(""); // the end of the text on the way to and in each node
  for (let n = 0; n < N; ++n) {
    const before = parent[n] === NONE ? "" : tails[parent[n]];
    const parts = texts[n];
    let text = before;
    for (let k = 0; k < parts.length; k += 3) text += (k > 0 ? "\n" : "") + parts[k + 1];
    tails[n] = shown[n] < size[n] ? "" : text.slice(-longest);
    let matches = names[n].some((name) => { pattern.lastIndex = 0; return pattern.test(name); });
    pattern.lastIndex = 0;
    for (let match; !matches && (match = pattern.exec(text));) matches = match.index + match[0].length > before.length;
    if (matches) found.push(n);
  }
  return found;
}

function sayFound() {
  const all = view.matches.length;
  byId("found").textContent = !search.pattern ? ""
    : all === 0 ? "Nothing found" : search.at < 0 ? plural(all, "match") : `${count(search.at + 1)} of ${plural(all, "match")}`;
  byId("previous").disabled = byId("next").disabled = all === 0;
}

function find() {
  const query = byId("query").value;
  search.pattern = patternOf(query);
  search.at = -1;
  view.matches = search.pattern ? nodesWith(search.pattern, query.trim().length - 1 || 0) : [];
  sayFound();
  showPanel(view.selected);
  redraw();
}

function goToMatch(step) {
  const all = view.matches.length;
  if (all === 0) return;
  search.at = search.at < 0 ? (step > 0 ? 0 : all - 1) : (search.at + step + all) % all;
  sayFound();
  select(view.matches[search.at]);
  const mark = byId("panel").querySelector("mark.found");
  if (mark) byId("panel").scrollTop = mark.offsetTop - byId("panel").offsetTop - 60;
}

let waiting = 0;
function findNow() {
  clearTimeout(waiting);
  if (waiting) find();
  waiting = 0;
}

// Steps through the branches of a cause of lost sharing.
const lastShown = new Map();
function showNextOf(number, status) {
  const begin = (lastShown.get(number) ?? -1) + 1;
  let n = cause.indexOf(number, begin);
  if (n < 0) n = cause.indexOf(number);
  if (n < 0) {
    status.textContent = "None of them is in the chart.";
    return;
  }
  lastShown.set(number, n);
  reveal(n);
}

function listenToSearch() {
  byId("query").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(findNow, SEARCH_DELAY);
  });
  byId("search").addEventListener("submit", (event) => event.preventDefault());
  byId("query").addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    findNow();
    goToMatch(event.shiftKey ? -1 : 1);
  });
  byId("previous").addEventListener("click", () => { findNow(); goToMatch(-1); });
  byId("next").addEventListener("click", () => { findNow(); goToMatch(1); });
  byId("lost").addEventListener("click", (event) => {
    const from = event.target.closest("button");
    if (!from) return;
    if (from.dataset.node) reveal(Number(from.dataset.node));
    if (from.dataset.cause) showNextOf(Number(from.dataset.cause), from.nextElementSibling);
  });
}

