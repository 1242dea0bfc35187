// What samples say: values, rates, shares and quantiles. Nothing here touches the page.

export const SPAN_S = 600; // of sparklines and of recent quantiles
const RATE_S = 5; // over which rates and shares are taken
const KEEP_S = 10; // between histograms that are kept for later

const text = (labels) => JSON.stringify(Object.entries(labels).sort());
const matches = (labels, wanted) =>
  Object.entries(wanted).every(([name, value]) => labels[name] === value);

/** Return the sum of a metric's series that have these labels; 0 if there are none. */
export function value(sample, name, wanted = {}) {
  return (sample.values[name] ?? [])
    .filter(([labels]) => matches(labels, wanted))
    .reduce((sum, [, each]) => sum + each, 0);
}

/** Return the values that a label has in a metric. */
export function labelValues(sample, name, label) {
  const series = sample.values[name] ?? sample.histograms[name]?.series ?? [];
  return [...new Set(series.map(([labels]) => labels[label]))].sort();
}

/** Return a histogram, of all series with these labels: `counts` up to each edge, and `sum`. */
export function histogram(sample, name, wanted = {}) {
  const reading = sample?.histograms[name];
  const edges = reading?.edges ?? [];
  const found = { edges, counts: new Array(edges.length + 1).fill(0), sum: 0 };
  for (const [labels, counts, sum] of reading?.series ?? []) {
    if (!matches(labels, wanted)) continue;
    counts.forEach((count, index) => (found.counts[index] += count));
    found.sum += sum;
  }
  return found;
}

/** Return what a histogram counted since an earlier reading of it. */
export function since(later, earlier) {
  if (!earlier?.counts.length || earlier.counts.at(-1) > later.counts.at(-1)) return later;
  return {
    edges: later.edges,
    counts: later.counts.map((count, index) => count - (earlier.counts[index] ?? 0)),
    sum: later.sum - earlier.sum,
  };
}

export const count = ({ counts }) => counts.at(-1) ?? 0;
export const mean = (one) => (count(one) ? one.sum / count(one) : null);
export const isFew = (one) => count(one) < 20; // a percentile of so few would be made up: the mean is shown
export const typical = (one, q) => (isFew(one) ? mean(one) : quantile(one, q));

/**
 * Return a quantile as Prometheus' histogram_quantile does: linear within its bucket. Beyond the
 * last edge it is that edge; of nothing, null.
 */
export function quantile({ edges, counts }, q) {
  const total = counts.at(-1);
  if (!total) return null;
  const rank = q * total;
  const index = counts.findIndex((each) => each >= rank);
  if (index >= edges.length) return edges.at(-1);
  const below = index ? counts[index - 1] : 0;
  const from = index ? edges[index - 1] : 0;
  return from + ((edges[index] - from) * (rank - below)) / (counts[index] - below);
}

/** The samples of a tab: the last few whole, histograms of ten minutes, and lines to draw. */
export class History {
  #recent = []; // samples of the last RATE_S seconds
  #kept = []; // samples KEEP_S apart, for quantiles of SPAN_S
  #lines = new Map();

  get now() {
    return this.#recent.at(-1);
  }

  /** The oldest sample that recent quantiles are counted from. */
  get start() {
    return this.#kept[0];
  }

  add(sample) {
    if (this.now && sample.started !== this.now.started) {
      this.#recent = []; // it was started again: counters begin at zero
      this.#kept = [];
    }
    this.#recent.push(sample);
    while (sample.at - this.#recent[0].at > RATE_S + 0.5) this.#recent.shift();
    if (!this.#kept.length || sample.at - this.#kept.at(-1).at >= KEEP_S) this.#kept.push(sample);
    while (sample.at - this.#kept[0].at > SPAN_S) this.#kept.shift();
  }

  /** Return how much a counter grew a second, over the last few seconds. */
  rate(name, wanted = {}) {
    const [first, last] = [this.#recent[0], this.now];
    const seconds = last.at - first.at;
    if (seconds < 0.5) return 0;
    return Math.max(0, (value(last, name, wanted) - value(first, name, wanted)) / seconds);
  }

  /** Return what a histogram counted in the last few seconds. */
  lately(name, wanted = {}) {
    return since(histogram(this.now, name, wanted), histogram(this.#recent[0], name, wanted));
  }

  /** Return a histogram since the gateway started, or of the last ten minutes that were watched. */
  histogram(name, wanted, isRecent) {
    const whole = histogram(this.now, name, wanted);
    return isRecent ? since(whole, histogram(this.start, name, wanted)) : whole;
  }

  /** Return a counter since the gateway started, or its growth in the last ten minutes. */
  total(name, wanted, isRecent) {
    return value(this.now, name, wanted) - (isRecent ? value(this.start, name, wanted) : 0);
  }

  /** Add a point to a line, and return the points of the last ten minutes: [age in seconds, y]. */
  draw(name, y) {
    const at = this.now.at;
    const line = this.#lines.get(name) ?? [];
    line.push([at, y]);
    while (at - line[0][0] > SPAN_S) line.shift();
    this.#lines.set(name, line);
    return line.map(([when, each]) => [at - when, each]);
  }

  /** Return the label sets of a histogram, each once. */
  series(name) {
    const every = (this.now.histograms[name]?.series ?? []).map(([labels]) => labels);
    return [...new Map(every.map((labels) => [text(labels), labels])).values()];
  }
}

// Formats. A number that is not there is a dash.

export const NONE = "–";
const digits = (most) => new Intl.NumberFormat("en", { maximumFractionDigits: most });
const [whole, tenths, hundredths] = [0, 1, 2].map(digits);

export const integer = (number) => (number == null ? NONE : whole.format(number));
export const decimal = (number) => (number == null ? NONE : (number < 10 ? hundredths : tenths).format(number));
export const percent = (share) => (share == null ? NONE : `${(share < 0.1 ? tenths : whole).format(100 * share)} %`);

export function rate(number) {
  return (number >= 100 ? whole : tenths).format(number);
}

export function seconds(number) {
  if (number == null) return NONE;
  if (number < 0.001) return `${hundredths.format(1000 * number)} ms`;
  if (number < 0.0995) return `${tenths.format(1000 * number)} ms`;
  if (number < 0.9995) return `${whole.format(1000 * number)} ms`;
  return number < 99.5 ? `${hundredths.format(number)} s` : duration(number);
}

export function duration(number) {
  const [days, hours, minutes] = [number / 86400, (number / 3600) % 24, (number / 60) % 60].map(Math.floor);
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${Math.floor(number % 60)} s` : `${Math.floor(number)} s`;
}

export function bytes(number) {
  if (number == null) return NONE;
  const gib = number / 2 ** 30;
  return gib > 0 && gib < 0.01 ? "<0.01 GiB" : `${decimal(gib)} GiB`;
}
