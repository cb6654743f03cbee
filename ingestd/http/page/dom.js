// Elements, created and changed without parsing HTML: names can't inject markup.

/** Return a new element; `attributes` as in HTML, children are elements or texts. */
export function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

/** Set an element's text if it differs, so that unchanged text causes no new layout. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Set an attribute if it differs, or remove it if the value is null. */
export function setAttribute(element, name, value) {
  if (value === null) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else if (element.getAttribute(name) !== String(value)) {
    element.setAttribute(name, value);
  }
}

export function setHidden(element, isHidden) {
  if (element.hidden !== isHidden) element.hidden = isHidden;
}

/** Make these the only children, in this order; those already in place are not moved. */
export function setChildren(parent, children) {
  let at = parent.firstChild;
  for (const child of children) {
    if (child === at) at = at.nextSibling;
    else parent.insertBefore(child, at);
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

/** A badge for a state: a sign, which screen readers skip, and the word. */
export function badge(level, word) {
  const sign = el("span", { "aria-hidden": "true", class: "sign" });
  const text = el("span");
  const made = el("span", { class: "badge" }, sign, text);
  setBadge(made, level, word);
  return made;
}

const SIGNS = { ok: "✓", busy: "…", warn: "!", stop: "✕", off: "–" };

export function setBadge(made, level, word) {
  setAttribute(made, "data-level", level);
  setText(made.firstChild, SIGNS[level]);
  setText(made.lastChild, word);
}
