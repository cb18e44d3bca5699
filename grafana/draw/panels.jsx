// Draws the kinds of panels that the dashboards use with Grafana's own components.
//
// Stat, time series, bar gauge, table and text are drawn by @grafana/ui. The panels of heat maps and state
// timelines are part of Grafana's server and on no registry: their cells are drawn here, on Grafana's own
// plot (UPlotConfigBuilder, UPlotChart), axes, colours and legend.
import React, { useLayoutEffect } from 'react';
import * as d3 from 'd3';
import {
  FieldColorModeId, FieldConfigOptionsRegistry, FieldType, applyFieldOverrides, booleanOverrideProcessor,
  displayNameOverrideProcessor, formattedValueToString, getDisplayProcessor, getDisplayValueAlignmentFactors,
  getFieldDisplayName, getFieldDisplayValues, getValueFormat, identityOverrideProcessor, numberOverrideProcessor,
  renderTextPanelMarkdown, standardTransformers, standardTransformersRegistry, stringOverrideProcessor,
  thresholdsOverrideProcessor, transformDataFrame, unitOverrideProcessor, valueMappingsOverrideProcessor,
} from '@grafana/data';
import { AxisPlacement, ScaleDirection, ScaleOrientation } from '@grafana/schema';
import {
  BarGauge, BigValue, TimeSeries, Table, UPlotChart, UPlotConfigBuilder, VizLayout, VizLegend, VizRepeater, useTheme2,
} from '@grafana/ui';
import { lastValueFrom } from 'rxjs';

const TIME_ZONE = 'utc';
export const drawn = []; // what the plots say about themselves; see Record

standardTransformersRegistry.setInit(() =>
  [...new Set(Object.values(standardTransformers))].map((transformation) => ({ id: transformation.id, name: transformation.name, transformation })),
);

// Properties that every panel has, with the processors that Grafana's editors give them.
const STANDARD = {
  displayName: displayNameOverrideProcessor,
  unit: unitOverrideProcessor,
  min: numberOverrideProcessor,
  max: numberOverrideProcessor,
  fieldMinMax: booleanOverrideProcessor,
  decimals: numberOverrideProcessor,
  noValue: stringOverrideProcessor,
  color: identityOverrideProcessor,
  mappings: valueMappingsOverrideProcessor,
  thresholds: thresholdsOverrideProcessor,
  links: identityOverrideProcessor,
  filterable: booleanOverrideProcessor,
};
const THRESHOLDS = { mode: 'absolute', steps: [{ value: null, color: 'green' }, { value: 80, color: 'red' }] };
// What the panels' plugins take where the dashboard says nothing.
const DEFAULTS = {
  timeseries: {
    color: { mode: FieldColorModeId.PaletteClassic },
    custom: {
      drawStyle: 'line', lineInterpolation: 'linear', lineWidth: 1, fillOpacity: 0, gradientMode: 'none', barAlignment: 0,
      barWidthFactor: 0.6, stacking: { mode: 'none', group: 'A' }, axisGridShow: true, axisCenteredZero: false,
      axisBorderShow: false, showPoints: 'auto', pointSize: 5, spanNulls: false, insertNulls: false, axisPlacement: 'auto',
      axisLabel: '', axisColorMode: 'text', scaleDistribution: { type: 'linear' },
      hideFrom: { tooltip: false, viz: false, legend: false }, thresholdsStyle: { mode: 'off' },
    },
  },
};
DEFAULTS['state-timeline'] = { color: { mode: FieldColorModeId.ContinuousGrYlRd }, custom: { fillOpacity: 70, lineWidth: 0 } };

// JSON has no infinity: the lowest step of a list of thresholds is null in it.
const restored = (config) => {
  for (const step of config?.thresholds?.steps ?? []) step.value ??= -Infinity;
  return config;
};

// The panel's field configuration with its plugin's defaults in it.
function fieldConfig(panel) {
  const source = structuredClone(panel.fieldConfig ?? { defaults: {}, overrides: [] });
  const { color, custom } = DEFAULTS[panel.type] ?? { color: { mode: FieldColorModeId.Thresholds } };
  const defaults = restored({ thresholds: structuredClone(THRESHOLDS), ...source.defaults });
  defaults.color ??= color;
  defaults.custom = { ...structuredClone(custom ?? {}), ...defaults.custom };
  for (const rule of source.overrides) for (const property of rule.properties) if (property.id === 'thresholds') restored({ thresholds: property.value });
  return { defaults, overrides: source.overrides };
}

