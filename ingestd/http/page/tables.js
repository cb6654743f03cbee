// The tables of a source: searchable and sortable; each row is updated in place.

import { badge, el, setAttribute, setBadge, setChildren, setHidden, setText } from "./dom.js";
import { count, exactCount, plural, time } from "./format.js";
import { severity, tableState } from "./words.js";

const AT_FIRST = 100;
const byName = new Intl.Collator("en", { numeric: true }).compare;

const COLUMNS = [
  { key: "table", title: "Table", first: "ascending", compare: (a, b) => byName(a.table, b.table) },
  {
    key: "state",
    title: "State",
    first: "ascending",
    compare: (a, b) => severity(tableState(a).level) - severity(tableState(b).level),
  },
  { key: "rows", title: "Rows", first: "descending", compare: (a, b) => a.rows - b.rows },
  {
    key: "last",
    title: "Last change",
    first: "descending",
    compare: (a, b) => (a.last_change ?? "").localeCompare(b.last_change ?? ""),
  },
];

/** A table's row, and below it why the table is stopped or its last snapshot failed. */
class Row {
  constructor(table) {
    this.name = el("th", { scope: "row" }, ...breakable(table));
    this.badge = badge("ok", "");
    this.rows = el("td", { class: "number" });
    this.last = el("td", { class: "number" });
    this.facts = el("tr", {}, this.name, el("td", {}, this.badge), this.rows, this.last);
    this.element = el("tbody", {}, this.facts);
  }

  draw(table, now) {
    const { level, word } = tableState(table);
    setBadge(this.badge, level, word);
    setText(this.rows, count(table.rows));
    setAttribute(this.rows, "title", exactCount(table.rows));
    setText(this.last, time(table.last_change, now));
    this.drawWhy(table);
  }

  drawWhy(table) {
    const failed = table.last_snapshot?.outcome === "failed" ? table.last_snapshot : {};
    const reason = table.reason ?? (failed.reason ? `Its last snapshot failed: ${failed.reason}` : null);
    const remedy = table.remedy ?? failed.remedy ?? null;
    if (reason === null) {
      if (this.why) this.why.hidden = true;
      return;
    }
    if (!this.why) {
      this.what = el("p");
      this.remedy = el("pre", { class: "remedy" });
      this.why = el("tr", { class: "why" }, el("td", { colspan: "4" }, this.what, this.remedy));
      this.element.append(this.why);
    }
    this.why.hidden = false;
    setText(this.what, reason);
    setText(this.remedy, remedy ?? "");
    setHidden(this.remedy, remedy === null);
  }
}

/** A name that may wrap after its schema. */
function breakable(name) {
  const dot = name.indexOf(".") + 1;
  return [name.slice(0, dot), el("wbr"), name.slice(dot)];
}

/** Search field, sort buttons and rows; `source`: from the model. */
export class TableList {
  constructor(source) {
    this.source = source;
    this.rows = new Map();
    this.sorted = { key: "state", isDown: false };
    this.limit = AT_FIRST;
    const id = `search-${source.name}`;
    this.search = el("input", { id, type: "search", autocomplete: "off", spellcheck: "false" });
    this.search.addEventListener("input", () => this.arrange());
    this.shown = el("output", { for: id, class: "quiet" });
    this.more = el("button", { type: "button", class: "more" });
    this.more.addEventListener("click", () => {
      this.limit = Infinity;
      this.arrange();
    });
    this.headings = COLUMNS.map((column) => this.heading(column));
    this.table = el("table", { class: "tables" }, el("thead", {}, el("tr", {}, ...this.headings)));
    this.none = el("p", { class: "quiet" }, "No table matches.");
    const find = el("div", { class: "find" }, el("label", { for: id }, "Find"), this.search, this.shown);
    this.element = el("section", {}, el("h3", {}, "Tables"), find, this.table, this.none, this.more);
    this.tell();
  }

  heading({ key, title, first }) {
    const button = el("button", { type: "button" }, title);
    button.addEventListener("click", () => {
      const isSame = this.sorted.key === key;
      this.sorted = { key, isDown: isSame ? !this.sorted.isDown : first === "descending" };
      this.tell();
      this.arrange();
    });
    return el("th", { scope: "col", "data-key": key }, button);
  }

  /** Mark the column by which the rows are sorted. */
  tell() {
    for (const heading of this.headings) {
      const isIt = heading.dataset.key === this.sorted.key;
      const order = this.sorted.isDown ? "descending" : "ascending";
      setAttribute(heading, "aria-sort", isIt ? order : null);
    }
  }

  /** Draw changed tables. Rows are reordered only if one was added or removed or changed state. */
  draw(now) {
    this.now = now;
    const { changed, tables } = this.source;
    let isMoved = !this.arranged;
    for (const name of changed) {
      const table = tables.get(name);
      const row = this.rows.get(name);
      if (!table || !row || row.state !== tableState(table).level) isMoved = true;
      if (!table) this.rows.delete(name);
      else if (row?.element.isConnected) row.draw(table, now);
    }
    changed.clear();
    if (isMoved) this.arrange();
  }

  /** Filter, sort and place the rows. */
  arrange() {
    this.arranged = true;
    const wanted = this.search.value.trim().toLowerCase();
    const all = [...this.source.tables.values()];
    const found = all.filter(
      (t) => !wanted || t.table.toLowerCase().includes(wanted) || tableState(t).word.toLowerCase().includes(wanted),
    );
    const { compare } = COLUMNS.find(({ key }) => key === this.sorted.key);
    const sign = this.sorted.isDown ? -1 : 1;
    found.sort((a, b) => sign * compare(a, b) || byName(a.table, b.table));
    const placed = found.slice(0, this.limit);
    setChildren(this.table, [this.table.tHead, ...placed.map((table) => this.row(table))]);
    this.tellCount(found.length, all.length, placed.length);
  }

  row(table) {
    if (!this.rows.has(table.table)) this.rows.set(table.table, new Row(table.table));
    const row = this.rows.get(table.table);
    row.state = tableState(table).level;
    row.draw(table, this.now);
    return row.element;
  }

  tellCount(found, all, placed) {
    setText(this.shown, found === all ? plural(all, "table") : `${found} of ${plural(all, "table")}`);
    setHidden(this.none, found > 0 || all === 0);
    setHidden(this.table, found === 0);
    setText(this.more, `Show all ${found}`);
    setHidden(this.more, placed === found);
  }
}
