// What a state means, in words, and what is to be done. Levels: ok, busy, warn, stop, off.

import { bytes, percent, plural, seconds, since } from "./format.js";

const BEHIND_S = 60;
const LITTLE_ROOM = 0.2;
const ORDER = ["stop", "warn", "busy", "ok", "off"];

export const worst = (levels) => ORDER.find((level) => levels.includes(level)) ?? "ok";
export const severity = (level) => ORDER.indexOf(level);

export function isBehind(source) {
  return source.facts.state === "streaming" && source.facts.lag_seconds > BEHIND_S;
}

/** Part of the WAL that the slot may hold back which is still free; null where that is not told. */
export function headRoom({ safe_bytes: safe, retained_bytes: retained }) {
  if (safe == null || retained == null) return null;
  return safe <= 0 ? 0 : safe / (safe + Math.max(0, retained));
}

const SLOT_WORDS = {
  reserved: "The WAL it needs is within max_wal_size.",
  extended: "The WAL it needs is beyond max_wal_size, and kept for it.",
  unreserved: "The server is about to remove WAL that it needs.",
  lost: "The server has removed WAL that it needed.",
};

/** The slot's head-room: a level, a headline, and what it means. */
export function slot(facts) {
  if (facts.retained_bytes == null) {
    return { level: "off", head: "–", text: "No slot, or it was not measured yet." };
  }
  const text = SLOT_WORDS[facts.wal_status] ?? "";
  const part = headRoom(facts);
  if (facts.wal_status === "lost") return { level: "stop", head: "lost", text };
  if (facts.wal_status === "unreserved") return { level: "stop", head: bytes(facts.safe_bytes), text };
  if (part === null) {
    return { level: "ok", head: "no limit", text: "The server keeps WAL until its disk is full." };
  }
  return { level: part < LITTLE_ROOM ? "warn" : "ok", head: bytes(facts.safe_bytes), text };
}

const TABLE_WORDS = {
  live: ["ok", "Live"],
  snapshotting: ["busy", "Being read"],
  stopped: ["stop", "Stopped"],
  dropped: ["off", "Dropped"],
};

/** A table's level and word. */
export function tableState(table) {
  const [level, word] = TABLE_WORDS[table.state] ?? ["warn", table.state];
  if (table.state === "stopped" || table.state === "dropped") return { level, word };
  if (table.snapshot) return { level: "busy", word: `Being read, ${percent(table.snapshot.ratio)}` };
  if (table.snapshot_requested) return { level: "busy", word: `${word}, to be read anew` };
  return { level, word };
}

function stoppedTables(source) {
  return [...source.tables.values()].filter((table) => table.state === "stopped");
}

function readTables(source) {
  return [...source.tables.values()].filter((t) => t.snapshot || t.state === "snapshotting");
}

/** A source in words: a level, one or two words, a sentence. */
export function describe(source, now) {
  const { facts } = source;
  const made = (level, word, sentence) => ({ level, word, sentence });
  const read = readTables(source).length;
  const reading = `${plural(read, "table")} ${read === 1 ? "is" : "are"}`;
  switch (facts.state) {
    case "starting":
      return made("busy", "Starting", "It connects and looks where the lake ends.");
    case "snapshotting":
      return made("busy", "Reading tables", `${reading} being read for the first time.`);
    case "backing_off":
      return made("warn", "Trying again", `${facts.reason ?? "A fault"}. It is tried again by itself.`);
    case "stopped":
      return made("stop", "Stopped", `${facts.reason ?? "A fault"}. It is tried again every minute.`);
    case "paused": {
      const kept = facts.retained_bytes == null ? "" : `; ${bytes(facts.retained_bytes)} of WAL are kept for it`;
      const what = `Somebody paused it ${since(facts.since, now)} ago${kept}.`;
      return made("off", "Paused", `${what} Resume it with: ingestd resume ${source.name}`);
    }
    case "closed":
      return made("off", "Closed", "The daemon is ending.");
    default:
  }
  const stopped = stoppedTables(source).length;
  const lag = facts.lag_seconds;
  const behind = `${seconds(lag)} and ${bytes(facts.lag_bytes)} of WAL behind`;
  if (isBehind(source)) return made(stopped ? "stop" : "warn", "Behind", `It delivers, ${behind}.`);
  if (stopped) {
    const verb = stopped === 1 ? "is" : "are";
    return made("stop", "Delivering in part", `${plural(stopped, "table")} ${verb} stopped; the others go on.`);
  }
  if (read) {
    return made("busy", "Delivering, and reading tables", `It delivers; ${reading} being read beside that.`);
  }
  const last = facts.last_commit;
  const when = last ? ` The last change became durable ${since(last, now)} ago.` : "";
  return made("ok", "Delivering", `Every table is up to date.${when}`);
}

