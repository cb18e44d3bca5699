// One dashboard as Grafana lays it out: its grid, rows and panels, in the dark theme. draw.py opens this
// page, answers its questions to Prometheus, and takes the picture when `window.draw` has returned.
import './ready.js';
import React from 'react';
import { createRoot } from 'react-dom/client';
import { ThemeContext, createTheme } from '@grafana/data';
import { GlobalStyles, Icon, PanelChrome } from '@grafana/ui';
import { Variables, events, panelExemplars, panelFrames, timeRange } from './queries.js';
import { Content, drawn, plots, prepared } from './panels.jsx';
import '@fontsource/inter/400.css';
import '@fontsource/inter/500.css';
import '@fontsource/roboto-mono/400.css';
import './page.css';

// Grafana's grid: 24 columns, rows of 30 pixels, 8 pixels between.
const COLUMNS = 24, ROW = 30, GAP = 8, EDGE = 16;
const HIDDEN = 2; // a variable's `hide`: neither its label nor its value is shown
const theme = createTheme({ colors: { mode: 'dark' } });
const failures = []; // {id, message}

class Guard extends React.Component {
  state = { failed: null };
  static getDerivedStateFromError(failed) { return { failed }; }
  componentDidCatch(failed) { failures.push({ id: this.props.id, message: String(failed.message) }); }
  render() { return this.state.failed ? <div className="no-data">{String(this.state.failed.message)}</div> : this.props.children; }
}

function Panel({ panel, box, variables, marks }) {
  const { result, error } = panel.loaded;
  return (
    <PanelChrome title={variables.fill(panel.title ?? '')} description={panel.description} width={box.width} height={box.height}
      displayMode={panel.transparent ? 'transparent' : 'default'} statusMessage={error?.message} padding={panel.type === 'table' ? 'none' : 'md'}>
      {(width, height) => (error ? null : (
        <Guard id={panel.id}>
          <Content {...result} panel={panel} variables={variables} range={variables.range} width={width} height={height} marks={marks} />
        </Guard>
      ))}
    </PanelChrome>
  );
}

const moment = (time) => new Date(time).toISOString().slice(11, 19);

function Head({ board, variables, marks }) {
  const shown = [...variables.values.values()].filter(({ model }) => model.hide !== HIDDEN);
  const { from, to } = variables.range;
  const told = [...new Map(marks.map((mark) => [`${mark.time} ${mark.name} ${mark.text}`, mark])).values()].sort((a, b) => a.time - b.time);
  return (
    <header>
      <h1>{board.title}</h1>
      <span className="range"><Icon name="clock-nine" /> {moment(from)} to {moment(to)} UTC</span>
      <div className="variables">
        {shown.map(({ model, text }) => <span key={model.name}><b>{model.label || model.name}</b> {text}</span>)}
      </div>
      <div className="events">
        {told.map(({ time, color, name, text }, number) => (
          <span key={number}><i style={{ background: theme.visualization.getColorByName(color) }} />{moment(time)} {text || `${name} (no text)`}</span>
        ))}
      </div>
    </header>
  );
}

function Board({ board, variables, marks, width }) {
  const column = (width - 2 * EDGE - GAP * (COLUMNS - 1)) / COLUMNS;
  const box = ({ x, y, w, h }) => ({
    left: x * (column + GAP), top: y * (ROW + GAP), width: w * column + (w - 1) * GAP, height: h * ROW + (h - 1) * GAP,
  });
  const bottom = Math.max(...board.panels.map(({ gridPos }) => gridPos.y + gridPos.h));
  return (
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <main style={{ width, padding: EDGE }}>
        <Head board={board} variables={variables} marks={marks} />
        <div style={{ position: 'relative', height: bottom * (ROW + GAP) }}>
          {board.panels.map((panel) => (
            <div key={panel.id} id={`panel-${panel.id}`} style={{ position: 'absolute', ...box(panel.gridPos) }}>
              {panel.type === 'row'
                ? <div className="row"><Icon name={panel.collapsed ? 'angle-right' : 'angle-down'} /> {variables.fill(panel.title)} {panel.collapsed && <small>({panel.panels.length} panels)</small>}</div>
                : <Panel panel={panel} box={box(panel.gridPos)} variables={variables} marks={marks} />}
            </div>
          ))}
        </div>
      </main>
    </ThemeContext.Provider>
  );
}

