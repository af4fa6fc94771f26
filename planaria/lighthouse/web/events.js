// Events in plain language, the newest first.

import { html } from "/web/vendor/lit-html/lit-html.js";
import { clock, count } from "/web/words.js";

const SHOWN = 200;
const TONES = {
  lost: "bad", suspect: "warn", evict: "bad", corrupt: "bad", diverged: "bad", mismatch: "bad", stop: "bad", refuse: "bad",
  trouble: "warn", late: "warn", still: "warn", majority: "warn", kill: "warn", agent: "warn", resume: "warn",
  recovery: "ok", away: "heal", quorum: "accent", plan: "accent", complete: "done", finish: "done",
}; // prettier-ignore
// Of the marks on the timeline those that say more than any event: what a loss came to.
const STORIES = new Set(["recovery", "away"]);
const NAMES = { recovery: "recovered", away: "healed" };
const IMPORTANT = new Set(["recovery", "away", "resume", "stop", "complete", "corrupt", "diverged", "majority", "still"]);

/** Events and what became of them, in the order of time. */
export function told(events, marks) {
  const stories = marks.filter((mark) => STORIES.has(mark.lane)).map((mark) => ({ at: mark.until, kind: mark.lane, text: mark.text }));
  return [...events, ...stories].sort((a, b) => b.at - a.at);
}

export function eventList(all, onlyImportant) {
  const shown = onlyImportant ? all.filter((event) => IMPORTANT.has(event.kind)) : all;
  if (!shown.length) return html`<p class="quiet">Nothing to tell yet.</p>`;
  return html`<ol class="events" tabindex="0" aria-label="Events, the newest first">
      ${shown.slice(0, SHOWN).map(
        (event) => html`<li>
          <time datetime=${new Date(event.at * 1000).toISOString()}>${clock(event.at, 2)}</time>
          <span class="kind ${TONES[event.kind] ?? "quiet"}">${NAMES[event.kind] ?? event.kind}</span>
          <span class="text">${event.text}</span>
        </li>`,
      )}
    </ol>
    ${shown.length > SHOWN ? html`<p class="quiet">and ${count(shown.length - SHOWN, "older one")}</p>` : ""}`;
}
