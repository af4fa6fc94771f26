// Where the time of the groups went.

import { html } from "/web/vendor/lit-html/lit-html.js";
import { conditionOf, duration, percent } from "/web/words.js";

const GOOD = new Set(["working", "finished"]);

/** Of all the time of all groups, the share that went into training; NaN if there was none yet. */
export function goodput(seconds) {
  const all = Object.values(seconds).reduce((sum, each) => sum + each, 0);
  return [...GOOD].reduce((sum, name) => sum + (seconds[name] ?? 0), 0) / all;
}

export function goodputTable(seconds) {
  const all = Object.values(seconds).reduce((sum, each) => sum + each, 0);
  if (!all) return html`<p class="quiet">No time has passed yet.</p>`;
  const rows = Object.entries(seconds)
    .filter(([, each]) => each / all > 0.00005)
    .sort((a, b) => GOOD.has(b[0]) - GOOD.has(a[0]) || b[1] - a[1]);
  return html`
    <div class="shares" aria-hidden="true">
      ${rows.map(([name, each]) => html`<span class="tone ${conditionOf(name).tone}" .style=${`flex-grow: ${each / all}`}></span>`)}
    </div>
    <table>
      <thead><tr><th scope="col">what the groups' time went into</th><th scope="col" class="number">share</th><th scope="col" class="number">time of one group</th></tr></thead>
      <tbody>
        ${rows.map(
          ([name, each]) => html`<tr>
            <td><span class="dot ${conditionOf(name).tone}" aria-hidden="true"></span>${conditionOf(name).time}</td>
            <td class="number">${percent(each / all)}</td>
            <td class="number">${duration(each)}</td>
          </tr>`,
        )}
      </tbody>
    </table>
  `;
}
