// The lists: snapshots, reference tables, epochs, errors, and the problems of all sources.

import { badge, el, setAttribute, setBadge, setChildren, setHidden, setText } from "./dom.js";
import { about, bytes, count, percent, plural, seconds, time } from "./format.js";
import { tableState } from "./words.js";

const READING_SHOWN = 12;
const PROBLEMS_SHOWN = 8;

/** Elements kept by key, so that unchanged ones stay in place (and keep the focus). */
class Kept {
  constructor(make) {
    this.make = make;
    this.held = new Map();
  }

  /** Return the elements of these items, in order; `key`: returns an item's unique key. */
  elements(items, key, draw) {
    const held = new Map();
    for (const item of items) {
      const name = key(item);
      const made = this.held.get(name) ?? this.make();
      held.set(name, made);
      draw(made, item);
    }
    this.held = held;
    return [...held.values()].map((made) => made.element);
  }
}

/** Running snapshots with their progress and estimated end. */
export class Readings {
  constructor() {
    this.list = el("ul", { class: "readings" });
    this.more = el("p", { class: "quiet" });
    this.element = el("section", { hidden: "" }, el("h3", {}, "Snapshots"), this.list, this.more);
    this.kept = new Kept(() => {
      const name = el("span", { class: "name" });
      const bar = el("progress", { max: "1" });
      const text = el("span", { class: "quiet" });
      return { name, bar, text, element: el("li", {}, name, bar, text) };
    });
  }

  draw(source) {
    const tables = [...source.tables.values()]
      .filter((table) => table.snapshot || table.state === "snapshotting")
      .sort((a, b) => (b.snapshot?.ratio ?? 0) - (a.snapshot?.ratio ?? 0) || (a.table < b.table ? -1 : 1));
    setHidden(this.element, !tables.length);
    const shown = tables.slice(0, READING_SHOWN);
    setChildren(this.list, this.kept.elements(shown, (t) => t.table, drawReading));
    const rest = tables.length - shown.length;
    setText(this.more, rest ? `and ${plural(rest, "more table")}` : "");
  }
}

function drawReading({ name, bar, text }, { table, snapshot }) {
  setText(name, table);
  setAttribute(bar, "aria-label", `Snapshot progress of ${table}`);
  setAttribute(bar, "value", snapshot?.ratio ?? 0);
  setText(text, snapshot ? progress(snapshot) : "queued");
}

function progress({ ratio, bytes: read, total_bytes: total, eta_s: left }) {
  const of = total == null ? "" : ` of ${bytes(total)}`;
  const eta = left == null ? "" : `, about ${about(left)} left`;
  return `${percent(ratio)}, ${bytes(read)}${of}${eta}`;
}

/** The reference tables: current rows, in `_ref`. */
export class References {
  constructor() {
    this.body = el("tbody");
    const heads = ["Reference table", "State", "Rows", "Checked at"];
    this.element = section("Reference tables", grid("references", heads, this.body));
    this.kept = new Kept(() => {
      const name = el("th", { scope: "row" });
      const state = badge("ok", "");
      const [rows, looked] = cells(2);
      const why = el("p", { class: "quiet" });
      return { name, state, rows, looked, why, element: el("tr", {}, name, el("td", {}, state, why), rows, looked) };
    });
  }

  draw({ facts }, now) {
    setHidden(this.element, !facts.references.length);
    const drawn = ({ name, state, rows, looked, why }, reference) => {
      const { level, word } = tableState(reference);
      setText(name, reference.table);
      setBadge(state, level, word);
      setText(rows, count(reference.rows));
      setText(looked, time(reference.looked, now));
      setText(why, reference.reason ?? "");
    };
    setChildren(this.body, this.kept.elements(facts.references, (r) => r.table, drawn));
  }
}