function registryFor({ defaults, overrides }) {
  const own = Object.keys(defaults.custom).map((name) => `custom.${name}`);
  const changed = overrides.flatMap(({ properties }) => properties.map(({ id }) => id));
  const names = new Set([...Object.keys(STANDARD), ...own, ...changed]);
  return new FieldConfigOptionsRegistry(() =>
    [...names].map((id) => {
      const isCustom = id.startsWith('custom.');
      const process = STANDARD[id] ?? identityOverrideProcessor;
      return { id, path: id.replace(/^custom\./, ''), name: id, isCustom, process, shouldApply: () => true, settings: {} };
    }),
  );
}

// The panel's frames as its component takes them: transformed, with overrides, units and colours.
export async function prepared(panel, frames, variables, theme) {
  const replaceVariables = (text) => variables.fill(text);
  const transformed = await lastValueFrom(
    transformDataFrame((panel.transformations ?? []).filter(({ disabled }) => !disabled), frames, { interpolate: replaceVariables }),
  );
  const config = fieldConfig(panel);
  const fieldConfigRegistry = registryFor(config);
  const data = applyFieldOverrides({ data: transformed, fieldConfig: config, fieldConfigRegistry, replaceVariables, theme, timeZone: TIME_ZONE });
  for (const frame of data) for (const field of frame.fields) field.state.displayName = getFieldDisplayName(field, frame, data);
  return { data, fieldConfig: config };
}

function displayValues({ panel, data, fieldConfig: config }, sparkline, theme) {
  const { reduceOptions } = panel.options;
  return getFieldDisplayValues({ fieldConfig: config, reduceOptions, replaceVariables: (text) => text, theme, data, sparkline, timeZone: TIME_ZONE });
}

function Stat(props) {
  const { panel, data, width, height, range } = props;
  const theme = useTheme2();
  const { orientation = 'auto', graphMode = 'area', ...options } = panel.options;
  return (
    <VizRepeater
      getValues={() => displayValues(props, graphMode !== 'none', theme)}
      getAlignmentFactors={getDisplayValueAlignmentFactors}
      width={width} height={height} source={data} itemSpacing={3} renderCounter={0} autoGrid={true} orientation={orientation}
      renderValue={({ value, alignmentFactors, width: wide, height: high, count }) => {
        if (value.sparkline) value.sparkline.timeRange = range;
        return (
          <BigValue
            value={value.display} count={count} sparkline={value.sparkline} alignmentFactors={alignmentFactors} width={wide}
            height={high} theme={theme} graphMode={graphMode} colorMode={options.colorMode} justifyMode={options.justifyMode}
            textMode={options.textMode} text={options.text} parentOrientation={orientation} wideLayout={options.wideLayout ?? true}
          />
        );
      }}
    />
  );
}

function Bars(props) {
  const { panel, data, width, height } = props;
  const theme = useTheme2();
  const { orientation = 'auto', minVizWidth = 8, minVizHeight = 16, maxVizHeight = 300, namePlacement = 'auto', ...options } = panel.options;
  return (
    <VizRepeater
      getValues={() => displayValues(props, false, theme)}
      getAlignmentFactors={getDisplayValueAlignmentFactors}
      width={width} height={height} minVizWidth={minVizWidth} minVizHeight={minVizHeight} maxVizHeight={maxVizHeight}
      source={data} itemSpacing={10} renderCounter={0} orientation={orientation}
      renderValue={({ value, alignmentFactors, width: wide, height: high, orientation: way }) => (
        <BarGauge
          value={value.display} field={value.field} display={value.view?.getFieldDisplayProcessor(value.colIndex)} text={options.text}
          width={wide} height={high} orientation={way} theme={theme} itemSpacing={10} lcdCellWidth={12}
          displayMode={options.displayMode} alignmentFactors={alignmentFactors} showUnfilled={options.showUnfilled}
          valueDisplayMode={options.valueMode} namePlacement={namePlacement}
        />
      )}
    />
  );
}

