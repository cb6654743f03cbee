// The form that asks for the token if the daemon has one. The token is stored for this tab only and
// sent in a header, only to this host and port.

import { el, setHidden, setText } from "./dom.js";

const KEY = "ingestd-token";

export const token = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

/** Return the form; `onToken`: called when a token was entered. */
export function signInForm(onToken) {
  const input = el("input", {
    id: "token",
    type: "password",
    autocomplete: "off",
    required: "",
    "aria-describedby": "token-help token-wrong",
  });
  const wrong = el("p", { id: "token-wrong", class: "wrong", role: "alert" });
  const help = el(
    "p",
    { id: "token-help", class: "quiet" },
    "The token set in [http] of the daemon's config. This tab keeps it until it is closed.",
  );
  const form = el(
    "form",
    { class: "card signin" },
    el("h2", {}, "Sign in"),
    el("label", { for: "token" }, "Token"),
    input,
    el("button", { type: "submit" }, "Show the status"),
    wrong,
    help,
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    token.set(input.value.trim());
    setText(wrong, "");
    onToken();
  });
  return {
    form,
    show(isWrong) {
      setHidden(form, false);
      setText(wrong, isWrong ? "The daemon rejects this token." : "");
      input.value = "";
      input.focus();
    },
  };
}
