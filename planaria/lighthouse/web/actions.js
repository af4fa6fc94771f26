// What an operator can have done from here. Without an operator's certificate there are no verbs, and no buttons.

import { html, nothing, render } from "/web/vendor/lit-html/lit-html.js";
import { placeName } from "/web/model.js";

/** What each verb does, for the one who is asked to confirm it. */
const EXPLAINED = {
  drain: "It leaves in order after one of the next commits; the others go on without a pause, and nobody replaces it.",
  evict: "It counts as dead from now on, whatever its processes do. Only for a group that cannot be reached and is known to be dead: it alone can release those who wait for it.",
  kill: "SIGKILL is sent to its processes, as if its machine had died. The others go on, and it is started again.",
  scale: "Groups beyond the number leave in order; missing ones are started where an engine can do that.",
  undrain: "Groups may be started there again.",
};

let verbs = [];

/** Ask what this browser may have done; `then` is called if that is anything. */
export async function learnVerbs(then) {
  try {
    verbs = await (await fetch("/verbs")).json();
  } catch {
    return; // nobody answers: the page says so elsewhere
  }
  if (verbs.length) then();
}

async function act(job, verb, fields) {
  try {
    const reply = await fetch(`/jobs/${encodeURIComponent(job)}/${verb}`, {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-Planaria-Action": "1" },
      body: JSON.stringify(fields),
    });
    return (await reply.json()).text;
  } catch {
    return "The lighthouse did not answer, so it is not known whether it was done.";
  }
}

/** Ask before anything is done; what came of it is said in the same place. */
function confirmed(title, job, verb, fields) {
  const dialog = document.createElement("dialog");
  dialog.setAttribute("aria-labelledby", "question");
  const show = (text, done) =>
    render(
      html`<h2 id="question">${title}</h2>
        <p role="status">${text}</p>
        <div class="buttons">
          <button type="button" autofocus @click=${() => dialog.close()}>${done ? "Close" : "Cancel"}</button>
          ${done ? nothing : html`<button type="button" class="danger" @click=${go}>${title}</button>`}
        </div>`,
      dialog,
    );
  async function go() {
    show("Asking …", true);
    show(await act(job, verb, fields), true);
  }
  dialog.addEventListener("close", () => dialog.remove());
  show(EXPLAINED[verb], false);
  document.body.append(dialog);
  dialog.showModal();
}

function button(name, title, job, verb, fields) {
  if (!verbs.includes(verb)) return nothing;
  return html`<button type="button" @click=${() => confirmed(title, job, verb, fields)}>${name}</button>`;
}

export function groupActions(job, group) {
  if (!verbs.length || ["dead", "drained", "finished", "refused"].includes(group.condition)) return nothing;
  const number = group.number;
  return html`<div class="buttons">
    ${button("Drain …", `Drain group ${number}`, job, "drain", { group: number })}
    ${button("Kill …", `Kill group ${number}`, job, "kill", { group: number, signal: 9 })}
    ${button("Evict …", `Evict group ${number}`, job, "evict", { group: number })}
  </div>`;
}

export function jobActions(job) {
  if (!verbs.length || job.complete || job.stopped) return nothing;
  const drained = job.drained.map(([node, device]) => {
    const place = placeName([node, device]);
    return button(`Undrain ${place} …`, `Undrain ${place}`, job.job, "undrain", { node, device });
  });
  const scale = (by) => button(`${by > 0 ? "+1" : "−1"} group …`, `Scale to ${job.desired + by} groups`, job.job, "scale", { groups: job.desired + by });
  return html`<div class="buttons" role="group" aria-label="What an operator can do">
    ${job.desired > 1 ? scale(-1) : nothing} ${scale(1)} ${drained}
  </div>`;
}
