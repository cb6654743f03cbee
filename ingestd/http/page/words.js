// Words for states, and remedies. Levels: ok, busy, warn, stop, off.

import { bytes, percent, plural, seconds, since } from "./format.js";

const BEHIND_S = 60;
const LITTLE_ROOM = 0.2;
const ORDER = ["stop", "warn", "busy", "ok", "off"];

export const worst = (levels) => ORDER.find((level) => levels.includes(level)) ?? "ok";
export const severity = (level) => ORDER.indexOf(level);

export function isBehind(source) {
  return source.facts.state === "streaming" && source.facts.lag_seconds > BEHIND_S;
}

/** The free part of the WAL that the slot may retain, 0 to 1; null if the server has no limit. */
export function headRoom({ safe_bytes: safe, retained_bytes: retained }) {
  if (safe == null || retained == null) return null;
  return safe <= 0 ? 0 : safe / (safe + Math.max(0, retained));
}

const SLOT_WORDS = {
  reserved: "The WAL it needs fits in max_wal_size.",
  extended: "The WAL it needs exceeds max_wal_size; the server keeps it.",
  unreserved: "The server is about to remove WAL that it needs.",
  lost: "The server has removed WAL that it needed.",
};

/** The slot's headroom: a level, a headline, and its explanation. */
export function slot(facts) {
  if (facts.retained_bytes == null) {
    return { level: "off", head: "–", text: "No slot, or not measured yet." };
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
  snapshotting: ["busy", "Snapshot"],
  stopped: ["stop", "Stopped"],
  dropped: ["off", "Dropped"],
};

/** A table's level and word. */
export function tableState(table) {
  const [level, word] = TABLE_WORDS[table.state] ?? ["warn", table.state];
  if (table.state === "stopped" || table.state === "dropped") return { level, word };
  if (table.snapshot) return { level: "busy", word: `Snapshot, ${percent(table.snapshot.ratio)}` };
  if (table.snapshot_requested) return { level: "busy", word: `${word}, snapshot requested` };
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
      return made("busy", "Starting", "Connecting to the server and opening the lake.");
    case "snapshotting":
      return made("busy", "Snapshotting", `${reading} being read for the first time.`);
    case "backing_off":
      return made("warn", "Retrying", `${facts.reason ?? "Failed"}. Retrying automatically.`);
    case "stopped":
      return made("stop", "Stopped", `${facts.reason ?? "Failed"}. Retrying every minute.`);
    case "paused": {
      const kept = facts.retained_bytes == null ? "" : `; its slot retains ${bytes(facts.retained_bytes)} of WAL`;
      const what = `Paused ${since(facts.since, now)} ago${kept}.`;
      return made("off", "Paused", `${what} Resume with: ingestd resume ${source.name}`);
    }
    case "closed":
      return made("off", "Closed", "The daemon is shutting down.");
    default:
  }
  const stopped = stoppedTables(source).length;
  const lag = facts.lag_seconds;
  const behind = `${seconds(lag)} and ${bytes(facts.lag_bytes)} of WAL behind`;
  if (isBehind(source)) return made(stopped ? "stop" : "warn", "Behind", `Delivering, ${behind}.`);
  if (stopped) {
    const verb = stopped === 1 ? "is" : "are";
    return made("stop", "Partially delivering", `${plural(stopped, "table")} ${verb} stopped; the others continue.`);
  }
  if (read) {
    return made("busy", "Delivering and snapshotting", `${reading} being read; changes are delivered meanwhile.`);
  }
  const last = facts.last_commit;
  const when = last ? ` The last change became durable ${since(last, now)} ago.` : "";
  return made("ok", "Delivering", `Every table is up to date.${when}`);
}

/** The problems of all sources, worst first and sources before tables. */
export function allProblems(model) {
  const found = [...model.sources.values()].flatMap(problems);
  const rank = (problem) => 2 * severity(problem.level) + (problem.isOfTable ? 1 : 0);
  return found.sort((a, b) => rank(a) - rank(b));
}

/** The problems of a source: {level, where, what, remedy, isOfTable}. */
function problems(source) {
  const { facts, name } = source;
  const found = [];
  if (facts.state === "stopped" || facts.state === "backing_off") {
    const level = facts.state === "stopped" ? "stop" : "warn";
    found.push({ level, where: name, what: facts.reason ?? facts.state, remedy: facts.remedy });
  }
  const { level, head, text } = slot(facts);
  if (level === "stop" || level === "warn") {
    const what = head === "lost" ? text : `The slot can retain ${head} more WAL. ${text}`;
    const remedy = "find out what delays the daemon, or raise max_slot_wal_keep_size";
    found.push({ level, where: `${name}, slot`, what, remedy });
  }
  if (isBehind(source)) {
    const what = `The lake is ${seconds(facts.lag_seconds)} and ${bytes(facts.lag_bytes)} of WAL behind.`;
    const remedy = source.latest("rows_per_s") > 0
      ? "watch the lag; if it grows, the source writes faster than ingestd delivers"
      : "no rows arrive: check the last errors and the lake's storage";
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

/** The state of all sources in one sentence; `found`: the result of `allProblems`. */
export function overall(model, found) {
  const sources = [...model.sources.values()];
  if (!sources.length) return { level: "stop", text: "The config has no sources" };
  const told = sources.map((source) => ({ name: source.name, ...describe(source, model.now) }));
  const level = worst([...told, ...found].map((t) => t.level));
  const paused = sources.filter((source) => source.facts.state === "paused").map(({ name }) => name);
  if (level === "ok" && paused.length) {
    const rest = sources.length - paused.length;
    const those = rest === 1 ? "The other source delivers" : `The other ${rest} sources deliver`;
    return { level, text: `${those} every table; ${paused.join(", ")}: paused` };
  }
  const all = sources.length === 1 ? `${sources[0].name} delivers` : "All sources deliver";
  const these = told.filter((t) => t.level === level).map((t) => `${t.name}: ${t.word.toLowerCase()}`);
  const urgent = found.filter((problem) => problem.level === "stop").length;
  const text = {
    stop: `${plural(urgent, "problem")} ${urgent === 1 ? "needs" : "need"} attention`,
    warn: these.length ? these.join(", ") : "There are warnings",
    busy: these.join(", "),
    ok: `${all} every table`,
    off: these.join(", "),
  }[level];
  return { level, text };
}