// Notes, each time a plot is drawn, its vertical scales: their ends, the greatest value on each, and what
// `meaning` adds. A plot of rows has none.
function useRecord(config, panel, meaning = null) {
  useLayoutEffect(() => {
    config.addHook('draw', (plot) => {
      const scales = Object.entries(plot.scales)
        .filter(([key, { min }]) => meaning && key !== 'x' && min != null)
        .map(([key, { min, max }]) => {
          const on = plot.series.flatMap((series, index) => (index && series.scale === key && series.show ? [index] : []));
          const values = on.flatMap((index) => [...plot.data[index]].filter((value) => Number.isFinite(value)));
          return { min, max, greatest: values.length ? Math.max(...values) : null, ...meaning(on) };
        });
      drawn.push({ id: panel.id, scales });
    });
  }, [config]);
}

// The lines and the shade of annotations, and a diamond for each exemplar.
function Marks({ config, frame, panel, marks, exemplars }) {
  const theme = useTheme2();
  useLayoutEffect(() => {
    config.addHook('draw', (plot) => {
      const { ctx, bbox } = plot;
      ctx.save();
      ctx.beginPath();
      ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
      ctx.clip();
      const at = (moment) => Math.round(plot.valToPos(moment, 'x', true));
      for (const { time, timeEnd, color } of marks) {
        const shade = theme.visualization.getColorByName(color);
        ctx.strokeStyle = shade;
        ctx.lineWidth = 2;
        ctx.setLineDash([5, 5]);
        for (const moment of new Set([time, timeEnd])) {
          ctx.beginPath();
          ctx.moveTo(at(moment), bbox.top);
          ctx.lineTo(at(moment), bbox.top + bbox.height);
          ctx.stroke();
        }
        ctx.globalAlpha = 0.1;
        ctx.fillStyle = shade;
        ctx.fillRect(at(time), bbox.top, at(timeEnd) - at(time), bbox.height);
        ctx.globalAlpha = 1;
      }
      const upright = plot.series[1]?.scale; // the first curve's
      ctx.fillStyle = theme.visualization.getColorByName('blue');
      for (const { time, value } of upright ? exemplars : []) {
        const [x, y] = [at(time), plot.valToPos(value, upright, true)];
        ctx.beginPath();
        [[0, -4], [4, 0], [0, 4], [-4, 0]].forEach(([right, down]) => ctx.lineTo(x + right, y + down));
        ctx.fill();
      }
      ctx.restore();
    });
  }, [config]);
  useRecord(config, panel, (on) => {
    const fields = on.map((index) => frame.fields[index]).filter(Boolean);
    const configs = fields.map((field) => field.config);
    const lines = configs.flatMap(({ custom, thresholds }) =>
      /line|dashed/.test(custom.thresholdsStyle?.mode ?? '') ? thresholds.steps.map(({ value }) => value).filter(Number.isFinite) : [],
    );
    return { unit: configs[0]?.unit ?? '', lines: [...new Set(lines)] };
  });
  return null;
}

function Curves({ panel, data, width, height, range, marks, exemplars }) {
  // A curve has a gap where a value is not finite.
  const finite = (field) => ({ ...field, values: field.values.map((value) => (Number.isFinite(value) ? value : null)) });
  const graphed = data
    .filter((frame) => frame.fields.some(({ type }) => type === FieldType.number))
    .map((frame) => ({ ...frame, fields: frame.fields.map((field) => (field.type === FieldType.number ? finite(field) : field)) }));
  const { legend = { showLegend: true, displayMode: 'list', placement: 'bottom', calcs: [] } } = panel.options;
  return (
    <TimeSeries
      frames={graphed} structureRev={1} timeRange={range} timeZone={TIME_ZONE} width={width} height={height}
      legend={legend} options={panel.options} replaceVariables={(text) => text} dataLinkPostProcessor={(link) => link} cursorSync={0}
    >
      {(config, frame) => <Marks config={config} frame={frame} panel={panel} marks={marks} exemplars={exemplars} />}
    </TimeSeries>
  );
}

// A plot over time with one row for each name, on Grafana's plot and axes.
function useRowPlot(names, range, theme, label, paint) {
  return React.useMemo(() => {
    const config = new UPlotConfigBuilder(TIME_ZONE);
    config.addScale({ scaleKey: 'x', isTime: true, orientation: ScaleOrientation.Horizontal, direction: ScaleDirection.Right, range: () => [range.from.valueOf(), range.to.valueOf()] });
    config.addScale({ scaleKey: 'rows', orientation: ScaleOrientation.Vertical, direction: ScaleDirection.Up, range: () => [0, names.length] });
    config.addAxis({ scaleKey: 'x', isTime: true, placement: AxisPlacement.Bottom, timeZone: TIME_ZONE, theme });
    config.addAxis({ scaleKey: 'rows', placement: AxisPlacement.Left, theme, ...label });
    config.addSeries({ scaleKey: 'rows', pathBuilder: () => null, pointsBuilder: () => null, show: true, theme });
    config.addHook('drawClear', paint);
    return config;
  }, []);
}

