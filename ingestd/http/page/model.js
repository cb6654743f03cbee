// The status received so far from /status/events.

const KEPT = 360; // points of the history, an hour, as many as the daemon keeps

export class Model {
  constructor() {
    this.now = 0;
    this.about = {};
    this.sources = new Map();
  }

  /** Apply a `state` or a `change`. */
  take({ now, sources, removed = [], ...about }) {
    if (now) this.now = now;
    Object.assign(this.about, about);
    for (const name of removed) this.sources.delete(name);
    for (const [name, told] of Object.entries(sources ?? {})) {
      if (!this.sources.has(name)) this.sources.set(name, new Source(name));
      this.sources.get(name).take(told);
    }
  }
}

export class Source {
  constructor(name) {
    this.name = name;
    this.facts = { last_epochs: [], last_errors: [], references: [] };
    this.tables = new Map();
    this.history = { at: [] };
    this.newPoints = 0; // increases with each update of the history, so views know when to redraw
    this.changed = new Set(); // names of tables that are not drawn yet
  }

  take({ tables = [], gone = [], history, ...facts }) {
    Object.assign(this.facts, facts);
    for (const table of tables) {
      this.tables.set(table.table, table);
      this.changed.add(table.table);
    }
    for (const name of gone) {
      this.tables.delete(name);
      this.changed.add(name);
    }
    if (history) {
      for (const [figure, values] of Object.entries(history)) {
        this.history[figure] = [...(this.history[figure] ?? []), ...values].slice(-KEPT);
      }
      this.newPoints += 1;
    }
  }

  /** The newest value of a figure of the history. */
  latest(figure) {
    return this.history[figure]?.at(-1) ?? null;
  }
}
