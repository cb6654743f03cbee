// A line chart of the last hour, as SVG. Gaps are times without measurements.

import { el, setText } from "./dom.js";
import { hour, seconds, time } from "./format.js";

const NS = "http://www.w3.org/2000/svg";
const WIDTH = 360;
const HEIGHT = 64;
const SPAN_MS = 3_600_000;
const GAP_MS = 25_000; // two points missed

function svg(name, attributes) {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

const SPANS_S = [60, 120, 300, 600, 1200, 1800, 3600, 7200, 18000, 36000, 86400, 172800, 604800];

/** The next round number above a value: 1, 2 or 5 times a power of ten, or a usual time span. */
function roundUp(value, isSeconds) {
  const span = SPANS_S.find((each) => each >= value);
  if (isSeconds && value > 50 && span) return span;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * (1 - 1e-9));
}

/** Draws figures of a source's history; `series`: [{figure, name}], `format`: formats a value. */
export class Chart {
  constructor(title, series, format, least) {
    Object.assign(this, { title, series, format, least });
    this.svg = svg("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": `${title}: no points yet`,
    });
    for (const y of [0.5, HEIGHT / 2, HEIGHT - 0.5]) {
      this.svg.append(svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: y, y2: y }));
    }
    this.paths = series.map((_, n) => svg("path", { class: `line line-${n}` }));
    this.area = svg("path", { class: "area" });
    this.svg.append(this.area, ...this.paths);
    this.top = el("span", { class: "top" });
    this.from = el("span");
    this.to = el("span");
    this.mark = el("span", { class: "mark", hidden: "" });
    this.read = el("span", { class: "read", hidden: "" });
    const key = series.length > 1 ? legend(series) : "";
    const plot = el("div", { class: "plot" }, this.svg, this.top, this.mark, this.read);
    const axis = el("div", { class: "axis", "aria-hidden": "true" }, this.from, key, this.to);
    this.element = el("div", { class: "chart" }, plot, axis);
    plot.addEventListener("pointermove", (event) => this.point(event, plot));
    plot.addEventListener("pointerleave", () => this.leave());
    this.history = { at: [] };
  }

  draw(history, now) {
    this.history = history;
    this.now = now;
    const values = this.series.map(({ figure }) => history[figure] ?? []);
    const highest = Math.max(this.least, ...values.flat().filter((v) => v !== null));
    const top = roundUp(highest, this.format === seconds);
    this.paths.forEach((path, n) => path.setAttribute("d", this.line(values[n], top)));
    this.area.setAttribute("d", this.filled(values[0], top));
    setText(this.top, this.format(top));
    setText(this.from, hour(now - SPAN_MS));
    setText(this.to, hour(now));
    this.svg.setAttribute("aria-label", this.words(values));
  }

  words(values) {
    const told = this.series.map(({ name }, n) => {
      const known = values[n].filter((v) => v !== null);
      if (!known.length) return `${name} was not measured`;
      const last = this.format(values[n].at(-1));
      return `${name} now ${last}, highest ${this.format(Math.max(...known))}`;
    });
    return `${this.title}, the last hour: ${told.join("; ")}`;
  }

  x(at) {
    return Math.max(0, WIDTH * (1 - (this.now - at) / SPAN_MS));
  }

  /** The segments between gaps: lists of [x, y]. */
  pieces(values, top) {
    const found = [];
    let last = null;
    this.history.at.forEach((at, n) => {
      const value = values[n] ?? null;
      if (value === null) {
        last = null;
        return;
      }
      if (last === null || at - last > GAP_MS) found.push([]);
      last = at;
      found.at(-1).push([this.x(at), (HEIGHT - 1) * (1 - value / top) + 0.5]);
    });
    return found;
  }

  line(values, top) {
    return this.pieces(values, top).map(path).join("");
  }

  filled(values, top) {
    return this.pieces(values, top)
      .map((points) => `${path(points)}V${HEIGHT}H${points[0][0].toFixed(1)}Z`)
      .join("");
  }

  /** Show the values at the time under the pointer. */
  point(event, plot) {
    const box = plot.getBoundingClientRect();
    const wanted = this.now - SPAN_MS * (1 - (event.clientX - box.left) / box.width);
    const { at } = this.history;
    if (!at.length) return;
    let best = 0;
    for (let n = 1; n < at.length; n += 1) {
      if (Math.abs(at[n] - wanted) < Math.abs(at[best] - wanted)) best = n;
    }
    const told = this.series.map(({ figure, name }) => {
      const value = this.history[figure]?.[best] ?? null;
      return this.series.length > 1 ? `${name} ${this.format(value)}` : this.format(value);
    });
    setText(this.read, `${time(at[best], this.now)}  ${told.join("  ")}`);
    this.mark.style.left = `${(100 * this.x(at[best])) / WIDTH}%`;
    this.mark.hidden = this.read.hidden = false;
    this.top.hidden = true;
  }

  leave() {
    this.mark.hidden = this.read.hidden = true;
    this.top.hidden = false;
  }
}

function legend(series) {
  const keys = series.map(({ name }, n) => el("span", { class: `key-${n}` }, name));
  return el("span", { class: "legend" }, ...keys);
}

function path(points) {
  // a lone point is drawn as a short line
  const told = points.length > 1 ? points : [points[0], [points[0][0] + 1, points[0][1]]];
  return told.map(([x, y], n) => `${n ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
}