const STEPS = 64;

// A scheme of d3, as Grafana's options name it; on a dark page few observations are dark.
function shades({ scheme = 'Oranges', steps = STEPS, reverse = false }, theme) {
  const along = d3[`interpolate${scheme}`];
  const flipped = theme.isDark !== reverse;
  return Array.from({ length: steps }, (_, step) => along(flipped ? 1 - step / (steps - 1) : step / (steps - 1)));
}

function Heat({ panel, data, width, height, range }) {
  const theme = useTheme2();
  const [frame] = data;
  const [time, ...rows] = frame.fields;
  const { yAxis = {}, color = {}, cellGap = 1, filterValues = { le: 1e-9 }, legend } = panel.options;
  const format = getValueFormat(yAxis.unit ?? panel.fieldConfig.defaults.unit ?? 'short');
  const labels = rows.map(({ name }) => (name === '+Inf' ? '+Inf' : formattedValueToString(format(Number(name), yAxis.decimals))));
  const counts = rows.flatMap(({ values }) => values).filter((count) => count > (filterValues.le ?? -Infinity));
  const [least, most] = counts.length ? [Math.min(...counts), Math.max(...counts)] : [0, 0];
  const palette = shades(color, theme);
  const shade = (count) => palette[most > least ? Math.round(((count - least) / (most - least)) * (palette.length - 1)) : palette.length - 1];
  const paint = (plot) => {
    const { ctx } = plot;
    const step = time.config.interval;
    rows.forEach(({ values }, row) => values.forEach((count, index) => {
      if (!(count > (filterValues.le ?? -Infinity))) return;
      const [left, right] = [time.values[index] - step, time.values[index]].map((moment) => plot.valToPos(moment, 'x', true));
      const [bottom, top] = [row, row + 1].map((place) => plot.valToPos(place, 'rows', true));
      ctx.fillStyle = shade(count);
      ctx.fillRect(left, top, Math.max(right - left - cellGap, 1), Math.max(bottom - top - cellGap, 1));
    }));
  };
  // As many labels as there is room for; a label is its cell's upper bound.
  const every = Math.ceil((rows.length * 16) / (height - 60));
  const splits = rows.map((_, row) => row + 1);
  const config = useRowPlot(labels, range, theme, {
    splits: () => splits,
    values: (_, places) => places.map((place) => (place % every ? null : labels[place - 1])),
  }, paint);
  useRecord(config, panel);
  const number = (count) => formattedValueToString(getValueFormat('short')(count));
  const scale = legend?.show === false ? null : (
    <VizLayout.Legend placement="bottom" maxHeight="20%">
      <div style={{ display: 'flex', alignItems: 'center', gap: 6, fontSize: 11, padding: '4px 0 0 40px' }}>
        {number(least)}
        <div style={{ width: 200, height: 8, background: `linear-gradient(90deg, ${palette.join(',')})` }} />
        {number(most)}
      </div>
    </VizLayout.Legend>
  );
  return (
    <VizLayout width={width} height={height} legend={scale}>
      {(wide, high) => <UPlotChart config={config} data={[time.values, time.values.map(() => null)]} width={wide} height={high} />}
    </VizLayout>
  );
}

