// ---- The panel: path, facts, text and siblings of the selected node --------------------------------------------

const MOST_TEXT = 20000, MOST_SIBLINGS = 6, MOST_LISTED = 300, PATH_HEAD = 2, PATH_TAIL = 6;

function factsOf(n) {
  const facts = [
    `${plural(size[n], "token")} at ${size[n] === 1 ? "position" : "positions"} ${count(position[n])}` +
      (size[n] === 1 ? "" : ` to ${count(position[n] + size[n] - 1)}`),
    `${multiplicity[n] === 1 ? "1 trajectory passes" : `${count(multiplicity[n])} trajectories pass`} here (multiplicity)`,
    plural(trained[n], "trained token"),
    `${plural(below[n], "tree token")} from here on`,
  ];
  if (hidden[n] > 0) facts.push(`${plural(hidden[n], "token")} in branches left out`);
  if (lost[n] > 0) facts.push(`${plural(lost[n], "token")} encoded again`);
  return facts;
}

// Appends text with search matches marked.
function appendMarked(place, text) {
  const found = search.pattern;
  if (!found) {
    place.append(text);
    return;
  }
  let at = 0;
  found.lastIndex = 0; // matchAll begins there
  for (const match of text.matchAll(found)) {
    place.append(text.slice(at, match.index), element("mark", match[0], "found"));
    at = match.index + match[0].length;
  }
  place.append(text.slice(at));
}

// Appends the parts of a text (partsOf), each with its role.
function said(parts, place) {
  for (const part of parts) {
    const role = ROLES[part.role];
    const message = element("span", undefined, `message ${role}`);
    if (part.role > 0) message.append(element("b", role, "role"), " ");
    appendMarked(message, part.text);
    if (part.ended) {
      const end = element("span", "\u220E", "end");
      end.title = "end of the message";
      message.append(end);
    }
    place.append(message);
  }
  return place;
}

function textOf(n, most) {
  const place = element("pre", undefined, "said");
  const parts = partsOf(n, most);
  if (parts.length > 0) return said(parts, place);
  place.append(element("span", report.sharing.text_known ? plural(size[n], "token") : `${plural(size[n], "token")} (only ids are known)`, "faint"));
  return place;
}

function showPath(n) {
  const path = [];
  for (let at = n; at !== NONE; at = parent[at]) path.unshift(at);
  const list = element("ol");
  const add = (entry) => {
    const item = element("li");
    item.append(entry);
    list.append(item);
  };
  const steps = path.length <= PATH_HEAD + PATH_TAIL + 1 ? path : [...path.slice(0, PATH_HEAD), NONE, ...path.slice(-PATH_TAIL)];
  for (const step of steps) {
    if (step === NONE) {
      add(element("span", `\u2026 ${plural(path.length - PATH_HEAD - PATH_TAIL, "node")} \u2026`, "faint"));
    } else if (step === n) {
      const here = element("span", title(n, 28), `crumb ${ROLES[mainRole[n]]}`);
      here.setAttribute("aria-current", "true");
      add(here);
    } else {
      const crumb = button(title(step, 28), () => select(step), `crumb ${ROLES[mainRole[step]]}`);
      crumb.dataset.node = step;
      add(crumb);
    }
  }
  byId("path").replaceChildren(list);
}

function showFacts(n) {
  let children = 0;
  for (let child = n + 1; child < last[n]; child = last[child]) ++children;
  byId("here").textContent = `Node ${count(n)}, level ${depth[n] + 1}, ${children === 1 ? "1 child" : `${count(children)} children`}: ${factsOf(n).join(", ")}.`;
  const here = byId("ends");
  here.replaceChildren();
  if (ends[n] === 0) return;
  here.append(`${plural(ends[n], "trajectory")} ${ends[n] === 1 ? "ends" : "end"} here: `);
  const known = names[n].slice(0, 20);
  const list = element("span");
  appendMarked(list, known.join(", "));
  here.append(list, known.length < ends[n] ? `${known.length > 0 ? ", and " : ""}${count(ends[n] - known.length)} more` : "");
}

