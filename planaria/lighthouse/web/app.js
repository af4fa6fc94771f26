// Which page this is, and what is on it: all jobs at /, one at /jobs/NAME.

import { html, nothing, render } from "/web/vendor/lit-html/lit-html.js";
import { JobPage } from "/web/jobpage.js";
import { home, jobsPage } from "/web/jobspage.js";
import { listen } from "/web/stream.js";
import { clock } from "/web/words.js";

const root = document.getElementById("app");
const job = nameIn(location.pathname);
let picture = null;
let silentSince = null;
let tooMany = false;
let asked = 0;

const page = job === null ? null : new JobPage(redraw);

function nameIn(path) {
  if (!path.startsWith("/jobs/")) return null;
  try {
    return decodeURIComponent(path.slice("/jobs/".length));
  } catch {
    return path.slice("/jobs/".length); // no name that a job could have: the lighthouse will say so
  }
}

/** Soon, and once for all that happens until then. */
function redraw() {
  cancelAnimationFrame(asked);
  asked = requestAnimationFrame(() => render(view(), root));
}

function view() {
  const since = silentSince === null ? "" : clock(silentSince / 1000);
  const trouble = silentSince === null ? nothing : tooMany ? html`<p class="banner" role="alert">Too many pages of this lighthouse are open; what follows is of ${since}. Close some. Trying again …</p>` : html`<p class="banner" role="alert">No answer from the lighthouse since ${since}; what follows is older. Training needs none to go on; a run that is over took its own along. Trying again …</p>`;
  if (picture === null) return html`${trouble}<p class="quiet">Asking the lighthouse …</p>`;
  const seat = picture.seat.words ? html`<p class="banner" role="status">${picture.seat.words}</p>` : nothing;
  return html`${trouble}${seat}${content()}`;
}

function content() {
  if (page === null) return picture.seat.leads ? html`${home}${jobsPage(picture)}` : html`${home}<h1>Jobs</h1>`;
  if (picture.job) return page.view(picture);
  return html`${home}
    <h1>${job}</h1>
    ${picture.missing ? html`<section class="card"><p>${capital(picture.missing)}. It appears here when it begins.</p></section>` : nothing}`;
}

function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

document.title = job === null ? "Planaria: jobs" : `${job} – Planaria`;
render(html`<p class="quiet">Asking the lighthouse …</p>`, (root.textContent = "", root));
listen(job, {
  picture(data) {
    picture = data;
    redraw();
  },
  news(data) {
    page?.news(data);
    redraw();
  },
  silent(since, full) {
    if (silentSince === since && tooMany === full) return;
    [silentSince, tooMany] = [since, full];
    redraw();
  },
});
