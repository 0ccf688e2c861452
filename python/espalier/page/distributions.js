// ---- Distributions ---------------------------------------------------------------------------------------------

// `head`: names of columns. A cell is a text, {bar: fraction}, or {text: ...} for left alignment.
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

// Groups a map from number to count into buckets [2^k, 2^(k+1)) if it is long.
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
  return table(caption, [name, what, "share", ""],
    rows.map(([range, value]) => [range, count(value), percent(value / all), { bar: value / all }]));
}

function showHistograms() {
  const place = element("div", undefined, "columns");
  place.append(table("Sharing by depth", ["positions", "tree tokens", "flat tokens", "multiplicity", "reused", ""],
    report.sharing_by_depth.map((b) => [`${count(b.begin)} to ${count(b.end - 1)}`, count(b.tree_tokens),
      count(b.flat_tokens), b.mean_multiplicity.toFixed(2), percent(b.reused), { bar: b.reused }])));
  const column = element("div");
  column.append(
    powersTable("Tree tokens by multiplicity", "multiplicity", "tree tokens", report.tokens_by_multiplicity),
    powersTable("Nodes by number of children", "children", "nodes", report.nodes_by_branching));
  place.append(column);
  byId("histograms").append(place);
}

