// Numbers, times and conditions in words.

/**
 * What a group may be doing: sign (so that nothing is told by colour alone), tone (a class of style.css), and what the
 * time that goes into it is called.
 */
export const CONDITIONS = {
  working: { sign: "", tone: "ok", time: "training" },
  finished: { sign: "✓", tone: "done", time: "finished, waiting for the others" },
  forming: { sign: "…", tone: "wait", time: "forming a communicator" },
  healing: { sign: "+", tone: "heal", time: "healing from the others" },
  loading: { sign: "↓", tone: "heal", time: "loading" },
  starting: { sign: "○", tone: "wait", time: "starting: imports, model, data" },
  ready: { sign: "◔", tone: "wait", time: "ready, waiting to be taken in" },
  draining: { sign: "−", tone: "wait", time: "leaving in order" },
  moving: { sign: "→", tone: "wait", time: "moving to another place" },
  drained: { sign: "−", tone: "off", time: "drained by an operator" },
  suspect: { sign: "?", tone: "warn", time: "standing still: hung or stopped" },
  "out of reach": { sign: "?", tone: "warn", time: "out of reach" },
  dead: { sign: "×", tone: "bad", time: "dead, until the next life starts" },
  refused: { sign: "!", tone: "bad", time: "refused" },
  missing: { sign: "×", tone: "bad", time: "not there" },
  interrupted: { sign: "↯", tone: "warn", time: "interrupted: recoveries of lost groups" },
};

export const CALM = new Set(["working", "finished"]);

export function conditionOf(name) {
  return CONDITIONS[name] ?? { sign: "?", tone: "warn", time: name };
}

export function count(number, one, many = `${one}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
}

export function number(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  return String(Number(value.toPrecision(digits)));
}

/** 0.034 -> "34 ms", 95 -> "1 min 35 s". */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 0.0995) return `${number(seconds * 1000, 3)} ms`;
  if (seconds < 59.95) return `${number(seconds, 3)} s`;
  const whole = Math.round(seconds);
  const parts = [
    [Math.floor(whole / 86400), "d"],
    [Math.floor(whole / 3600) % 24, "h"],
    [Math.floor(whole / 60) % 60, "min"],
    [whole % 60, "s"],
  ];
  const first = parts.findIndex(([amount]) => amount > 0);
  return parts
    .slice(first, first + 2)
    .filter(([amount]) => amount > 0)
    .map(([amount, unit]) => `${amount} ${unit}`)
    .join(" ");
}

export function percent(share) {
  if (!Number.isFinite(share)) return "–";
  // 99.996 % is not 100 %
  const digits = share > 0.999 && share < 1 ? 3 : share > 0.99 && share < 1 ? 2 : 1;
  const shown = Math.floor(share * 100 * 10 ** digits) / 10 ** digits;
  return `${share > 0 && shown === 0 ? "under 0.1" : shown} %`;
}

/** Unix seconds as the time of the day here, with the date if that is another day. */
export function clock(at, digits = 0) {
  const date = new Date(at * 1000);
  const fraction = digits ? `.${String(date.getMilliseconds()).padStart(3, "0").slice(0, digits)}` : "";
  const hms = date.toLocaleTimeString("en-GB") + fraction;
  return date.toDateString() === new Date().toDateString() ? hms : `${date.toLocaleDateString("en-CA")} ${hms}`;
}
