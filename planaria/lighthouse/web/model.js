// What was heard of one job, put together. Bounded, for a page may stay open for weeks.

const EVENTS = 1000;
const MARKS = 1024; // of each lane of the timeline: checkpoints, of which there are many, push no loss out
const COMMITS = 8192;
const SPEED_SECONDS = 30; // steps a second are those of the last half minute, as in planaria top
const LEAST_SECONDS = 1; // below it a rate says more of the heartbeats than of the steps

export class Model {
  constructor() {
    this.forget();
  }

  forget() {
    this.events = []; // {at, kind, group, text}, oldest first
    this.marks = []; // {lane, at, until, group, step, text}, in the order in which they were made
    this.commits = []; // [at, step]: the newest, one by one
    this.loss = []; // [step, mean, least, most]
    this.progress = []; // [seconds since the lighthouse began, step, …]
  }

  /** Take what the lighthouse says that is new. */
  take(news) {
    if (news.anew) this.forget();
    for (const [at, kind, group, text] of news.events) this.events.push({ at, kind, group, text });
    for (const [lane, at, until, group, step, text] of news.marks) {
      this.marks.push({ lane, at, until, group, step, text });
    }
    this.commits.push(...news.commits);
    this.events.splice(0, this.events.length - EVENTS);
    this.marks = newestOfEach(this.marks);
    this.commits.splice(0, this.commits.length - COMMITS);
    this.loss.splice(news.loss.from, Infinity, ...news.loss.rows);
    this.progress.splice(news.progress.from, Infinity, ...news.progress.rows);
  }

  /** Steps a second until `now` (of the lighthouse's clock), or null if too little was seen; 0 when nothing moves. */
  speed(now) {
    const last = this.commits.at(-1);
    if (!last) return null;
    const newest = this.commits.length - 1;
    let first = newest;
    // A step may take longer than that: one is looked at always.
    while (first > 0 && (first === newest || now - this.commits[first - 1][0] <= SPEED_SECONDS)) {
      if (this.commits[first - 1][1] > this.commits[first][1]) break; // the job went back to a checkpoint
      first -= 1;
    }
    const [at, step] = this.commits[first];
    if (now - last[0] > Math.max(SPEED_SECONDS, 2 * (last[0] - at))) return 0;
    return first < newest && now - at >= LEAST_SECONDS ? (last[1] - step) / (now - at) : null;
  }

  /** Where groups at work were lost. What only may lead to that is trouble, another lane. */
  failures() {
    return this.marks.filter((mark) => mark.lane === "interrupt");
  }

  /** Whether each sample was trained on once, as far as is known: with the policy `shrink` those of the lost are left
   *  out, and a job that goes back to a checkpoint makes steps again. */
  lostNothing(policy) {
    return policy !== "shrink" && !this.marks.some((mark) => mark.lane === "resume");
  }

  /** Every commit that is known: those of long ago in steps of seconds or more, the newest one by one. */
  everyCommit(began) {
    const first = this.commits.length ? this.commits[0][0] : Infinity;
    const old = this.progress.map(([seconds, , , most]) => [began + seconds, most]).filter(([at]) => at < first);
    return [...old, ...this.commits];
  }
}

function newestOfEach(marks) {
  if (marks.length <= MARKS) return marks;
  const kept = new Map();
  return marks.toReversed().filter(({ lane }) => {
    kept.set(lane, (kept.get(lane) ?? 0) + 1);
    return kept.get(lane) <= MARKS;
  }).reverse();
}

/** A place that was drained, [node, GPU] or [node, ""], as the command line calls it. */
export function placeName([node, gpu]) {
  return gpu ? `${node}:${gpu}` : node;
}

/** A group's line in a picture. */
export function groupOf([number, life, condition, phase, step, stepSeconds, loss, shards, node, note]) {
  return { number, life, condition, phase, step, stepSeconds, loss, shards, node, note };
}
