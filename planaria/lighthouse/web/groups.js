// The groups as a strip: a cell for each, of which a thousand fit, and all about the one that is chosen.

import { html, nothing } from "/web/vendor/lit-html/lit-html.js";
import { repeat } from "/web/vendor/lit-html/directives/repeat.js";
import { groupActions } from "/web/actions.js";
import { CALM, conditionOf, CONDITIONS, count, duration, number } from "/web/words.js";

const CARDS = 16; // up to so many groups each has a card; beyond that a tile with its number, and then only a sign
const TILES = 200;
const LOOK = 12; // groups that are listed
const URGENT = ["bad", "warn"]; // tones, in their order; the others come after them

/** What matters is said in the name of a cell too: it is all that some people get. */
function named(group) {
  const shards = group.shards ? `, ${count(group.shards, "shard")}` : "";
  const note = group.note ? `: ${group.note}` : "";
  return `group ${group.number}, ${group.condition}, step ${group.step}${shards}${note}`;
}

function pace(group) {
  return group.stepSeconds ? `${duration(group.stepSeconds)} a step` : "";
}

function card(group) {
  return html`<span class="id">${group.number}<small> life ${group.life}</small></span>
    <span class="is"><b aria-hidden="true">${conditionOf(group.condition).sign}</b> ${group.condition}</span>
    <span>step ${group.step.toLocaleString("en")}</span>
    <span>${pace(group) || "–"}</span>
    <span>${group.shards ? count(group.shards, "shard") : "no shards"}</span>`;
}

export class Strip {
  /** @param {() => void} redraw */
  constructor(redraw) {
    this.redraw = redraw;
    this.chosen = null; // the number of a group
    this.groups = [];
  }

  view(job, groups) {
    this.job = job;
    this.groups = groups;
    const size = groups.length <= CARDS ? "cards" : groups.length <= TILES ? "tiles" : "signs";
    const stop = groups.some((group) => group.number === this.chosen) ? this.chosen : groups[0]?.number;
    return html`
      ${legend(groups)}
      <div class="strip ${size}" role="listbox" aria-label="Groups" @keydown=${(event) => this.key(event)}>
        ${repeat(
          groups,
          (group) => group.number,
          (group) => html`<button
            type="button"
            role="option"
            class="cell tone ${conditionOf(group.condition).tone}"
            data-group=${group.number}
            tabindex=${group.number === stop ? 0 : -1}
            aria-selected=${group.number === this.chosen ? "true" : "false"}
            aria-label=${named(group)}
            title=${size === "cards" ? nothing : named(group)}
            @click=${() => this.choose(group.number)}
          >${size === "cards" ? card(group) : size === "tiles" ? group.number : conditionOf(group.condition).sign}</button>`,
        )}
      </div>
      ${this.details()}
    `;
  }

  choose(number) {
    this.chosen = this.chosen === number ? null : number;
    this.redraw();
  }

  /** Arrows go from cell to cell, as they lie on the screen. */
  key(event) {
    const cells = [...event.currentTarget.children];
    const at = cells.indexOf(document.activeElement);
    if (at < 0) return;
    const top = cells[0].offsetTop;
    const across = Math.max(cells.findIndex((cell) => cell.offsetTop > top), 0) || cells.length;
    const to = {
      ArrowRight: at + 1,
      ArrowLeft: at - 1,
      ArrowDown: at + across,
      ArrowUp: at - across,
      Home: 0,
      End: cells.length - 1,
    }[event.key];
    if (to === undefined || !cells[to]) return;
    event.preventDefault();
    this.chosen = Number(cells[to].dataset.group);
    cells[to].focus();
    this.redraw();
  }

  details() {
    const group = this.groups.find((each) => each.number === this.chosen);
    if (!group) return nothing;
    const facts = [
      ["state", `${group.condition}${group.condition === "working" ? ` (${group.phase})` : ""}`],
      ["life", `${group.life} (incarnation)`],
      ["step", group.step.toLocaleString("en")],
      ["speed", pace(group) || "not known"],
      ["shards", group.shards ? `${group.shards} in its newest step` : "none known"],
      ["loss", number(group.loss)],
      ["node", group.node || "–"],
      ["note", group.note],
    ];
    return html`<section class="details" aria-live="polite">
      <h3>Group ${group.number}</h3>
      <dl>${facts.filter(([, value]) => value).map(([name, value]) => html`<div class=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
      ${groupActions(this.job, group)}
    </section>`;
  }
}

function legend(groups) {
  const counts = new Map();
  for (const group of groups) counts.set(group.condition, (counts.get(group.condition) ?? 0) + 1);
  return html`<ul class="legend">
    ${Object.keys(CONDITIONS)
      .filter((name) => counts.has(name))
      .map((name) => html`<li><span class="swatch tone ${conditionOf(name).tone}" aria-hidden="true">${conditionOf(name).sign}</span>${counts.get(name)} ${name}</li>`)}
  </ul>`;
}

/** Those that are not at work, and then the slowest if they are much slower than usual. */
export function lookers(groups) {
  const times = groups.map((group) => group.stepSeconds).filter(Boolean).sort((a, b) => a - b);
  const usual = times[Math.floor(times.length / 2)] ?? 0;
  const slow = (group) => CALM.has(group.condition) && group.stepSeconds > 1.5 * usual;
  const found = groups.filter((group) => !CALM.has(group.condition) || slow(group));
  const urgency = (group) => (CALM.has(group.condition) ? 3 : [...URGENT, conditionOf(group.condition).tone].indexOf(conditionOf(group.condition).tone));
  return found.sort((a, b) => urgency(a) - urgency(b) || b.stepSeconds - a.stepSeconds || a.number - b.number);
}

/** @param {(group: number) => void} choose */
export function lookTable(groups, choose) {
  const found = lookers(groups);
  if (!found.length) return nothing;
  return html`<h3 class="look">Need a look</h3>
    <div class="scroll" tabindex="0" role="region" aria-label="Groups that need a look"><table class="looks">
      <thead><tr><th scope="col">group</th><th scope="col">is</th><th scope="col" class="number">step</th><th scope="col" class="number">a step takes</th><th scope="col">node</th><th scope="col">note</th></tr></thead>
      <tbody>
        ${found.slice(0, LOOK).map(
          (group) => html`<tr>
            <th scope="row"><button type="button" class="plain" aria-label="group ${group.number}" @click=${() => choose(group.number)}>${group.number}</button></th>
            <td class="is"><span class="dot ${conditionOf(group.condition).tone}" aria-hidden="true"></span>${CALM.has(group.condition) ? "slow" : group.condition}</td>
            <td class="number">${group.step.toLocaleString("en")}</td>
            <td class="number">${group.stepSeconds ? duration(group.stepSeconds) : "–"}</td>
            <td class="free">${group.node}</td>
            <td class="free">${group.note}</td>
          </tr>`,
        )}
      </tbody>
    </table></div>
    ${found.length > LOOK ? html`<p class="quiet">and ${count(found.length - LOOK, "more group")}</p>` : nothing}`;
}
