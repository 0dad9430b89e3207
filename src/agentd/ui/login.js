// Who looks: on a socket nobody has to say so, on TCP a token does.

import { token } from "./api.js";
import { byId } from "./dom.js";

/** Ask for a token, and return when there is one. */
export function login(problem) {
  byId("main").hidden = true;
  byId("login").hidden = false;
  byId("login-problem").textContent = problem;
  byId("token").focus();
  return new Promise((resolve) => {
    byId("login").addEventListener("submit", (event) => {
      event.preventDefault();
      token.keep(byId("token").value.trim());
      byId("token").value = "";
      byId("login").hidden = true;
      resolve();
    }, { once: true });
  });
}