function States({ panel, data, width, height, range }) {
  const theme = useTheme2();
  const rows = data.flatMap((frame) => {
    const time = frame.fields.find(({ type }) => type === FieldType.time);
    return frame.fields.filter((field) => field !== time).map((field) => ({ time, field, name: getFieldDisplayName(field, frame, data) }));
  }).reverse(); // the first on top
  const { rowHeight = 0.9, showValue = 'auto', legend } = panel.options;
  const seen = new Map(); // text → colour
  const paint = (plot) => {
    const { ctx, bbox } = plot;
    rows.forEach(({ time, field }, row) => {
      const [bottom, top] = [row + (1 - rowHeight) / 2, row + (1 + rowHeight) / 2].map((place) => plot.valToPos(place, 'rows', true));
      for (const { from, to, value } of stretches(time, field)) {
        if (value == null) continue;
        const { color, ...shown } = field.display(value);
        const left = Math.max(plot.valToPos(from, 'x', true), bbox.left);
        const right = Math.min(plot.valToPos(to, 'x', true), bbox.left + bbox.width);
        seen.set(formattedValueToString(shown), color);
        ctx.globalAlpha = (field.config.custom.fillOpacity ?? 70) / 100;
        ctx.fillStyle = color;
        ctx.fillRect(left, top, right - left, bottom - top);
        ctx.globalAlpha = 1;
        const text = formattedValueToString(shown);
        ctx.font = `12px ${theme.typography.fontFamily}`;
        if (showValue === 'never' || (showValue === 'auto' && ctx.measureText(text).width > right - left - 8)) continue;
        ctx.fillStyle = theme.colors.text.primary;
        ctx.textBaseline = 'middle';
        ctx.textAlign = 'left';
        ctx.fillText(text, left + 4, (top + bottom) / 2);
      }
    });
  };
  for (const { time, field } of rows) for (const { value } of stretches(time, field)) if (value != null) { const { color, ...shown } = field.display(value); seen.set(formattedValueToString(shown), color); }
  const config = useRowPlot(rows, range, theme, {
    splits: () => rows.map((_, row) => row + 0.5),
    values: (_, places) => places.map((place) => rows[place - 0.5].name),
    grid: { show: false }, ticks: { show: false },
  }, paint);
  useRecord(config, panel);
  const items = [...seen].map(([label, color]) => ({ label, color, yAxis: 1 }));
  const list = legend?.showLegend === false ? null : (
    <VizLayout.Legend placement="bottom"><VizLegend placement="bottom" displayMode="list" items={items} /></VizLayout.Legend>
  );
  return (
    <VizLayout width={width} height={height} legend={list}>
      {(wide, high) => <UPlotChart config={config} data={[[range.from.valueOf(), range.to.valueOf()], [null, null]]} width={wide} height={high} />}
    </VizLayout>
  );
}

// Equal values in a row are one stretch; it ends where the value changes or a point is missing.
function stretches(time, field) {
  const step = time.config.interval;
  const found = [];
  time.values.forEach((moment, index) => {
    const value = field.values[index];
    const last = found.at(-1);
    if (last && last.value === value && moment - last.to <= step) last.to = moment + step;
    else {
      if (last) last.to = Math.min(last.to, moment);
      found.push({ from: moment, to: moment + step, value });
    }
  });
  return found;
}

function Text({ panel, variables }) {
  const { mode, content } = panel.options;
  const html = mode === 'html' ? content : renderTextPanelMarkdown(variables.fill(content));
  return <div className="markdown-html" dangerouslySetInnerHTML={{ __html: html }} />;
}

function Rows({ data, width, height, panel }) {
  const { showHeader = true, cellHeight, sortBy } = panel.options;
  return <Table data={data[panel.options.frameIndex ?? 0]} width={width} height={height} noHeader={!showHeader} cellHeight={cellHeight} initialSortBy={sortBy} timeRange={null} />;
}

const KINDS = { stat: Stat, timeseries: Curves, bargauge: Bars, heatmap: Heat, 'state-timeline': States, text: Text, table: Rows };
const SPEAK_FOR_THEMSELVES = new Set(['stat', 'bargauge', 'text']); // draw a missing value in their own way
const PLOTS = new Set(['timeseries', 'heatmap', 'state-timeline']);

const empty = (data) => !data.some((frame) => frame.length && frame.fields.length > 1);

// Whether a panel comes to a plot, which notes in `drawn` that it is there.
export const plots = ({ type }, data) => PLOTS.has(type) && !empty(data);

export function Content(props) {
  const { panel, data } = props;
  const Kind = KINDS[panel.type];
  if (!Kind) throw new Error(`panels of type ${panel.type} are not drawn`);
  if (!SPEAK_FOR_THEMSELVES.has(panel.type) && empty(data)) {
    const style = { display: 'flex', alignItems: 'center', justifyContent: 'center', width: props.width, height: props.height, textAlign: 'center' };
    return <div className="no-data" style={style}>{panel.fieldConfig.defaults.noValue ?? 'No data'}</div>;
  }
  return <Kind {...props} />;
}
