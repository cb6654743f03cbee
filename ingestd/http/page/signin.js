// The form that asks for the token, where the daemon has one. It is kept for this tab alone and
// goes in a header, to this very host and port only.

import { el, setHidden, setText } from "./dom.js";

const KEY = "ingestd-token";

export const token = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

/** Make the form; `onToken` is called once there is one to try. */
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
    "It is the token of [http] in the daemon's config. This tab keeps it until it is closed.",
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
      setText(wrong, isWrong ? "The daemon has another token." : "");
      input.value = "";
      input.focus();
    },
  };
}
