// Server-sent events by fetch: EventSource can't send the token, and a cookie would be sent to
// other servers on the host as well (cookies don't distinguish ports).

const SILENCE_MS = 35_000; // the daemon sends an event at least every 10 s
const LONGEST_WAIT_MS = 10_000;
const HIDDEN_MS = 60_000;

export class UnauthorizedError extends Error {}

/** Follows the daemon and reconnects whenever the connection ends. */
export class Follower {
  /** `on`: told({event, data}), connected(), lost(why), unauthorized(). */
  constructor(on, getToken) {
    this.on = on;
    this.getToken = getToken;
    this.failures = 0;
    this.timers = {};
    document.addEventListener("visibilitychange", () => this.seen());
  }

  start() {
    this.cut?.abort();
    clearTimeout(this.timers.again);
    this.cut = new AbortController();
    this.follow(this.cut);
  }

  /** Disconnect a hidden page after a while, and reconnect once it is visible. */
  seen() {
    clearTimeout(this.timers.hidden);
    if (document.hidden) {
      this.timers.hidden = setTimeout(() => {
        this.isAsleep = true;
        clearTimeout(this.timers.again);
        this.cut?.abort();
      }, HIDDEN_MS);
    } else if (this.isAsleep) {
      this.isAsleep = false;
      this.start();
    }
  }

  async follow(cut) {
    let why = "the connection was closed";
    try {
      await this.read(cut);
    } catch (error) {
      if (error instanceof UnauthorizedError) return this.on.unauthorized();
      why = error.told ?? "the daemon does not respond";
    } finally {
      clearTimeout(this.timers.silence);
    }
    if (cut !== this.cut || this.isAsleep) return undefined; // superseded, or the page is hidden
    this.on.lost(why);
    this.failures += 1;
    const wait = Math.min(LONGEST_WAIT_MS, 500 * 2 ** this.failures) * (0.5 + Math.random() / 2);
    this.timers.again = setTimeout(() => this.start(), wait);
    return undefined;
  }

  async read(cut) {
    const token = this.getToken();
    const headers = token ? { Authorization: `Bearer ${token}` } : {};
    this.heard(cut);
    const response = await fetch("status/events", { headers, cache: "no-store", signal: cut.signal });
    if (response.status === 401) throw new UnauthorizedError();
    if (!response.ok) throw await refusal(response);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let held = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      this.heard(cut);
      const events = (held + value).split("\n\n");
      held = events.pop();
      for (const event of events) this.take(event);
    }
  }

  /** Restart the timer that aborts a silent connection: it may be dead without an error. */
  heard(cut) {
    clearTimeout(this.timers.silence);
    this.timers.silence = setTimeout(() => cut.abort(), SILENCE_MS);
  }

  take(text) {
    const lines = text.split("\n");
    const field = (name) => lines.find((l) => l.startsWith(`${name}: `))?.slice(name.length + 2);
    const event = field("event");
    if (event === "state") {
      this.failures = 0;
      this.on.connected();
    }
    if (event) this.on.told(event, JSON.parse(field("data")));
  }
}

async function refusal(response) {
  const told = await response.json().catch(() => ({}));
  const error = new Error(told.error);
  if (told.error) error.told = [told.error, told.remedy].filter(Boolean).join(": ");
  return error;
}
