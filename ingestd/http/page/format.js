// Figures and times for people. An unknown value is a dash.

const UNKNOWN = "–";
const number = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const precise = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const clock = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });
const shortClock = new Intl.DateTimeFormat("en-GB", { timeStyle: "short" });
const day = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });
const zone = new Intl.DateTimeFormat("en-GB", { timeZoneName: "shortOffset" });

function scaled(value, steps) {
  const [size, unit] = steps.find(([size]) => value >= size) ?? steps[steps.length - 1];
  return `${precise.format(value / size)} ${unit}`.trimEnd();
}

/** Bytes, in powers of 1000 as in the config. */
export function bytes(value) {
  if (value == null) return UNKNOWN;
  return scaled(value, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]]);
}

/** A count, exact up to five digits. */
export function count(value) {
  if (value == null) return UNKNOWN;
  if (value < 1e5) return number.format(value);
  return scaled(value, [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]);
}

export function exactCount(value) {
  return value == null ? UNKNOWN : number.format(value);
}

export function rate(value) {
  if (value == null) return UNKNOWN;
  return `${value < 10 ? precise.format(value) : count(Math.round(value))}/s`;
}

/** A time span in seconds, in its two largest units. */
export function seconds(value) {
  if (value == null) return UNKNOWN;
  if (value < 0.0005) return "0 s";
  if (value < 1) return `${precise.format(Math.round(value * 1000))} ms`;
  if (value < 59.5) return `${precise.format(value)} s`;
  const whole = Math.round(value);
  const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const at = parts.findIndex(([size]) => whole >= size);
  const [size, unit] = parts[at];
  const rest = Math.floor((whole % size) / parts[at + 1][0]);
  const first = `${Math.floor(whole / size)} ${unit}`;
  return rest ? `${first} ${rest} ${parts[at + 1][1]}` : first;
}

export function percent(ratio) {
  return `${Math.floor(ratio * 100)} %`;
}

/** `n` of these: "1 table", "2 tables". */
export function plural(n, word) {
  return `${number.format(n)} ${word}${n === 1 ? "" : "s"}`;
}

/** A time in this computer's time zone, with the day if it is not today. `at`: ms or ISO 8601. */
export function time(at, now) {
  if (at == null) return UNKNOWN;
  const date = new Date(at);
  const told = clock.format(date);
  return date.toDateString() === new Date(now).toDateString() ? told : `${day.format(date)} ${told}`;
}

export function hour(at) {
  return shortClock.format(new Date(at));
}

/** How long ago, in whole seconds. */
export function since(at, now) {
  return seconds(Math.max(1, Math.round((now - Date.parse(at)) / 1000)));
}

/** An estimated time span. */
export function about(value) {
  const step = [[5400, 1800], [90, 60], [20, 5], [0, 1]].find(([above]) => value >= above)[1];
  return seconds(Math.max(1, Math.round(value / step)) * step);
}

export function zoneName() {
  return zone.formatToParts(new Date()).find((part) => part.type === "timeZoneName").value;
}