// Shows why the node's tokens are encoded again: because it or an ancestor diverges.
function showLoss(n) {
  const place = byId("repeats");
  place.replaceChildren();
  let branch = n;
  if (lost[n] > 0) while (branch !== NONE && cause[branch] === 0) branch = parent[branch];
  if (branch === NONE || cause[branch] === 0) return;
  const why = report.sharing.causes.find((entry) => entry.cause === data.tree.causes[cause[branch] - 1]);
  place.append(element("strong", lost[n] > 0 ? `${plural(lost[n], "token")} of this node ${lost[n] === 1 ? "is" : "are"} encoded again. ` : "The tokens after this are encoded again. "),
    branch === n ? "This branch diverges: " : "A branch above diverges: ", `${why.meaning}. To share: ${why.remedy}. `);
  if (branch !== n) place.append(button("Show where it diverges", () => select(branch)), " ");
  if (other[branch] > 0) place.append(button("Show the other branch", () => select(other[branch] - 1)));
}

function showText(n) {
  const place = byId("text");
  const whole = partsOf(n).reduce((sum, part) => sum + part.text.length, 0);
  place.replaceChildren(textOf(n, MOST_TEXT));
  if (whole > MOST_TEXT) {
    place.append(button(`Show all ${count(whole)} characters`, () => place.replaceChildren(textOf(n))));
  }
  if (report.sharing.text_known && shown[n] < size[n]) {
    place.append(element("p", shown[n] > 0 ? `The page contains the first ${plural(shown[n], "token")} of this text.` : "The page does not contain this text, because of its size limit.", "note"));
  }
}

function siblingEntry(n) {
  const item = element("li");
  const link = button(count(multiplicity[n]) + "\u00d7", () => select(n), "go");
  link.dataset.node = n;
  link.title = `Select: ${plural(multiplicity[n], "trajectory")}`;
  item.append(link, textOf(n, 240));
  return item;
}

function showSiblings(n) {
  const place = byId("siblings");
  place.replaceChildren();
  const p = parent[n], end = p === NONE ? N : last[p];
  const siblings = [];
  for (let child = p === NONE ? 0 : p + 1; child < end; child = last[child]) if (child !== n) siblings.push(child);
  const stop = p === NONE ? 0 : ends[p];
  const before = p === NONE ? "" : partsOf(p).map((part) => part.text).join(" ").slice(-60).replace(/\s+/g, " ");
  if (siblings.length === 0 && stop === 0) {
    place.append(element("p", p === NONE ? "There are no other trees." : "There are no other branches here.", "note"));
    return;
  }
  place.append(element("p", p === NONE ? "Other trees begin with:" : before.trim() && shown[p] === size[p] ? `After \u201c\u2026${before}\u201d the others have:` : "At this place the others have:", "note"));
  const list = element("ul");
  list.append(...siblings.slice(0, MOST_SIBLINGS).map(siblingEntry));
  if (stop > 0) list.append(element("li", `Nothing: ${plural(stop, "trajectory")} ${stop === 1 ? "ends" : "end"} here.`, "faint"));
  place.append(list);
  if (siblings.length <= MOST_SIBLINGS) return;
  const listed = Math.min(siblings.length, MOST_LISTED);
  const more = button(listed < siblings.length ? `Show ${count(listed)} of ${count(siblings.length)}` : `Show all ${count(siblings.length)}`, () => {
    more.remove();
    list.append(...siblings.slice(MOST_SIBLINGS, listed).map(siblingEntry));
  });
  place.append(more);
}

function showPanel(n) {
  if (n === NONE) return;
  showPath(n);
  showFacts(n);
  showLoss(n);
  showText(n);
  showSiblings(n);
  byId("panel").scrollTop = 0;
}

