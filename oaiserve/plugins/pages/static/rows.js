// Shows lists that change while they are looked at. A row stays the same element as long as the list has it, so that a
// click that has begun finds it, and it keeps the focus and what is selected in it.

const hasFocus = (row) => row.contains(document.activeElement);

// Makes a list show rows, in their order. Each has a property `key`. A row whose key the list has already, or one of
// `others`, is altered to look like the new one, and gets the properties that were given to that.
export function showRows(list, made, others = []) {
  const known = new Map([...others, list].flatMap(({ children }) => [...children]).map((row) => [row.key, row]));
  const rows = made.map((row) => {
    const kept = known.get(row.key);
    if (kept) alter(kept, row);
    return Object.assign(kept ?? row, row);
  });
  arrange(list, rows);
}

// Gives an element the attributes and the children of another one, and keeps each child that is of the same kind.
function alter(old, made) {
  for (const name of old.getAttributeNames()) if (!made.hasAttribute(name)) old.removeAttribute(name);
  for (const name of made.getAttributeNames()) {
    const value = made.getAttribute(name);
    if (old.getAttribute(name) === value) continue;
    if (name === "style") old.style.cssText = value; // The policy of these pages forbids styles as attributes.
    else old.setAttribute(name, value);
  }
  const next = [...made.childNodes];
  while (old.childNodes.length > next.length) old.lastChild.remove();
  next.forEach((child, place) => {
    const kept = old.childNodes[place];
    if (!kept) old.append(child);
    else if (kept.nodeName !== child.nodeName) kept.replaceWith(child);
    else if (child instanceof Text) kept.data === child.data || (kept.data = child.data);
    else alter(kept, child);
  });
}

// Puts rows into a list, in their order, and removes the others. Rows that are at their place aren't moved, nor is the
// one that has the focus, unless it comes from another list. One that has left all lists stays until it loses the focus.
function arrange(list, rows) {
  const kept = new Set(rows);
  for (const row of [...list.children]) if (!kept.has(row) && !hasFocus(row)) row.remove();
  let before = null;
  for (const row of rows.toReversed()) {
    const isHere = row.parentNode === list;
    const focused = hasFocus(row) ? document.activeElement : null;
    if (!isHere || (row.nextSibling !== before && !focused)) {
      list.insertBefore(row, before);
      focused?.focus({ preventScroll: true }); // A row loses the focus when it moves.
    }
    before = row;
  }
}