/** What a person should look at, worst first and sources before tables. */
export function allProblems(model) {
  const found = [...model.sources.values()].flatMap(problems);
  const rank = (problem) => 2 * severity(problem.level) + (problem.isOfTable ? 1 : 0);
  return found.sort((a, b) => rank(a) - rank(b));
}

/** What of a source a person should look at: {level, where, what, remedy, isOfTable}. */
function problems(source) {
  const { facts, name } = source;
  const found = [];
  if (facts.state === "stopped" || facts.state === "backing_off") {
    const level = facts.state === "stopped" ? "stop" : "warn";
    found.push({ level, where: name, what: facts.reason ?? facts.state, remedy: facts.remedy });
  }
  const { level, head, text } = slot(facts);
  if (level === "stop" || level === "warn") {
    const what = head === "lost" ? text : `The slot has ${head} of WAL left. ${text}`;
    const remedy = "see what holds the daemon up, or raise max_slot_wal_keep_size";
    found.push({ level, where: `${name}, slot`, what, remedy });
  }
  if (isBehind(source)) {
    const what = `It is ${seconds(facts.lag_seconds)} behind, ${bytes(facts.lag_bytes)} of WAL.`;
    const remedy = source.latest("rows_per_s") > 0
      ? "see whether the lag falls; if it grows, the source writes more than is taken"
      : "nothing arrives: look at the last errors, and at the lake's storage";
    found.push({ level: "warn", where: name, what, remedy });
  }
  for (const notice of facts.notices ?? []) {
    found.push({ level: "warn", where: name, what: notice.reason, remedy: notice.remedy });
  }
  for (const table of stoppedTables(source)) {
    const where = `${name}, table ${table.table}`;
    found.push({ level: "stop", where, what: table.reason, remedy: table.remedy, isOfTable: true });
  }
  for (const reference of facts.references) {
    if (reference.state === "stopped" && source.tables.get(reference.table)?.state !== "stopped") {
      const where = `${name}, reference table ${reference.table}`;
      const { reason: what, remedy } = reference;
      found.push({ level: "stop", where, what, remedy, isOfTable: true });
    }
  }
  return found;
}

/** All sources in one sentence; `found`: what `allProblems` gave. */
export function overall(model, found) {
  const sources = [...model.sources.values()];
  if (!sources.length) return { level: "stop", text: "There are no sources in the config" };
  const told = sources.map((source) => ({ name: source.name, ...describe(source, model.now) }));
  const level = worst([...told, ...found].map((t) => t.level));
  const paused = sources.filter((source) => source.facts.state === "paused").map(({ name }) => name);
  if (level === "ok" && paused.length) {
    const rest = sources.length - paused.length;
    const those = rest === 1 ? "The other source delivers" : `The other ${rest} sources deliver`;
    return { level, text: `${those} every table; ${paused.join(", ")}: paused` };
  }
  const all = sources.length === 1 ? `${sources[0].name} delivers` : `All ${sources.length} sources deliver`;
  const these = told.filter((t) => t.level === level).map((t) => `${t.name}: ${t.word.toLowerCase()}`);
  const urgent = found.filter((problem) => problem.level === "stop").length;
  const text = {
    stop: `${plural(urgent, "thing")} ${urgent === 1 ? "needs" : "need"} you`,
    warn: these.length ? these.join(", ") : "Something needs a look",
    busy: these.join(", "),
    ok: `${all} every table`,
    off: these.join(", "),
  }[level];
  return { level, text };
}