async function load(panel, variables, columnWidth, scrape) {
  if (panel.type === 'row') return {};
  if (panel.repeat) return { error: new Error('repeated panels are not drawn') };
  try {
    const width = panel.gridPos.w * columnWidth;
    const frames = await panelFrames(panel, variables, width, scrape);
    const exemplars = await panelExemplars(panel, variables, width, scrape);
    return { result: { ...(await prepared(panel, frames, variables, theme)), exemplars } };
  } catch (error) {
    return { error };
  }
}

// Every plot is drawn, fonts and icons are there, and nothing changes any more.
async function settled(board) {
  const plotted = ({ id }) => drawn.some((plot) => plot.id === id) || failures.some((failure) => failure.id === id);
  const waits = () => board.panels.some((panel) => panel.loaded.result && plots(panel, panel.loaded.result.data) && !plotted(panel));
  await document.fonts.ready;
  let before = null;
  for (let still = 0; still < 5; ) {
    await new Promise((later) => setTimeout(later, 100));
    const now = `${document.getElementById('root').innerHTML.length} ${drawn.length}`;
    still = now === before && !waits() ? still + 1 : 0;
    before = now;
  }
}

// The part of a panel that its legend takes: of the height below the plot, of the width beside it; 1 where
// the legend is longer than its place and must be scrolled.
function legendShare(frame) {
  const items = [...frame.querySelectorAll('[data-testid^="data-testid VizLegend series"]')].map((item) => item.getBoundingClientRect());
  const plot = frame.querySelector('.uplot')?.getBoundingClientRect();
  if (!items.length || !plot) return 0;
  const panel = frame.getBoundingClientRect();
  const end = Math.max(...items.map(({ bottom }) => bottom));
  const left = Math.min(...items.map((item) => item.left));
  if (end > panel.bottom) return 1;
  return left >= plot.right - 1 ? (panel.right - left) / panel.width : (end - plot.bottom) / panel.height;
}

// What a check needs to know of each panel as it stands in the page.
function report(board, marks) {
  const panels = board.panels.filter(({ type }) => type !== 'row').map((panel) => {
    const frame = document.querySelector(`#panel-${panel.id} > section`);
    return {
      id: panel.id, title: panel.title, type: panel.type,
      error: panel.loaded.error?.message ?? failures.find(({ id }) => id === panel.id)?.message ?? null,
      text: frame?.innerText ?? '',
      names: (panel.loaded.result?.data ?? []).flatMap(({ fields }) => fields.filter(({ type }) => type === 'number').map(({ state }) => state.displayName)),
      legend: frame ? legendShare(frame) : 0,
      scales: drawn.filter(({ id }) => id === panel.id).at(-1)?.scales ?? [],
    };
  });
  return { title: board.title, panels, events: marks.map(({ time, name, text }) => ({ time, name, text })) };
}

window.draw = async ({ board, from, to, width, scrape }) => {
  const variables = await Variables.of(board, timeRange(from, to));
  const enabled = (board.annotations?.list ?? []).filter(({ enable, builtIn }) => enable && !builtIn);
  const marks = (await Promise.all(enabled.map((one) => events(one, variables, scrape)))).flat();
  await Promise.all(board.panels.map(async (panel) => { panel.loaded = await load(panel, variables, width / COLUMNS, scrape); }));
  createRoot(document.getElementById('root')).render(<Board board={board} variables={variables} marks={marks} width={width} />);
  await settled(board);
  return report(board, marks);
};