/** The last epochs, the newest first. */
export class Epochs {
  constructor() {
    this.body = el("tbody");
    const heads = ["Epoch", "Durable at", "Rows", "Transactions", "Tables", "Received", "Commit took", "Oldest change"];
    this.none = el("p", { class: "quiet" }, "None since the daemon's start.");
    this.table = grid("epochs", heads, this.body);
    this.element = section("Last epochs", this.none, this.table);
    this.kept = new Kept(() => {
      const name = el("th", { scope: "row" });
      const values = cells(7);
      return { name, values, element: el("tr", {}, name, ...values) };
    });
  }

  draw({ facts }, now) {
    const epochs = [...facts.last_epochs].reverse();
    setHidden(this.none, epochs.length > 0);
    setHidden(this.table, !epochs.length);
    const drawn = ({ name, values }, epoch) => {
      setText(name, String(epoch.epoch));
      const told = [
        time(epoch.at, now),
        count(epoch.rows),
        count(epoch.transactions),
        count(epoch.tables),
        bytes(epoch.bytes),
        seconds(epoch.commit_seconds),
        seconds(epoch.oldest_seconds),
      ];
      told.forEach((text, n) => setText(values[n], text));
    };
    setChildren(this.body, this.kept.elements(epochs, (e) => e.epoch, drawn));
  }
}

/** The last errors, the newest first, with remedies. */
export class Errors {
  constructor() {
    this.none = el("p", { class: "quiet" }, "None since the daemon's start.");
    this.list = el("ol", { class: "errors" });
    this.element = section("Last errors", this.none, this.list);
    this.kept = new Kept(() => {
      const when = el("span", { class: "when" });
      const what = el("p");
      const remedy = el("pre", { class: "remedy" });
      return { when, what, remedy, element: el("li", {}, when, what, remedy) };
    });
  }

  draw({ facts }, now) {
    const errors = [...facts.last_errors].reverse();
    setHidden(this.none, errors.length > 0);
    setHidden(this.list, !errors.length);
    const drawn = ({ when, what, remedy }, error) => {
      const times = error.times > 1 ? `, ${error.times} times` : "";
      setText(when, `${time(error.at, now)}${times}`);
      setText(what, error.table ? `${error.table}: ${error.what}` : error.what);
      setText(remedy, error.remedy ?? "");
      setHidden(remedy, !error.remedy);
    };
    const key = (e) => `${e.table ?? ""}\n${e.what}`;
    setChildren(this.list, this.kept.elements(errors, key, drawn));
  }
}

/** All sources in a sentence, and their problems. */
export class Problems {
  constructor() {
    this.text = el("h2", { id: "overall" });
    this.list = el("ol", { class: "problems" });
    this.more = el("p", { class: "quiet" });
    this.element = el("section", { class: "overall", "aria-labelledby": "overall" }, this.text, this.list, this.more);
    this.kept = new Kept(() => {
      const mark = badge("stop", "");
      const what = el("p");
      const remedy = el("pre", { class: "remedy" });
      return { mark, what, remedy, element: el("li", {}, mark, what, remedy) };
    });
  }

  draw({ level, text }, problems) {
    setAttribute(this.element, "data-level", level);
    setText(this.text, text);
    const drawn = ({ mark, what, remedy }, problem) => {
      setBadge(mark, problem.level, problem.where);
      setText(what, problem.what ?? "");
      setText(remedy, problem.remedy ?? "");
      setHidden(remedy, !problem.remedy);
    };
    const shown = problems.slice(0, PROBLEMS_SHOWN);
    setChildren(this.list, this.kept.elements(shown, (p) => `${p.where}\n${p.what}`, drawn));
    setHidden(this.list, !shown.length);
    const rest = problems.length - shown.length;
    setText(this.more, rest ? `and ${rest} more: see the tables below` : "");
    setHidden(this.more, !rest);
  }
}

function section(title, ...children) {
  return el("section", {}, el("h3", {}, title), ...children);
}

function grid(name, heads, body) {
  const row = el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)));
  return el("table", { class: name }, el("thead", {}, row), body);
}

function cells(n) {
  return Array.from({ length: n }, () => el("td", { class: "number" }));
}
