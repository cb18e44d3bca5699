// From a panel's targets to Grafana's data frames, as Grafana resolves them: variables, intervals and
// steps, names of series, the rows of a heat map, the regions of an annotation. A Grafana server does
// these steps; its packages on npm do not, so they are written here from their documented behaviour.
import { FieldType, dateTime, escapeRegex, rangeUtil } from '@grafana/data';

const MOST_POINTS = 11000; // Prometheus refuses longer answers
const ALL = '$__all';

const ask = async (path, parameters) => {
  const answer = await window.ask(path, parameters);
  if (answer.status !== 'success') throw new Error(answer.error);
  return answer.data;
};

// What `$name`, `${name:format}` and `[[name]]` stand for in one dashboard, at one time range.
export class Variables {
  constructor(range) {
    this.range = range;
    this.values = new Map(); // name → {value: string | string[] | {raw}, text, model}
  }

  // Ask Prometheus for the values of a dashboard's variables, in their order: each may use those before.
  static async of(board, range) {
    const variables = new Variables(range);
    for (const model of board.templating?.list ?? []) await variables.add(model);
    return variables;
  }

  async add(model) {
    const options = await this.options(model);
    const wanted = [model.current?.value ?? []].flat();
    const all = model.includeAll && (wanted.includes(ALL) || !wanted.length);
    const known = wanted.filter((value) => options.includes(value));
    let value = known.length ? known : options.slice(0, 1);
    if (all) value = model.allValue ? { raw: model.allValue } : options;
    else if (!model.multi) value = value[0] ?? '';
    const text = model.type === 'datasource' ? [model.current?.text ?? value] : [value]; // its value is an id
    this.values.set(model.name, { value, text: all ? 'All' : text.flat().join(' + '), model });
  }

  async options(model) {
    const query = this.fill(typeof model.query === 'string' ? model.query : (model.query?.query ?? ''));
    if (model.type === 'datasource') return [model.current?.value ?? query].flat();
    if (model.type === 'constant' || model.type === 'textbox') return [query];
    if (model.type === 'custom' || model.type === 'interval') return query.split(',').map((one) => one.trim());
    if (model.type !== 'query') throw new Error(`variable ${model.name}: type ${model.type} is not drawn`);
    const found = query.match(/^label_values\((?:(.+),\s*)?([\w:]+)\)$/s);
    if (!found) throw new Error(`variable ${model.name}: ${query} is not label_values(…)`);
    const [, selector, label] = found;
    const times = { start: this.range.from.unix(), end: this.range.to.unix() };
    const values = await ask(`/api/v1/label/${label}/values`, { ...(selector && { 'match[]': selector }), ...times });
    const matches = model.regex ? new RegExp(model.regex.replace(/^\/(.*)\/\w*$/s, '$1')) : null;
    const kept = values.flatMap((value) => {
      const match = matches ? value.match(matches) : [value];
      return match ? [match[1] ?? match[0]] : [];
    });
    const numeric = model.sort === 3 || model.sort === 4;
    if (model.sort) kept.sort((a, b) => a.localeCompare(b, undefined, { numeric }));
    return model.sort && model.sort % 2 === 0 ? kept.reverse() : kept;
  }

  // The text with its variables replaced. In PromQL several values become an alternation.
  fill(text, more = {}, promql = false) {
    const one = (whole, name, format) => {
      const found = this.values.get(name)?.value ?? more[name];
      if (found === undefined) return whole;
      if (found.raw !== undefined) return found.raw;
      return written(found, format ?? (promql && this.values.has(name) ? 'promql' : 'glob'), this.values.get(name)?.model);
    };
    return text
      .replace(/\$(\w+)/g, (whole, name) => one(whole, name))
      .replace(/\$\{(\w+)(?::(\w+))?\}/g, one)
      .replace(/\[\[(\w+)(?::(\w+))?\]\]/g, one);
  }
}

