// The page: follows the daemon, draws what changed, announces problems to screen readers.

import { el, setAttribute, setChildren, setHidden, setText } from "./dom.js";
import { seconds, time, zoneName } from "./format.js";
import { Problems } from "./lists.js";
import { Model } from "./model.js";
import { signInForm, token } from "./signin.js";
import { SourceView } from "./source.js";
import { Follower } from "./stream.js";
import { allProblems, describe, overall } from "./words.js";

const ANNOUNCE_AFTER_MS = 1500;

const main = document.querySelector("#main");
const connection = document.querySelector("#connection");
const about = document.querySelector("#about");
const announced = document.querySelector("#announced");
const icon = document.querySelector("link[rel=icon]");

const summary = new Problems();
const nav = el("nav", { "aria-label": "Sources", hidden: "" });
const signOut = el("button", { type: "button", class: "plain" }, "Forget the token");
const signIn = signInForm(() => follower.start());
const views = new Map();
let model = new Model();
let lostAt = null;
let isDue = false;
let announcing = { text: null, timer: null };

const follower = new Follower(
  {
    told(event, data) {
      if (event === "state") begin();
      model.take(data);
      tellState();
      due();
    },
    connected() {
      lostAt = null;
      setHidden(signIn.form, true);
      setText(connection, "Connected");
      setAttribute(document.body, "data-connection", "live");
      setHidden(signOut, token.get() === null);
    },
    lost(why) {
      lostAt ??= Date.now();
      setText(connection, `No connection since ${time(lostAt, Date.now())}: ${why}. Reconnecting …`);
      setAttribute(document.body, "data-connection", "lost");
      tellState();
      due();
    },
    unauthorized() {
      const isWrong = token.get() !== null;
      token.forget();
      setText(connection, "Signed out");
      setAttribute(document.body, "data-connection", "out");
      views.clear();
      model = new Model();
      setHidden(signOut, true);
      setChildren(main, [signIn.form]);
      signIn.show(isWrong);
    },
  },
  token.get,
);

/** Start a new model: a `state` event is complete. Views of the same sources are reused. */
function begin() {
  model = new Model();
}

function due() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    draw();
  });
}

function draw() {
  if (document.body.dataset.connection === "out") return;
  if (lostAt === null || model.now) summary.draw(told(), allProblems(model));
  for (const name of views.keys()) {
    if (!model.sources.has(name)) views.delete(name);
  }
  for (const [name, source] of model.sources) {
    let view = views.get(name);
    if (view?.source !== source) {
      view = view ? taken(view, source) : new SourceView(source);
      views.set(name, view);
    }
    view.draw(model.now);
  }
  drawNav();
  const { version, started_at: startedAt } = model.about;
  if (version) {
    const up = seconds((model.now - startedAt) / 1000);
    setText(about, `${version}, up ${up}. Times are ${zoneName()}.`);
  }
  setChildren(main, [summary.element, nav, ...[...views.values()].map((view) => view.element), signOut]);
}

/** Return the view, now showing `source` of a new `state`; search and order are kept. */
function taken(view, source) {
  for (const name of view.source.tables.keys()) source.changed.add(name);
  view.source = view.tables.source = source;
  view.drawn = null;
  return view;
}

function drawNav() {
  setHidden(nav, model.sources.size < 2);
  if (nav.hidden) return;
  const names = [...model.sources.keys()].join("\n");
  if (nav.dataset.names !== names) {
    nav.dataset.names = names;
    const link = (name) => el("a", { href: `#source-${encodeURIComponent(name)}` }, el("span"), ` ${name}`);
    setChildren(nav, [...model.sources.keys()].map(link));
  }
  [...model.sources.values()].forEach((source, n) => {
    const { level, word } = describe(source, model.now);
    setAttribute(nav.children[n], "data-level", level);
    setText(nav.children[n].firstChild, `${word}:`);
  });
}

function told() {
  if (lostAt === null) return overall(model, allProblems(model));
  return { level: "stop", text: "No connection to the daemon: the data below is out of date" };
}

/** Set the tab's title and icon, also in the background; announce changes, at most every 1.5 s. */
function tellState() {
  const { level, text } = told();
  const isTrouble = level === "stop" || level === "warn";
  document.title = isTrouble ? `! ${text} – ingestd` : "ingestd";
  setAttribute(icon, "href", `page/icon${isTrouble ? "-trouble" : ""}.svg`);
  if (announcing.text === text) return;
  clearTimeout(announcing.timer);
  const timer = setTimeout(() => setText(announced, text), ANNOUNCE_AFTER_MS);
  announcing = { text, timer };
}

signOut.addEventListener("click", () => {
  token.forget();
  follower.start();
});
follower.start();
