// One source: its state in words, its metrics with charts, and its lists.

import { Chart } from "./chart.js";
import { badge, el, setAttribute, setBadge, setHidden, setText } from "./dom.js";
import { bytes, count, percent, rate, seconds, time } from "./format.js";
import { Epochs, Errors, Readings, References } from "./lists.js";
import { TableList } from "./tables.js";
import { describe, headRoom, slot } from "./words.js";

/** A figure with its explanation, and its chart or a list of facts. */
class Card {
  constructor(title, chart, facts = []) {
    this.figure = el("p", { class: "figure" }, "–");
    this.note = el("p", { class: "quiet note" });
    this.chart = chart;
    this.values = facts.map(() => el("dd"));
    const pairs = facts.map((fact, n) => el("div", {}, el("dt", {}, fact), this.values[n]));
    const below = chart?.element ?? el("dl", {}, ...pairs);
    this.element = el("div", { class: "card" }, el("h3", {}, title), this.figure, this.note, below);
  }

  draw(figure, note, ...facts) {
    setText(this.figure, figure);
    setText(this.note, note);
    facts.forEach((fact, n) => setText(this.values[n], fact ?? "–"));
  }
}

export class SourceView {
  constructor(source) {
    this.source = source;
    const id = `source-${source.name}`;
    this.badge = badge("busy", "");
    this.sentence = el("p", { class: "sentence" });
    const title = el("h2", { id }, source.name);
    const head = el("div", { class: "head" }, title, this.badge);
    this.cards = makeCards();
    this.room = el("meter", { min: "0", max: "1", low: "0.2", optimum: "1", hidden: "" });
    this.room.setAttribute("aria-label", "Free part of the slot's WAL limit");
    this.cards.slot.element.append(this.room);
    const cards = el("div", { class: "cards" }, ...Object.values(this.cards).map((c) => c.element));
    this.lists = [new Readings(), new References(), new Epochs(), new Errors()];
    const [readings, references, epochs, errors] = this.lists.map((list) => list.element);
    this.tables = new TableList(source);
    this.element = el(
      "article",
      { "aria-labelledby": id, class: "source" },
      ...[head, this.sentence, cards, readings, this.tables.element, references, epochs, errors],
    );
  }

  draw(now) {
    const { level, word, sentence } = describe(this.source, now);
    setBadge(this.badge, level, word);
    setText(this.sentence, sentence);
    this.drawCards(now);
    this.tables.draw(now);
    for (const list of this.lists) list.draw(this.source, now);
  }

  drawCards(now) {
    const { facts } = this.source;
    const { lag, wal, rows, freshness, slot: head, epoch } = this.cards;
    const isMeasured = facts.state === "streaming" || facts.state === "snapshotting";
    const at = facts.lag_at ? ` since ${time(facts.lag_at, now)}` : " yet";
    const not = `Not measured${at}.`;
    lag.draw(
      isMeasured ? seconds(facts.lag_seconds) : "–",
      isMeasured ? "Age of the oldest change that is not in the lake." : not,
    );
    wal.draw(
      isMeasured ? bytes(facts.lag_bytes) : "–",
      isMeasured ? "WAL between the confirmed position and the server's current one." : not,
    );
    const done = `${count(facts.rows)} rows in ${count(facts.transactions)} transactions`;
    rows.draw(rate(this.source.latest("rows_per_s")), `${done} since the daemon's start.`);
    freshness.draw(
      seconds(facts.freshness_p50_seconds),
      `Median from commit to durable; 99 % within ${seconds(facts.freshness_p99_seconds)}.`,
    );
    this.drawSlot(head);
    epoch.draw(
      count(facts.epoch),
      "The last durable epoch in the lake.",
      ...[time(facts.last_commit, now), facts.end_lsn, facts.confirmed_lsn, facts.received_lsn],
    );
    if (this.drawn !== this.source.newPoints) {
      this.drawn = this.source.newPoints;
      for (const { chart } of Object.values(this.cards)) chart?.draw(this.source.history, now);
    }
  }

  drawSlot(card) {
    const { facts } = this.source;
    const { level, head, text } = slot(facts);
    const part = headRoom(facts);
    const free = part === null ? null : `${percent(part)} of its limit`;
    card.draw(head, text, bytes(facts.retained_bytes), free, facts.wal_status);
    setAttribute(card.element, "data-level", level);
    setHidden(this.room, part === null);
    setAttribute(this.room, "value", part);
  }
}

function makeCards() {
  const chart = (title, series, format, least) => new Chart(title, series, format, least);
  return {
    lag: new Card("Lag", chart("Lag", [{ figure: "lag_seconds", name: "lag" }], seconds, 1)),
    wal: new Card("Lag in WAL", chart("Lag in WAL", [{ figure: "lag_bytes", name: "lag" }], bytes, 1000)),
    rows: new Card("Throughput", chart("Throughput", [{ figure: "rows_per_s", name: "rows" }], rate, 1)),
    freshness: new Card(
      "Freshness",
      chart(
        "Freshness",
        [
          { figure: "freshness_p99", name: "p99" },
          { figure: "freshness_p50", name: "median" },
        ],
        seconds,
        0.1,
      ),
    ),
    slot: new Card("Slot headroom", null, ["Retained", "Free", "wal_status"]),
    epoch: new Card("Epoch", null, ["Durable at", "Ends at", "Confirmed", "Received"]),
  };
}