function written(value, format, model) {
  const values = [value].flat().map(String);
  // A backslash of the regular expression is one more in PromQL's string.
  const escaped = values.map((one) => (format === 'promql' ? escapeRegex(one).replace(/\\/g, '\\\\') : escapeRegex(one)));
  if (format === 'promql' && !model.multi && !model.includeAll) return value.replace(/\\/g, '\\\\').replace(/'/g, "\\'");
  if (format === 'promql' || format === 'regex') {
    return escaped.length === 1 ? escaped[0] : `(${escaped.join('|')})`;
  }
  if (format === 'pipe') return values.join('|');
  if (format === 'text' || format === 'queryparam') return values.join(' + ');
  return values.length > 1 && format === 'glob' ? `{${values.join(',')}}` : values.join(',');
}

// Milliseconds between points: what fits the panel's width, not below the scrape interval.
export function intervals(range, maxDataPoints, minInterval, scrape) {
  const lowest = minInterval || scrape;
  const interval = rangeUtil.calculateInterval(range, maxDataPoints, lowest).intervalMs;
  const safest = rangeUtil.roundInterval((range.to.valueOf() - range.from.valueOf()) / MOST_POINTS);
  const step = Math.max(interval, safest);
  const scraped = rangeUtil.intervalToMs(lowest);
  return { step, rate: Math.max(step + scraped, 4 * scraped) };
}

function builtIn(range, { step, rate }) {
  const length = range.to.valueOf() - range.from.valueOf();
  return {
    __interval: rangeUtil.secondsToHms(step / 1000),
    __interval_ms: step,
    __rate_interval: rangeUtil.secondsToHms(rate / 1000),
    __rate_interval_ms: rate,
    __range: `${Math.round(length / 1000)}s`,
    __range_s: Math.round(length / 1000),
    __range_ms: length,
    __from: range.from.valueOf(),
    __to: range.to.valueOf(),
  };
}

// The frames of a panel that is `width` pixels wide, before its transformations.
export async function panelFrames(panel, variables, width, scrape) {
  const { range } = variables;
  const frames = [];
  for (const target of panel.targets ?? []) {
    if (target.hide) continue;
    const minInterval = variables.fill(target.interval || panel.interval || '');
    const times = intervals(range, panel.maxDataPoints ?? Math.floor(width), minInterval, scrape);
    const expr = variables.fill(target.expr, builtIn(range, times), true);
    const instant = target.instant && !target.range;
    const series = await (instant ? instantly(expr, range) : overTime(expr, range, times.step));
    if (target.format === 'heatmap') frames.push(...heatmapRows(series, times.step));
    else if (target.format === 'table') frames.push(...tableOf(series, target.refId));
    else frames.push(...series.map((one) => frameOf(one, target, variables, times.step)));
  }
  return frames;
}

// Single observations that carry a label such as a trace's id, for the targets that ask for them.
export async function panelExemplars(panel, variables, width, scrape) {
  const { range } = variables;
  const found = [];
  for (const target of panel.targets ?? []) {
    if (target.hide || !target.exemplar) continue;
    const times = intervals(range, Math.floor(width), variables.fill(target.interval || ''), scrape);
    const query = variables.fill(target.expr, builtIn(range, times), true);
    const series = await ask('/api/v1/query_exemplars', { query, start: range.from.unix(), end: range.to.unix() });
    found.push(...series.flatMap(({ exemplars }) => exemplars));
  }
  return found.map(({ timestamp, value }) => ({ time: timestamp * 1000, value: number(value) }));
}

async function instantly(expr, range) {
  const { resultType, result } = await ask('/api/v1/query', { query: expr, time: range.to.valueOf() / 1000 });
  if (resultType === 'scalar') return [{ metric: {}, values: [result] }];
  return result.map(({ metric, value, values }) => ({ metric, values: values ?? [value] }));
}

async function overTime(expr, range, step) {
  const aligned = (moment) => (Math.floor(moment.valueOf() / step) * step) / 1000;
  const parameters = { query: expr, start: aligned(range.from), end: aligned(range.to), step: step / 1000 };
  return (await ask('/api/v1/query_range', parameters)).result;
}

const number = (text) => Number(text.replace('Inf', 'Infinity')); // NaN stays NaN, as in Grafana

function legend(target, labels, variables) {
  const { __name__: name = '', ...others } = labels;
  const pairs = Object.entries(others).map(([label, value]) => `${label}="${value}"`);
  const whole = pairs.length ? `${name}{${pairs.join(', ')}}` : name;
  if (!target.legendFormat || target.legendFormat === '__auto') return whole || target.expr;
  const named = target.legendFormat.replace(/\{\{\s*(.+?)\s*\}\}/g, (_, label) => labels[label] ?? '');
  return variables.fill(named);
}

function frameOf({ metric, values }, target, variables, step) {
  const displayNameFromDS = legend(target, metric, variables);
  return {
    refId: target.refId,
    name: displayNameFromDS,
    length: values.length,
    fields: [
      { name: 'Time', type: FieldType.time, config: { interval: step }, values: values.map(([time]) => time * 1000) },
      { name: 'Value', type: FieldType.number, labels: metric, config: { displayNameFromDS }, values: values.map(([, text]) => number(text)) },
    ],
  };
}

// One frame with a row for every series and a column for every label.
function tableOf(series, refId) {
  if (!series.length) return [];
  const labels = [...new Set(series.flatMap(({ metric }) => Object.keys(metric)))].sort();
  const rows = series.flatMap(({ metric, values }) => values.map(([time, text]) => ({ metric, time, text })));
  const field = (name, type, value) => ({ name, type, config: {}, values: rows.map(value) });
  return [
    {
      refId,
      length: rows.length,
      fields: [
        field('Time', FieldType.time, ({ time }) => time * 1000),
        ...labels.map((label) => field(label, FieldType.string, ({ metric }) => metric[label] ?? '')),
        field(`Value #${refId}`, FieldType.number, ({ text }) => number(text)),
      ],
    },
  ];
}

// Observations in each bucket: Prometheus' buckets are cumulative, so each loses the one below it.
function heatmapRows(series, step) {
  const bound = ({ metric }) => Number(metric.le.replace('Inf', 'Infinity'));
  const ordered = series.filter(({ metric }) => metric.le !== undefined).sort((a, b) => bound(a) - bound(b));
  if (!ordered.length) return [];
  const times = [...new Set(ordered.flatMap(({ values }) => values.map(([time]) => time * 1000)))].sort((a, b) => a - b);
  let below = new Map();
  const fields = ordered.map(({ metric, values }) => {
    const here = new Map(values.map(([time, text]) => [time * 1000, number(text)]));
    const lower = below;
    below = here;
    const own = times.map((time) => (Number.isFinite(here.get(time)) ? Math.max(here.get(time) - (lower.get(time) || 0), 0) : null));
    return { name: metric.le, type: FieldType.number, labels: metric, config: { displayNameFromDS: metric.le }, values: own };
  });
  const time = { name: 'Time', type: FieldType.time, config: { interval: step }, values: times };
  return [{ length: times.length, meta: { type: 'heatmap-rows' }, fields: [time, ...fields] }];
}

// Moments and regions: values that are not 0, in a row at most a step apart, are one event.
export async function events(annotation, variables, scrape) {
  const { range } = variables;
  const target = annotation.target ?? annotation;
  const lowest = variables.fill(annotation.step || target.interval || '60s');
  const times = intervals(range, 100, lowest, scrape);
  const expr = variables.fill(target.expr, builtIn(range, times), true);
  const found = [];
  for (const { metric, values } of await overTime(expr, range, times.step)) {
    const text = (format) => variables.fill((format ?? '').replace(/\{\{\s*(.+?)\s*\}\}/g, (_, label) => metric[label] ?? ''));
    let latest = null;
    for (const [seconds, value] of values) {
      const time = annotation.useValueForTime ? Math.floor(Number(value)) : seconds * 1000;
      if (!annotation.useValueForTime && !Number(value)) latest = null;
      else if (latest && time <= latest.timeEnd + times.step) latest.timeEnd = time;
      else {
        latest = { time, timeEnd: time, name: annotation.name, color: annotation.iconColor };
        latest.text = [text(annotation.titleFormat), text(annotation.textFormat)].filter(Boolean).join(': ');
        found.push(latest);
      }
    }
  }
  const [from, to] = [range.from.valueOf(), range.to.valueOf()];
  return found.filter(({ time, timeEnd }) => timeEnd >= from && time <= to);
}

export const timeRange = (from, to) => {
  const [start, end] = [dateTime(from), dateTime(to)];
  return { from: start, to: end, raw: { from: start, to: end } };
};
